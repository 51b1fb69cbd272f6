"""A drafter at work under control: what is accepted is chosen, what it proposes is kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmla.generate import build_step
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.states import StateCollector
from specmla.testing.proposal_check import MakeDrafter, ask, make_drafter
from specmla.verify.hidden import committed_rows
from specmla.verify.plan import StepPlan
from specmla.verify.proposal import Drafter, DraftProposal, DraftRequest, HiddenRows, RequestResult
from specmla.verify.sampling import SamplingParams
from specmla.verify.sparse import SparseProbs
from specmla.verify.step import VerifyStep

Accept = Callable[[Hashable, int], int]
Histories = Mapping[Any, Sequence[int]]


@dataclass(frozen=True)
class Proposed:
    """One request's part of a proposal, on the CPU: tokens [k], q [k, W] if reported, and of a tree
    the place of each node's parent."""

    tokens: Tensor
    probs: Tensor | None
    parents: tuple[int, ...] | None = None


def take_part(proposal: DraftProposal, request_id: Hashable, vocab_size: int) -> Proposed:
    """Copy one request's part of a proposal; one that was left out has no drafts."""
    if request_id not in proposal.request_ids:
        return Proposed(torch.empty(0, dtype=torch.int64), None)
    row = proposal.request_ids.index(request_id)
    count, probs = proposal.counts[row], proposal.probs
    if isinstance(probs, SparseProbs):
        probs = probs.dense(vocab_size)
    kept = None if probs is None else probs[row, :count].cpu().clone()
    parents = None if proposal.parents is None else proposal.parents[row]
    tree = None if parents is None else tuple(map(int, parents))
    return Proposed(proposal.tokens[row, :count].cpu().clone(), kept, tree)


@torch.no_grad()
def run_histories(
    target: DeepseekForCausalLM,
    make: MakeDrafter,
    prompts: Histories,
    num_tokens: int,
    num_drafts: int,
    accept: Accept,
) -> list[tuple[DraftRequest, Proposed]]:
    """Continue prompts with chosen acceptances of the drafter's own drafts.

    The target's logits are replaced: a request accepts `accept(name, length)` drafts, as far as it
    has them, then gets another token than the next one.

    Returns:
        What was asked of the drafter (sampled at temperature 1, the seed is the length) and what it
        proposed, step by step.
    """
    step = _make_step(target, prompts, num_tokens)
    drafter, seen = make_drafter(make, step), []
    for name, tokens in prompts.items():
        step.add(name, tokens, SamplingParams(max_tokens=num_tokens))
    while step.active:
        asked = [
            r._replace(tokens=list(r.tokens), sampling=SamplingParams(1.0, seed=len(r.tokens)))
            for r in step.draft_requests(num_drafts)
        ]
        proposal = ask(drafter, asked) if asked else None
        if proposal is not None:
            seen += [(r, take_part(proposal, r.request_id, drafter.vocab_size)) for r in asked]
        results, hidden = _run_step(target, step, drafter, proposal, accept)
        drafter.observe(results, hidden)
        for r in results:
            if r.finish_reason:
                drafter.reset(r.request_id)
    step.blocks.check_integrity()
    return seen


@torch.no_grad()
def drafts_after(
    target: DeepseekForCausalLM,
    make: MakeDrafter,
    histories: Histories,
    sampling: Mapping[Any, SamplingParams],
    num_drafts: int,
    num_nodes: int = 0,
    times: int = 1,
) -> dict[Hashable, Proposed]:
    """Give what a fresh drafter proposes behind `histories`, each of two tokens or more.

    All but the last token, the anchor, are computed as a prompt; that the target would have gone on
    otherwise makes no difference. Asked several `times`, as where steps are cancelled, it is the
    last proposal. Trees may have `num_nodes` nodes, as many as drafts if that is 0.
    """
    prompts = {name: list(tokens[:-1]) for name, tokens in histories.items()}
    step = _make_step(target, prompts, num_drafts + 2)
    drafter = make_drafter(make, step)
    for name, tokens in prompts.items():
        step.add(name, tokens, SamplingParams(max_tokens=num_drafts + 2))
    results, hidden = _run_step(target, step, drafter, None, lambda name, length: 0)
    told = [r._replace(new_tokens=(histories[r.request_id][-1],)) for r in results]
    drafter.observe(told, hidden)
    asked = [
        DraftRequest(name, list(tokens), num_drafts, sampling[name], num_nodes or num_drafts)
        for name, tokens in histories.items()
    ]
    for _ in range(times):
        proposal = ask(drafter, asked)
    return {name: take_part(proposal, name, drafter.vocab_size) for name in histories}


def _make_step(target: DeepseekForCausalLM, prompts: Histories, num_tokens: int) -> VerifyStep:
    """Build a step with room for `num_tokens` more, and a layer for a drafter's rows."""
    size = 16
    pages = sum(-(-(len(tokens) + num_tokens) // size) + 2 for tokens in prompts.values())
    return build_step(
        target, num_pages=pages, page_size=size, num_draft_layers=1, prefix_caching=False
    )


def _run_step(
    target: DeepseekForCausalLM,
    step: VerifyStep,
    drafter: Drafter,
    proposal: DraftProposal | None,
    accept: Accept,
) -> tuple[list[RequestResult], HiddenRows | None]:
    """Run and commit one step; give its results and the states that the drafter asks for."""
    layers: Sequence[int] = getattr(drafter, "hidden_layers", ())
    states = StateCollector(layers, target.config.num_layers) if layers else None
    plan = step.plan(proposal)
    hidden = target(plan.token_ids, plan.metadata, step.cache, step.builder.backend, states)
    logits = target.logits(hidden[plan.logit_rows])
    _steer(plan, logits, accept)
    results = step.commit(plan, step.verify(plan, logits))
    return results, committed_rows(plan, results, states.joined()) if states else None


def _steer(plan: StepPlan, logits: Tensor, accept: Accept) -> None:
    """Make the target's choice, in place, that of the wanted drafts, then of another token.

    In a tree the youngest children that have children themselves are wanted.
    """
    table, drafts = plan.row_table.tolist(), plan.drafts.tolist()
    for rows, given, request in zip(table, drafts, plan.requests, strict=True):
        tree, at = request.tree, 0
        parents = tree.parents if tree is not None else tuple(range(request.num_drafts))
        for left in range(accept(request.request_id, request.position + 1), -1, -1):
            children = {given[i]: i + 1 for i, parent in enumerate(parents) if parent == at}
            drawn = [token for token in children if token >= 0]
            if not drawn:
                break
            inner = [token for token in drawn if children[token] in parents]
            token = (inner or drawn)[-1]
            while left == 0 and token in children:
                token = (token + 1) % logits.shape[1]
            logits[rows[at]] = 0.0
            logits[rows[at], token] = 1.0
            at = children.get(token, at)
