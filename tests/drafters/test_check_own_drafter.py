"""What `check_drafter` says of a drafter that somebody writes for the first time."""

from __future__ import annotations

import pytest
import torch

from specmla import (
    DeepseekForCausalLM,
    DraftProposal,
    DraftRequest,
    Stream,
    draw_siblings,
    uniforms,
)
from specmla.testing import check_drafter
from tests.drafters.networks import VOCAB, tiny_target


@pytest.fixture(scope="module")
def target() -> DeepseekForCausalLM:
    return tiny_target(layers=2)


class Own:
    """Draws siblings, the anchor's children, from a distribution of the last two tokens."""

    vocab_size = VOCAB

    def __init__(self, step) -> None:
        pass

    def children(self, r: DraftRequest) -> tuple[torch.Tensor, torch.Tensor]:
        given = torch.Generator().manual_seed(sum(r.tokens[-2:]))
        q = torch.randn(1, VOCAB, generator=given, dtype=torch.float64).mul(1.5).softmax(-1)
        count = r.num_nodes if r.num_drafts else 0  # as `DraftRequest` has it
        at = torch.tensor([len(r.tokens) - 1])
        u = uniforms(torch.tensor([r.sampling.seed]), at, torch.arange(count), Stream.DRAFT)
        drawn = draw_siblings(q, u.view(1, count))
        return drawn.tokens[0], self.rows(q, drawn.probs[0])

    def rows(self, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def propose(self, requests) -> DraftProposal:
        made = [self.children(r) for r in requests]
        width = max(len(tokens) for tokens, _ in made)
        tokens = torch.full((len(made), width), -1)
        probs = torch.zeros(len(made), width, VOCAB, dtype=torch.float64)
        for row, (drawn, rows) in enumerate(made):
            tokens[row, : len(drawn)], probs[row, : len(drawn)] = drawn, rows
        counts = tuple(len(drawn) for drawn, _ in made)
        parents = tuple((-1,) * count for count in counts)
        return DraftProposal(tuple(r.request_id for r in requests), counts, tokens, probs, parents)

    def observe(self, results, hidden=None) -> None:
        pass

    def reset(self, request_id) -> None:
        pass


class ForgetsElders(Own):
    """Reports what the first child was drawn from for all of them."""

    def rows(self, q, rows):
        return q.expand_as(rows)


class WithReplacement(ForgetsElders):
    """Draws every child from the same row, which is right to report."""

    def children(self, r):
        first = super().children
        each = [
            first(r._replace(num_nodes=1, sampling=type(r.sampling)(seed=r.sampling.seed * 99 + i)))
            for i in range(r.num_nodes if r.num_drafts else 0)
        ]
        if not each:
            return first(r)
        return torch.cat([tokens for tokens, _ in each]), torch.cat([rows for _, rows in each])


class OneMore(Own):
    def propose(self, requests):
        return super().propose([r._replace(num_nodes=r.num_nodes + 1) for r in requests])


class Longer(Own):
    def propose(self, requests):
        given = super().propose([r._replace(num_nodes=r.num_nodes + 1) for r in requests])
        return DraftProposal(given.request_ids, given.counts, given.tokens, given.probs)


class Foreign(Own):
    def propose(self, requests):
        given = super().propose(requests)
        return DraftProposal(given.request_ids, given.counts, given.tokens + VOCAB)


class Narrow(Own):
    vocab_size = VOCAB + 1


class Silent(Own):
    def propose(self, requests):
        return None


class Writes(Own):
    def propose(self, requests):
        given = super().propose(requests)
        requests[0].tokens.append(1)
        return given


class Nothing:
    """Has nothing of a drafter."""

    def __init__(self, step) -> None:
        pass


class LeavesOut(Own):
    """Answers for requests that have a guess alone, as a step takes it."""

    def propose(self, requests):
        kept = [r for r in requests if r.tokens[-1] % 2]
        none = DraftProposal((), (), torch.empty(0, 0, dtype=torch.int64))
        return super().propose(kept) if kept else none


@pytest.mark.parametrize("right", [Own, WithReplacement, LeavesOut])
def test_right_ones_pass(target, right):
    check_drafter(right, target, num_drafts=3, num_samples=150).raise_if_failed()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (ForgetsElders, r"honest: plain: 0 of 300 siblings have the token of an elder one"),
        (OneMore, r"request 0 has 4 nodes, num_nodes is 3"),
        (Longer, r"request 0 has 4 drafts, num_drafts is 3"),
        (Foreign, rf"has drafts \[\d+, .*accepted are 0 .. {VOCAB - 1}, and -1 for none"),
        (Narrow, rf"probs has rows of {VOCAB} ids, vocab_size is {VOCAB + 1}"),
        (Silent, r"proposal is None, accepted is a specmla.*DraftProposal"),
        (Writes, r"tokens of request 0 were changed, accepted is to read them"),
        (Nothing, r"without \['vocab_size', 'propose', 'observe', 'reset'\]"),
    ],
)
def test_wrong_ones_are_told_why(target, wrong, told):
    found = check_drafter(wrong, target, num_drafts=3, num_samples=150)
    with pytest.raises(AssertionError, match=told):
        found.raise_if_failed()
    assert found.failures[0].startswith("honest: ")
