"""The whole loop with every drafter of ours, sampled: three tokens against exact probabilities."""

from __future__ import annotations

import pytest

from specmla import SamplingParams, generate
from tests.drafters.kinds import KINDS, maker
from tests.drafters.networks import tiny_target
from tests.e2e.conftest import make_step
from tests.exact_triples import exact_triples, p_value

PROMPT, TEMPERATURE = [3, 1, 4, 1, 5], 0.45
TOTAL, BATCH = 2000, 500


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=3).double()


@pytest.fixture(scope="module")
def expected(target):
    found = exact_triples(target, PROMPT, TEMPERATURE, TOTAL)
    assert len(found) > 25
    return found


def draw(target, kind: str, rule: str, spoil=lambda drafter: drafter):
    """Continue the prompt under many seeds; give the tokens, and drafts made and accepted."""
    tokens, drafted, accepted = dict[int, list[int]](), 0, 0
    make = maker(target, kind, 5 * BATCH)
    for start in range(0, TOTAL, BATCH):
        step = make_step(target, 8, 4 * BATCH, num_draft_layers=1, rule=rule)
        drafter = spoil(make(step))
        batch = {
            seed: (PROMPT, SamplingParams(TEMPERATURE, seed=seed, max_tokens=5))
            for seed in range(start, start + BATCH)
        }
        for results in generate(target, step, batch, drafter, 3):
            for r in results:
                tokens.setdefault(int(str(r.request_id)), []).extend(r.new_tokens)
                drafted, accepted = drafted + r.num_drafts, accepted + r.num_accepted
    return tokens, drafted, accepted


def chance(tokens: dict[int, list[int]], expected: dict) -> float:
    counts = dict.fromkeys(expected, 0)
    for new in tokens.values():
        if tuple(new[:3]) in counts:
            counts[tuple(new[:3])] += 1
    return p_value(list(counts.values()), list(expected.values()), TOTAL)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [(kind, ("token_level", "block")[i % 2]) for i, kind in enumerate(KINDS)],
)
def test_three_tokens_follow_the_target(target, expected, kind, rule):
    tokens, drafted, accepted = draw(target, kind, rule)
    assert chance(tokens, expected) > 1e-4
    assert drafted > TOTAL
    assert drafted / 100 < accepted < drafted


class Raw:
    """Reports another distribution than it drew from: a flatter one."""

    def __init__(self, drafter) -> None:
        self.drafter, self.vocab_size = drafter, drafter.vocab_size
        self.hidden_layers = drafter.hidden_layers
        self.observe, self.reset = drafter.observe, drafter.reset

    def propose(self, requests):
        given = self.drafter.propose(requests)
        if given.probs is None:
            return given
        raw = given.probs**0.2
        probs = raw / raw.sum(-1, keepdim=True).clamp(min=1e-30)
        return type(given)(given.request_ids, given.counts, given.tokens, probs)


def test_a_raw_q_is_noticed(target, expected):
    tokens, _, _ = draw(target, "dflash", "token_level", Raw)
    assert chance(tokens, expected) < 1e-4
