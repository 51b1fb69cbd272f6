"""Prompts by other kernels than a backend's own: right, with their LSE, and refused by name."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import NgramDrafter
from specmla import DeepseekForCausalLM, SamplingParams, build_step, generate
from specmla.backends import sdpa_prompts
from specmla.backends.base import Requirements
from specmla.backends.fa3_prompts import FA3Prompts
from specmla.backends.prompt_kernel import blocks_of
from specmla.backends.reference import ReferenceBackend
from specmla.backends.sdpa_prompts import KINDS, SdpaPrompts, _one_width
from specmla.backends.with_prompts import NAMES, WithPrompts, get_prompt_kernel
from specmla.errors import ArgumentError, UnsupportedError
from specmla.testing import assert_attention_within_budget, check_backend, make_prompt_case
from tests.backends.test_reference_backend_prefill import prompt_part, written_out_mha
from tests.e2e.conftest import VOCAB
from tests.e2e.conftest import model as model

LIMIT = SamplingParams(max_tokens=16)

SDPA = WithPrompts(ReferenceBackend(), "sdpa")
LENS = {
    "ragged": [(5, 5), (3, 20), (1, 1), (2, 0), (4, 2), (0, 3), (1, 9)],
    "whole-prompts": [(6, 6)] * 3,
    "context-of-one-shape": [(4, 9)] * 3,
    "single-rows": [(1, 7)] * 4,
    "more-rows-than-keys": [(5, 2)] * 2,
    "no-keys": [(3, 0)] * 2,
}


def draw(lens: list[tuple[int, int]], width: int, v_dim: int, dtype: torch.dtype) -> list[Tensor]:
    rows, keys = (sum(n) for n in zip(*lens, strict=True))
    made = torch.Generator().manual_seed(rows)
    return [
        torch.randn(n, 3, d, generator=made, dtype=torch.float64).to(dtype)
        for n, d in ((rows, width), (keys, width), (keys, v_dim))
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("v_dim", [24, 8, 40])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_rows_and_lse_are_those_written_out(
    lens: list[tuple[int, int]], v_dim: int, dtype: torch.dtype, causal: bool
) -> None:
    part, given = prompt_part(lens), draw(lens, 24, v_dim, dtype)
    got = SDPA.forward_mha(*given, part, softmax_scale=0.2, causal=causal)
    wide = torch.promote_types(dtype, torch.float32)
    exact, plain, lse = (
        written_out_mha(*(t.to(d) for t in given), part, 0.2, causal)
        for d in (torch.float64, dtype, wide)
    )
    assert got.out.dtype is dtype
    assert_attention_within_budget(got, exact, plain, lse.lse, score_width=24)


@pytest.mark.parametrize("rows", [16, 64, None])
def test_chunks_of_context_are_merged_by_its_lse(rows: int | None) -> None:
    batch = [(9, 9), (5, 70), (1, 33), (20, 21)]
    case = make_prompt_case(batch, nope_dim=24, v_dim=16, num_heads=3, kv_lora_rank=32, rope_dim=8,
                            page_size=16, dtype=torch.float32, device="cpu")  # fmt: skip
    workspace = None if rows is None else case.workspace(rows)
    plain = case.attend(ReferenceBackend())
    got = case.attend(SDPA, workspace)
    assert_attention_within_budget(got, case.oracle(), plain, plain.lse, score_width=32)


def test_verifies_stay_the_backends_and_the_check_passes() -> None:
    report = check_backend(SDPA, device="cpu", dtypes=[torch.float32], only="^(contexts|mask|no-)")
    report.raise_if_failed()
    assert SDPA.capabilities.name == "reference-sdpa"
    assert "prompts by sdpa" in SDPA.capabilities.summary


def test_requests_of_one_shape_go_in_one_call() -> None:
    assert [b.shape for b in blocks_of(prompt_part([(4, 9)] * 3))] == [(3, 4, 9)]
    assert [b.shape for b in blocks_of(prompt_part([(4, 9), (3, 9)]))] == [(1, 4, 9), (1, 3, 9)]


def test_widths_are_filled_up_with_zeros() -> None:
    query, value = torch.ones(1, 2, 3, 20), torch.ones(1, 2, 3, 12)
    for whole, width in ((False, 20), (True, 24)):
        made = _one_width(query, query, value, whole)
        assert [t.shape[-1] for t in made] == [width] * 3
        assert [t.sum() for t in made] == [120, 120, 72]


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_operators_of_a_gpu_are_called_as_their_schemas_say(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments are bound to the operator's schema; a CPU's kernel computes in its place."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    schema = operator.default._schema
    seen: list[dict[str, Any]] = []

    def attend(*given: Any, scale: float) -> tuple[Tensor, Tensor]:
        names = [a.name for a in schema.arguments if not a.kwarg_only]
        bound = dict(zip(names, given, strict=True))
        seen.append(bound)
        query, key, value = (bound[n] for n in ("query", "key", "value"))
        wide = query.shape[-1]
        padded = torch.nn.functional.pad(value, (0, wide - value.shape[-1]))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, padded, 0.0, bound["is_causal"], scale=scale
        )
        return out[..., : value.shape[-1]], lse[..., None] if name == "cudnn" else lse

    fake = types.SimpleNamespace(**{f"_scaled_dot_product_{name}_attention": attend})
    monkeypatch.setattr(sdpa_prompts, "OPERATORS", fake)
    lens = LENS["ragged"]
    part, given = prompt_part(lens), draw(lens, 24, 12, torch.float32)
    got = SdpaPrompts(name).attend(*given, part, softmax_scale=0.2, causal=True)
    monkeypatch.undo()
    want = SDPA.forward_mha(*given, part, softmax_scale=0.2)
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse)
    for bound in seen:
        assert bound["dropout_p"] == 0.0
        assert bound["value"].shape[-1] == (12 if name == "cudnn" else 24)
        assert bound.get("compute_log_sumexp", True) is True
        assert not bound["is_causal"] or bound["query"].shape[2] == bound["key"].shape[2]


def test_fa3_rows_without_keys_become_the_empty_state(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = [(2, 0), (3, 4), (1, 0)]
    part, given = prompt_part(lens), draw(lens, 24, 24, torch.float32)
    kernel = FA3Prompts()

    class Library:
        def missing(self) -> list[str]:
            return []

        def operator(self, name: str) -> Any:
            return lambda **_: [torch.full((6, 3, 24), torch.nan), torch.full((3, 6), torch.inf)]

    kernel.library = Library()  # type: ignore[assignment]
    got = kernel.attend(*given, part, softmax_scale=0.2, causal=True)
    empty = torch.tensor([True, True, False, False, False, True])
    assert (got.out[empty] == 0).all()
    assert (got.lse[empty] == -torch.inf).all()
    assert got.out[~empty].isnan().all()


def test_what_can_not_run_is_refused_with_all_reasons() -> None:
    need = Requirements(torch.device("cpu"), torch.float32, 3, 32, 8, 16)
    assert SDPA.problems(need) == []
    for name in set(NAMES) - {"sdpa"}:
        found = WithPrompts(ReferenceBackend(), name).problems(need)
        assert any(text.startswith("prompts: device is 'cpu'") for text in found), name
        assert any("dtype is torch.float32" in text for text in found), name
    (reason,) = SDPA.problems(dataclasses.replace(need, dtype=torch.bfloat16))
    assert reason.startswith("prompts: dtype is torch.bfloat16, accepted by 'sdpa' are")
    gpu = dataclasses.replace(need, device=torch.device("cuda"))
    assert SDPA.problems(gpu) == ["prompts: device is 'cuda', accepted by 'sdpa' is 'cpu'"]
    part, given = prompt_part([(2, 2)]), draw([(2, 2)], 24, 12, torch.float32)
    with pytest.raises(ArgumentError, match=r"accepted by 'cudnn' is 'cuda'.*accepted by 'cudnn'"):
        WithPrompts(ReferenceBackend(), "cudnn").forward_mha(*given, part, softmax_scale=1.0)
    with pytest.raises(ArgumentError, match=r"key is \(2, 3, 23\)"):
        SDPA.forward_mha(given[0], given[1][..., 1:], given[2], part, softmax_scale=1.0)
    with pytest.raises(UnsupportedError, match="not given"):
        FA3Prompts().attend(*given, part, softmax_scale=1.0, causal=True)


def test_names() -> None:
    assert [get_prompt_kernel(name).name for name in NAMES] == [*KINDS, "fa3"]
    with pytest.raises(ArgumentError, match=r"name is 'fa2', accepted.*; library is 'x'"):
        get_prompt_kernel("fa2", "x")
    with pytest.raises(ArgumentError, match="kind is 'fa3'"):
        SdpaPrompts("fa3")


def test_a_step_is_built_with_it(model: DeepseekForCausalLM) -> None:
    """Greedy tokens of the plain backend, drafts and pages of its own included."""
    found = []
    for backend in (ReferenceBackend(), WithPrompts(ReferenceBackend(), "sdpa")):
        step = build_step(model, num_pages=100, page_size=4, backend=backend)
        batch = {i: ([(5 * i + j) % VOCAB for j in range(3 + 9 * i)], LIMIT) for i in range(3)}
        tokens: dict[int, list[int]] = {i: [] for i in batch}
        for results in generate(model, step, batch, NgramDrafter(VOCAB), 3):
            for r in results:
                tokens[r.request_id] += r.new_tokens
        found.append(tokens)
    assert found[0] == found[1]
