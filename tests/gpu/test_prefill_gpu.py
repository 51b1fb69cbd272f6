"""Chunked prompts on a GPU: right in bf16, without a host sync, in memory flat in the context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.reference import ReferenceBackend
from specmla.backends.triton import TritonBackend
from specmla.testing import PromptCase, assert_attention_within_budget, make_prompt_case

pytestmark = pytest.mark.gpu

BATCH = [(64, 3000), (5, 5), (17, 900), (1, 1025), (128, 128)]
DEEPSEEK: dict[str, Any] = {"num_heads": 16, "dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.parametrize("dims", [(128, 128), (192, 256)], ids=["deepseek", "glm"])
@pytest.mark.parametrize("rows", [64, 1024, 8192])
def test_chunks_are_as_good_as_one_pass(rows: int, dims: tuple[int, int]) -> None:
    case = make_prompt_case(BATCH, nope_dim=dims[0], v_dim=dims[1], **DEEPSEEK)
    plain = case.attend(ReferenceBackend())
    got = case.attend(TritonBackend(), case.workspace(rows))
    assert_attention_within_budget(got, case.oracle(), plain, plain.lse, score_width=dims[0] + 64)


def attend(case: PromptCase, rows: int) -> None:
    """Attend with a warm kernel, then once more; a host sync raises, the peak counts that one."""
    backend, workspace = TritonBackend(), case.workspace(rows)
    part = case.part(backend, workspace)
    attention, query = case.inputs(backend)
    attention.attend(query, part)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention.attend(query, part)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_sync() -> None:
    attend(make_prompt_case(BATCH, **DEEPSEEK), 256)


@pytest.mark.slow
def test_peak_is_flat_from_2k_to_128k() -> None:
    """DeepSeek-V3's dims at 16 heads, 512 new rows, chunks of 1024 rows.

    A single chunk takes less: what rows have seen is made after its keys, not held beside them.
    """
    peaks = []
    for context in (2048, 8192, 32_768, 131_072):
        case = make_prompt_case([(512, context + 512)], **DEEPSEEK)
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        attend(case, 1024)
        # What was asked for: blocks that the allocator does not split count up to 1 MB more.
        peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
        del case
    # The slots of a part are 8 bytes a cached token; its workspace is the same for all.
    slots = 8 * (131_072 - 2048)
    assert max(peaks) - peaks[0] <= slots + 2**20
