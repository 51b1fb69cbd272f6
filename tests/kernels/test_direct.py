"""When a call goes through Triton and when straight to the compiled kernel, without a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.experimental.gluon.language import NVMMASharedLayout

from specmla.kernels.direct import DirectKernel
from specmla.kernels.raw_launcher import launcher_problems
from specmla.kernels.tensor_box import BoxedTensor, tensor_box
from tests.kernels.launch_bench import MEMORY, NAMED, Bench

pytestmark = pytest.mark.skipif(
    bool(launcher_problems()), reason="Triton's launcher is unknown here: all calls go through it"
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_the_first_call_goes_through_triton_and_later_ones_do_not(bench: Bench) -> None:
    assert [bench.launch(), bench.launch(), bench.launch()] == [1, 1, 1]
    assert bench.through_triton[0] == ((3,), (MEMORY, MEMORY, 0.5, 64), NAMED)
    at = MEMORY.data_ptr()
    assert bench.direct == [(1, (3, 1, 1), (0, 7), [at, at, 0.5, 64, None])] * 2


def test_what_varies_within_a_form_is_passed_on(bench: Bench) -> None:
    bench.launch()
    bench.stream = 9
    bench.kernel.launch((5, 6), MEMORY[16:], MEMORY, -1.5, 128, **NAMED)
    first, second = MEMORY[16:].data_ptr(), MEMORY.data_ptr()
    assert bench.direct == [(1, (5, 6, 1), (0, 9), [first, second, -1.5, 128, None])]


@pytest.mark.parametrize(
    "change",
    [
        {"x": MEMORY[1:]},
        {"y": MEMORY[8 + 1 :]},
        {"x": MEMORY.view(torch.float16)},
        {"x": None},
        {"stride": 1},
        {"stride": 65},
        {"stride": 2**33},
        {"stride": 64.0},
        {"N": 128},
        {"num_warps": 8},
        {"launch_pdl": True},
    ],
    ids=str,
)
def test_another_form_goes_through_triton_once(bench: Bench, change: dict[str, Any]) -> None:
    bench.launch()
    assert [bench.launch(**change), bench.launch(**change), bench.launch()] == [2, 2, 2]
    assert [number for number, *_ in bench.direct] == [2, 1]


def test_every_device_has_its_own_kernels(bench: Bench) -> None:
    bench.launch()
    bench.device = 1
    assert [bench.launch(), bench.launch()] == [2, 2]
    assert bench.direct[-1][0] == 2
    assert bench.direct[-1][2] == (1, 7)


def test_settings_of_the_compiler_are_part_of_the_form(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.launch()
    monkeypatch.setattr(knobs.runtime, "debug", True)
    assert [bench.launch(), bench.launch()] == [2, 2]
    monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "other")
    assert [bench.launch(), bench.launch()] == [3, 3]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("added", [True, False], ids=["added to the chain", "in its place"])
def test_launches_go_through_triton_while_a_hook_is_set(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, added: bool
) -> None:
    def hook(metadata: object) -> None:
        pass

    bench.launch()
    if added:
        chain = getattr(knobs.runtime, name)
        chain.add(hook)
        assert [bench.launch(), bench.launch()] == [2, 3]
        chain.remove(hook)
        assert bench.launch() == 3
        return
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, name, hook)
        assert [bench.launch(), bench.launch()] == [2, 3]
        patch.setattr(knobs.runtime, name, None)
        assert bench.launch() == 3


def test_pre_run_hooks_and_stage_hooks_are_honoured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.launch()
    bench.jitted.add_pre_run_hook(lambda *args, **named: None)
    assert bench.launch() == 2
    bench.jitted.pre_run_hooks.clear()
    assert bench.launch() == 2
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *args: ("", ""))
    assert bench.launch() == 3


def test_a_kernel_that_only_triton_can_start_always_goes_through_it(bench: Bench) -> None:
    bench.startable = False
    assert [bench.launch(), bench.launch()] == [1, 2]
    assert bench.direct == []


@pytest.mark.parametrize("stride", [True, "64"], ids=repr)
def test_arguments_of_unknown_types_go_through_triton(bench: Bench, stride: object) -> None:
    assert [bench.launch(stride=stride), bench.launch(stride=stride)] == [1, 2]


def test_a_constexpr_left_out_goes_through_triton(bench: Bench) -> None:
    for _ in range(2):
        bench.kernel.launch((1,), MEMORY, MEMORY, 0.5, 1, num_warps=4)
    assert len(bench.through_triton) == 2


def test_maps_stand_before_shape_and_strides(bench: Bench) -> None:
    pool = MEMORY.view(1, 8, 64)
    box = tensor_box((1, 8, 64), NVMMASharedLayout(128, 16, 3))
    for tensor in (pool, pool[:, 4:]):
        bench.launch(y=BoxedTensor(tensor, box))
    descriptor = bench.through_triton[0][1][1]
    assert descriptor.base is pool
    assert descriptor.block_shape == [1, 8, 64]
    moved, sizes = pool[:, 4:].data_ptr(), [1, 4, 64, 512, 64, 1]
    encoded = ("map", moved, (1, 4, 64), (512, 64, 1))
    assert bench.direct[0][3] == [MEMORY.data_ptr(), encoded, *sizes, 0.5, 64, None]


def test_find_gives_the_start_of_a_known_form_alone(bench: Bench) -> None:
    args = (MEMORY, MEMORY, 0.5, 64)
    assert bench.kernel.find(args, NAMED) is None
    bench.launch()
    found = bench.kernel.find(args, NAMED)
    assert found is not None
    assert found[1] == [MEMORY.data_ptr(), MEMORY.data_ptr(), 0.5, 64]
    assert bench.kernel.find((MEMORY[1:], *args[1:]), NAMED) is None
    assert len(bench.through_triton) == 1


def test_a_kernel_of_the_interpreter_is_launched_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []

    class Interpreted:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **named: launched.append((grid, args, named))

    for _ in range(2):
        DirectKernel(Interpreted()).launch((2,), MEMORY, 3, N=4)
    assert launched == [((2,), (MEMORY, 3), {"N": 4})] * 2
