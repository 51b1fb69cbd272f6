"""Which random numbers two decisions may share: exact sums over shared numbers, and the streams.

A number that two decisions share is cut at every threshold that either compares it with; between
two cuts both decisions are constant, so summing over the pieces is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specmla.verify.accept import LOSSLESS, decide, step_numbers
from specmla.verify.rules.block import block
from specmla.verify.rules.terms import Ending, Rule, RuleTerms
from specmla.verify.rules.token_level import token_level
from specmla.verify.streams import Stream, step_uniforms, uniforms

# The toy of Sun et al.: two drafts, the target and the drafter ignore the history.
P = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
Q = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
K, W = 2, 2
CHAINS = torch.cartesian_prod(torch.arange(W), torch.arange(W))
Numbers = list[tuple[float, float]]  # what a number is, with its chance


def toy_terms(rule: Rule) -> RuleTerms:
    """Give the terms of all four chains."""
    return rule(P.expand(4, K + 1, W), CHAINS, Q.expand(4, K, W))


def pieces(thresholds: Tensor) -> Numbers:
    """Give midpoints and lengths of the pieces of (0, 1) between thresholds."""
    inner = thresholds[(thresholds > 0) & (thresholds < 1)].unique()
    ends = torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)])
    middle, length = (ends[1:] + ends[:-1]) / 2, ends[1:] - ends[:-1]
    return list(zip(middle.tolist(), length.tolist(), strict=True))


def outcome(
    terms: RuleTerms, drafts: tuple[int, int], u: tuple[float, float]
) -> list[tuple[tuple[int, ...], float]]:
    """Give what a block emits, with its chance, given its drafts and acceptance numbers."""
    chain = drafts[0] * W + drafts[1]
    first, second = (u[j] < terms.accept[chain, j].item() for j in range(K))
    if terms.ending is Ending.LAST_PASS:
        stand = 2 if second else int(first)
    else:
        stand = int(first) + int(first and second)
    row = terms.correction[chain, stand]
    return [((*drafts[:stand], y), (row[y] / row.sum()).item()) for y in range(W)]


def variation(rule: Rule, *, same_drafts: bool, same_tests: bool) -> float:
    """Compare the first tokens of two blocks with the target's.

    If the first block ends before its second draft, the second block drafts for that place again:
    keyed by position it meets the same number for the draft, for the test, or both.
    """
    terms = toy_terms(rule)
    tests, drawn = pieces(terms.accept.flatten()), list(enumerate(Q.tolist()))
    got = torch.zeros([W] * 6, dtype=torch.float64)
    for (d1, a1), (d2, a2), (u1, b1), (u2, b2) in itertools.product(drawn, drawn, tests, tests):
        for tokens, chance in outcome(terms, (d1, d2), (u1, u2)):
            again = len(tokens) == 1
            firsts = [(d2, 1.0)] if again and same_drafts else drawn
            numbers = [(u2, 1.0)] if again and same_tests else tests
            for (e1, f1), (e2, f2), (v1, g1), (v2, g2) in itertools.product(
                firsts, drawn, numbers, tests
            ):
                weight = a1 * a2 * b1 * b2 * chance * f1 * f2 * g1 * g2
                for more, rest in outcome(terms, (e1, e2), (v1, v2)):
                    _add(got, (*tokens, *more), weight * rest)
    want = torch.ones([], dtype=torch.float64)
    for _ in range(6):
        want = want[..., None] * P
    return 0.5 * (got - want).abs().sum().item()


def _add(got: Tensor, tokens: tuple[int, ...], chance: float) -> None:
    """Add an output that the target itself finishes."""
    tail = torch.tensor(chance, dtype=torch.float64)
    for _ in range(6 - len(tokens)):
        tail = tail[..., None] * P
    got[tokens] += tail


@pytest.mark.parametrize("rule", [token_level, block])
def test_numbers_of_the_block_are_lossless(rule: Rule) -> None:
    assert variation(rule, same_drafts=False, same_tests=False) < 1e-12


def test_block_verification_must_not_be_keyed_by_position() -> None:
    """It stops before a draft because of what that draft is; then the same draft must not come."""
    assert variation(block, same_drafts=True, same_tests=True) == pytest.approx(1 / 18, abs=1e-12)
    # Token-level rejection stops for reasons of the draft that it refuses, and hides the mistake.
    assert variation(token_level, same_drafts=True, same_tests=True) < 1e-12


P_WIDE, Q_WIDE = (0.45, 0.45, 0.1), (0.2, 0.1, 0.7)
GRID = [(i + 0.5) / 500 for i in range(500)]


def one_token(rule: Rule, numbers: Callable[[float], tuple[float, float, float]]) -> Tensor:
    """Give the first token's distribution for one draft where one number v decides everything.

    `numbers` makes of v the numbers of draft, acceptance and correction.
    """
    p = torch.tensor(P_WIDE, dtype=torch.float64)
    q = torch.tensor(Q_WIDE, dtype=torch.float64)
    drafts = torch.arange(3)[:, None]
    terms = rule(p.expand(3, 2, 3), drafts, q.expand(3, 1, 3))
    rows = terms.correction / terms.correction.sum(-1, keepdim=True)
    cuts = torch.cat([q.cumsum(0), terms.accept.flatten(), rows.cumsum(-1).flatten()])
    got = torch.zeros(3, dtype=torch.float64)
    for v, chance in pieces(cuts.round(decimals=12)):
        draft_u, accept_u, correction_u = numbers(v)
        draft = int((q.cumsum(0) <= draft_u).sum())
        if accept_u < terms.accept[draft, 0]:
            got[draft] += chance
        else:
            got[int((rows[draft, 0].cumsum(0) <= correction_u).sum())] += chance
    return got


SHARED: dict[str, Callable[[float, float], tuple[float, float, float]]] = {
    "draft-accept": lambda v, fresh: (v, v, fresh),
    "accept-correction": lambda v, fresh: (fresh, v, v),
    "draft-correction": lambda v, fresh: (v, fresh, v),
}


@pytest.mark.parametrize("shared", ["draft-accept", "accept-correction", "draft-correction"])
def test_shared_noise_is_caught(shared: str) -> None:
    """One number decides two things; the third is averaged over 500 points (off by 0.004 at most).

    With q = (1/5, 1/2, 3/10) the residual holds one id and its number does not matter, so that the
    shape with two ids left is used.
    """
    p = torch.tensor(P_WIDE, dtype=torch.float64)
    got = sum(one_token(token_level, lambda v, f=f: SHARED[shared](v, f)) / 500 for f in GRID)
    assert isinstance(got, Tensor)
    assert 0.5 * (got - p).abs().sum().item() > 0.02


def test_fresh_noise_is_not() -> None:
    total = torch.zeros(3, dtype=torch.float64)
    for draft_u, correction_u in itertools.product(GRID[::10], GRID[::10]):
        total += one_token(token_level, lambda v, d=draft_u, c=correction_u: (d, v, c)) / 2500
    p = torch.tensor(P_WIDE, dtype=torch.float64)
    assert 0.5 * (total - p).abs().sum().item() < 0.02


@pytest.mark.parametrize("name", LOSSLESS)
def test_streams_give_the_target_distribution_over_two_blocks(name: str) -> None:
    """The toy again, sampled with the very streams, 100,000 sequences of two blocks."""
    n, rule = 100_000, LOSSLESS[name]
    seed, position = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    out = torch.full((n, 6), -1)
    for _ in range(2):
        row = torch.arange(K)
        drafts = (uniforms(seed, position, row, Stream.DRAFT) >= Q[0]).long()
        terms = rule(P.expand(n, K + 1, W), drafts, Q.expand(n, K, W))
        u = step_numbers(terms.ending, seed, position, K)
        got = decide(terms, drafts, u.accept, u.correction)
        for j in range(K + 1):
            live = got.tokens[:, j] >= 0
            out[live, position[live] + j] = got.tokens[live, j]
        position = position + got.num_accepted + 1
    first = out[:, 0] * 2 + out[:, 1]
    counts = first.bincount(minlength=4).double()
    want = n * (P[:, None] * P).flatten()
    assert ((counts - want) ** 2 / want).sum().item() < 21  # chi square, 3 degrees: p = 1e-4
    third = out[out[:, 2] >= 0, 2].double().mean().item()
    assert abs(third - 2 / 3) < 4 * (2 / 9 / n) ** 0.5


def test_accepting_at_equality_is_caught() -> None:
    """u <= p / q with u = 0: a token of probability 0 stands; u < accept never lets it."""
    p = torch.tensor([[[1.0, 0.0]] * 2], dtype=torch.float64)
    q = torch.tensor([[[0.5, 0.5]]], dtype=torch.float64)
    drafts = torch.tensor([[1]])
    zero = torch.zeros(1, 1, dtype=torch.float64)
    for rule in (token_level, block):
        terms = rule(p, drafts, q)
        assert decide(terms, drafts, zero, zero[0]).tokens.tolist() == [[0, -1]]
        assert (zero <= terms.accept).all()  # the inclusive comparison would accept it


def test_greedy_and_match_numbers_do_not_depend_on_where_a_block_starts() -> None:
    seed = torch.tensor([5, 6])
    whole = step_numbers(Ending.MATCH, seed, torch.tensor([10, 20]), 7).correction
    for start in range(4):
        part = step_numbers(Ending.MATCH, seed, torch.tensor([10, 20]) + start, 3).correction
        assert torch.equal(part, whole[:, start : start + 4])


def test_numbers_of_accept_and_correction_do() -> None:
    seed = torch.tensor([5])
    one, two = (step_uniforms(seed, torch.tensor([at]), 3) for at in (10, 11))
    assert not torch.isin(one.accept, two.accept).any()
    assert one.correction != two.correction
