"""Sparse draft distributions from proposal to decision: equal to the dense ones, checked, moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specmla.errors import ArgumentError, ArgumentTypeError
from specmla.verify.proposal import DraftProposal
from specmla.verify.rules.registry import LOSSLESS
from specmla.verify.sampling import SamplingParams
from specmla.verify.sparse import SparseProbs
from specmla.verify.vocab import pick_probs
from tests.verify.test_step import W, make_step, prefilled


def some(b: int, k: int, c: int, seed: int = 0) -> SparseProbs:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(W, generator=generator)[:c] for _ in range(b * k)]).view(
        b, k, c
    )
    probs = torch.softmax(torch.randn(b, k, c, generator=generator, dtype=torch.float64), -1)
    return SparseProbs(ids, probs)


def test_dense_and_lookup_by_hand() -> None:
    q = SparseProbs(
        torch.tensor([[2, -1, 5], [7, 0, -1]]),
        torch.tensor([[0.25, torch.nan, 0.75], [0.5, 0.25, torch.nan]]),
    )
    assert q.dense(6).tolist() == [[0, 0, 0.25, 0, 0, 0.75], [0.25, 0, 0, 0, 0, 0]]
    assert q.at(torch.tensor([5, 7])).tolist() == [0.75, 0.5]
    assert q.at(torch.tensor([1, 1])).tolist() == [0, 0]


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("ragged", [False, True])
def test_step_decides_as_with_dense_rows(rule: str, ragged: bool) -> None:
    sparse = some(2, 3, 4)
    drafts = sparse.ids[..., 1].clone()
    counts = (3, 2) if ragged else (3, 3)
    if ragged:
        drafts[1, 2:] = -1
    outcomes = []
    for probs in (sparse, sparse.dense(W)):
        step = make_step(rule=rule)
        prefilled(step, "a", "b")
        for state in (step._table["a"], step._table["b"]):
            state.sampling = SamplingParams(0.9, seed=4, max_tokens=20)
        order = ("b", "a") if ragged else ("a", "b")
        plan = step.plan(DraftProposal(order, counts, drafts, probs))
        logits = torch.randn(len(plan.logit_rows), W, generator=torch.Generator().manual_seed(6))
        rows = plan.row_table[:, :-1].flatten()
        logits[rows, plan.drafts.flatten().clamp(min=0)] += 2.0  # so that some are accepted
        outcomes.append(step.commit(plan, step.verify(plan, logits)))
    assert outcomes[0] == outcomes[1]
    assert sum(r.num_accepted for r in outcomes[0]) > 0


def test_picked_rows_keep_their_ids() -> None:
    q = some(2, 3, 4)
    cells = torch.tensor([[4, 0], [5, 5]])
    got = pick_probs(q, cells)
    assert isinstance(got, SparseProbs)
    assert torch.equal(got.ids, q.ids.flatten(0, 1)[cells])
    assert torch.equal(got.dense(W), q.dense(W).flatten(0, 1)[cells])


def proposal(ids: Tensor, probs: Tensor) -> DraftProposal:
    return DraftProposal(("a",), (1,), torch.tensor([[3]]), SparseProbs(ids, probs))


def test_rows_are_checked_on_the_cpu() -> None:
    good = torch.tensor([[[3, 5, -1]]])
    proposal(good, torch.tensor([[[0.25, 0.75, torch.nan]]]))
    for ids, probs in (
        (good, torch.tensor([[[0.25, 0.5, 0.25]]])),
        (good, torch.tensor([[[-0.25, 1.25, 0.0]]])),
        (torch.tensor([[[3, 3, 5]]]), torch.tensor([[[0.25, 0.5, 0.25]]])),
        (good, torch.tensor([[[torch.nan, 1.0, 0.0]]])),
    ):
        with pytest.raises(ArgumentError, match=r"rows \[\[0, 0\]\] are no distributions"):
            proposal(ids, probs)


def test_shapes_and_dtypes_are_checked() -> None:
    with pytest.raises(ArgumentError, match="one shape"):
        proposal(torch.zeros(1, 1, 2, dtype=torch.int64), torch.ones(1, 1, 3))
    with pytest.raises(ArgumentError, match=r"accepted is \[B, K, C\]"):
        proposal(torch.zeros(1, 2, 1, dtype=torch.int64), torch.ones(1, 2, 1))
    with pytest.raises(ArgumentTypeError, match="ids has dtype"):
        proposal(torch.zeros(1, 1, 1, dtype=torch.int32), torch.ones(1, 1, 1))
    with pytest.raises(ArgumentTypeError, match="probs has dtype"):
        proposal(torch.zeros(1, 1, 1, dtype=torch.int64), torch.ones(1, 1, 1).half())
