"""Prompts over cached context: in chunks, in one pass and by the oracle, all the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specmla.backends.base import AttentionOutput
from specmla.backends.reference import ReferenceBackend
from specmla.prefill import PromptAttention
from specmla.reference import expanded_mha
from specmla.testing import (
    PromptCase,
    assert_attention_within_budget,
    make_prompt_case,
    make_verify_part,
)

SMALL: dict[str, Any] = {
    "num_heads": 3,
    "kv_lora_rank": 24,
    "rope_dim": 8,
    "nope_dim": 12,
    "v_dim": 28,
}
EPS32 = torch.finfo(torch.float32).eps


def expanded(case: PromptCase) -> AttentionOutput:
    """The other oracle: keys and values one row and head at a time, in the case's dtype."""
    part = make_verify_part(
        case.base.requests, case.base.spec.mask, page_size=case.base.spec.page_size
    )
    return expanded_mha(
        case.q_nope,
        case.base.q_rope,
        case.base.latent_cache,
        part,
        w_uk_t=case.w_uk,
        w_uv=case.w_uv,
        softmax_scale=case.base.softmax_scale,
    )


def assert_merged_is(got: AttentionOutput, want: AttentionOutput, merges: int) -> None:
    """Two float32 LSEs are rounded in each merge: a share is off by as much, of values below 8."""
    unit = (1 + float(want.lse.abs().max())) * EPS32
    torch.testing.assert_close(got.lse, want.lse, rtol=0, atol=(1 + merges) * 2 * unit)
    torch.testing.assert_close(got.out, want.out, rtol=0, atol=max(1e-12, merges * 8 * unit))


lens_strategy = st.lists(
    st.tuples(st.sampled_from([1, 2, 5, 17]), st.sampled_from([0, 0, 1, 15, 16, 47, 64, 90])),
    min_size=1,
    max_size=5,
).map(lambda lens: [(q, q + past) for q, past in lens])


@given(lens_strategy, st.sampled_from([1, 3, 16, 32]), st.integers(0, 60), st.integers(0, 2**20))
@example([(17, 18), (5, 5), (2, 92)], 16, 0, 0)  # more rows than context; no context between
@example([(3, 3), (3, 67), (3, 3)], 16, 0, 0)  # BL-07: context lengths 0, 64, 0
@example([(17, 17), (5, 5)], 16, 0, 0)  # new rows exceed the workspace, no context at all
@settings(max_examples=40)
def test_chunks_equal_one_pass_and_both_oracles(
    lens: list[tuple[int, int]], page_size: int, more: int, seed: int
) -> None:
    case = make_prompt_case(
        lens, page_size=page_size, dtype=torch.float64, seed=seed, page_gap=5, **SMALL
    )
    backend, exact = ReferenceBackend(), case.oracle()
    assert_merged_is(expanded(case), exact, 0)
    assert_merged_is(case.attend(backend), exact, 0)
    fits = case.workspace(max(page_size, sum(s for _, s in lens)))
    assert case.part(backend, fits).context == ()
    assert_merged_is(case.attend(backend, fits), exact, 0)
    small = case.workspace(page_size + more)
    part = case.part(backend, small)
    assert all(chunk.keys.kv_slots.numel() <= small.num_rows for chunk in part.context)
    assert part.kv_slots.numel() <= max(small.num_rows, sum(q for q, _ in lens))
    assert_merged_is(case.attend(backend, small), exact, len(part.context))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 48, 128])
def test_chunks_are_as_good_as_one_pass(rows: int, dtype: torch.dtype) -> None:
    """Budget: that of one pass in the same dtype, even after 150 merges of a row."""
    batch = [(9, 300), (4, 4), (20, 150), (1, 222)]
    case = make_prompt_case(batch, page_size=2, dtype=dtype, **SMALL)
    backend = ReferenceBackend()
    one_pass, chunked = case.attend(backend), case.attend(backend, case.workspace(rows))
    assert chunked.out.dtype is dtype
    assert chunked.lse.dtype is torch.float32
    assert_attention_within_budget(
        chunked, case.oracle(), one_pass, one_pass.lse, score_width=SMALL["nope_dim"] + 8
    )


def test_requests_without_context_keep_their_bits() -> None:
    """Beside others that have some, in the chunks' row ranges and outside of them."""
    batch = [(3, 3), (2, 50), (4, 4), (1, 40), (5, 5)]
    case = make_prompt_case(batch, page_size=16, **SMALL)
    backend = ReferenceBackend()
    got = case.attend(backend, case.workspace(32)).out.split([q for q, _ in batch])
    one_pass = case.attend(backend).out.split([q for q, _ in batch])
    for i in (0, 2, 4):
        assert torch.equal(got[i], one_pass[i])


class Recorder(ReferenceBackend):
    """Notes the shapes of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, ...]] = []

    def forward_mha(self, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        self.calls.append(
            (len(query), len(key), key.shape[2], value.shape[2], options.get("causal", True))
        )
        return super().forward_mha(query, key, value, *rest, **options)


def test_one_pass_where_it_fits_else_chunks_and_new_rows() -> None:
    case, backend = make_prompt_case([(3, 40), (2, 10)], page_size=16, **SMALL), Recorder()
    case.attend(backend, case.workspace(50))
    assert backend.calls == [(5, 50, 20, 28, True)]
    backend.calls.clear()
    case.attend(backend, case.workspace(48))
    # 37 + 8 rows of context fit at once; P + R = 12 + 8 wide keys, V = 28 wide values.
    assert backend.calls == [(5, 45, 20, 28, False), (5, 5, 20, 28, True)]
    backend.calls.clear()
    case.attend(backend, case.workspace(16))
    assert [call[:2] for call in backend.calls] == [(3, 16), (3, 16), (5, 13), (5, 5)]
    backend.calls.clear()
    case.attend(backend, case.workspace(32))
    # What is left of the context, 5 + 8 rows, fits beside the 5 new ones.
    assert [(*call[:2], call[4]) for call in backend.calls] == [(3, 32, False), (5, 18, True)]
    backend.calls.clear()
    filled = make_prompt_case([(11, 48), (5, 16)], page_size=16, **SMALL)
    filled.attend(backend, filled.workspace(32))  # 37 + 11 rows of context, 16 new ones
    assert [(*call[:2], call[4]) for call in backend.calls] == [(11, 32, False), (16, 32, True)]


def test_the_budget_is_one_block_at_least_and_chunks_stay_in_the_workspace() -> None:
    case = make_prompt_case([(3, 103)], page_size=16, dtype=torch.float64, **SMALL)
    workspace = case.workspace(16)
    address, seen = workspace.rows(1).data_ptr(), []

    class Watching(PromptCase):
        def expand(self, rows: Any) -> Any:
            seen.append((rows.data_ptr() == address, len(rows)))
            return super().expand(rows)

    got = Watching(**vars(case)).attend(ReferenceBackend(), workspace)
    assert seen == [*[(True, 16)] * 6, (True, 7)]
    assert_merged_is(got, case.oracle(), 6)


def test_no_device_to_host_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are the host's: Python reads no tensor of the part (but for the cache's own checks
    of slots on a CPU)."""
    case = make_prompt_case([(3, 103), (2, 2)], page_size=16, **SMALL)
    backend, workspace, pool = ReferenceBackend(), case.workspace(32), case.base.latent_cache
    part = case.part(backend, workspace)

    def gather(slots: Tensor, out: Tensor | None) -> Tensor:
        assert out is not None
        return out.copy_(pool[slots // 16, slots % 16])

    attention = PromptAttention(backend, 0.2, gather, case.expand)
    query = torch.randn(5, 3, 20)
    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "nonzero", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
    attention.attend(query, part)


@pytest.mark.parametrize("batch", [[(5, 70), (2, 2), (3, 40)], [(1, 33), (6, 7)]], ids=str)
def test_triton_kernel_serves_chunks(batch: list[tuple[int, int]]) -> None:
    pytest.importorskip("triton")
    from specmla.backends.triton import TritonBackend

    case = make_prompt_case(batch, page_size=16, **SMALL)
    got = case.attend(TritonBackend(), case.workspace(32))
    plain = case.attend(ReferenceBackend(), case.workspace(32))
    assert_attention_within_budget(got, case.oracle(), plain, plain.lse, score_width=20)


def test_the_order_of_requests_does_not_matter() -> None:
    batch = [(2, 50), (4, 4), (1, 40)]
    case = make_prompt_case(batch, page_size=16, dtype=torch.float64, **SMALL)
    starts = [0, *itertools.accumulate(q for q, _ in batch)]
    want = case.attend(ReferenceBackend())
    for order in itertools.permutations(range(3)):
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
        base = vars(case.base) | {
            "requests": tuple(case.base.requests[i] for i in order),
            "q_rope": case.base.q_rope[rows],
        }
        turned = PromptCase(type(case.base)(**base), case.q_nope[rows], case.w_uk, case.w_uv)
        got = turned.attend(ReferenceBackend(), case.workspace(32))
        assert_merged_is(got, AttentionOutput(want.out[rows], want.lse[rows]), 4)
