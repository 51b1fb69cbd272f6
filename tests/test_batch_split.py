"""Which path a request takes and where its rows stand: kinds decide, lengths for extends only."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specmla.backends.reference import ReferenceBackend
from specmla.batch_split import BatchRules, split_batch
from specmla.builder import MetadataBuilder
from specmla.errors import ArgumentError
from specmla.mask import DraftMask
from specmla.metadata import RequestKind, RequestRows
from specmla.query import QueryLenSupport
from specmla.workspace import PrefillWorkspace

VERIFY, EXTEND, PROMPT = RequestKind.VERIFY, RequestKind.EXTEND, RequestKind.PROMPT
CAUSAL, FULL, TREE = DraftMask.CAUSAL, DraftMask.FULL, DraftMask.TREE
VARLEN, UNIFORM = QueryLenSupport.VARLEN, QueryLenSupport.UNIFORM
SINGLE = QueryLenSupport.SINGLE_ONLY


def backend(support: QueryLenSupport = VARLEN, threshold: int = 1) -> ReferenceBackend:
    class Declares(ReferenceBackend):
        capabilities = dataclasses.replace(
            ReferenceBackend.capabilities,
            name="declares",
            query_len_support=support,
            reorder_batch_threshold=threshold,
        )

    return Declares()


def builder(
    support: QueryLenSupport = VARLEN, threshold: int = 1, page_size: int = 16
) -> MetadataBuilder:
    return MetadataBuilder(
        backend=backend(support, threshold),
        page_size=page_size,
        num_pages=100,
        num_heads=3,
        kv_lora_rank=16,
        device="cpu",
        max_seq_len=1000,
        dtype=torch.float32,
    )


def rows(kind: RequestKind, query_len: int, seq_len: int = 200, **fields: object) -> RequestRows:
    return RequestRows(kind, query_len, seq_len, tuple(range(70)))._replace(**fields)


@pytest.mark.parametrize(
    ("support", "declared", "drafts", "parallel", "threshold"),
    [
        (VARLEN, 1, 0, False, 1),
        (VARLEN, 1, 4, False, 5),
        (VARLEN, 1, 4, True, 9),
        (VARLEN, 128, 4, True, 128),
        (UNIFORM, 1, 3, False, 4),
        (UNIFORM, 128, 3, False, 128),
        (SINGLE, 1, 4, True, 1),
    ],
)
def test_threshold_is_raised_to_a_verify_unless_single_only(
    support: QueryLenSupport, declared: int, drafts: int, parallel: bool, threshold: int
) -> None:
    made = builder(support, declared)
    assert made.reorder_batch_threshold == (1 if support is SINGLE else max(1, declared))
    assert made.configure(BatchRules(drafts, parallel)) is made
    assert made.reorder_batch_threshold == threshold


@given(
    st.lists(st.tuples(st.sampled_from([VERIFY, EXTEND, PROMPT]), st.integers(0, 9)), max_size=9),
    st.integers(1, 9),
)
def test_order_is_verifies_short_extends_long_extends_prompts(
    parts: list[tuple[RequestKind, int]], threshold: int
) -> None:
    requests = [rows(kind, n if kind is VERIFY else max(n, 1)) for kind, n in parts]
    split = split_batch(requests, CAUSAL, threshold, VARLEN)

    def rank(r: RequestRows) -> int:
        if r.kind is EXTEND:
            return 1 if r.query_len <= threshold else 2
        return 0 if r.kind is VERIFY else 3

    stable = sorted(range(len(requests)), key=lambda i: rank(requests[i]))
    assert split.order == tuple(stable)
    assert split.absorbed == tuple(i for i in stable if rank(requests[i]) < 2)


def test_a_verify_is_absorbed_and_a_prompt_is_not_whatever_their_lengths() -> None:
    requests = [rows(PROMPT, 1), rows(VERIFY, 150), rows(VERIFY, 0), rows(EXTEND, 1)]
    assert split_batch(requests, CAUSAL, 1, VARLEN) == ((1, 2, 3), (0,))


@pytest.mark.parametrize(("mask", "most"), [(CAUSAL, 70), (FULL, 1), (TREE, 64)])
def test_a_mask_that_would_not_be_causal_sends_extends_the_other_way(
    mask: DraftMask, most: int
) -> None:
    requests = [rows(EXTEND, n) for n in (1, 2, 64, 65, 70, 71)]
    split = split_batch(requests, mask, 70, VARLEN)
    assert [requests[i].query_len for i in split.absorbed] == [
        n for n in (1, 2, 64, 65, 70) if n <= most
    ]


def test_a_uniform_backend_takes_extends_of_its_one_length() -> None:
    requests = [rows(EXTEND, n) for n in (2, 4, 5, 4)]
    assert split_batch([*requests, rows(VERIFY, 4)], CAUSAL, 4, UNIFORM) == ((4, 1, 3), (0, 2))
    assert split_batch(requests, CAUSAL, 4, UNIFORM) == ((1, 3), (0, 2))
    assert split_batch([*requests, rows(VERIFY, 0)], CAUSAL, 4, UNIFORM) == ((4, 1, 3), (0, 2))
    assert split_batch([*requests, rows(VERIFY, 2)], CAUSAL, 4, UNIFORM) == ((4, 0), (1, 2, 3))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_the_first_request_does_not_decide_for_a_uniform_backend(order: tuple[int, ...]) -> None:
    """BL-17: any order of extends of 1, 4, 4 and 4 rows gives three absorbed ones and another."""
    requests = [rows(EXTEND, (1, 4, 4, 4)[i]) for i in order]
    split = split_batch(requests, CAUSAL, 4, UNIFORM)
    assert [requests[i].query_len for i in split.order] == [4, 4, 4, 1]
    assert len(split.absorbed) == 3


def test_rows_that_pad_a_uniform_batch_have_no_say_in_its_length() -> None:
    step = builder(UNIFORM).build(
        [rows(VERIFY, 0, 0), rows(VERIFY, 3, 40), rows(PROMPT, 2, 9), rows(VERIFY, 3, 7),
         rows(VERIFY, 0, 33)]
    )  # fmt: skip
    assert step.order == (0, 1, 3, 4, 2)
    assert step.query_start == (0, 0, 3, 6, 6, 8)
    assert step.verify.query_lens == (3, 3)
    assert step.verify.block_table.shape[0] == 2
    assert step.num_verify_rows == 6
    step = builder(UNIFORM).build([rows(VERIFY, 0, 0), rows(VERIFY, 0, 5)])
    assert (step.verify, step.order, step.query_start) == (None, (0, 1), (0, 0, 0))


def test_results_come_back_in_the_callers_order() -> None:
    requests = [
        rows(kind, n, 100 + i)
        for i, (kind, n) in enumerate(
            [(PROMPT, 3), (EXTEND, 2), (VERIFY, 4), (EXTEND, 50), (VERIFY, 0), (VERIFY, 1)]
        )
    ]
    random.Random(5).shuffle(requests)
    step = builder().configure(BatchRules(num_speculative_tokens=3)).build(requests)
    pieces = step.positions.tensor_split(step.query_start[1:-1])
    for i, r in enumerate(requests):
        want = range(r.seq_len - r.query_len, r.seq_len)
        assert pieces[step.order.index(i)].tolist() == list(want)
    assert sum(step.verify.query_lens) == step.num_verify_rows == 7
    assert step.prefill.query_lens == (50, 3)


@pytest.mark.parametrize(
    ("request_rows", "mask", "reason"),
    [
        (rows(EXTEND, 0), CAUSAL, "query_len is 0, accepted are values >= 1"),
        (rows(EXTEND, 5, 5), CAUSAL, "seq_len is 5 for an extend, accepted are values > query_len"),
        (rows(EXTEND, 5, window_start=1), CAUSAL, "window_start is 1, accepted is 0 for an extend"),
        (rows(EXTEND, 1, parents=(-1,)), TREE, "parents are given for an extend"),
    ],
)
def test_build_refuses_extends_that_are_none(
    request_rows: RequestRows, mask: DraftMask, reason: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        builder().build([rows(VERIFY, 1), request_rows], mask)
    assert f"request 1: {reason}" in str(caught.value)


def workspace(page_size: int, dtype: torch.dtype, device: str) -> PrefillWorkspace:
    made = PrefillWorkspace(24, page_size, dtype, device)
    made.claim(page_size)
    made.lock()
    return made


def test_rules_that_do_not_fit_are_refused_with_all_reasons_and_change_nothing() -> None:
    made = builder()
    before = made.rules
    with pytest.raises(ArgumentError) as caught:
        made.configure(BatchRules(4, workspace=workspace(8, torch.float16, "meta")))
    wanted = ["workspace.page_size is 8, accepted is 16", "workspace.dtype is torch.float16, "
              "accepted is torch.float32", "workspace is on meta, accepted is cpu"]  # fmt: skip
    assert [text for text in wanted if text not in str(caught.value)] == []
    assert (made.rules, made.reorder_batch_threshold) == (before, 1)
    with pytest.raises(ArgumentError, match=r"'declares' is SINGLE_ONLY and declares .* 4"):
        builder(SINGLE, 4)
    with pytest.raises(ArgumentError, match=r"num_speculative_tokens is -1.*; workspace is not"):
        BatchRules(-1, workspace=PrefillWorkspace(24, 16, torch.float32, "cpu"))
    with pytest.raises(ArgumentError, match="parallel_drafting is 'no', accepted are True, False"):
        BatchRules(1, parallel_drafting="no")  # type: ignore[arg-type]
