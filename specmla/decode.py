"""The loop that drafts, verifies and commits until every prompt has been continued."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch

from specmla.budget.base import Budget, BudgetRequest, chosen_counts
from specmla.verify.captured import CapturedStep
from specmla.verify.hidden import committed_rows
from specmla.verify.proposal import Drafter, DraftRequest, HiddenRows, RequestResult
from specmla.verify.sampling import SamplingParams
from specmla.verify.step import VerifyStep

Prompt = tuple[Sequence[int], SamplingParams]


def prompt_problems(prompts: object, drafter: object) -> list[str]:
    """List why these are no prompts of a run, or no drafter."""
    accepted = "accepted is a mapping of names to (tokens, SamplingParams)"
    found = []
    if not isinstance(prompts, Mapping):
        found.append(f"prompts is {prompts!r}, {accepted}")
    else:
        pairs = {n: p for n, p in prompts.items() if not isinstance(p, Sequence) or len(p) != 2}
        found += [f"prompts[{name!r}] is {pair!r}, {accepted}" for name, pair in pairs.items()]
    missing = [n for n in ("vocab_size", "propose", "observe", "reset") if not hasattr(drafter, n)]
    if drafter is not None and missing:
        found.append(f"drafter is {drafter!r} without {missing}, accepted are a Drafter and None")
    return found


@torch.no_grad()
def decode_loop(
    runner: CapturedStep,
    prompts: Mapping[Hashable, Prompt],
    drafter: Drafter | None,
    num_speculative_tokens: int | Mapping[Hashable, int] | Budget,
) -> Iterator[list[RequestResult]]:
    """Continue all prompts together; what `generate` does once a runner is made.

    Args:
        runner: runs steps, and holds its `VerifyStep`; it can be used again.
        prompts: tokens and parameters by request name.
        drafter: proposes tokens.
        num_speculative_tokens: K for all requests, or by request, or a budget.

    Raises:
        ArgumentError: prompts that can't be served.
        PoolFullError: a pool is too small for all prompts.
        NumericsError: logits without a distribution.
    """
    step = runner.step
    running: list[Hashable] = []
    try:
        for request_id, (tokens, sampling) in prompts.items():
            step.add(request_id, tokens, sampling)
            running.append(request_id)
        while running:
            proposal = None
            if drafter is not None and (
                wanted := draft_requests(step, num_speculative_tokens, running)
            ):
                proposal = drafter.propose(wanted)
            verdict = runner.run(proposal, running)
            results = step.commit(verdict.plan, verdict)
            ended = [r.request_id for r in results if r.finish_reason]
            if drafter is not None:
                states = runner.states
                rows = None if states is None else committed_rows(verdict.plan, results, states)
                _tell(drafter, num_speculative_tokens, results, rows)
                _reset(ended, drafter, num_speculative_tokens)
            running = [name for name in running if name not in ended]
            yield results
    finally:  # an error, or a caller that stops early, leaves no request and no page behind
        step.drop(running)
        _reset(running, drafter, num_speculative_tokens)


def draft_requests(
    step: VerifyStep,
    num_drafts: int | Mapping[Hashable, int] | Budget,
    request_ids: Sequence[Hashable],
) -> list[DraftRequest]:
    """Give what a drafter may draft for, as `VerifyStep.draft_requests`, and let a budget choose K.

    The budget sees names and lengths: no draft of the coming step exists yet.
    """
    if not isinstance(num_drafts, Budget):
        return step.draft_requests(num_drafts, request_ids)
    most = step.draft_requests(num_drafts.max_drafts, request_ids)
    asked = [BudgetRequest(r.request_id, len(r.tokens), r.num_drafts) for r in most]
    chosen = zip(most, chosen_counts(num_drafts, asked), strict=True)
    return [
        r._replace(num_drafts=min(n, r.num_drafts), num_nodes=min(n, r.num_nodes))
        for r, n in chosen
    ]


def _tell(
    drafter: Drafter, budget: object, results: list[RequestResult], rows: HiddenRows | None
) -> None:
    """Let drafter and budget know what was committed."""
    drafter.observe(results, rows)
    if isinstance(budget, Budget):
        budget.observe(results)


def _reset(names: Sequence[Hashable], drafter: Drafter | None, budget: object) -> None:
    """Let drafter and budget forget requests."""
    for name in names:
        if drafter is not None:
            drafter.reset(name)
        if isinstance(budget, Budget):
            budget.reset(name)
