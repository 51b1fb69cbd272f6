from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
import torch

from specmla import (
    DeepseekConfig,
    DeepseekForCausalLM,
    DraftProposal,
    DraftRequest,
    MLAConfig,
    RequestResult,
    SamplingParams,
    VerifyStep,
    build_step,
    generate,
)

VOCAB = 61


@pytest.fixture(scope="session")
def model() -> DeepseekForCausalLM:
    torch.manual_seed(7)
    attention = MLAConfig(
        hidden_size=48,
        num_heads=3,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=24,
    )
    config = DeepseekConfig(attention, 2, VOCAB, 64, 160)
    made = DeepseekForCausalLM(config)
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.25)
    return made.eval()


class ScriptedDrafter:
    """Proposes what a function of (tokens so far, draft limit) says; one-hot distributions."""

    def __init__(self, script, vocab_size: int = VOCAB) -> None:
        self.script, self.vocab_size = script, vocab_size
        self.seen: list[RequestResult] = []

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        drafts = [list(self.script(list(r.tokens), r.num_drafts))[: r.num_drafts] for r in requests]
        width = max((len(d) for d in drafts), default=0)
        rows = [d + [-1] * (width - len(d)) for d in drafts]
        return DraftProposal(
            tuple(r.request_id for r in requests),
            tuple(len(d) for d in drafts),
            torch.tensor(rows, dtype=torch.int64).view(len(drafts), width),
        )

    def observe(self, results: Sequence[RequestResult], hidden=None) -> None:
        self.seen += results

    def reset(self, request_id: Hashable) -> None:
        pass


def make_step(
    model: DeepseekForCausalLM, page_size: int = 4, num_pages: int = 200, **kw
) -> VerifyStep:
    step = build_step(model, num_pages=num_pages, page_size=page_size, backend="reference", **kw)
    # Poison the pool: a row that is read before it was written shows as NaN logits.
    for i in range(model.config.num_layers):
        step.cache.layer(i).fill_(float("nan"))
    return step


def run(model, prompts: dict, drafter=None, k=4, step: VerifyStep | None = None):
    """Run to the end; new tokens by request, and the step results."""
    step = step or make_step(model)
    start = step.blocks.num_free
    tokens: dict = {name: [] for name in prompts}
    history = []
    for results in generate(model, step, prompts, drafter, k):
        step.blocks.check_integrity()
        history.append(results)
        for r in results:
            tokens[r.request_id] += r.new_tokens
    assert step.blocks.num_free == start
    return tokens, history


def prompts(count: int, max_tokens: int = 24, **sampling) -> dict:
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 5, 9, 17, 30][:count]
    return {
        f"r{i}": (
            torch.randint(VOCAB, (n,), generator=generator).tolist(),
            SamplingParams(max_tokens=max_tokens, seed=i, **sampling),
        )
        for i, n in enumerate(lengths)
    }
