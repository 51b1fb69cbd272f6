"""What went wrong elsewhere is caught: each variant breaks the distribution in a case beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specmla.verify.rules.block import block
from specmla.verify.rules.sample_match import sample_match
from specmla.verify.rules.terms import Ending, Rule, RuleTerms
from specmla.verify.rules.token_level import token_level
from specmla.verify.sparse import DraftProbs, SparseProbs
from tests.verify.enumeration import Case, Model, total_variation
from tests.verify.enumeration import block as one_block
from tests.verify.enumeration_cases import (
    NARROW,
    dense,
    depth,
    filtered,
    make_case,
    padded,
    random_model,
    sparse,
)

Variant = Callable[[Rule], Rule]


def accepts_zero(rule: Rule) -> Rule:
    """Test u <= p/q with u on a grid of 2**-24 that holds 0: p = 0 is accepted now and then."""

    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        terms = rule(p, drafts, q)
        impossible = (drafts >= 0) & (terms.accept == 0)
        return terms._replace(accept=terms.accept.masked_fill(impossible, 2.0**-24))

    return wrong


def one_hot_residual(rule: Rule) -> Rule:
    """Pair the test with the residual of a one-hot draft (BL-31)."""

    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        return rule(p, drafts, q)._replace(correction=rule(p, drafts, None).correction)

    return wrong


def q_dropped_in_the_test(rule: Rule) -> Rule:
    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        return rule(p, drafts, q)._replace(accept=rule(p, drafts, None).accept)

    return wrong


def no_residual(rule: Rule) -> Rule:
    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        return rule(p, drafts, q)._replace(correction=p)

    return wrong


def token_level_residual(rule: Rule) -> Rule:
    """Forget P in block verification's residual: max(p - q, 0) at every place."""

    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        return rule(p, drafts, q)._replace(correction=token_level(p, drafts, q).correction)

    return wrong


def rows_shifted(rule: Rule) -> Rule:
    """Judge each draft by the row after it instead of the row before it."""

    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        return rule(p.roll(-1, dims=1), drafts, q)

    return wrong


def bonus_from_last_draft_row(rule: Rule) -> Rule:
    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        terms = rule(p, drafts, q)
        return terms._replace(correction=torch.cat([terms.correction[:, :-1], p[:, -2:-1]], 1))

    return wrong


def q_of_the_next_place(rule: Rule) -> Rule:
    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        if isinstance(q, SparseProbs):
            return rule(p, drafts, SparseProbs(q.ids.roll(1, dims=1), q.probs.roll(1, dims=1)))
        return rule(p, drafts, None if q is None else q.roll(1, dims=1))

    return wrong


def padding_gets_a_residual(rule: Rule) -> Rule:
    """Treat -1 as a refused draft: correct it from max(p - q, 0)."""

    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        return rule(p, torch.where(drafts < 0, p.shape[2], drafts), q)

    return wrong


def padding_reads_the_last_id(rule: Rule) -> Rule:
    """Let -1 index the last vocabulary entry (BL-29)."""

    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        return rule(p, drafts % p.shape[2], q)

    return wrong


def outside_ids_drawn_from_p(rule: Rule) -> Rule:
    """Treat an id beyond the target's vocabulary as if no draft had been made."""

    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        return rule(p, torch.where(drafts >= p.shape[2], -1, drafts), q)

    return wrong


def cut_q_renormalised(rule: Rule) -> Rule:
    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        assert isinstance(q, Tensor)
        return rule(p, drafts, q / q.sum(-1, keepdim=True))

    return wrong


def first_refusal_ends(rule: Rule) -> Rule:
    """Read block verification's tests as those of token-level rejection."""

    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        return rule(p, drafts, q)._replace(ending=Ending.FIRST_REFUSAL)

    return wrong


def last_pass_counts(rule: Rule) -> Rule:
    """Read token-level tests as those of block verification."""

    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        return rule(p, drafts, q)._replace(ending=Ending.LAST_PASS)

    return wrong


def redrawn_after_a_mismatch(rule: Rule) -> Rule:
    """Throw sample-match's own token away and draw once more from the full row."""

    def wrong(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        return rule(p, drafts, q)._replace(ending=Ending.FIRST_REFUSAL)

    return wrong


WRONG: list[tuple[Rule, Variant, str]] = [
    *((rule, accepts_zero, "target-has-zeros") for rule in (token_level, block)),
    *((rule, one_hot_residual, "dense") for rule in (token_level, block)),
    *((rule, q_dropped_in_the_test, "dense") for rule in (token_level, block)),
    *((rule, no_residual, kind) for rule in (token_level, block) for kind in ("dense", "one-hot")),
    *((rule, rows_shifted, "dense") for rule in (token_level, block, sample_match)),
    *((rule, bonus_from_last_draft_row, "dense") for rule in (token_level, block, sample_match)),
    *(
        (rule, q_of_the_next_place, kind)
        for rule in (token_level, block)
        for kind in ("dense", "sparse")
    ),
    *((rule, padding_reads_the_last_id, "padded-one-hot") for rule in (token_level, block)),
    *((rule, outside_ids_drawn_from_p, "larger-vocabulary") for rule in (token_level, block)),
    *((rule, cut_q_renormalised, "larger-vocabulary") for rule in (token_level, block)),
    (block, token_level_residual, "dense"),
    (block, first_refusal_ends, "dense"),
    (token_level, last_pass_counts, "dense"),
    (sample_match, redrawn_after_a_mismatch, "dense"),
]


@pytest.mark.parametrize(
    ("rule", "variant", "kind"),
    WRONG,
    ids=[f"{r.__name__}-{v.__name__}-{c}" for r, v, c in WRONG],  # type: ignore[attr-defined]
)
def test_wrong_rules_are_caught(rule: Rule, variant: Variant, kind: str) -> None:
    case = make_case(kind, 3, 2, seed=1)
    assert total_variation(case, rule) < 1e-12
    # The rarest fault acts with 2**-24, still far above the bound. NaN is caught as well: it shows
    # that the rule used a row which the model cannot know.
    assert not total_variation(case, variant(rule)) <= 1e-9


@pytest.mark.parametrize("rule", [token_level, block])
def test_padding_must_not_meet_a_residual(rule: Rule) -> None:
    case = make_case("dense", 3, 2, seed=1)
    case = case._replace(drafter=padded(case.drafter, poison=None))
    assert total_variation(case, rule) < 1e-12
    assert total_variation(case, padding_gets_a_residual(rule)) > 1e-2


@pytest.mark.parametrize("rule", [token_level, block])
def test_raw_q_for_filtered_drafts_is_caught(rule: Rule) -> None:
    """Drafts drawn from filtered logits, the unfiltered softmax reported."""
    raw, target = random_model(4, depth(2), 101), random_model(4, depth(2), 1)
    dishonest = Case(target, dense(filtered(raw, NARROW), 2, reported=raw), 2)
    honest = Case(target, dense(filtered(raw, NARROW), 2), 2)
    assert total_variation(honest, rule) < 1e-12
    assert total_variation(dishonest, rule) > 1e-2
    # Sparse q from the top ids of a draft that was drawn from all: what is left out is gone.
    cut = sparse(dense(raw, 2, reported=filtered(raw, NARROW)))
    assert not total_variation(Case(target, cut, 2), rule) <= 1e-2


def test_bl31_wrong_marginals() -> None:
    def model(*row: float) -> Model:
        one = torch.tensor(row, dtype=torch.float64)
        return Model([one.expand(3**n, 3) for n in range(5)], 3)

    case = Case(model(0.5, 0.3, 0.2), dense(model(0.2, 0.5, 0.3), 1), 1)
    one, two = one_block(case, one_hot_residual(token_level), 0)
    got = (one[0] + two[0].reshape(3, 3).sum(1)).tolist()
    assert [round(x, 4) for x in got] == [0.4054, 0.3375, 0.2571]
    accepted = one_block(case, q_dropped_in_the_test(token_level), 0)[1].sum().item()
    assert accepted == pytest.approx(0.31, abs=1e-15)
