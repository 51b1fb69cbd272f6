"""Launches that recur: which places get new addresses, and when they may start at all."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.experimental.gluon.language import NVMMASharedLayout

from specmla.kernels.prepared import Launch, PreparedLaunches, prepare
from specmla.kernels.raw_launcher import launcher_problems
from specmla.kernels.tensor_box import BoxedTensor, tensor_box
from tests.kernels.launch_bench import MEMORY, NAMED, Bench

pytestmark = pytest.mark.skipif(
    bool(launcher_problems()), reason="Triton's launcher is unknown here: all calls go through it"
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def started(bench: Bench, *launches: Launch) -> list[Launch]:
    for launch in launches:
        assert launch.run() is None  # through Triton
    bench.direct.clear()
    return list(launches)


NOT_KNOWN = (None, None)


def test_moving_tensors_alone_get_new_addresses(bench: Bench) -> None:
    first, second, fixed = MEMORY[:64], MEMORY[64:128], MEMORY[128:192]
    launches = started(
        bench,
        Launch(bench.kernel, (3,), (first, fixed, 0.5, 64), NAMED),
        Launch(bench.kernel, (4, 2), (second, first, 0.25, 1), NAMED),
    )
    ready = prepare(launches, NOT_KNOWN[: len(launches)], (second, first))
    assert ready is not None
    bench.stream = 8
    for k in (1, 2):
        ready.start([1000 * k, 2000 * k])
    at = fixed.data_ptr()
    assert bench.direct == [
        call
        for k in (1, 2)
        for call in (
            (1, (3, 1, 1), (0, 8), [2000 * k, at, 0.5, 64, None]),
            (2, (4, 2, 1), (0, 8), [1000 * k, 2000 * k, 0.25, 1, None]),
        )
    ]
    assert len(bench.through_triton) == 2


def test_a_tensor_of_the_same_memory_that_does_not_move_stays(bench: Bench) -> None:
    moved, kept = MEMORY[:64], MEMORY[:64]
    launches = started(bench, Launch(bench.kernel, (1,), (moved, kept, 0.5, 64), NAMED))
    ready = prepare(launches, NOT_KNOWN[: len(launches)], (moved,))
    assert ready is not None
    ready.start([48])
    assert bench.direct[0][3][:2] == [48, kept.data_ptr()]


def test_maps_are_made_for_the_new_address(bench: Bench) -> None:
    box = tensor_box((1, 8, 64), NVMMASharedLayout(128, 16, 3))
    pool = BoxedTensor(MEMORY.view(1, 8, 64), box)
    tables = MEMORY[:16]
    launches = started(bench, Launch(bench.kernel, (1,), (pool, tables, 0.5, 64), NAMED))
    ready = prepare(launches, NOT_KNOWN[: len(launches)], (tables, pool))
    assert ready is not None
    ready.start([160, 4096])
    encoded = ("map", 4096, (1, 8, 64), (512, 64, 1))
    assert bench.direct[0][3] == [encoded, 1, 8, 64, 512, 64, 1, 160, 0.5, 64, None]


def test_what_run_gave_is_the_same_as_what_is_found(bench: Bench) -> None:
    box = tensor_box((1, 8, 64), NVMMASharedLayout(128, 16, 3))
    pool = BoxedTensor(MEMORY.view(1, 8, 64), box)
    launches = started(bench, Launch(bench.kernel, (1,), (pool, MEMORY, 0.5, 64), NAMED))
    given = [launches[0].run()]
    assert given[0] is not None
    for known in (given, [None]):
        ready = prepare(launches, known, (MEMORY, pool))
        assert ready is not None
        ready.start([32, 4096])
    assert bench.direct[1] == bench.direct[2]
    assert bench.direct[1][3][7] == 32


def test_nothing_is_prepared_that_only_triton_can_start(bench: Bench) -> None:
    known = Launch(bench.kernel, (1,), (MEMORY, MEMORY, 0.5, 64), NAMED)
    unknown = Launch(bench.kernel, (1,), (MEMORY, MEMORY, 0.5, 65), NAMED)
    started(bench, known)
    assert prepare([known, unknown], NOT_KNOWN, (MEMORY,)) is None


def test_a_hook_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = started(bench, Launch(bench.kernel, (1,), (MEMORY, MEMORY, 0.5, 64), NAMED))
    ready = prepare(launches, NOT_KNOWN[: len(launches)], (MEMORY,))
    assert isinstance(ready, PreparedLaunches)
    assert ready.is_free
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", lambda metadata: None)
    assert not ready.is_free
