"""The Triton backends on a real device: bf16, every launch entry, far pages, graphs, no syncs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.backends.reference import ReferenceBackend
from specmla.backends.rows import RowsBackend
from specmla.backends.triton import TritonBackend
from specmla.cache import cache_format
from specmla.mask import DraftMask
from specmla.metadata import PrefillPart, VerifyPart
from specmla.testing import (
    VerifyCase,
    assert_attention_within_budget,
    assert_matches_oracle,
    check_backend,
    make_case,
)

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
MASKS = [DraftMask.CAUSAL, DraftMask.FULL, DraftMask.TREE]


def attend(case: VerifyCase, backend: AttentionBackend, part: VerifyPart) -> AttentionOutput:
    return backend.forward_mqa(
        case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=case.softmax_scale
    )


def check(case: VerifyCase, backend: AttentionBackend) -> AttentionOutput:
    got = case.attend(backend)
    assert_matches_oracle(got, case, case.tables())
    return got


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", [TritonBackend, RowsBackend])
def test_hostile_cases(backend: type[AttentionBackend], share: str) -> None:  # BL-03 among others
    check_backend(backend(), device=CUDA, only=share).raise_if_failed()


@pytest.mark.parametrize("backend", [TritonBackend, RowsBackend])
def test_batch_invariant_results(backend: type[AttentionBackend]) -> None:
    made = backend(batch_invariant=True)  # type: ignore[call-arg]
    only = "^rows|^windows|^mask-full|^repeats|^contexts|^long"
    check_backend(made, device=CUDA, only=only).raise_if_failed()


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_mask_page_size_and_dtype(
    dtype: torch.dtype, mask: DraftMask, page_size: int
) -> None:
    for query_len, num_heads in ((1, 16), (2, 12), (5, 20), (3, 128)):
        lens = [(query_len, n) for n in (query_len, 63, 64, 65, 700, 1999)]
        case = make_case(
            [*lens, (0, 7), (0, 0)],
            num_heads=num_heads,
            page_size=page_size,
            mask=mask,
            dtype=dtype,
            device=CUDA,
            page_gap=64,
            query_layout="slice",
            windows=True,
        )
        check(case, TritonBackend())
        if mask is not DraftMask.TREE:
            check(case, RowsBackend())


@pytest.mark.parametrize(("rank", "rope"), [(512, 0), (256, 32), (128, 64), (64, 16), (16, 128)])
def test_dims(rank: int, rope: int) -> None:
    case = make_case(
        "2q4s300,1q1s77",
        num_heads=16,
        kv_lora_rank=rank,
        rope_dim=rope,
        dtype=torch.bfloat16,
        device=CUDA,
    )
    check(case, TritonBackend())
    check(case, RowsBackend())


@pytest.mark.parametrize("num_splits", [1, 2, 4, 16, 100])
@pytest.mark.parametrize("backend", [TritonBackend, RowsBackend])
def test_split_counts(backend: type[AttentionBackend], num_splits: int) -> None:
    lens = [(3, 1), (3, 65), (3, 700), (4, 4000), (1, 0)]
    case = make_case(lens, num_heads=16, dtype=torch.bfloat16, device=CUDA)
    check(case, backend(num_splits))  # type: ignore[call-arg]


def test_many_runs_give_the_same_bits() -> None:
    """A copy that overtakes its reader shows as a difference between runs, sooner or later."""
    case = make_case("24q4s4096,8q3s3000", num_heads=16, dtype=torch.bfloat16, device=CUDA)
    backend = TritonBackend()
    part = case.planned(backend)
    first = attend(case, backend, part)
    assert_matches_oracle(first, case, case.tables())
    for _ in range(50):
        again = attend(case, backend, part)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)


@contextmanager
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_plan_and_attention_wait_for_nothing() -> None:
    case = make_case("3q4s700,1q1s64", num_heads=16, dtype=torch.bfloat16, device=CUDA)
    backend, tables = TritonBackend(), case.tables()
    case.attend(backend)  # compiles
    torch.cuda.synchronize()
    with no_syncs():
        part = backend.plan(tables, num_heads=16, kv_lora_rank=512)
        got = attend(case, backend, part)
    assert_matches_oracle(got, case, tables)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_captured_plan_follows_rows_requests_and_lengths(invariant: bool) -> None:  # BL-18, BL-20
    backend = TritonBackend(batch_invariant=invariant)
    static = make_case([(3, 700)] * 8, num_heads=16, dtype=torch.bfloat16, device=CUDA)
    part = static.tables()
    attend(static, backend, static.planned(backend, part))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(static, backend, static.planned(backend, part))
    ragged = [(3, 1), (3, 64), (3, 65), (3, 700), (3, 3)]
    for lens in (ragged, [(3, 1)] * 8, [(9, 512), (0, 4), (12, 90)], ragged):
        live = make_case(lens, num_heads=16, dtype=torch.bfloat16, device=CUDA)
        tables, rows, requests = live.tables(), sum(q for q, _ in lens), len(lens)
        static.latent_cache[: live.latent_cache.shape[0]] = live.latent_cache
        part.query_start.fill_(rows)
        part.query_start[:requests] = tables.query_start[:requests]
        part.seq_lens.zero_()
        part.seq_lens[:requests] = tables.seq_lens
        part.block_table[:requests, : tables.block_table.shape[1]] = tables.block_table
        part.row_extent[:rows] = tables.row_extent
        static.q_latent[:rows] = live.q_latent
        static.q_rope[:rows] = live.q_rope
        captured.out.fill_(math.nan)
        graph.replay()
        held = AttentionOutput(captured.out[:rows], captured.lse[:rows])
        assert_matches_oracle(held, live, tables)
        assert (captured.out[rows:] == 0).all(), "rows of nobody"
        assert (captured.lse[rows:] == -math.inf).all()
        if invariant:
            eager = live.attend(backend)
            assert torch.equal(held.out, eager.out)
            assert torch.equal(held.lse, eager.lse)


@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (96, 64), (24, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_prompts(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    query_lens, seq_lens = (300, 0, 1, 65, 128), (300, 9, 500, 129, 400)
    starts = [
        torch.tensor([0, *torch.tensor(v).cumsum(0).tolist()], dtype=torch.int32, device=CUDA)
        for v in (query_lens, seq_lens)
    ]
    slots = torch.arange(sum(seq_lens), device=CUDA)
    part = PrefillPart(starts[0], starts[1], slots, query_lens, seq_lens)
    rows, keys = sum(query_lens), sum(seq_lens)
    query = torch.randn(rows, 20, dims[0], device=CUDA).to(dtype)
    key = torch.randn(keys, 20, dims[0], device=CUDA).to(dtype)
    value = torch.randn(keys, 20, dims[1], device=CUDA).to(dtype)

    def run(backend: AttentionBackend, as_dtype: torch.dtype, causal: bool) -> AttentionOutput:
        return backend.forward_mha(
            query.to(as_dtype),
            key.to(as_dtype),
            value.to(as_dtype),
            part,
            softmax_scale=0.1,
            causal=causal,
        )

    reference = ReferenceBackend()
    for causal in (True, False):
        assert_attention_within_budget(
            run(TritonBackend(), dtype, causal),
            run(reference, torch.float64, causal),
            run(reference, dtype, causal),
            run(reference, torch.float32, causal).lse,
            score_width=query.shape[-1],
        )


@pytest.mark.parametrize("name", ["fp8", "fp8_ds_mla", "fp8_per_token_head"])
def test_hostile_cases_over_quantised_rows(name: str) -> None:
    scale = {"k_scale": 2.0**-6} if name == "fp8" else {}
    made = cache_format(name, 512, 64, dtype=torch.bfloat16, **scale)
    only = "^(contexts|totals|rows|repeats|heads-12$|page-16$|windows|small-page|far|refuses)"
    check_backend(TritonBackend(cache_format=made), device=CUDA, only=only).raise_if_failed()
