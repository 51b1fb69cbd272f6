from __future__ import annotations

import math
import random

import pytest
import torch

from specmla.errors import ArgumentError
from specmla.mask import DraftMask, tree_bits
from specmla.testing import ABSURD_PAGE, make_case, random_parents

SMALL = {"num_heads": 3, "kv_lora_rank": 16, "rope_dim": 8, "page_size": 16}
BATCH = [(3, 20), (0, 0), (1, 65), (2, 32)]


@pytest.mark.parametrize("page_gap", [0, 7])
def test_make_case_fills_used_slots_and_poisons_all_others(page_gap: int) -> None:
    case = make_case(BATCH, **SMALL, page_gap=page_gap, spare_pages=2)
    cache = case.latent_cache
    used = torch.zeros(cache.shape[:2], dtype=torch.bool).flatten()
    for request, (_, seq_len) in enumerate(BATCH):
        slots = case.slots(request)
        assert len(slots) == seq_len
        assert not used[slots].any(), "requests share no slot"
        used[slots] = True
    flat = cache.flatten(0, 1)
    assert flat[used].isfinite().all()
    assert flat[~used].isnan().all()
    assert cache.shape[0] == 2 + 5 + 2 + 2
    assert cache.stride() == (16 * 24 + page_gap, 24, 1)
    gaps = cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))
    assert gaps[:, 16 * 24 :].isnan().all()


def test_make_case_permutes_pages() -> None:
    ids = [b for r in make_case([(1, 400)], **SMALL).requests for b in r.block_ids]
    assert ids != sorted(ids)
    assert len(set(ids)) == 25


@pytest.mark.parametrize("layout", ["packed", "heads_first", "slice"])
def test_make_case_gives_the_same_queries_in_every_layout(layout: str) -> None:
    case, plain = make_case(BATCH, **SMALL, query_layout=layout), make_case(BATCH, **SMALL)
    assert torch.equal(case.q_latent, plain.q_latent)
    assert torch.equal(case.q_rope, plain.q_rope)
    assert case.q_latent.is_contiguous() == (layout == "packed")
    assert case.q_latent.stride(-1) == 1


def test_make_case_draws_standard_normal_data_of_a_seed() -> None:
    case = make_case([(8, 1000)], **SMALL)
    values = case.latent_cache.flatten(0, 1)[case.slots(0)]
    assert abs(float(values.mean())) < 0.03
    assert abs(float(values.std()) - 1) < 0.03
    assert torch.equal(case.q_latent, make_case([(8, 1000)], **SMALL).q_latent)
    assert not torch.equal(case.q_latent, make_case([(8, 1000)], **SMALL, seed=1).q_latent)
    low = make_case([(8, 1000)], **SMALL, dtype=torch.bfloat16)
    assert torch.equal(low.q_latent, case.q_latent.bfloat16())


def test_tables_hold_absurd_ids_past_each_requests_pages() -> None:
    case = make_case(BATCH, **SMALL)
    part = case.tables()
    for row, (r, table) in enumerate(zip(case.requests, part.block_table.tolist(), strict=True)):
        assert tuple(table[: len(r.block_ids)]) == r.block_ids, row
        assert set(table[len(r.block_ids) :]) == {ABSURD_PAGE}
    assert part.query_start.tolist() == [0, 3, 3, 4, 6]
    assert part.row_extent.tolist() == [18, 19, 20, 65, 31, 32]
    assert part.plan is None


def test_windows_start_rows_of_every_other_request_inside_their_length() -> None:
    case = make_case([(2, 50)] * 6, **SMALL, windows=True)
    starts = [r.window_start for r in case.requests]
    assert starts[1::2] == [0, 0, 0]
    assert any(starts)
    assert case.tables().row_start.tolist() == [s for s in starts for _ in range(2)]


def test_trees_are_random_and_in_no_order() -> None:
    case = make_case([(64, 80), (64, 64)], **SMALL, mask=DraftMask.TREE)
    first, second = (r.parents for r in case.requests)
    assert first != second
    assert any(parent > node for node, parent in enumerate(first))
    assert case.tables().tree_bits.tolist() == [*tree_bits(first), *tree_bits(second)]
    assert sorted(p == -1 for p in random_parents(64, random.Random(0)))[-2:] == [False, True]


def test_options_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"query_layout is 'odd', accepted are \['packed'"):
        make_case(BATCH, query_layout="odd")
    with pytest.raises(TypeError, match="heads"):
        make_case(BATCH, heads=3)
    assert math.isclose(make_case([(1, 1)], **SMALL).softmax_scale, 192**-0.5)
