"""Offline scores equal those of the loop, without the target being run."""

from __future__ import annotations

import json

import pytest
import torch

from drafters import (
    DDTreeDrafter,
    DFlashDrafter,
    DraftModelDrafter,
    DSparkDrafter,
    MTPDrafter,
    NgramDrafter,
    SuffixDrafter,
    save_block_model,
)
from specmla import FINAL, CheckpointError, save_checkpoint
from specmla.__main__ import main
from specmla.bench.compare_run import Contender, RunSettings, run_contender
from specmla.bench.offline import score_offline
from specmla.bench.recording import Recording, record
from specmla.verify.stats import AcceptanceStats
from tests.drafters.networks import VOCAB, tiny_block, tiny_mtp, tiny_target

PROMPTS = [[3, 1, 4, 1, 5, 9, 3, 1], [2, 7, 1, 8], [5, 9] * 5]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def maker(target, kind):
    if kind == "ngram":
        return lambda step: NgramDrafter(VOCAB)
    if kind == "suffix-tree":
        return lambda step: SuffixDrafter(VOCAB, tree=True)
    if kind == "draft_model":
        return lambda step: DraftModelDrafter(tiny_target(1), num_pages=40, page_size=8)
    if kind == "mtp":
        return lambda step: MTPDrafter(target, tiny_mtp(target), step)
    if kind == "ddtree":
        return lambda step: DDTreeDrafter(maker(target, "dflash")(step))
    made = {"dflash": DFlashDrafter, "dspark": DSparkDrafter}[kind]
    return lambda step: made(target, tiny_block(target, kind), num_pages=40, page_size=8)


@pytest.mark.parametrize(
    "kind", ["ngram", "suffix-tree", "draft_model", "mtp", "dflash", "dspark", "ddtree"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_offline_is_what_the_loop_gives(target, kind, temperature, monkeypatch):
    found = record(target, PROMPTS[1:], (0, 2), max_tokens=13, temperature=temperature, seed=5)
    make = maker(target, kind)
    settings = RunSettings(num_drafts=4, num_nodes=4, max_tokens=13, seed=5)
    run = run_contender(
        target, PROMPTS[1:], Contender(kind, make), "sample_match", temperature, settings
    )
    assert [c.tokens for c in run.continuations] == [
        text[n:].tolist() for text, n in zip(found.tokens, found.prompt_lens, strict=True)
    ]
    live = AcceptanceStats()
    for c in run.continuations:
        live.merge(c.stats)

    def refuse(*args):
        raise AssertionError("the target was run")

    monkeypatch.setattr(target.model, "forward", refuse)
    score = score_offline(found, make, target, num_drafts=4, seed=5)
    assert score.stats == live
    assert live.num_draft_tokens > 0 or (kind, temperature) == ("ngram", 1.0)
    json.dumps(score.as_dict(), allow_nan=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overlap_of_a_perfect_drafter_is_one(target, temperature):
    found = record(target, PROMPTS, (), max_tokens=12, temperature=temperature)
    score = score_offline(
        found, lambda step: DraftModelDrafter(target, num_pages=40, page_size=8), target, 3
    )
    found = score.overlap_per_position
    assert found == pytest.approx([1] * (len(found) if temperature else 3), abs=1e-4)
    assert found
    assert score.reached[0] == score.stats.num_spec_steps
    accepted = score.stats.accepted_per_position
    if temperature:
        assert accepted[0] < score.reached[0]  # drawn drafts need not equal the text
    else:
        assert accepted[0] == score.reached[0]


def test_first_overlap_is_that_of_p_and_q(target):
    """Against p and q of each anchor, by whole passes of both models."""
    small = tiny_target(1)
    found = record(target, PROMPTS[:1], (), max_tokens=10, temperature=0.7)
    score = score_offline(
        found, lambda step: DraftModelDrafter(small, num_pages=40, page_size=8), target, 1
    )
    text, want, at = found.tokens[0], [], found.prompt_lens[0]
    with torch.no_grad():
        p, q = ((m.forward_full(text[None])[0] / 0.7).softmax(-1) for m in (target, small))
    seen = []

    class Watch(DraftModelDrafter):
        def propose(self, requests):
            given = super().propose(requests)
            seen.extend(len(r.tokens) for r, n in zip(requests, given.counts, strict=True) if n)
            return given

    score_offline(found, lambda step: Watch(small, num_pages=40, page_size=8), target, 1)
    want = [float(torch.minimum(p[n - 1], q[n - 1]).sum()) for n in seen]
    assert at <= seen[0] <= at + 1
    assert score.overlap[0] == pytest.approx(sum(want), abs=1e-3)


def test_files(target, tmp_path):
    found = record(target, PROMPTS, (1,), max_tokens=5, temperature=0.5)
    assert found.layers == (1, FINAL)
    found.save(tmp_path / "a.safetensors")
    again = Recording.load(tmp_path / "a.safetensors")
    assert (again.layers, again.prompt_lens, again.temperature) == ((1, FINAL), (8, 4, 10), 0.5)
    for name in ("tokens", "states"):
        pairs = zip(getattr(again, name), getattr(found, name), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="no recording"):
        Recording.load(tmp_path / "b.safetensors")
    with pytest.raises(Exception, match=r"layers \[0, 2\]"):
        score_offline(found, maker(target, "dflash"), target)


def test_command(target, tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    from tests.test_cli import TEXT

    folder, made = tmp_path / "target", tmp_path / "drafts"
    save_checkpoint(target, folder)
    save_block_model(tiny_block(target, "dflash"), made)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(TEXT.split())}, unk_token="def"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps([TEXT]))
    file = tmp_path / "states.safetensors"
    common = ["compare", "--target", str(folder), "--draft", f"ngram,{made}"]
    sizes = ["--max-tokens", "8", "--temperature", "1"]
    assert main([*common, *sizes, "--prompts", str(texts), "--record", str(file)]) == 0
    assert Recording.load(file).layers == (0, 2, FINAL)
    capsys.readouterr()
    assert main([*common, "--recording", str(file), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["drafter"] for row in rows] == ["ngram", "drafts"]
    assert rows[1]["num_draft_tokens"] > 0
    assert rows[1]["temperature"] == 1
    assert main([*common, "--recording", str(file), "--record", str(file)]) == 2
