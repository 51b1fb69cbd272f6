"""What a drafter must answer whatever it draws: what was asked, within the limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from specmla.errors import ArgumentError, kind_problem
from specmla.verify.proposal import Drafter, DraftProposal, DraftRequest
from specmla.verify.step import VerifyStep
from specmla.verify.tree import tree_shape

MakeDrafter = Callable[[VerifyStep], Drafter]
_MEMBERS = ("vocab_size", "propose", "observe", "reset")


class ProposalError(ArgumentError):
    """A drafter is none, or its answer is none that it may give; the message lists how."""


def make_drafter(make: MakeDrafter, step: VerifyStep) -> Drafter:
    """Build a drafter beside a step.

    Raises:
        ProposalError: it lacks members.
    """
    drafter = make(step)
    missing = [name for name in _MEMBERS if not hasattr(drafter, name)]
    if missing:
        raise ProposalError(f"drafter is {drafter!r} without {missing}, accepted is a Drafter")
    return drafter


def ask(drafter: Drafter, requests: Sequence[DraftRequest]) -> DraftProposal:
    """Ask for drafts.

    Raises:
        ProposalError: the answer is no proposal, has more drafts than were asked for, ids outside
            the drafter's vocabulary or rows of another width, or `tokens` was written to.
    """
    before = [list(r.tokens) for r in requests]
    proposal = drafter.propose(requests)
    found = kind_problem("proposal", proposal, DraftProposal)
    if not found:
        found = _limit_problems(proposal, requests) + _vocab_problems(proposal, drafter.vocab_size)
    found += [
        f"tokens of request {r.request_id!r} were changed, accepted is to read them"
        for r, held in zip(requests, before, strict=True)
        if list(r.tokens) != held
    ]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ProposalError("propose: " + "; ".join(found[:3]) + more)
    return proposal


def _limit_problems(proposal: DraftProposal, requests: Sequence[DraftRequest]) -> list[str]:
    """List where a chain is longer, a tree deeper or larger than was asked for."""
    asked, found = {r.request_id: r for r in requests}, []
    trees = proposal.parents or [None] * len(proposal.counts)
    for name, count, parents in zip(proposal.request_ids, proposal.counts, trees, strict=True):
        if name not in asked:  # a step ignores those that are no part of it
            continue
        limits = asked[name]
        length, what = count, "drafts"
        if parents is not None:
            rows = tuple(parent + 1 for parent in parents)
            length, what = max(tree_shape(rows).depths, default=0), "levels"
            if count > limits.num_nodes:
                text = f"request {name!r} has {count} nodes, num_nodes is {limits.num_nodes}"
                found.append(text)
        if length > limits.num_drafts:
            found.append(f"request {name!r} has {length} {what}, num_drafts is {limits.num_drafts}")
    return found


def _vocab_problems(proposal: DraftProposal, vocab_size: int) -> list[str]:
    """List ids and rows that are not of the drafter's vocabulary."""
    found, probs = [], proposal.probs
    if isinstance(probs, Tensor) and probs.shape[-1] != vocab_size:
        found.append(f"probs has rows of {probs.shape[-1]} ids, vocab_size is {vocab_size}")
    for name, count, row in zip(
        proposal.request_ids, proposal.counts, proposal.tokens.tolist(), strict=True
    ):
        outside = [token for token in row[:count] if not -1 <= token < vocab_size]
        if outside:
            found.append(
                f"request {name!r} has drafts {outside[:4]}, accepted are 0 .. {vocab_size - 1}, "
                "and -1 for none"
            )
    return found
