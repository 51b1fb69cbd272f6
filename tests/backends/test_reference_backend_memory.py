from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import pytest
import torch

from specmla.backends.base import AttentionOutput
from specmla.backends.reference import ReferenceBackend
from specmla.builder import MetadataBuilder
from specmla.mask import DraftMask
from specmla.metadata import VerifyPart
from specmla.reference import merge_attention_states
from specmla.testing import (
    VerifyCase,
    assert_matches_oracle,
    make_case,
    make_verify_part,
    overwrite_unused_cells,
    relative_error,
)

BACKEND = ReferenceBackend()
SMALL: dict[str, Any] = {"num_heads": 3, "kv_lora_rank": 16, "rope_dim": 8, "page_size": 16}
EMPTY = -math.inf


def attend(case: VerifyCase, tables: VerifyPart | None = None) -> AttentionOutput:
    return case.attend(BACKEND, tables)


def assert_same_bits(got: AttentionOutput, want: AttentionOutput) -> None:
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_padded_request_is_the_empty_state_and_leaves_the_others(query_len: int) -> None:
    """seq_lens [5, 130, 64, 0]: the last one pads the batch."""
    lens = [(query_len, s) for s in (5, 130, 64)]
    case = make_case([*lens, (query_len, 0)], **SMALL)
    got, live = attend(case), 3 * query_len
    assert not got.out[live:].any()
    assert (got.lse[live:] == EMPTY).all()
    alone = dataclasses.replace(
        case,
        q_latent=case.q_latent[:live],
        q_rope=case.q_rope[:live],
        requests=case.requests[:3],
    )
    want = attend(alone)
    assert relative_error(got.out[:live], want.out) < 1e-6
    torch.testing.assert_close(got.lse[:live], want.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mask", list(DraftMask))
@pytest.mark.parametrize("seq_len", [1, 13, 63, 64, 65])
def test_bits_past_the_length_do_not_matter(seq_len: int, mask: DraftMask) -> None:
    """NaN, inf and 0 in unused slots, pages and gaps, and any id in unused table cells."""
    batch = [(min(3, seq_len), seq_len), (0, 7), (1, 130)]
    results = [
        attend(make_case(batch, **SMALL, mask=mask, poison=poison, unused_cell=cell, page_gap=48))
        for poison, cell in ((math.nan, 2**31 - 1), (math.inf, -1), (0.0, 0))
    ]
    assert results[0].out.isfinite().all()
    for got in results[1:]:
        assert_same_bits(got, results[0])


@pytest.mark.parametrize("fill", [math.nan, math.inf])
def test_keys_that_no_row_of_a_request_sees_do_not_matter(fill: float) -> None:
    """Keys before the window and past every extent; the batch is ragged, so rows are padded."""
    case = make_case([(1, 50), (3, 40)], **SMALL)
    first = case.requests[0]._replace(window_start=20)
    part = make_verify_part([first, case.requests[1]], DraftMask.CAUSAL, page_size=16)
    extent = torch.tensor([45, 39, 39, 39], dtype=torch.int32)
    part = dataclasses.replace(part, row_extent=extent)
    want = attend(case, part)
    flat = case.latent_cache.flatten(0, 1)
    flat[case.slots(0)[:20]] = fill
    flat[case.slots(0)[45:]] = fill
    flat[case.slots(1)[39:]] = fill
    got = attend(case, part)
    assert got.out.isfinite().all()
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_an_extent_past_the_length_sees_the_length() -> None:
    case = make_case([(1, 50), (2, 40)], **SMALL)
    part = case.tables()
    far = dataclasses.replace(part, row_extent=torch.tensor([60, 39, 99], dtype=torch.int32))
    got, want = attend(case, far), attend(case, part)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("page_size", [1, 16])
def test_cells_that_the_builder_leaves_do_not_matter(page_size: int) -> None:
    case = make_case([(3, 65), (1, 0), (2, 130)], **SMALL | {"page_size": page_size})
    backend = ReferenceBackend()
    builder = MetadataBuilder(
        backend=backend, page_size=page_size, num_pages=case.latent_cache.shape[0], num_heads=3,
        kv_lora_rank=16, device="cpu", max_seq_len=200,
    )  # fmt: skip
    part = builder.build([case.requests[0], case.requests[1]._replace(query_len=0),
                          case.requests[2]]).verify  # fmt: skip
    rows = [0, 1, 2, 4, 5]
    some = dataclasses.replace(case, q_latent=case.q_latent[rows], q_rope=case.q_rope[rows])
    want = backend.forward_mqa(some.q_latent, some.q_rope, some.latent_cache, part,
                               softmax_scale=case.softmax_scale)  # fmt: skip
    assert_same_bits(attend(some, overwrite_unused_cells(part)), want)
    assert_matches_oracle(want, some, part)


@pytest.mark.parametrize("seq_len", [0, 1, 2])
def test_rows_without_keys_are_the_empty_state(seq_len: int) -> None:
    """Tables with seq_len < query_len = 3, which the builder refuses."""
    case = make_case([(3, seq_len), (4, 70)], **SMALL)
    got, empty = attend(case), 3 - seq_len
    assert not got.out[:empty].any()
    assert (got.lse[:empty] == EMPTY).all()
    assert got.lse[empty:].isfinite().all()
    assert_matches_oracle(got, case, case.tables())
    full = torch.randn(empty, 3, 16), torch.randn(empty, 3)
    merged = merge_attention_states(*full, got.out[:empty], got.lse[:empty])
    assert torch.equal(merged.out, full[0])
    assert torch.equal(merged.lse, full[1])


def test_negative_extents_are_the_empty_state() -> None:
    case = make_case([(2, 9), (1, 5)], **SMALL)
    part = dataclasses.replace(
        case.tables(), row_extent=torch.tensor([-4, 0, 5], dtype=torch.int32)
    )
    got = attend(case, part)
    assert not got.out[:2].any()
    assert (got.lse[:2] == EMPTY).all()
    assert got.out[2].any()


def test_contexts_of_zero_and_64_stand_in_one_batch() -> None:
    case = make_case([(3, 3), (3, 67), (3, 3)], **SMALL)
    got = attend(case)
    assert got.lse.isfinite().all()
    assert_matches_oracle(got, case, case.tables())


@pytest.mark.parametrize("layout", ["heads_first", "slice"])
@pytest.mark.parametrize("page_gap", [0, 24, 7])
def test_strides_do_not_matter(layout: str, page_gap: int) -> None:
    batch = [(6, 20), (1, 33)]
    got = attend(make_case(batch, **SMALL, query_layout=layout, page_gap=page_gap))
    assert_same_bits(got, attend(make_case(batch, **SMALL)))


def test_a_layer_of_a_pool_is_read_with_its_own_page_stride() -> None:
    case = make_case([(2, 40), (1, 17)], **SMALL)
    pages, page, width = case.latent_cache.shape
    pool = torch.full((pages, 5, page, width), math.nan)
    pool[:, 3] = case.latent_cache
    assert_same_bits(attend(dataclasses.replace(case, latent_cache=pool[:, 3])), attend(case))


@pytest.mark.parametrize("batch", [[(0, 5), (0, 0)], [(1, 0)], [(0, 0)]])
def test_a_step_with_nothing_to_attend_is_the_empty_state(batch: list[tuple[int, int]]) -> None:
    got = attend(make_case(batch, **SMALL))
    assert got.out.shape == (sum(q for q, _ in batch), 3, 16)
    assert not got.out.any()
    assert (got.lse == EMPTY).all()
    assert got.lse.dtype is torch.float32


def test_a_plan_serves_all_layers_and_results_outlive_the_next_call() -> None:
    case, backend = make_case([(2, 40), (1, 70)], **SMALL), ReferenceBackend()
    planned = case.planned(backend)
    layers = [case.latent_cache, case.latent_cache * 2, case.latent_cache - 1]
    got = [
        backend.forward_mqa(case.q_latent, case.q_rope, c, planned, softmax_scale=0.1)
        for c in layers
    ]
    scaled = dataclasses.replace(case.spec, softmax_scale=0.1)
    for cache, result in zip(layers, got, strict=True):
        layer = dataclasses.replace(case, latent_cache=cache, spec=scaled)
        assert_matches_oracle(result, layer, planned)


def test_a_backend_serves_modes_of_autograd_in_turn() -> None:
    case, backend = make_case([(2, 40)], **SMALL), ReferenceBackend()
    with torch.inference_mode():
        first = case.attend(backend)
    second = case.attend(backend)
    assert_same_bits(first, second)


def test_threads_that_share_a_backend_do_not_disturb_each_other() -> None:
    backend, failures = ReferenceBackend(), []

    def work(seed: int) -> None:
        case = make_case([(2, 120 + seed)], **SMALL, seed=seed)
        want = attend(case)
        for _ in range(100):
            got = case.attend(backend)
            if not torch.equal(got.out, want.out):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.gpu
@pytest.mark.parametrize("mask", list(DraftMask))
def test_gpu_equals_the_oracle_and_never_waits_for_the_device(mask: DraftMask) -> None:
    case = make_case([(5, 65), (0, 9), (1, 0), (3, 130)], **SMALL, dtype=torch.bfloat16,
                     device="cuda", mask=mask, page_gap=7, windows=True)  # fmt: skip
    tables = case.tables()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = attend(case, tables)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_matches_oracle(got, case, tables)
