"""A rule of the caller's own: what it says of places without a draft, and terms that don't fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specmla import ArgumentError, SamplingParams
from specmla.verify.accept import decide
from specmla.verify.rules.terms import Ending, RuleTerms
from specmla.verify.sparse import DraftProbs
from tests.verify.scripted import W, make_step, run


def accepts_all(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
    return RuleTerms(torch.ones(drafts.shape, dtype=torch.float64), p)


@pytest.mark.parametrize("ending", [Ending.FIRST_REFUSAL, Ending.LAST_PASS])
def test_what_is_no_draft_never_stands(ending: Ending) -> None:
    drafts = torch.tensor([[3, -1, -1], [-1, 3, 4], [3, W, 4], [3, 4, 5]])
    p = torch.full((4, 4, W), 1 / W)
    terms = accepts_all(p, drafts)._replace(ending=ending)
    got = decide(terms, drafts, torch.full((4, 3), 0.5), torch.full((4,), 0.5))
    assert got.num_accepted.tolist() == [1, 0, 1, 3]
    after = torch.arange(4) > got.num_accepted[:, None]
    assert (got.tokens[after] == -1).all()
    assert ((got.tokens[~after] >= 0) & (got.tokens[~after] < W)).all()


def test_ragged_drafts_of_a_generous_rule() -> None:
    step = make_step(accepts_all)
    for seed, name in enumerate("ab"):
        step.add(name, [1, 2, 3], SamplingParams(1.0, seed=seed))
    run(step)
    got = run(step, {"a": [3, 4, 5], "b": [6]})
    assert [len(got[name].new_tokens) for name in "ab"] == [4, 2]
    assert min(min(r.new_tokens) for r in got.values()) >= 0
    assert all(r.num_accepted == r.num_drafts for r in got.values())
    run(step, {"a": [3, 4]})
    step.blocks.check_integrity()


def mend(**changed: object) -> Callable[..., RuleTerms]:
    def own(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        return accepts_all(p, drafts)._replace(**changed)

    return own


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda p, drafts, q=None: None, "rule <lambda> gives NoneType, accepted are RuleTerms"),
        (mend(accept=torch.ones(2)), r"rule own gives accept .* \(2,\) .* floating \(2, 0\)"),
        (mend(accept=0.5), "rule own gives accept=0.5, accepted is a tensor"),
        (mend(correction=torch.ones(2, 1, W + 1)), rf"correction .* floating \(2, 1, {W}\)"),
        (mend(correction=torch.ones(2, 1, W).long()), "correction torch.int64 .* is floating"),
        (mend(ending="match"), "rule own gives ending='match', accepted are"),
    ],
)
def test_terms_that_do_not_fit(rule: Callable[..., RuleTerms], message: str) -> None:
    step = make_step(rule)
    for seed, name in enumerate("ab"):
        step.add(name, [1, 2, 3], SamplingParams(1.0, seed=seed))
    with pytest.raises(ArgumentError, match=message):
        run(step)
    assert step.tokens("a").tolist() == [1, 2, 3]
