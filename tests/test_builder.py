from __future__ import annotations

import dataclasses
import itertools
import random
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specmla import host_tables
from specmla.backends.reference import ReferenceBackend
from specmla.builder import MetadataBuilder
from specmla.mask import DraftMask
from specmla.metadata import RequestKind, RequestRows, StepMetadata
from specmla.query import QueryLenSupport
from specmla.testing import (
    VerifyCase,
    make_case,
    make_verify_part,
    overwrite_unused_cells,
    random_parents,
)

VERIFY, PROMPT = RequestKind.VERIFY, RequestKind.PROMPT


class SingleRow(ReferenceBackend):
    capabilities = dataclasses.replace(
        ReferenceBackend.capabilities,
        name="single",
        query_len_support=QueryLenSupport.SINGLE_ONLY,
        reorder_batch_threshold=1,
        masks=frozenset({DraftMask.CAUSAL, DraftMask.FULL}),
    )


def builder(
    page_size: int = 16, num_pages: int = 100, backend: ReferenceBackend | None = None
) -> MetadataBuilder:
    return MetadataBuilder(
        backend=backend or ReferenceBackend(),
        page_size=page_size,
        num_pages=num_pages,
        num_heads=3,
        kv_lora_rank=16,
        device="cpu",
        max_seq_len=1000,
    )


def rows(query_len: int, seq_len: int, **fields: object) -> RequestRows:
    return RequestRows(VERIFY, query_len, seq_len, tuple(range(70)))._replace(**fields)


requests_strategy = st.lists(
    st.builds(
        lambda kind, query, past, start, seed: RequestRows(
            kind=kind,
            query_len=max(query, 1) if kind is PROMPT else query,
            seq_len=past + (max(query, 1) if kind is PROMPT else query),
            block_ids=random.Random(seed).sample(range(100), 70),
            window_start=0 if kind is PROMPT else min(start, past),
        ),
        st.sampled_from([VERIFY, PROMPT]),
        st.sampled_from([0, 1, 2, 5, 17]),
        st.sampled_from([0, 1, 15, 16, 47]),
        st.sampled_from([0, 0, 9]),
        st.integers(0, 99),
    ),
    max_size=5,
)


@given(requests_strategy, st.sampled_from([1, 3, 16]), st.sampled_from(list(DraftMask)))
def test_build_gives_the_tables_written_out_plainly(
    requests: list[RequestRows], page_size: int, mask: DraftMask
) -> None:
    step = builder(page_size).build(requests, mask)
    ordered = [requests[i] for i in step.order]
    assert [r.kind for r in ordered] == sorted(
        (r.kind for r in requests), key=lambda k: k is PROMPT
    )
    assert sorted(step.order) == list(range(len(requests)))
    at = [(r, i) for r in ordered for i in range(r.seq_len - r.query_len, r.seq_len)]
    assert step.positions.tolist() == [i for _, i in at]
    assert step.slot_mapping.tolist() == [slot(r, i, page_size) for r, i in at]
    assert step.positions.dtype == step.slot_mapping.dtype == torch.int64
    lens = [r.query_len for r in ordered]
    assert step.query_start == tuple(itertools.accumulate(lens, initial=0))
    assert step.num_rows == sum(lens)
    verify = [r for r in ordered if r.kind is VERIFY]
    assert step.num_verify_rows == sum(r.query_len for r in verify)
    check_verify_part(step, verify, page_size, mask)
    check_prefill_part(step, [r for r in ordered if r.kind is PROMPT], page_size)


def slot(r: RequestRows, position: int, page_size: int) -> int:
    return r.block_ids[position // page_size] * page_size + position % page_size


def check_verify_part(
    step: StepMetadata, verify: list[RequestRows], page_size: int, mask: DraftMask
) -> None:
    if not verify:
        assert step.verify is None
        return
    got = step.verify
    want = make_verify_part(verify, mask, page_size=page_size, unused_cell=-1)
    for field in ("query_start", "seq_lens", "row_extent", "row_start", "tree_bits"):
        a, b = getattr(got, field), getattr(want, field)
        assert (a is None) == (b is None), field
        assert a is None or (torch.equal(a, b) and a.dtype == b.dtype), field
    width = got.block_table.shape[1]
    assert width == max(1, *(-(-r.seq_len // page_size) for r in verify))
    assert torch.equal(got.block_table, want.block_table[:, :width])
    assert got.block_table.dtype == torch.int32
    for field in ("mask", "query_lens", "max_query_len", "max_seq_len", "page_size", "rows"):
        assert getattr(got, field) == getattr(want, field), field


def check_prefill_part(step: StepMetadata, prompts: list[RequestRows], page_size: int) -> None:
    if not prompts:
        assert step.prefill is None
        return
    got = step.prefill
    assert got.query_lens == tuple(r.query_len for r in prompts)
    assert got.seq_lens == tuple(r.seq_len for r in prompts)
    assert got.num_rows == sum(got.query_lens)
    assert got.query_start.tolist() == list(itertools.accumulate(got.query_lens, initial=0))
    assert got.kv_start.tolist() == list(itertools.accumulate(got.seq_lens, initial=0))
    assert got.kv_slots.tolist() == [
        slot(r, i, page_size) for r in prompts for i in range(r.seq_len)
    ]


def test_build_sends_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    real = host_tables.send_arrays
    monkeypatch.setattr(host_tables, "send_arrays", lambda *a: sent.append(a) or real(*a))
    step = builder().build([rows(3, 40, window_start=2), rows(2, 9, kind=PROMPT)], DraftMask.TREE)
    assert len(sent) == 1
    verify, prefill = step.verify, step.prefill
    tables = [step.positions, step.slot_mapping, verify.block_table, verify.row_start,
              verify.tree_bits, verify.seq_lens, prefill.kv_slots, prefill.kv_start]  # fmt: skip
    assert len({t.untyped_storage().data_ptr() for t in tables}) == 1


def test_build_takes_arrays_along_in_the_same_copy() -> None:
    along = {"positions": array("q", [7, 2**40]), "odd": array("i", [-5]), "none": array("q")}
    step = builder().build([rows(3, 40)], along=along)
    assert {name: t.tolist() for name, t in step.along.items()} == {
        name: list(values) for name, values in along.items()
    }
    assert step.positions.tolist() == [37, 38, 39]
    tensors = [step.positions, step.verify.block_table, *step.along.values()]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=4),
    st.sampled_from([1, 3, 16]),
    st.booleans(),
)
def test_rounds_equal_the_steps_built_one_by_one(
    sizes: list[tuple[int, int]], page_size: int, single: bool
) -> None:
    """Ragged ends and page edges included; only cells past a request's length may differ."""
    chains = [
        RequestRows(VERIFY, count, past + count, random.Random(past).sample(range(100), 70))
        for count, past in sorted(sizes, reverse=True)
    ]
    made = builder(page_size, backend=SingleRow() if single else None)
    steps = made.build_rounds(chains)
    assert len(steps) == max([0, *(r.query_len for r in chains)])
    for i, step in enumerate(steps):
        now = [
            r._replace(query_len=1, seq_len=r.seq_len - r.query_len + i + 1)
            for r in chains
            if r.query_len > i
        ]
        want = made.build(now)
        assert (step.order, step.query_start) == (want.order, want.query_start)
        assert torch.equal(step.positions, want.positions)
        assert torch.equal(step.slot_mapping, want.slot_mapping)
        for field in ("query_start", "seq_lens", "row_extent"):
            a, b = getattr(step.verify, field), getattr(want.verify, field)
            assert torch.equal(a, b), field
            assert a.dtype == b.dtype, field
        for field in ("mask", "query_lens", "max_query_len", "max_seq_len", "row_start"):
            assert getattr(step.verify, field) == getattr(want.verify, field), field
        width = want.verify.block_table.shape[1]
        used = want.verify.block_table >= 0
        assert torch.equal(step.verify.block_table[:, :width][used], want.verify.block_table[used])
        if single:
            assert torch.equal(step.verify.rows.seq_lens, want.verify.rows.seq_lens)
            assert step.verify.rows.block_table.shape[0] == len(now)


def test_rounds_are_sent_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    real = host_tables.send_arrays
    monkeypatch.setattr(host_tables, "send_arrays", lambda *a: sent.append(a) or real(*a))
    assert len(builder().build_rounds([rows(3, 40), rows(2, 9)])) == 3
    assert len(sent) == 1


def test_build_of_no_requests_is_an_empty_step() -> None:
    step = builder().build([])
    assert (step.num_rows, step.num_verify_rows, step.order) == (0, 0, ())
    assert step.verify is None
    assert step.prefill is None


def test_build_accepts_requests_without_rows() -> None:
    step = builder().build([rows(0, 0, block_ids=()), rows(2, 17), rows(0, 33)])
    assert step.verify.query_lens == (0, 2, 0)
    assert step.verify.query_start.tolist() == [0, 0, 2, 2]
    assert step.verify.block_table.tolist() == [[-1, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert step.verify.row_extent.tolist() == [16, 17]


def test_build_repeats_the_tables_for_a_single_row_backend() -> None:
    step = builder(backend=SingleRow()).build([rows(2, 17), rows(0, 5), rows(1, 3)])
    assert step.verify.rows.seq_lens.tolist() == [16, 17, 3]
    assert step.verify.rows.block_table.tolist() == [[0, 1], [0, 1], [0, -1]]
    absurd = overwrite_unused_cells(step.verify)
    assert absurd.rows.block_table.tolist() == [[0, 1], [0, 1], [0, 2**31 - 1]]
    assert absurd.block_table.tolist() == [[0, 1], [0, 2**31 - 1], [0, 2**31 - 1]]
    assert step.verify.block_table.tolist() == [[0, 1], [0, -1], [0, -1]]


def test_build_places_tree_nodes_at_prefix_plus_depth() -> None:
    parents = (2, 0, -1, 2, 3)  # the anchor is node 2; depths 1 2 0 1 2
    step = builder().build([rows(5, 35, parents=parents), rows(3, 20)], DraftMask.TREE)
    assert step.positions.tolist() == [31, 32, 30, 31, 32, 17, 18, 19]
    assert step.slot_mapping.tolist() == [30, 31, 32, 33, 34, 17, 18, 19], "slots stay distinct"
    assert step.verify.tree_bits.tolist() == [5, 7, 4, 12, 28, 1, 3, 7]
    assert step.verify.row_extent.tolist() == [35] * 5 + [20] * 3


def test_build_accepts_an_empty_tree_and_one_of_64_nodes() -> None:
    full = random_parents(64, random.Random(1))
    step = builder().build([rows(0, 9, parents=()), rows(64, 64, parents=full)], DraftMask.TREE)
    assert step.verify.query_lens == (0, 64)
    assert step.verify.tree_bits.min() < 0, "bit 63 is the sign"


PERMUTED = make_case(
    [(4, 20), (1, 17), (4, 33), (4, 4)],
    num_heads=3,
    kv_lora_rank=16,
    rope_dim=8,
    page_size=16,
    dtype=torch.float64,
)


def run_in_order(case: VerifyCase, order: tuple[int, ...]) -> list[Tensor]:
    """Run the case's requests in another order, the second one as a prompt; outputs per request."""
    backend = ReferenceBackend()
    kinds = [VERIFY, PROMPT, VERIFY, VERIFY]
    given = [case.requests[i]._replace(kind=kinds[i]) for i in order]
    step = builder(16, case.latent_cache.shape[0], backend).build(given)
    starts = list(itertools.accumulate((r.query_len for r in case.requests), initial=0))
    here = [order[i] for i in step.order]  # index of the case's request, in the step's order
    packed = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in here])
    q_latent, q_rope = case.q_latent[packed], case.q_rope[packed]
    n, scale = step.num_verify_rows, case.softmax_scale
    assert step.prefill.query_lens == (1,), "3 verifies of 4 rows and 1 other, in any order"
    out = [backend.forward_mqa(
        q_latent[:n], q_rope[:n], case.latent_cache, step.verify, softmax_scale=scale
    ).out]  # fmt: skip
    cached = case.latent_cache.flatten(0, 1)[step.prefill.kv_slots]
    key = cached[:, None].expand(-1, case.spec.num_heads, -1)
    query = torch.cat([q_latent[n:], q_rope[n:]], -1)
    value = key[..., : case.spec.kv_lora_rank]
    out.append(backend.forward_mha(query, key, value, step.prefill, softmax_scale=scale).out)
    pieces = torch.cat(out).split([case.requests[i].query_len for i in here])
    return [piece for _, piece in sorted(zip(here, pieces, strict=True), key=lambda pair: pair[0])]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_any_order_of_the_batch_gives_the_same_rows_back(order: tuple[int, ...]) -> None:
    want = run_in_order(PERMUTED, (0, 1, 2, 3))
    for got, expected in zip(run_in_order(PERMUTED, order), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
