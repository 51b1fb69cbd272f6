"""Launches that recur with other tensors in a few places, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specmla.kernels.direct import DirectKernel, current_stream, is_watched
from specmla.kernels.raw_launcher import Call
from specmla.kernels.tensor_box import BoxedTensor


class Launch(NamedTuple):
    """One launch, as `DirectKernel.launch` takes it."""

    kernel: DirectKernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    named: Mapping[str, Any]

    def run(self) -> None:
        """Start it."""
        self.kernel.launch(self.grid, *self.args, **self.named)


class _Prepared(NamedTuple):
    call: Call
    grid: tuple[int, ...]
    args: list[Any]
    holes: list[tuple[int, int]]
    maps: list[tuple[int, int, Callable[[int], Any]]]


class PreparedLaunches:
    """Starts the same launches again; see `prepare`."""

    def __init__(self, launches: Sequence[_Prepared], kernels: Sequence[Any]) -> None:
        self._launches, self._kernels = launches, kernels

    @property
    def is_free(self) -> bool:
        """Whether they may start without Triton now: nobody watches."""
        return not is_watched(*self._kernels)

    def start(self, addresses: Sequence[int]) -> None:
        """Start all on the current stream of the device that they were prepared on.

        Args:
            addresses: of the tensors in the places of those that `prepare` was told move, with the
                same dtype, device, shape, strides and, if it was aligned to 16 bytes, alignment.
        """
        stream = current_stream()
        for call, grid, args, holes, maps in self._launches:
            given = args.copy()
            for place, which in holes:
                given[place] = addresses[which]
            for place, which, make_map in maps:
                given[place] = make_map(addresses[which])
            call(grid, stream, given)


def prepare(launches: Sequence[Launch], moving: Sequence[Any]) -> PreparedLaunches | None:
    """Prepare to start launches again that have just been started.

    Args:
        launches: in order. All tensors but the moving ones must keep their memory.
        moving: those arguments (tensors, `BoxedTensor`s), by identity, whose tensors will be
            others.

    Returns:
        None if one of them can only go through Triton.
    """
    found = [_prepare(launch, moving) for launch in launches]
    ready = [p for p in found if p is not None]
    if len(ready) < len(found):
        return None
    return PreparedLaunches(ready, [launch.kernel.kernel for launch in launches])


def _prepare(launch: Launch, moving: Sequence[Any]) -> _Prepared | None:
    known = launch.kernel.find(launch.args, launch.named)
    if known is None:
        return None
    start, flat = known
    args: list[Any] = []
    holes: list[tuple[int, int]] = []
    maps: list[tuple[int, int, Callable[[int], Any]]] = []
    makers, moves = dict(start.maps), {id(argument): k for k, argument in enumerate(moving)}
    for i, (argument, value) in enumerate(zip(launch.args, flat, strict=True)):
        which = moves.get(id(argument))
        if type(argument) is BoxedTensor:
            shape, strides = argument.tensor.shape, argument.tensor.stride()
            make_map = _of_address(makers[i], shape, strides)
            if which is not None:
                maps.append((len(args), which, make_map))
            args += make_map(argument.tensor.data_ptr()), *shape, *strides
        else:
            if which is not None:
                holes.append((len(args), which))
            args.append(value)
    return _Prepared(start.call, (*launch.grid, 1, 1)[:3], args + start.tail, holes, maps)


def _of_address(
    make_map: Callable[..., Any], shape: Sequence[int], strides: Sequence[int]
) -> Callable[[int], Any]:
    return lambda address: make_map(address, shape, strides)
