"""`DraftProposal`: what a drafter may hand over, checked before anything is reserved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specmla import (
    ArgumentError,
    ArgumentTypeError,
    DraftProposal,
    NumericsError,
    SamplingParams,
    SparseProbs,
)
from tests.verify.test_step import W, logits_for, make_step, prefilled

TOKENS = torch.tensor([[1, 2]])
PROBS = torch.full((1, 2, W), 1 / W)


@pytest.mark.parametrize(
    ("counts", "tokens", "probs", "message"),
    [
        ((2,), TOKENS.int(), None, "tokens has dtype torch.int32, accepted is torch.int64"),
        ((2,), TOKENS.float(), None, "tokens has dtype torch.float32"),
        ((2,), TOKENS > 0, None, "tokens has dtype torch.bool"),
        ((1.5,), TOKENS, None, r"counts is \(1.5,\), accepted are integers"),
        (("2",), TOKENS, None, "accepted are integers"),
        ((3,), TOKENS, None, "must lie in 0 .. K=2"),
        ((2,), TOKENS, PROBS.long(), "probs has dtype torch.int64"),
        ((2,), TOKENS, PROBS[0], r"probs has shape \(2, 16\).*accepted is \[B, K, W\]"),
        ((2,), TOKENS, PROBS[..., 0], r"accepted is \[B, K, W\]"),
        ((2,), TOKENS, PROBS[:, :, None], r"accepted is \[B, K, W\]"),
    ],
)
def test_refusals(counts, tokens, probs, message):
    with pytest.raises(ArgumentError, match=message):
        DraftProposal(("a",), counts, tokens, probs)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        (((-1, 0.7),), r"parents\[0\] holds \[0.7\], accepted are integers, -1 for the anchor"),
        ((("-1", "0"),), r"parents\[0\] holds \['-1', '0'\], accepted are integers"),
        (((float("nan"), -1),), r"parents\[0\] holds \[nan\], accepted are integers"),
        (((None, -1),), r"parents\[0\] holds \[None\], accepted are integers"),
        ((5,), r"parents\[0\] is 5, accepted are integers"),
        (((1, 0),), r"parents\[0\] has a cycle: draft 0 does not hang"),
        (((-1, 2),), r"parents\[0\] holds \[2\], outside -1 .. 1"),
        (((-1,),), r"parents\[0\] has 1 nodes, counts\[0\] is 2"),
    ],
)
def test_parents_are_named_by_the_numbers_given(parents, message):
    with pytest.raises(ArgumentError, match=message):
        DraftProposal(("a",), (2,), TOKENS, parents=parents)


def test_numpy_and_torch_integers_are_parents():
    for parents in (np.array([-1, 0]), torch.tensor([-1, 0]), [-1, 0]):
        DraftProposal(("a",), (2,), TOKENS, parents=(parents,))


def test_too_many_nodes_are_counted_without_the_anchor():
    tokens = torch.ones(1, 64, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"parents\[0\] has 64 nodes, accepted are at most 63"):
        DraftProposal(("a",), (64,), tokens, parents=((-1,) * 64,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": [[1, 2]]}, "tokens is a list, accepted is a tensor"),
        ({"probs": [1]}, "probs is a list, accepted are a tensor, SparseProbs, None"),
        ({"probs": SparseProbs([1], [1.0])}, "ids and probs are list and list"),
        ({"request_ids": 5}, "request_ids is 5, accepted is a tuple"),
        ({"counts": "2"}, "counts is '2', accepted is a tuple"),
        ({"parents": 5}, "parents is 5, accepted is a tuple"),
    ],
)
def test_fields_of_another_type_are_refused(fields, message):
    given = {"request_ids": ("a",), "counts": (2,), "tokens": TOKENS, **fields}
    with pytest.raises(ArgumentTypeError, match=message):
        DraftProposal(**given)


def test_what_is_no_proposal_is_refused():
    step = make_step()
    prefilled(step, "a")
    with pytest.raises(ArgumentTypeError, match="proposal is a list, accepted are DraftProposal"):
        step.plan([1])
    step.cancel(step.plan())


def test_numpy_counts_and_wide_probs_are_accepted():
    step = make_step()
    prefilled(step, "a")
    plan = step.plan(DraftProposal(("a",), (np.int64(2),), TOKENS, PROBS.double()))
    assert plan.token_ids.tolist() == [7, 1, 2]
    assert plan.draft_probs.dtype == torch.float64


def test_nan_probabilities_are_named_and_change_nothing():
    step = make_step()
    step.add("a", [1, 1, 1], SamplingParams(1.0, max_tokens=20))
    plan = step.plan()
    step.commit(plan, step.verify(plan, logits_for(plan, [7])))
    before, free = list(step.tokens("a")), step.blocks.num_free
    proposal = DraftProposal(("a",), (2,), TOKENS, PROBS.clone())
    proposal.probs.fill_(torch.nan)  # on a GPU nothing would have looked before
    plan = step.plan(proposal)
    with pytest.raises(NumericsError, match=r"draft probabilities .* \['a'\]"):
        step.commit(plan, step.verify(plan, torch.zeros(3, W)))
    assert list(step.tokens("a")) == before
    assert step.blocks.num_free == free


@pytest.mark.parametrize("wrong", [torch.nan, 0.0, 7.0, -1.0])
def test_rows_that_are_no_distribution_are_refused_on_a_cpu(wrong):
    probs = PROBS.clone()
    probs[0, 1] = wrong
    with pytest.raises(ArgumentError, match=r"probs rows \[\[0, 1\]\] are no distributions"):
        DraftProposal(("a",), (2,), TOKENS, probs)
    DraftProposal(("a",), (1,), TOKENS, probs)  # a row past the count may hold anything
