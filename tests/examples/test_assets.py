"""The models that ship with the package: their size, their files, the prompts."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch

import specmla
from drafters import load_block_model
from specmla.cli.named import SHIPPED

ASSETS = Path(specmla.__file__).parent / "assets"
LIMIT = 20_000_000  # bytes, everything that ships


def test_everything_fits() -> None:
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= LIMIT


def test_anyone_may_read_them() -> None:
    for path in ASSETS.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444, path


def test_every_drafter_has_a_name() -> None:
    folders = {path for path in ASSETS.iterdir() if (path / "config.json").is_file()}
    assert set(SHIPPED.values()) | {ASSETS / "target"} == folders


@pytest.mark.parametrize("name", ["mtp", "dflash", "dspark"])
def test_drafters_of_hidden_states_are_stored_in_bfloat16_and_load_alike(name: str) -> None:
    target, _ = specmla.load_checkpoint(ASSETS / "target")
    load = specmla.load_mtp if name == "mtp" else load_block_model
    first, second = load(SHIPPED[name], target), load(SHIPPED[name], target)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert one.dtype == torch.bfloat16
        assert one.isfinite().all()
        assert torch.equal(one, other)


@pytest.mark.parametrize("part", ["target", "draft"])
def test_weights_are_bfloat16_and_equal_in_transformers(part: str) -> None:
    transformers = pytest.importorskip("transformers")
    stored, config = specmla.load_checkpoint(ASSETS / part)
    assert {weight.dtype for weight in stored.parameters()} == {torch.bfloat16}
    ours, _ = specmla.load_checkpoint(ASSETS / part, dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        ASSETS / part, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2, 40), generator=generator)
    with torch.no_grad():
        found, expected = ours.forward_full(tokens), theirs(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_both_speak_the_tokenizers_vocabulary() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(ASSETS / "target" / "tokenizer.json"))
    for part in ("target", "draft"):
        _, config = specmla.load_checkpoint(ASSETS / part)
        assert config.vocab_size == tokenizer.get_vocab_size()
        assert config.eos_token_ids == (tokenizer.token_to_id("<|endoftext|>"),)
    prompts = json.loads((ASSETS / "prompts.json").read_text())
    lengths = [len(tokenizer.encode(prompt).ids) for prompt in prompts]
    assert len(set(lengths)) >= 4
    assert min(lengths) >= 32
    assert max(lengths) <= 160
    assert all(tokenizer.decode(tokenizer.encode(prompt).ids) == prompt for prompt in prompts)


def test_target_has_learned_python() -> None:
    """Real code is far likelier than the same tokens in another order."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(ASSETS / "target" / "tokenizer.json"))
    model, _ = specmla.load_checkpoint(ASSETS / "target", dtype=torch.float32)
    prompts = json.loads((ASSETS / "prompts.json").read_text())
    ids = [torch.tensor(tokenizer.encode(prompt).ids) for prompt in prompts]
    generator = torch.Generator().manual_seed(0)
    shuffled = [row[torch.randperm(len(row), generator=generator)] for row in ids]
    assert _loss(model, ids) < 3.0 < _loss(model, shuffled)


@torch.no_grad()
def _loss(model: specmla.DeepseekForCausalLM, rows: list[torch.Tensor]) -> float:
    losses = []
    for row in rows:
        logits = model.forward_full(row[None, :-1])[0]
        losses.append(torch.nn.functional.cross_entropy(logits, row[1:]).item())
    return sum(losses) / len(losses)
