"""Attention of further layers over one plan: when a call may be repeated, and with what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.experimental.gluon.language import NVMMASharedLayout

from specmla.kernels.hopper.repeat import RepeatedAttention
from specmla.kernels.prepared import Launch
from specmla.kernels.raw_launcher import launcher_problems
from specmla.kernels.tensor_box import BoxedTensor, tensor_box
from tests.kernels.launch_bench import NAMED, Bench

pytestmark = pytest.mark.skipif(
    bool(launcher_problems()), reason="Triton's launcher is unknown here: all calls go through it"
)
ROWS, HEADS, PAGES = 6, 4, 3
BOX = tensor_box((1, 16, 64), NVMMASharedLayout(128, 16, 3))


class Part:
    """Stands for a step's tables, whose addresses are in launches already."""


def tensors(first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give q_latent, q_rope and cache; the query starts at element `first` of its memory."""
    query = torch.zeros(ROWS * HEADS * 96 + first, dtype=torch.bfloat16)[first:]
    query = query.view(ROWS, HEADS, 96)
    return query[..., :64], query[..., 64:], torch.zeros(PAGES, 16, 96, dtype=torch.bfloat16)


class Remembered:
    """A repeat that has seen one call of two launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
        self.bench, self.part, self.repeat = Bench(monkeypatch), Part(), RepeatedAttention()
        self.given = tensors()
        self.remember(self.given)

    def remember(self, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        q_latent, q_rope, cache = given
        boxed = BoxedTensor(cache, BOX)
        out, lse = torch.zeros(ROWS, HEADS, 64).bfloat16(), torch.zeros(ROWS, HEADS)
        kernel = self.bench.kernel
        launches = [
            Launch(kernel, (3,), (boxed, q_latent, 0.5, 8), NAMED),
            Launch(kernel, (1,), (out, lse, 0.5, 8), NAMED),
            Launch(kernel, (1,), (q_rope, lse, 0.5, 8), NAMED),
        ]
        started = [launch.run() for launch in launches]
        part: Any = self.part
        self.repeat.remember(launches, started, (q_latent, q_rope, boxed), (out, lse), part, 0.1)
        self.bench.direct.clear()

    def attend(self, *given: torch.Tensor, **other: Any) -> Any:
        part, scale = other.get("part", self.part), other.get("scale", 0.1)
        return self.repeat.attend(*(given or self.given), part, scale)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Remembered:
    return Remembered(monkeypatch)


def test_nothing_is_repeated_before_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    part: Any = Part()
    assert RepeatedAttention().attend(*tensors(), part, 0.1) is None


def test_a_repeat_reads_and_writes_the_tensors_of_its_call(call: Remembered) -> None:
    other = tensors()
    out, lse = call.attend(*other)
    assert (out.shape, out.dtype) == ((ROWS, HEADS, 64), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((ROWS, HEADS), torch.float32)
    q_latent, q_rope, cache = (t.data_ptr() for t in other)
    encoded = ("map", cache, other[2].shape, other[2].stride())
    args = [given[3] for given in call.bench.direct]
    assert args[0][0] == encoded
    assert args[0][7] == q_latent
    assert args[1][:2] == [out.data_ptr(), lse.data_ptr()]
    assert args[2][:2] == [q_rope, lse.data_ptr()]
    again, _ = call.attend(*other)
    assert again.data_ptr() != out.data_ptr()


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:-1],
        lambda t: t.half(),
        lambda t: t.to(memory_format=torch.contiguous_format, copy=True)[:, :, :-16],
        lambda t: t.transpose(0, 1),
        lambda t: t.to("meta"),
        lambda t: t[..., None],
        lambda t: torch.nn.Parameter(t),
    ],
    ids=["fewer", "dtype", "narrow", "strides", "device", "axes", "class"],
)
def test_another_call_is_not_repeated(call: Remembered, which: int, change: Any) -> None:
    given = list(tensors())
    assert call.attend(*given) is not None
    given[which] = change(given[which])
    count = len(call.bench.direct)
    assert call.attend(*given) is None
    assert len(call.bench.direct) == count


@pytest.mark.parametrize("first", [1, 2, 4])
def test_another_alignment_is_not_repeated(call: Remembered, first: int) -> None:
    q_latent, q_rope, _ = tensors(first)
    _, _, cache = call.given
    assert call.attend(q_latent, q_rope, cache) is None
    assert call.attend(*tensors(8)[:2], cache) is not None
    memory = torch.zeros(cache.numel() + first, dtype=cache.dtype)[first:]
    assert call.attend(*call.given[:2], memory.view(cache.shape)) is None


def test_a_call_that_is_not_aligned_is_not_remembered(call: Remembered) -> None:
    given = tensors(1)
    call.remember(given)
    assert call.attend(*given) is None
    assert call.attend() is None


def test_another_step_or_scale_is_not_repeated(call: Remembered) -> None:
    assert call.attend(part=Part()) is None
    assert call.attend(scale=0.2) is None
    assert call.attend() is not None


def test_a_step_that_is_gone_is_not_taken_for_another(call: Remembered) -> None:
    call.part = Part()
    for _ in range(100):
        assert call.attend(part=Part()) is None


def test_another_current_device_is_not_repeated(
    call: Remembered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert call.attend() is None


def test_a_hook_stops_repeats(call: Remembered, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
        assert call.attend() is None
    assert call.attend() is not None


def test_no_tensor_of_a_call_is_kept(call: Remembered) -> None:
    held = vars(call.repeat).values()
    assert not any(isinstance(value, torch.Tensor) and value.numel() for value in held)
