from __future__ import annotations

import dataclasses

import pytest

from specmla import host_tables
from specmla.backends.reference import ReferenceBackend
from specmla.builder import MetadataBuilder
from specmla.errors import ArgumentError
from specmla.mask import DraftMask
from specmla.metadata import RequestKind, RequestRows
from specmla.query import QueryLenSupport

VERIFY, PROMPT = RequestKind.VERIFY, RequestKind.PROMPT


class OneLength(ReferenceBackend):
    capabilities = dataclasses.replace(
        ReferenceBackend.capabilities, name="one", query_len_support=QueryLenSupport.UNIFORM
    )


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
        num_heads=4,
        kv_lora_rank=16,
        device="cpu",
        max_seq_len=1000,
    )


def rows(query_len: int, seq_len: int, **fields: object) -> RequestRows:
    return RequestRows(VERIFY, query_len, seq_len, tuple(range(70)))._replace(**fields)


@pytest.mark.parametrize(
    ("request_rows", "mask", "reason"),
    [
        (rows(3, 2), DraftMask.CAUSAL, "seq_len is 2, accepted are query_len (3) to max_seq_len"),
        (rows(1, 1001), DraftMask.CAUSAL, "seq_len is 1001"),
        (rows(1, -5), DraftMask.CAUSAL, "seq_len is -5"),
        (rows(-1, 5), DraftMask.CAUSAL, "query_len is -1, accepted are values >= 0"),
        (rows(0, 5, kind=PROMPT), DraftMask.CAUSAL, "query_len is 0, accepted are values >= 1"),
        (rows(1, 33, block_ids=(1, 2)), DraftMask.CAUSAL, "holds 2 pages, 33 tokens need 3"),
        (rows(1, 20, block_ids=(1, 100)), DraftMask.CAUSAL, "[100], accepted are 0 to 99"),
        (rows(1, 20, block_ids=(-1, 1)), DraftMask.CAUSAL, "[-1], accepted are 0 to 99"),
        (rows(1, 20, window_start=21), DraftMask.CAUSAL, "window_start is 21"),
        (rows(1, 20, window_start=-1), DraftMask.CAUSAL, "window_start is -1"),
        (rows(1, 20, window_start=1, kind=PROMPT), DraftMask.CAUSAL, "0 for a prompt"),
        (rows(1, 20, kind="verify"), DraftMask.CAUSAL, "kind is 'verify'"),
        (rows(1, 20, parents=(-1,)), DraftMask.CAUSAL, "mask is 'causal', accepted is 'tree'"),
        (rows(1, 20, parents=(-1,), kind=PROMPT), DraftMask.TREE, "given for a prompt"),
        (rows(2, 20, parents=(-1,)), DraftMask.TREE, "parents has 1 nodes, query_len is 2"),
        (rows(3, 20, parents=(-1, 2, 1)), DraftMask.TREE, "cycle"),
        (rows(2, 20, parents=(-1, 2)), DraftMask.TREE, "outside"),
        (rows(65, 80, parents=tuple(range(-1, 64))), DraftMask.TREE, "65 nodes"),
        (rows(65, 80), DraftMask.TREE, "query_len is 65, a tree holds at most 64"),
    ],
)
def test_build_refuses(
    request_rows: RequestRows,
    mask: DraftMask,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_tables, "send_arrays", lambda *a: pytest.fail("sent something"))
    with pytest.raises(ArgumentError) as caught:
        builder().build([rows(1, 5), request_rows], mask)
    assert reason in str(caught.value)
    assert "request 1:" in str(caught.value)
    assert "request 0:" not in str(caught.value)


def test_build_lists_all_reasons_of_all_requests_at_once() -> None:
    bad = [
        rows(3, 2, window_start=9),
        rows(4, 50, block_ids=(200,)),
        rows(2, 20, parents=(1, 0)),
        rows(1, 20, kind=PROMPT, block_ids=(500, 501)),
    ]
    with pytest.raises(ArgumentError) as caught:
        builder(backend=OneLength()).build(bad)
    wanted = ["request 0: seq_len", "request 0: window_start", "request 1: block_ids holds 1",
              "request 2: parents are given", "request 2: tree_bits: parents must hold",
              "request 3: block_ids has [500, 501]", "[2, 3, 4]", "UNIFORM"]  # fmt: skip
    assert [text for text in wanted if text not in str(caught.value)] == []


def test_build_refuses_a_mask_that_the_backend_does_not_serve() -> None:
    with pytest.raises(ArgumentError, match=r"mask is 'tree'; backend 'single' accepts \['causal'"):
        builder(backend=SingleRow()).build([rows(1, 5)], DraftMask.TREE)


def test_build_lets_a_uniform_backend_mix_verifies_of_one_length_with_prompts() -> None:
    batch = [rows(3, 9, kind=PROMPT), rows(2, 9), rows(2, 40)]
    step = builder(backend=OneLength()).build(batch)
    assert step.order == (1, 2, 0)


@pytest.mark.parametrize(
    ("chains", "reason"),
    [
        ([rows(1, 9), rows(2, 9)], r"the rows are \[1, 2\], accepted are verify chains of falling"),
        ([rows(1, 9, kind=PROMPT)], "accepted are verify chains"),
        ([rows(1, 9, window_start=2)], "accepted are verify chains"),
        ([rows(2, 20, block_ids=(1, 100))], r"request 0: block_ids has \[100\]"),
        ([rows(2, 40, block_ids=(1, 2))], "request 0: block_ids holds 2 pages, 40 tokens need 3"),
        ([rows(2, 1001)], "request 0: seq_len is 1001"),
    ],
)
def test_rounds_refuse(
    chains: list[RequestRows], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tables, "send_arrays", lambda *a: pytest.fail("sent something"))
    with pytest.raises(ArgumentError, match=reason):
        builder().build_rounds(chains)


def test_builder_lists_all_bad_sizes() -> None:
    with pytest.raises(ArgumentError, match=r"page_size is 0.*; num_pages is -1"):
        builder(page_size=0, num_pages=-1)
