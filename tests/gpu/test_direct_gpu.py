"""Launches past Triton's Python on a real device: same bits, forms, hooks, graphs, streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.backends.hopper import HopperBackend
from specmla.backends.rows import RowsBackend
from specmla.backends.triton import TritonBackend
from specmla.kernels import direct, store
from specmla.kernels.direct import DirectKernel
from specmla.kernels.prepared import PreparedLaunches
from specmla.kernels.raw_launcher import RawStart, launcher_problems
from specmla.kernels.store import store_kernel, store_rows
from specmla.metadata import VerifyPart
from specmla.testing import VerifyCase, make_case

CUDA = torch.device("cuda")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.gpu
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0")
BACKENDS = [
    pytest.param(TritonBackend(), id="triton"),
    pytest.param(RowsBackend(), id="rows"),
    pytest.param(HopperBackend(), id="hopper", marks=needs_hopper),
    pytest.param(HopperBackend(batch_invariant=True), id="hopper-invariant", marks=needs_hopper),
]


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Launches through Triton ("plain") and repeated calls ("repeated") from here on."""
    counted = {"plain": 0, "repeated": 0}
    run, find, start = DirectKernel._run, direct.find_start, PreparedLaunches.start

    def counting_run(self: DirectKernel, *args: Any) -> Any:
        counted["plain"] += 1
        return run(self, *args)

    def sure_find(*args: Any) -> RawStart | None:
        found = find(*args)
        assert found is not None, "Triton's launcher is known, but not how this kernel starts"
        return found

    def counting_start(self: PreparedLaunches, addresses: Sequence[int]) -> None:
        counted["repeated"] += 1
        start(self, addresses)

    monkeypatch.setattr(DirectKernel, "_run", counting_run)
    monkeypatch.setattr(direct, "find_start", sure_find)
    monkeypatch.setattr(PreparedLaunches, "start", counting_start)
    return counted


def attend(backend: AttentionBackend, case: VerifyCase, part: VerifyPart) -> AttentionOutput:
    return backend.forward_mqa(
        case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=case.softmax_scale
    )


def same(got: AttentionOutput, wanted: AttentionOutput) -> bool:
    return torch.equal(got.out, wanted.out) and torch.equal(got.lse, wanted.lse)


def watched(monkeypatch: pytest.MonkeyPatch, call: Callable[[], AttentionOutput]) -> Any:
    """Give what `call` gives while a hook is set, and how often the hook was called."""
    calls: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", calls.append)
        return call(), len(calls)


def test_the_launcher_of_this_triton_is_known() -> None:
    assert launcher_problems() == ()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", ["4q3s700", "32q5s2k", "2q3s40,q1s5k"])
def test_direct_launches_give_the_bits_of_plain_ones(
    backend: AttentionBackend, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(batch, device=CUDA, dtype=torch.bfloat16)
    part = case.planned(backend)
    plain, launches = watched(monkeypatch, lambda: attend(backend, case, part))
    assert launches
    for _ in range(3):  # through Triton at most, prepared, repeated
        assert same(attend(backend, case, part), plain)
    planned = case.planned(backend)
    assert same(attend(backend, case, planned), plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_layers_get_their_own_results(backend: AttentionBackend) -> None:
    """Repeats take the addresses of the call at hand: queries, cache, outputs."""
    first, second = (
        make_case("8q3s900", device=CUDA, dtype=torch.bfloat16, seed=seed) for seed in (1, 1)
    )
    second.latent_cache.neg_()
    second.q_latent.mul_(0.5)
    part = first.planned(backend)
    wanted = [attend(backend, c, c.planned(backend)) for c in (first, second)]
    assert not torch.equal(wanted[0].out, wanted[1].out)
    for _ in range(3):
        for case, result in zip((first, second), wanted, strict=True):
            assert same(attend(backend, case, part), result)


@needs_hopper
def test_a_repeat_is_no_launch_through_triton(count: dict[str, int]) -> None:
    backend = HopperBackend()
    case = make_case("8q3s900", device=CUDA, dtype=torch.bfloat16)
    for _ in range(2):
        part = case.planned(backend)
        attend(backend, case, part)
    before = dict(count)
    for _ in range(10):
        attend(backend, case, part)
    assert count["plain"] == before["plain"]
    assert count["repeated"] == before["repeated"] + 10


@needs_hopper
def test_what_a_repeat_would_not_check_is_still_refused() -> None:
    backend = HopperBackend()
    case = make_case("8q3s900", device=CUDA, dtype=torch.bfloat16)
    part = case.planned(backend)
    for _ in range(2):
        attend(backend, case, part)
    with pytest.raises(ValueError, match="q_latent"):
        backend.forward_mqa(
            case.q_latent[:-1], case.q_rope, case.latent_cache, part, softmax_scale=0.1
        )
    with pytest.raises(ValueError, match="softmax_scale"):
        backend.forward_mqa(case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=-1.0)


@needs_hopper
def test_a_query_of_another_alignment_is_read_right() -> None:
    backend = HopperBackend()
    case = make_case("8q3s900", device=CUDA, dtype=torch.bfloat16)
    part = case.planned(backend)
    wanted = [attend(backend, case, part) for _ in range(2)][-1]
    memory = torch.empty(case.q_latent.numel() + 8, dtype=torch.bfloat16, device=CUDA)
    for first in (1, 2, 4, 8):
        moved = memory[first : first + case.q_latent.numel()].view(case.q_latent.shape)
        moved.copy_(case.q_latent)
        got = backend.forward_mqa(
            moved, case.q_rope, case.latent_cache, part, softmax_scale=case.softmax_scale
        )
        assert same(got, wanted)


def test_another_alignment_compiles_anew(
    count: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "STORE", DirectKernel(store_kernel))
    pool = torch.zeros(4, 64, 576, dtype=torch.bfloat16, device=CUDA)
    memory = torch.randn(64 * 577, device=CUDA).bfloat16()
    slots = torch.randperm(256, device=CUDA)[:32]
    # Aligned; the start odd, then half as aligned; rows 1 apart from a multiple; a stride of 1.
    forms = ((0, 512), (1, 512), (8, 512), (0, 513), (3, 1))
    for round_number in range(2):
        for first, stride in forms:
            latent = memory.as_strided((32, 512), (stride, 1), first)
            rope = memory.as_strided((32, 64), (64, 1), 0)
            pool.zero_()
            store_rows(pool, latent, rope, slots)
            assert torch.equal(pool.view(256, 576)[slots], torch.cat([latent, rope], 1))
        if round_number == 0:
            plain = count["plain"]
            # 8 elements of 2 bytes are 16 again.
            assert plain == len(forms) - 1
    assert count["plain"] == plain


def test_hooks_are_called_and_the_bits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonBackend()
    case = make_case("4q3s700", device=CUDA, dtype=torch.bfloat16)
    part = case.planned(backend)
    wanted = [attend(backend, case, part) for _ in range(2)][-1]
    for _ in range(2):
        got, launches = watched(monkeypatch, lambda: attend(backend, case, part))
        assert launches >= 1
        assert same(got, wanted)
    assert same(attend(backend, case, part), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_direct_launches_are_captured(backend: AttentionBackend) -> None:
    case = make_case("8q3s900", device=CUDA, dtype=torch.bfloat16)
    part = case.planned(backend)
    wanted = [attend(backend, case, part) for _ in range(3)][-1]
    case.latent_cache.neg_()
    other = attend(backend, case, part)
    case.latent_cache.neg_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(backend, case, part)
    for _ in range(2):
        graph.replay()
        assert same(captured, wanted)
        case.latent_cache.neg_()
        graph.replay()
        assert same(captured, other)
        case.latent_cache.neg_()


@pytest.mark.parametrize("backend", BACKENDS)
def test_launches_go_to_the_current_stream(backend: AttentionBackend) -> None:
    """Two streams, each of which makes its input late: a launch elsewhere would read too early."""
    cases = [make_case("8q3s900", device=CUDA, dtype=torch.bfloat16, seed=seed) for seed in (3, 4)]
    parts = [case.planned(backend) for case in cases]
    wanted = [attend(backend, c, p) for c, p in zip(cases, parts, strict=True)]
    queries = [case.q_latent.clone() for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(5):
        for case in cases:
            case.q_latent.zero_()
        torch.cuda.synchronize()
        got = []
        for case, part, query, stream in zip(cases, parts, queries, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                case.q_latent.copy_(query)
                got.append(attend(backend, case, part))
        torch.cuda.synchronize()
        assert all(same(g, w) for g, w in zip(got, wanted, strict=True))


def test_a_host_tensor_is_refused_by_triton_as_ever(
    count: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct launches pass bare addresses: one of the host must not get there."""
    monkeypatch.setattr(store, "STORE", DirectKernel(store_kernel))
    pool = torch.zeros(4, 64, 576, dtype=torch.bfloat16, device=CUDA)
    latent = torch.zeros(8, 512, dtype=torch.bfloat16, device=CUDA)
    rope = torch.zeros(8, 64, dtype=torch.bfloat16, device=CUDA)
    slots = torch.arange(8, device=CUDA)
    for _ in range(2):
        store_rows(pool, latent, rope, slots)
    with pytest.raises(ValueError, match="cpu tensor"):
        store_rows(pool, latent.cpu(), rope, slots)
    assert count["plain"] == 2
