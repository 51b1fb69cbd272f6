"""Launch kernels through Triton and directly over a driver that writes launches down.

Run in a process of its own, with the Triton to test first on the path and `fake_cuda.c` as
libcuda.so.1; prints a line for each case, and fails at the first whose bytes differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fake_gpu import FakeGpu

from specmla.kernels.direct import DirectKernel, Started
from specmla.kernels.raw_launcher import launcher_problems

GPU = FakeGpu()


class Both(DirectKernel):
    """Launches everything twice, once each way, and compares from the second call of a form on."""

    direct_calls = 0

    def launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> Started | None:
        started = None
        for _ in range(2):
            GPU.watch(self)
            GPU.log()
            started = super().launch(grid, *args, **named)
            direct = GPU.log()
            GPU.watch(self)
            self._run(grid, args, named)
            if started is not None:
                same(direct, GPU.log())
        return started


def same(direct: bytes, through_triton: bytes) -> None:
    """Compare two logs and count them."""
    assert len(direct) > 40, "nothing was written down"
    assert direct == through_triton, (direct, through_triton)
    Both.direct_calls += 1


def store() -> None:
    from specmla.kernels import store

    store.STORE = Both(store.store_kernel)
    pool = torch.zeros(8, 64, 576, dtype=torch.bfloat16)
    rows = torch.zeros(33 * 577, dtype=torch.bfloat16)
    for first, rank in ((0, 512), (8, 512), (1, 511), (3, 64)):
        latent = rows[first : first + 32 * rank].view(32, rank)
        rope = rows[: 32 * (576 - rank)].view(32, 576 - rank)
        for slots in (torch.arange(32), torch.arange(33)[1:], torch.arange(1)):
            store.store_rows(pool, latent[: len(slots)], rope[: len(slots)], slots)
        store.store_rows(pool[:, 1:], latent, rope, torch.arange(32))


def pieces() -> None:
    from specmla.kernels import pieces
    from specmla.kernels.launch import find_entry
    from specmla.kernels.plan import CutRule, StepShape, fitting_plan

    pieces.PIECES = Both(pieces.pieces_kernel)
    entry = find_entry("packed", "sm_90", 80, 2, 64)
    lens = torch.full((9,), 700, dtype=torch.int32)
    starts = torch.arange(10, dtype=torch.int32)
    for requests, first in ((8, 0), (8, 1), (1, 0)):
        plan = fitting_plan(
            None, StepShape(40, requests, 16, 512, 2), entry, CutRule(), 1280, torch.device("cpu")
        )
        given = lens[first : first + requests]
        pieces.fill_plan(plan, starts[first : first + requests + 1], given)
        pieces.fill_plan(plan, None, given)


def hopper() -> None:
    from specmla.backends.hopper import HopperBackend
    from specmla.kernels.hopper import launch, plan
    from specmla.kernels.tensor_box import BoxedTensor, tensor_box
    from specmla.testing import make_case

    torch.cuda.current_device = lambda: None  # type: ignore[assignment,return-value]
    plan.SCHEDULE = Both(plan.schedule_kernel)
    launch.HOPPER, launch.MERGE = Both(launch.hopper_kernel), Both(launch.merge_kernel)
    launch.SMALL = Both(launch.small_kernel)
    for batch, kernel in (("2q3s70,q1s200", launch.HOPPER), ("q1s70,q1s200", launch.SMALL)):
        case = make_case(batch, num_heads=16, device=torch.device("cpu"), dtype=torch.bfloat16)
        backend = HopperBackend()
        part = case.planned(backend)
        query, rope, cache = case.q_latent, case.q_rope, case.latent_cache
        backend.forward_mqa(query, rope, cache, part, softmax_scale=0.1)
        for given in ((query, rope, cache), (query.clone(), rope.clone(), cache.clone())):
            GPU.log()
            out = part.plan.repeat.attend(*given, part, 0.1)
            repeated = GPU.log()
            boxed = BoxedTensor(given[2], tensor_box((1, 64, 64), launch.COPY.value))
            launches = launch.launches(out, (*given[:2], boxed), part, part.plan, 0.1)
            assert launches[0].kernel is kernel
            for one in launches:
                one.kernel._run(one.grid, one.args, one.named)
            same(repeated, GPU.log())


CASES: tuple[Callable[[], None], ...] = (store, pieces, hopper)


def main() -> None:
    assert not launcher_problems(), launcher_problems()
    for case in CASES:
        before = Both.direct_calls
        case()
        count = Both.direct_calls - before
        assert count, f"{case.__name__}: no launch was direct"
        print(f"{case.__name__}: {count} direct launches are those of Triton")


if __name__ == "__main__":
    main()
