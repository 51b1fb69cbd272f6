"""Exact losslessness: two consecutive blocks on small vocabularies, every path counted.

Target and drafter are tables indexed by the whole history. A block drafts K tokens from its anchor,
verifies them, emits 1 to K+1, and the next block drafts anew from what was emitted. The chance of
every output is summed over all drafts and all outcomes with the terms of the very rule that the
sampler uses, then compared with the target's own autoregressive distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specmla.verify.accept import RuleTerms, token_level
from specmla.verify.sampling import SamplingBatch, SamplingParams, processed_probs
from specmla.verify.vocab import pad_vocab

RuleFn = Callable[[Tensor, Tensor, Tensor | None], RuleTerms]


class Model(NamedTuple):
    """Next-token distributions: `tables[n]` is [W**n, W], a row per history of length n."""

    tables: list[Tensor]
    width: int


class Drafts(NamedTuple):
    """All P things a drafter may do after each of R histories."""

    tokens: Tensor  # [R, P, K]
    weight: Tensor  # [R, P]
    q: Tensor | None  # [R, P, K, W of the drafter], as reported


Drafter = Callable[[int, int], Drafts]  # (history length, W of the target) -> all drafts


class Case(NamedTuple):
    target: Model
    drafter: Drafter
    k: int


def random_model(width: int, depth: int, seed: int, *, sharp: float = 1.5) -> Model:
    generator = torch.Generator().manual_seed(seed)
    logits = [
        torch.randn(width**n, width, generator=generator, dtype=torch.float64) * sharp
        for n in range(depth)
    ]
    return Model([torch.softmax(x, -1) for x in logits], width)


def filtered(model: Model, params: SamplingParams) -> Model:
    """Apply the processors that the sampler applies."""
    batch = SamplingBatch.build([params], "cpu")
    return Model(
        [processed_probs(t.log()[None], batch).probs[0] for t in model.tables], model.width
    )


def all_tokens(width: int, k: int) -> Tensor:
    """Give every chain of k tokens [width**k, k]."""
    return torch.cartesian_prod(*[torch.arange(width)] * k).reshape(-1, k)


def rows_along(model: Model, n: int, tokens: Tensor, num_rows: int) -> Tensor:
    """Give the distributions [R, P, num_rows, W] that follow histories and 0, 1, ... tokens.

    Rows after a token that the model does not know hold NaN: nothing may depend on them.
    """
    r, p = tokens.shape[:2]
    history = torch.arange(r)[:, None].expand(r, p)
    known = torch.ones(r, p, dtype=torch.bool)
    rows = []
    for j in range(num_rows):
        row = model.tables[n + j][history]
        rows.append(torch.where(known[..., None], row, torch.nan))
        if j < tokens.shape[2]:
            known = known & (tokens[..., j] >= 0) & (tokens[..., j] < model.width)
            history = history * model.width + tokens[..., j].clamp(0, model.width - 1)
    return torch.stack(rows, dim=2)


def dense(model: Model, k: int, reported: Model | None = None) -> Drafter:
    """Draw each draft from the model, and report it (or `reported`) as q."""

    def propose(n: int, target_width: int) -> Drafts:
        tokens = all_tokens(model.width, k).expand(target_width**n, -1, k)
        drawn = rows_along(model, n, tokens, k)
        weight = drawn.gather(3, tokens[..., None])[..., 0].prod(-1)
        q = drawn if reported is None else rows_along(reported, n, tokens, k)
        return Drafts(tokens, weight, q)

    return propose


def embedded(width: int, target_width: int, k: int, depth: int, seed: int) -> Drafter:
    """Draft over `width` ids for a target of `target_width`; tables by the target's histories."""
    generator = torch.Generator().manual_seed(seed)
    tables = [
        torch.rand(target_width**n, width**j, width, generator=generator, dtype=torch.float64)
        for n in range(depth)
        for j in range(k)
    ]

    def propose(n: int, _: int) -> Drafts:
        chains = all_tokens(width, k)
        place = torch.zeros(len(chains), dtype=torch.int64)
        rows = []
        for j in range(k):
            table = tables[n * k + j]
            rows.append((table / table.sum(-1, keepdim=True))[:, place])
            place = place * width + chains[:, j]
        q = torch.stack(rows, dim=2)
        tokens = chains.expand(q.shape[0], -1, k)
        return Drafts(tokens, q.gather(3, tokens[..., None])[..., 0].prod(-1), q)

    return propose


def deterministic(k: int, depth: int, width: int, seed: int) -> Drafter:
    """Propose one chain a history, as an n-gram look-up does; q is None."""
    generator = torch.Generator().manual_seed(seed)
    chains = [torch.randint(width, (width**n, k), generator=generator) for n in range(depth)]

    def propose(n: int, _: int) -> Drafts:
        return Drafts(chains[n][:, None], torch.ones(len(chains[n]), 1, dtype=torch.float64), None)

    return propose


def padded(drafter: Drafter, *, poison: float | None) -> Drafter:
    """Keep 0 to K of the drafts, by history; q of the others is poison or what it was."""

    def propose(n: int, width: int) -> Drafts:
        drafts = drafter(n, width)
        r, _, k = drafts.tokens.shape
        count = (torch.arange(r) + n) % (k + 1)
        gone = torch.arange(k) >= count[:, None, None]
        tokens = drafts.tokens.masked_fill(gone, -1)
        q = drafts.q
        if q is not None and poison is not None:
            q = q.masked_fill(gone[..., None], poison)
        return Drafts(tokens, drafts.weight, q)

    return propose


def block(case: Case, rule: RuleFn, n: int) -> list[Tensor]:
    """Give the chance [W**n, W**m] of emitting each m = 1 .. K+1 tokens after each history."""
    width, k = case.target.width, case.k
    drafts = case.drafter(n, width)
    r, paths = drafts.weight.shape
    p = rows_along(case.target, n, drafts.tokens, k + 1).reshape(r * paths, k + 1, width)
    q = drafts.q
    if q is not None:
        q = pad_vocab(q.reshape(r * paths, k, -1), width, allow_mismatch=True)
    terms = rule(p, drafts.tokens.reshape(r * paths, k), q)
    accept = terms.accept.reshape(r, paths, k)
    correction = terms.correction.reshape(r, paths, k + 1, width)
    reach, prefix, out = drafts.weight, torch.zeros(r, paths, dtype=torch.int64), []
    for j in range(k + 1):
        stop = reach * (1 - accept[..., j]) if j < k else reach
        row = correction[..., j, :]
        mass = stop[..., None] * row / row.sum(-1, keepdim=True)
        mass = torch.where(stop[..., None] > 0, mass, 0.0)  # rows out of reach may hold anything
        emitted = torch.zeros(r, width**j, width, dtype=torch.float64)
        emitted.scatter_add_(1, prefix[..., None].expand(-1, -1, width), mass)
        out.append(emitted.reshape(r, -1))
        if j < k:
            reach = torch.where(accept[..., j] > 0, reach * accept[..., j], 0.0)
            prefix = prefix * width + drafts.tokens[..., j].clamp(0, width - 1)
    return out


def continued(model: Model, chance: Tensor, length: int, total: int) -> Tensor:
    """Let the target itself finish outputs [W**length] up to `total` tokens."""
    for n in range(length, total):
        chance = (chance[:, None] * model.tables[n]).flatten()
    return chance


def total_variation(case: Case, rule: RuleFn = token_level) -> float:
    """Compare the output of two consecutive blocks with the target's own."""
    total = 2 * (case.k + 1)
    got = torch.zeros(case.target.width**total, dtype=torch.float64)
    for m1, first in enumerate(block(case, rule, 0), start=1):
        for m2, second in enumerate(block(case, rule, m1), start=1):
            got += continued(case.target, (first[0][:, None] * second).flatten(), m1 + m2, total)
    want = continued(case.target, torch.ones(1, dtype=torch.float64), 0, total)
    assert abs(want.sum().item() - 1) < 1e-12
    return 0.5 * (got - want).abs().sum().item()


def depth(k: int) -> int:
    return 2 * (k + 1) + 1


def half_equal(target: Model, k: int, seed: int) -> Model:
    """Equal the target after every other history, so that half of the residuals are empty."""
    other = random_model(target.width, depth(k), seed)
    tables = []
    for t, o in zip(target.tables, other.tables, strict=True):
        every_other = (torch.arange(len(t)) % 2 == 0)[:, None]
        tables.append(torch.where(every_other, t, o))
    return Model(tables, target.width)


TOP = SamplingParams(0.75, top_k=3, top_p=0.8)
NARROW = SamplingParams(1.5, top_k=2, top_p=0.95)


def make_case(kind: str, width: int, k: int, seed: int = 0) -> Case:
    target = random_model(width, depth(k), seed)
    draft = random_model(width, depth(k), seed + 100)
    cases: dict[str, Callable[[], tuple[Model, Drafter]]] = {
        "dense": lambda: (target, dense(draft, k)),
        "one-hot": lambda: (target, deterministic(k, depth(k), width, seed)),
        "padded-dense": lambda: (target, padded(dense(draft, k), poison=torch.nan)),
        "padded-one-hot": lambda: (
            target,
            padded(deterministic(k, depth(k), width, seed), poison=None),
        ),
        "equal": lambda: (target, dense(target, k)),
        "half-equal": lambda: (target, dense(half_equal(target, k, seed + 7), k)),
        "target-has-zeros": lambda: (filtered(target, TOP), dense(draft, k)),
        "target-has-zeros-one-hot": lambda: (
            filtered(target, NARROW),
            deterministic(k, depth(k), width, seed),
        ),
        "draft-has-zeros": lambda: (target, dense(filtered(draft, NARROW), k)),
        "both-have-zeros": lambda: (filtered(target, TOP), dense(filtered(draft, TOP), k)),
        "target-greedy": lambda: (filtered(target, SamplingParams()), dense(draft, k)),
        "both-greedy": lambda: (
            filtered(target, SamplingParams()),
            dense(filtered(draft, SamplingParams()), k),
        ),
        "smaller-vocabulary": lambda: (target, embedded(width - 1, width, k, depth(k), seed)),
        "larger-vocabulary": lambda: (target, embedded(width + 1, width, k, depth(k), seed)),
    }
    return Case(*cases[kind](), k)


KINDS = [
    "dense",
    "one-hot",
    "padded-dense",
    "padded-one-hot",
    "equal",
    "half-equal",
    "target-has-zeros",
    "target-has-zeros-one-hot",
    "draft-has-zeros",
    "both-have-zeros",
    "target-greedy",
    "both-greedy",
    "smaller-vocabulary",
    "larger-vocabulary",
]
SIZES = [(2, 1), (2, 3), (3, 1), (3, 2), (4, 2), (3, 3), (4, 3)]


@pytest.mark.parametrize(("width", "k"), SIZES, ids=[f"W{w}-K{k}" for w, k in SIZES])
@pytest.mark.parametrize("kind", KINDS)
def test_token_level_keeps_the_target_distribution(kind: str, width: int, k: int) -> None:
    for seed in range(3 if width**k < 27 else 1):
        assert total_variation(make_case(kind, width, k, seed)) < 1e-12, seed


def test_cases_are_what_they_say() -> None:
    """The zeros and empty residuals that the cases promise do occur."""
    assert any((t == 0).any() for t in make_case("target-has-zeros", 4, 2).target.tables)
    q = make_case("draft-has-zeros", 4, 2).drafter(1, 4).q
    assert q is not None
    assert (q == 0).any()
    case = make_case("half-equal", 3, 2)
    q = case.drafter(1, 3).q
    assert q is not None
    same = (rows_along(case.target, 1, all_tokens(3, 2).expand(3, -1, 2), 2) == q).all(-1)
    assert same.any()
    assert not same.all()
    assert (make_case("larger-vocabulary", 3, 2).drafter(0, 3).tokens == 3).any()


# What went wrong elsewhere. Each variant breaks the distribution in the case named beside it.


def accepts_zero(p: Tensor, drafts: Tensor, q: Tensor | None) -> RuleTerms:
    """Test u <= p/q with u on a grid of 2**-24 that holds 0: p = 0 is accepted now and then."""
    terms = token_level(p, drafts, q)
    impossible = (drafts >= 0) & (terms.accept == 0)
    return terms._replace(accept=terms.accept.masked_fill(impossible, 2.0**-24))


def one_hot_residual(p: Tensor, drafts: Tensor, q: Tensor | None) -> RuleTerms:
    """Pair the ratio test with the residual of a one-hot draft (BL-31)."""
    return token_level(p, drafts, q)._replace(correction=token_level(p, drafts, None).correction)


def q_dropped_in_the_test(p: Tensor, drafts: Tensor, q: Tensor | None) -> RuleTerms:
    return token_level(p, drafts, q)._replace(accept=token_level(p, drafts, None).accept)


def no_residual(p: Tensor, drafts: Tensor, q: Tensor | None) -> RuleTerms:
    return token_level(p, drafts, q)._replace(correction=p)


def rows_shifted(p: Tensor, drafts: Tensor, q: Tensor | None) -> RuleTerms:
    """Judge each draft by the row after it instead of the row before it."""
    return token_level(p.roll(-1, dims=1), drafts, q)


def bonus_from_last_draft_row(p: Tensor, drafts: Tensor, q: Tensor | None) -> RuleTerms:
    terms = token_level(p, drafts, q)
    return terms._replace(correction=torch.cat([terms.correction[:, :-1], p[:, -2:-1]], dim=1))


def q_of_the_next_place(p: Tensor, drafts: Tensor, q: Tensor | None) -> RuleTerms:
    return token_level(p, drafts, None if q is None else q.roll(1, dims=1))


def padding_gets_a_residual(p: Tensor, drafts: Tensor, q: Tensor | None) -> RuleTerms:
    """Treat -1 as a refused draft: correct it from max(p - q, 0)."""
    return token_level(p, torch.where(drafts < 0, p.shape[2], drafts), q)


def padding_reads_the_last_id(p: Tensor, drafts: Tensor, q: Tensor | None) -> RuleTerms:
    """Let -1 index the last vocabulary entry (BL-29)."""
    return token_level(p, drafts % p.shape[2], q)


def outside_ids_drawn_from_p(p: Tensor, drafts: Tensor, q: Tensor | None) -> RuleTerms:
    """Treat an id beyond the target's vocabulary as if no draft had been made."""
    return token_level(p, torch.where(drafts >= p.shape[2], -1, drafts), q)


def cut_q_renormalised(p: Tensor, drafts: Tensor, q: Tensor | None) -> RuleTerms:
    return token_level(p, drafts, None if q is None else q / q.sum(-1, keepdim=True))


WRONG: list[tuple[RuleFn, str]] = [
    (accepts_zero, "target-has-zeros"),
    (one_hot_residual, "dense"),
    (q_dropped_in_the_test, "dense"),
    (no_residual, "dense"),
    (no_residual, "one-hot"),
    (rows_shifted, "dense"),
    (bonus_from_last_draft_row, "dense"),
    (q_of_the_next_place, "dense"),
    (padding_reads_the_last_id, "padded-one-hot"),
    (outside_ids_drawn_from_p, "larger-vocabulary"),
    (cut_q_renormalised, "larger-vocabulary"),
]


@pytest.mark.parametrize(("rule", "kind"), WRONG, ids=[f"{r.__name__}-{c}" for r, c in WRONG])
def test_wrong_rules_are_caught(rule: RuleFn, kind: str) -> None:
    case = make_case(kind, 3, 2, seed=1)
    assert total_variation(case) < 1e-12
    # The rarest fault acts with 2**-24, still far above the bound. NaN is caught as well: it shows
    # that the rule used a row which the model cannot know.
    assert not total_variation(case, rule) <= 1e-9


def test_padding_must_not_meet_a_residual() -> None:
    case = make_case("dense", 3, 2, seed=1)
    case = case._replace(drafter=padded(case.drafter, poison=None))
    assert total_variation(case) < 1e-12
    assert total_variation(case, padding_gets_a_residual) > 1e-2


def test_raw_q_for_filtered_drafts_is_caught() -> None:
    """Drafts drawn from filtered logits, the unfiltered softmax reported."""
    raw = random_model(4, depth(2), 101)
    target = random_model(4, depth(2), 1)
    dishonest = Case(target, dense(filtered(raw, NARROW), 2, reported=raw), 2)
    honest = Case(target, dense(filtered(raw, NARROW), 2), 2)
    assert total_variation(honest) < 1e-12
    assert total_variation(dishonest) > 1e-2


def test_bl31_marginals_by_enumeration() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    case = Case(
        Model([p.expand(3**n, 3) for n in range(5)], 3),
        dense(Model([q.expand(3**n, 3) for n in range(5)], 3), 1),
        1,
    )

    def marginal(rule: RuleFn) -> Tensor:
        one, two = block(case, rule, 0)
        return one[0] + two[0].reshape(3, 3).sum(1)

    torch.testing.assert_close(marginal(token_level), p, rtol=0, atol=1e-15)
    got = marginal(one_hot_residual).tolist()
    assert [round(x, 4) for x in got] == [0.4054, 0.3375, 0.2571]
    accepted = block(case, token_level, 0)[1].sum().item()
    assert accepted == pytest.approx(0.70, abs=1e-15)
    assert block(case, q_dropped_in_the_test, 0)[1].sum().item() == pytest.approx(0.31, abs=1e-15)
