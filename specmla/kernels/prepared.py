"""Launches that recur with other tensors in a few places, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specmla.kernels.direct import DirectKernel, Started, current_stream, is_watched
from specmla.kernels.raw_launcher import Call


class Launch(NamedTuple):
    """One launch, as `DirectKernel.launch` takes it."""

    kernel: DirectKernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    named: Mapping[str, Any]

    def run(self) -> Started | None:
        """Start it; give how, None if through Triton."""
        return self.kernel.launch(self.grid, *self.args, **self.named)


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


def prepare(
    launches: Sequence[Launch], started: Sequence[Started | None], moving: Sequence[Any]
) -> PreparedLaunches | None:
    """Prepare to start launches again that have just been started.

    Args:
        launches: in order. All tensors but the moving ones must keep their memory.
        started: what `run` gave for each.
        moving: those arguments (tensors, `BoxedTensor`s), by identity, whose tensors will be
            others.

    Returns:
        None if one of them can only go through Triton.
    """
    moves = {id(argument): k for k, argument in enumerate(moving)}
    ready = []
    for launch, known in zip(launches, started, strict=True):
        known = known or launch.kernel.find(launch.args, launch.named)
        if known is None:
            return None
        ready.append(_prepare(launch, known, moves))
    return PreparedLaunches(ready, [launch.kernel.kernel for launch in launches])


def _prepare(launch: Launch, known: Started, moves: Mapping[int, int]) -> _Prepared:
    start, args = known.start, list(known.args)
    holes = [(i, moves[k]) for i, k in enumerate(map(id, launch.args)) if k in moves]
    maps: list[tuple[int, int, Callable[[int], Any]]] = []
    for place, make_map in reversed(start.maps):
        tensor = launch.args[place].tensor
        shape, strides = tensor.shape, tensor.stride()
        of_address = _of_address(make_map, shape, strides)
        args[place : place + 1] = of_address(tensor.data_ptr()), *shape, *strides
        # A map is followed by shape and strides, which moves the places after it.
        further = len(shape) + len(strides)
        maps = [(i + further, which, of) for i, which, of in maps]
        maps += [(place, which, of_address) for i, which in holes if i == place]
        holes = [(i + further * (i > place), which) for i, which in holes if i != place]
    return _Prepared(start.call, (*launch.grid, 1, 1)[:3], args + start.tail, holes, maps)


def _of_address(
    make_map: Callable[..., Any], shape: Sequence[int], strides: Sequence[int]
) -> Callable[[int], Any]:
    return lambda address: make_map(address, shape, strides)
