"""torch's kernels for prompts on a GPU: right over chunks, ragged or not, and nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.base import Requirements
from specmla.backends.reference import ReferenceBackend
from specmla.backends.triton import TritonBackend
from specmla.backends.with_prompts import WithPrompts
from specmla.testing import assert_attention_within_budget, make_prompt_case

pytestmark = pytest.mark.gpu

BATCHES = {
    "ragged": [(64, 3000), (5, 5), (17, 900), (1, 1025), (128, 128)],
    "one-shape": [(128, 1000)] * 4,
    "whole-prompts": [(512, 512)] * 2,
}
DEEPSEEK: dict[str, Any] = {"num_heads": 16, "dtype": torch.bfloat16, "device": "cuda"}


def make(name: str) -> WithPrompts:
    backend = WithPrompts(TritonBackend(), name)
    found = backend.problems(Requirements(torch.device("cuda"), torch.bfloat16, 16, 512, 64, 64))
    if found:
        pytest.skip("; ".join(found))
    return backend


@pytest.mark.parametrize("rows", [None, 1024])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dims", [(128, 128), (192, 256)], ids=["deepseek", "glm"])
@pytest.mark.parametrize("name", ["flash", "cudnn", "fa3"])
def test_prompts_are_as_good_as_plain_ones(
    name: str, dims: tuple[int, int], batch: list[tuple[int, int]], rows: int | None
) -> None:
    backend = make(name)
    case = make_prompt_case(batch, nope_dim=dims[0], v_dim=dims[1], **DEEPSEEK)
    plain = case.attend(ReferenceBackend())
    got = case.attend(backend, None if rows is None else case.workspace(rows))
    assert_attention_within_budget(got, case.oracle(), plain, plain.lse, score_width=dims[0] + 64)


@pytest.mark.parametrize("name", ["flash", "cudnn", "fa3"])
def test_nothing_waits(name: str) -> None:
    backend, case = make(name), make_prompt_case(BATCHES["ragged"], **DEEPSEEK)
    part = case.part(backend, case.workspace(1024))
    attention, query = case.inputs(backend)
    attention.attend(query, part)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention.attend(query, part)
    finally:
        torch.cuda.set_sync_debug_mode("default")
