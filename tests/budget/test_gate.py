"""Confidences: admission before the draw keeps the target's distribution, after it does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specmla import ArgumentError
from specmla.budget.gate import Gate, StopRule, SurvivalThreshold, ThroughputStop
from specmla.verify.rules.block import block
from specmla.verify.rules.registry import LOSSLESS
from specmla.verify.rules.terms import Rule
from specmla.verify.rules.token_level import token_level
from tests.verify.enumeration import Case, Drafts, Model, mean_accepted, total_variation
from tests.verify.enumeration import block as one_block

P = torch.tensor([0.7, 0.3], dtype=torch.float64)
Q = torch.tensor([0.5, 0.5], dtype=torch.float64)
CHAINS = torch.cartesian_prod(torch.arange(2), torch.arange(2))
# Rows of a verify: 1, 2 and 3. One draft alone costs more than it brings.
RATES = [1.0, 1.0, 0.5, 0.45]


def confidence(place: int, before: Tensor) -> Tensor:
    """Estimate acceptance [B] as DSpark's head does: from the anchor, then from the last draft."""
    if place == 0:
        return torch.full((len(before),), 0.8, dtype=torch.float64)
    return torch.where(before[:, -1] == 0, 0.9, 0.1).double()


def case_of(tokens: Tensor) -> Case:
    """Let a drafter propose the four chains, cut as `tokens` [4, 2] says, after any history."""

    def propose(n: int, width: int) -> Drafts:
        chance = Q[CHAINS].prod(-1).expand(width**n, 4)
        return Drafts(tokens.expand(width**n, 4, 2), chance, Q.expand(width**n, 4, 2, 2))

    return Case(Model([P.expand(2**n, 2) for n in range(7)], 2), propose, 2)


def first_token(case: Case, rule: Rule) -> float:
    """Give the chance that the first emitted token is id 0."""
    out = one_block(case, rule, 0)
    return sum(o.view(2, -1)[0].sum().item() for o in out)


def anticipating() -> Tensor:
    """Search over all places for the best speed, with confidences that saw the drafts."""
    tokens = CHAINS.clone()
    for chain in range(4):
        c = [confidence(j, CHAINS[chain : chain + 1, :j]).item() for j in range(2)]
        expected = [1.0, 1.0 + c[0], 1.0 + c[0] + c[0] * c[1]]
        speed = [tau * RATES[1 + k] for k, tau in enumerate(expected)]
        tokens[chain, speed.index(max(speed)) :] = -1
    return tokens


def gated(rule: StopRule) -> Tensor:
    """Draft each chain through a gate of its own."""
    rows = []
    for chain in range(4):
        gate = Gate(rule, 1, "cpu")
        drawn = torch.empty(1, 0, dtype=torch.int64)
        kept = []
        for j in range(2):
            kept.append(gate.draw(confidence(j, drawn), lambda c=chain, j=j: CHAINS[c, j, None]))
            drawn = CHAINS[chain : chain + 1, : j + 1]
        rows.append(torch.cat(kept))
    return torch.stack(rows)


@pytest.mark.parametrize("rule", [token_level, block])
def test_counter_example(rule: Rule) -> None:
    """DSpark's appendix: a search that has seen the drafts emits id 0 with 0.85 instead of 0.70."""
    wrong = case_of(anticipating())
    assert first_token(wrong, rule) == pytest.approx(0.85, abs=1e-12)
    assert total_variation(wrong, rule) > 0.1
    ours = case_of(gated(ThroughputStop(RATES)))
    assert first_token(ours, rule) == pytest.approx(0.70, abs=1e-12)
    assert total_variation(ours, rule) < 1e-12


RULES: dict[str, Callable[[], StopRule]] = {
    "survival": lambda: SurvivalThreshold(0.5),
    "all": lambda: SurvivalThreshold(0.0),
    "throughput": lambda: ThroughputStop([1.0, 1.0, 0.95, 0.6]),
    "flat": lambda: ThroughputStop([1.0] * 4),
}


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("stop", RULES)
def test_gated_drafts_are_lossless(stop: str, name: str) -> None:
    case = case_of(gated(RULES[stop]()))
    assert total_variation(case, LOSSLESS[name]) < 1e-12
    assert mean_accepted(case, LOSSLESS[name]) > 0.3


def test_some_gates_stop_on_the_way() -> None:
    assert gated(RULES["survival"]()).tolist() == [[0, 0], [0, 1], [1, -1], [1, -1]]
    assert (gated(RULES["all"]()) == CHAINS).all()
    assert (gated(ThroughputStop(RATES)) == -1).all()


def test_a_count_chosen_by_the_draft_is_caught() -> None:
    tokens = CHAINS.clone()
    tokens[CHAINS[:, 0] == 1] = -1
    assert total_variation(case_of(tokens), token_level) > 0.1


def test_gate_decides_before_it_draws_and_for_good() -> None:
    order: list[str] = []

    def stop(survival: Tensor, alive: Tensor, admitted: Tensor, total: Tensor) -> Tensor:
        order.append("decide")
        return survival >= 0.5

    def draw() -> Tensor:
        order.append("draw")
        return torch.tensor([5, 6, 7])

    gate = Gate(stop, 3, "cpu")
    one = gate.draw(torch.tensor([0.9, 0.4, torch.nan]), draw)
    two = gate.draw(torch.tensor([0.9, 1.0, 1.0]), draw)
    three = gate.draw(torch.tensor([0.5, 1.0, 1.0]), draw)
    assert one.tolist() == [5, -1, -1]
    assert two.tolist() == [5, -1, -1]
    assert three.tolist() == [-1, -1, -1]
    assert order == ["decide", "draw"] * 3
    with pytest.raises(ArgumentError, match="confidence has shape"):
        gate.draw(torch.tensor([0.9]), draw)


def best_prefix(
    survivals: list[float], b: int, admitted: int, total: float, rates: list[float]
) -> int:
    """Add requests by hand until the speed falls."""
    rows, tau = b + admitted, b + total
    speed = tau * (rates[rows] if rows < len(rates) else 0)
    for i, a in enumerate(survivals):
        rows, tau = rows + 1, tau + a
        now = tau * (rates[rows] if rows < len(rates) else 0)
        if now <= speed:
            return i
        speed = now
    return len(survivals)


@pytest.mark.parametrize("shape", ["flat", "linear", "step", "short"])
def test_throughput_adds_requests_until_the_speed_falls(shape: str) -> None:
    rates = {
        "flat": [1.0] * 40,
        "linear": [1 / (1 + 0.05 * n) for n in range(40)],
        "step": [1.0] * 10 + [0.6] * 30,
        "short": [1.0] * 9,
    }[shape]
    generator = torch.Generator().manual_seed(3)
    for b in (1, 4, 7):
        survival = torch.rand(b, generator=generator, dtype=torch.float64)
        alive = torch.rand(b, generator=generator) < 0.7
        for admitted, total in ((0, 0.0), (3, 1.7)):
            got = ThroughputStop(rates)(
                survival, alive, torch.tensor(admitted), torch.tensor(total, dtype=torch.float64)
            )
            living = [i for i in range(b) if alive[i]]
            ranked = sorted(living, key=lambda i: -survival[i].item())
            count = best_prefix([survival[i].item() for i in ranked], b, admitted, total, rates)
            assert got.nonzero().flatten().tolist() == sorted(ranked[:count])


def test_mates_may_decide_but_not_their_tokens() -> None:
    """Two requests share one budget; the output of both together is that of each by itself."""
    stop = ThroughputStop([1.0, 1.0, 1.0, 0.9, 0.75, 0.4, 0.3])
    joint = torch.zeros(2, 2, dtype=torch.float64)
    for first, second in itertools.product(range(4), range(4)):
        chains = CHAINS[[first, second]]
        gate, drawn, kept = Gate(stop, 2, "cpu"), chains[:, :0], []
        for j in range(2):
            kept.append(gate.draw(confidence(j, drawn), lambda j=j, c=chains: c[:, j]))
            drawn = chains[:, : j + 1]
        tokens = torch.stack(kept, dim=1)
        terms = token_level(P.expand(2, 3, 2), tokens, Q.expand(2, 2, 2))
        row = terms.correction[:, 0] / terms.correction[:, 0].sum(-1, keepdim=True)
        accept = terms.accept[:, 0]
        emitted = (1 - accept)[:, None] * row
        emitted += accept[:, None] * torch.nn.functional.one_hot(tokens[:, 0].clamp(min=0), 2)
        joint += emitted[0, :, None] * emitted[1] / 16
    torch.testing.assert_close(joint, P[:, None] * P, rtol=0, atol=1e-14)


def test_rules_refuse_what_they_cannot_use() -> None:
    for least in (-0.1, 1.1, float("nan")):
        with pytest.raises(ArgumentError, match="least is"):
            SurvivalThreshold(least)
    for rates in ([], [1.0, 0.0], [float("inf")]):
        with pytest.raises(ArgumentError, match="steps_per_s"):
            ThroughputStop(rates)
