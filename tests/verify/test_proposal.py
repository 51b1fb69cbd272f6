"""`DraftProposal`: what a drafter may hand over, checked before anything is reserved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specmla import ArgumentError, DraftProposal, NumericsError, SamplingParams
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
