"""A step whose model is a fixed function of the tokens before each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmla import (
    BlockManager,
    DraftProposal,
    LatentCache,
    MetadataBuilder,
    RequestResult,
    Rule,
    VerifyStep,
    get_backend,
)

W = 16


def make_step(rule: str | Rule = "token_level") -> VerifyStep:
    builder = MetadataBuilder(
        backend=get_backend("reference"),
        page_size=4,
        num_pages=64,
        num_heads=2,
        kv_lora_rank=8,
        device="cpu",
        max_seq_len=64,
    )
    return VerifyStep(
        cache=LatentCache(1, 64, 4, 12, dtype=torch.float32, device="cpu"),
        blocks=BlockManager(64, 4),
        builder=builder,
        vocab_size=W,
        max_seq_len=64,
        rule=rule,
    )


def model(tokens: Sequence[int]) -> Tensor:
    """Give the logits after a history: a fixed function of all of it."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) & 0xFFFF)
    return torch.randn(W, generator=generator) * 2


def run(
    step: VerifyStep,
    drafts: dict[str, list[int]] | None = None,
    probs: dict[str, Tensor] | None = None,
    parents: dict[str, list[int]] | None = None,
) -> dict[str, RequestResult]:
    """Take one step with the model above.

    Args:
        step: all its requests take part.
        drafts: by request.
        probs: what they were drawn from, [K, W] by request; one-hot if None.
        parents: of the drafts of requests with a tree, -1 for the anchor; elders first.
    """
    proposal = propose(drafts, probs, parents) if drafts else None
    plan = step.plan(proposal)
    logits = []
    for b, request in enumerate(plan.requests):
        before = [list(request.state.tokens)]
        made = plan.drafts[b, : request.num_drafts].tolist()
        rows = request.tree.parents if request.tree else range(len(made))
        for row, token in zip(rows, made, strict=True):
            before.append([*before[row], token])
        logits += [model(tokens) for tokens in before]
    results = step.commit(plan, step.verify(plan, torch.stack(logits)))
    return {str(r.request_id): r for r in results}


def propose(
    drafts: dict[str, list[int]],
    probs: dict[str, Tensor] | None,
    parents: dict[str, list[int]] | None = None,
) -> DraftProposal:
    """Pad drafts of several lengths to one proposal."""
    width = max(len(d) for d in drafts.values())
    rows = [d + [-1] * (width - len(d)) for d in drafts.values()]
    tokens = torch.tensor(rows, dtype=torch.int64).view(-1, width)
    counts = tuple(len(d) for d in drafts.values())
    q = None
    if probs is not None:
        q = torch.zeros(len(rows), width, W, dtype=torch.float64)
        for row, name in enumerate(drafts):
            q[row, : counts[row]] = probs[name]
    trees = None if parents is None else tuple(parents.get(name) for name in drafts)
    return DraftProposal(tuple(drafts), counts, tokens, q, trees)
