"""The whole loop on a GPU, sampled, with chain and block drafters: 50,000 draws against exact
probabilities of the shipped target's next three tokens. Trees: `test_model_tree_gpu`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch

from drafters import (
    BlockDraftModel,
    DFlashDrafter,
    DraftModelDrafter,
    DSparkDrafter,
    load_block_model,
)
from drafters.block_config import BlockConfig
from specmla import SamplingParams
from specmla.cli.checkpoint import load_shipped_pair
from specmla.cli.run import run_loop
from tests.drafters.networks import attention, randomise
from tests.exact_triples import exact_triples, p_value

pytestmark = pytest.mark.gpu


def block_network(target, kind: str) -> BlockDraftModel:
    """The trained network that ships, or an untrained one: its drafts are refused mostly."""
    shipped = Path(str(files("specmla"))) / "assets" / kind
    if shipped.is_dir():
        return load_block_model(shipped, target)
    is_dspark, config = kind == "dspark", target.config
    model = BlockDraftModel(
        BlockConfig(
            attention=attention(config.attention.hidden_size, heads=4),
            num_layers=2,
            intermediate_size=64,
            vocab_size=config.vocab_size,
            block_size=4,
            mask_token_id=config.vocab_size - 1,
            target_layer_ids=(1, 4, 7),
            sample_from_anchor=is_dspark,
            markov_rank=8 if is_dspark else 0,
            confidence_head=is_dspark,
            architecture="DSparkDraftModel" if is_dspark else "DFlashDraftModel",
        )
    )
    randomise(model, 9, std=0.05)
    weight = target.model.embed_tokens.weight
    return model.eval().to(weight.device, weight.dtype)


def make_drafter(pair, kind: str, batch: int):
    if kind == "chain":
        return DraftModelDrafter(pair.draft, num_pages=batch * 3)
    made = {"dflash": DFlashDrafter, "dspark": DSparkDrafter}[kind]
    return made(pair.target, block_network(pair.target, kind), num_pages=batch * 3)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("chain", "token_level"),
        ("chain", "block"),
        ("chain", "sample_match"),
        ("dflash", "block"),
        ("dspark", "token_level"),
    ],
)
def test_three_tokens_of_50000_draws_follow_the_target(kind, rule):
    check_law(torch.device("cuda"), kind, rule, total=50_000, batch=1_000)


def check_law(device: torch.device, kind: str, rule: str, total: int, batch: int) -> None:
    """Cells expected below 5 times are pooled; both sides of each rule must have been taken."""
    pair, temperature = load_shipped_pair(device), 0.8
    prompt = min((pair.tokenizer.encode(text).ids for text in pair.prompts), key=len)
    expected = exact_triples(pair.target, prompt, temperature, total)
    counts = dict.fromkeys(expected, 0)
    drafted = accepted = 0
    for start in range(0, total, batch):
        sampling = [SamplingParams(temperature, seed=start + i, max_tokens=5) for i in range(batch)]
        drafter = make_drafter(pair, kind, batch)
        run = run_loop(
            pair.target, [prompt] * batch, sampling, drafter, num_speculative_tokens=3, rule=rule
        )
        drafted += run.stats.num_draft_tokens
        accepted += sum(run.stats.accepted_per_position)
        for tokens in run.tokens:
            if tuple(tokens[:3]) in counts:
                counts[tuple(tokens[:3])] += 1
    assert len(expected) > 50
    assert p_value(list(counts.values()), list(expected.values()), total) > 1e-4
    assert drafted > total / 2
    assert drafted / 20 < accepted < drafted or kind != "chain"
