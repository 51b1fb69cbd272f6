"""Seeds on a GPU: a batch-invariant loop gives a request its tokens whatever its batch mates."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from drafters import DraftModelDrafter
from specmla import (
    DeepseekConfig,
    DeepseekForCausalLM,
    MLAConfig,
    SamplingParams,
    build_step,
    generate,
    make_batch_invariant,
)

pytestmark = pytest.mark.gpu
VOCAB, DIMS = 512, MLAConfig(256, 16, 512, 128, 64, 128)
PARAMS = {
    "greedy": SamplingParams(seed=11, max_tokens=24),
    "plain": SamplingParams(1.0, seed=11, max_tokens=24),
    "filtered": SamplingParams(0.8, 9, 0.95, seed=11, min_p=0.01, max_tokens=24),
    "penalised": SamplingParams(1.2, seed=11, frequency_penalty=0.8, max_tokens=24),
}


def model(layers: int, seed: int) -> DeepseekForCausalLM:
    """A model in bfloat16 whose logits are far from flat."""
    torch.manual_seed(seed)
    made = DeepseekForCausalLM(DeepseekConfig(DIMS, layers, VOCAB, 512, 512))
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.08)
    made = made.eval().to("cuda", torch.bfloat16)
    make_batch_invariant(made)
    return made


def tokens_of(target, draft, batch: dict, drafts: dict[str, int], rule: str) -> dict:
    step = build_step(target, num_pages=300, prefix_caching=False, rule=rule)
    drafter = DraftModelDrafter(draft, num_pages=300)
    found: dict = {name: [] for name in batch}
    for results in generate(target, step, batch, drafter, drafts):
        for r in results:
            found[r.request_id] += r.new_tokens
    return found


@pytest.mark.parametrize("rule", ["token_level", "block", "sample_match"])
def test_batch_mates_and_their_filters_do_not_matter(rule: str) -> None:
    target, draft = model(2, 1), model(1, 2)
    draw = torch.Generator().manual_seed(3)
    lengths = (5, 70, 33, 150)
    batch = {
        name: (torch.randint(VOCAB, (n,), generator=draw).tolist(), params)
        for n, (name, params) in zip(lengths, PARAMS.items(), strict=True)
    }
    mates = {
        f"mate {i}": (torch.randint(VOCAB, (9 + 11 * i,), generator=draw).tolist(), params)
        for i, params in enumerate([*PARAMS.values(), SamplingParams(1.5, 3, max_tokens=9)])
    }
    drafts = {name: 1 + i for i, name in enumerate(batch)}
    together = tokens_of(target, draft, batch | mates, drafts | dict.fromkeys(mates, 2), rule)
    for name, request in batch.items():
        alone = tokens_of(target, draft, {name: request}, drafts, rule)
        assert alone[name] == together[name], name
    assert len({tuple(together[name]) for name in batch}) == len(batch)


def test_greedy_and_sample_match_do_not_depend_on_drafts() -> None:
    """A row has its bits wherever its block starts, so that only positions key the draws."""
    target = model(2, 1)
    prompt = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    for params in (PARAMS["greedy"], PARAMS["plain"]):
        found = [
            tokens_of(target, model(1, seed), {"x": (prompt, params)}, {"x": 3}, "sample_match")
            for seed in (2, 4)
        ]
        assert found[0] == found[1]
