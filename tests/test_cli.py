"""The command line as a user meets it: output on success, one line and exit code 2 on bad input."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch

from specmla import DeepseekConfig, DeepseekForCausalLM, MLAConfig, save_checkpoint
from specmla.__main__ import main

TEXT = "def area(width, height):\n    return width * height\n" * 3


def tiny_checkpoint(directory, vocab_size: int) -> None:
    torch.manual_seed(0)
    attention = MLAConfig(
        hidden_size=32,
        num_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    save_checkpoint(
        DeepseekForCausalLM(DeepseekConfig(attention, 1, vocab_size, 32, 256)), directory
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A target of the Hugging Face layout with a tokenizer of its own, and a draft model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    root = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet)
    )
    for name, size in (("target", 0), ("draft", 0), ("other", 7)):
        tiny_checkpoint(root / name, tokenizer.get_vocab_size() + size)
        tokenizer.save(str(root / name / "tokenizer.json"))
    return root


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


@pytest.mark.parametrize("draft", ["ngram", "suffix", "suffix-tree", "none", "model"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_generate(checkpoint, capsys, draft, temperature):
    draft = checkpoint / "draft" if draft == "model" else draft
    arguments = ["--target", checkpoint / "target", "--draft", draft, "--max-tokens", 12]
    sampling = ["--temperature", temperature, "--top-p", 0.9, "--seed", 3]
    assert run("generate", *arguments, *sampling, TEXT) == 0
    first = capsys.readouterr()
    assert "12 tokens" in first.err
    assert run("generate", *arguments, *sampling, TEXT) == 0
    assert capsys.readouterr().out == first.out


def test_greedy_text_does_not_depend_on_the_drafter(checkpoint, capsys):
    texts = set()
    for draft in ("none", "ngram", "suffix", "suffix-tree", checkpoint / "draft"):
        assert run("generate", "--target", checkpoint / "target", "--draft", draft, TEXT) == 0
        texts.add(capsys.readouterr().out)
    arguments = ["--target", checkpoint / "target", "--draft", checkpoint / "draft", "--tree"]
    assert run("generate", *arguments, "-k", 12, TEXT) == 0
    assert len(texts | {capsys.readouterr().out}) == 1
    assert run("generate", *arguments[:3], "suffix", "--tree", TEXT) == 2
    assert "'suffix-tree'" in capsys.readouterr().err


def test_sampled_text_of_sample_match_does_not_depend_on_the_drafter(checkpoint, capsys):
    """Every token is the target's own draw at its place; min-p is part of what is drawn from."""
    texts = []
    for draft in ("none", "ngram", checkpoint / "draft"):
        arguments = ["--target", checkpoint / "target", "--draft", draft, "--max-tokens", 12]
        sampling = ["--temperature", 1.5, "--min-p", 0.02, "--rule", "sample_match", "--seed", 5]
        assert run("generate", *arguments, *sampling, TEXT) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    arguments = ["--target", checkpoint / "target", "--draft", checkpoint / "draft"]
    for rule in ("block", "lossy_relaxed"):
        assert run("generate", *arguments, "--rule", rule, "--temperature", 1, TEXT) == 0
        capsys.readouterr()


def test_draft_pages_are_bounded_by_its_context(checkpoint, capsys):
    arguments = ["--target", checkpoint / "target", "--draft", checkpoint / "draft"]
    assert run("generate", *arguments, "--max-tokens", 10**12, TEXT) == 0
    assert "208 tokens" in capsys.readouterr().err  # up to the target's context of 256


def test_info(capsys):
    assert run("info") == 0
    out = capsys.readouterr().out
    for word in ("torch", "triton", "rows", "reference", "available", "launches: "):
        assert word in out
    if not torch.cuda.is_available():
        assert "  reference: preferred\n    query lengths: varlen" in out
        assert "  hopper: not available\n    because device is 'cpu'" in out


def test_demo(capsys, tmp_path):
    plot = tmp_path / "acceptance.png"
    assert run("demo", "--max-tokens", 12, "--json", "--plot", plot) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out.splitlines()[-1])
    assert summary["identical"] is True
    assert summary["device"] == "cpu"
    assert list(summary["drafters"]) == ["ngram", "draft_model", "dspark"]
    for figures in summary["drafters"].values():
        assert {
            "mean_acceptance_length",
            "tokens_per_step",
            "draft_acceptance_rate",
            "acceptance_histogram",
            "speedup",
        } <= set(figures)
        assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
    assert "tokens_per_step" in captured.err
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_demo_of_suffix_drafts(capsys):
    assert run("demo", "--max-tokens", 24, "-k", 8, "--draft", "suffix, suffix-tree", "--json") == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out.splitlines()[-1])
    assert summary["identical"] is True
    assert list(summary["drafters"]) == ["suffix", "suffix-tree"]
    assert all(f["num_accepted_draft_tokens"] for f in summary["drafters"].values())
    assert "accepted drafts of suffix-tree" in captured.err
    assert run("demo", "--draft", "sufix") == 2
    assert "'sufix'" in capsys.readouterr().err


def test_demo_of_what_ships(capsys):
    names = ["mtp", "dflash", "dflash-tree", "draft_model-tree"]
    assert run("demo", "--max-tokens", 10, "--draft", ",".join(names), "--json") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["identical"] is True
    assert list(summary["drafters"]) == names
    assert all(f["tokens_per_step"] > 1.5 for f in summary["drafters"].values())
    assert run("demo", "--draft", "dspark-tree") == 2
    assert "'dspark-tree'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["draft_model", "mtp", "dflash", "dflash-tree", "dspark"])
def test_generate_drafts_by_names_for_the_shipped_target(capsys, name):
    words = ["generate", "--max-tokens", 8, "def area(width, height):\n    return"]
    assert run(*words, "--draft", "none") == 0
    plain = capsys.readouterr().out
    assert run(*words, "--draft", name) == 0
    captured = capsys.readouterr()
    assert captured.out == plain
    assert "draft_acceptance_rate 0.00" not in captured.err


def test_names_of_what_ships_serve_no_other_target(checkpoint, capsys):
    for name in ("draft_model", "mtp", "dflash", "dspark"):
        assert run("generate", "--target", checkpoint / "target", "--draft", name, TEXT) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert run("generate", "--draft", "dspark", "--tree", TEXT) == 2
    assert "chains only" in capsys.readouterr().err


def test_demo_with_temperature_makes_no_claim_of_identity(capsys):
    assert run("demo", "--max-tokens", 6, "--temperature", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["identical"] is None


def bad_cases(root):
    target = root / "target"
    broken = root / "broken"
    if not broken.exists():
        broken.mkdir()
        (broken / "config.json").write_text("{}")
        (broken / "tokenizer.json").write_text("not json")
    yield "missing directory", ["generate", "--target", root / "nowhere", "x"], "nowhere"
    yield "broken tokenizer", ["generate", "--target", broken, "x"], "tokenizer.json"
    yield "missing draft", ["generate", "--target", target, "--draft", root / "no", "x"], "no"
    yield "no draft", ["generate", "--target", root / "nowhere", "--draft", "", "x"], "draft is ''"
    yield (
        "vocabulary",
        ["generate", "--target", target, "--draft", root / "other", TEXT],
        "vocabulary",
    )
    yield "empty prompt", ["generate", "--target", target, ""], "prompt"
    yield "temperature", ["generate", "--target", target, "--temperature", -1, "x"], "temperature"
    yield "min_p", ["generate", "--target", target, "--min-p", 2, "x"], "min_p"
    yield "rule", ["generate", "--target", target, "--rule", "wishful", "x"], "wishful"
    yield "top_p", ["generate", "--target", target, "--top-p", 0, "x"], "top_p"
    yield "dtype", ["generate", "--target", target, "--dtype", "int8", "x"], "int8"
    yield "device", ["demo", "--device", "toaster"], "toaster"
    yield "backend", ["demo", "--backend", "magic"], "magic"
    yield "drafts", ["demo", "-k", 64], "63"
    yield "plot", ["demo", "--plot", "/no/such/place.png"], "/no/such"
    yield "plot format", ["demo", "--plot", root / "plot.xyz"], "*.png"
    yield "plot directory", ["demo", "--plot", root], "*.png"
    yield "no UTF-8", ["generate", "--target", target, "\udcff"], "accepted is UTF-8"
    yield "unknown option", ["demo", "--wings"], "--wings"
    yield "unknown command", ["fly"], "fly"
    yield (
        "bench grammar",
        ["bench", "verify", "--batch", "32x", "--heads", "16", "--impl", "rows"],
        "32x",
    )


NAMES = [
    *("missing directory", "broken tokenizer", "missing draft", "no draft"),
    *("vocabulary", "empty prompt"),
    *("temperature", "min_p", "rule", "top_p", "dtype", "device", "backend", "drafts", "plot"),
    *("plot format", "plot directory", "no UTF-8"),
    *("unknown option", "unknown command", "bench grammar"),
]


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_one_line_and_exit_code_2(checkpoint, capsys, name):
    arguments, word = next((a, w) for n, a, w in bad_cases(checkpoint) if n == name)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert word in captured.err
    assert "Traceback" not in captured.err


def test_every_bad_case_is_run(checkpoint):
    assert [n for n, _, _ in bad_cases(checkpoint)] == NAMES


def test_text_that_the_terminal_lacks_is_escaped(checkpoint, monkeypatch):
    """Under LC_ALL=C, or behind a pipe: a text may hold any character."""
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="ascii"))
    monkeypatch.setattr("tokenizers.Tokenizer.decode", lambda *given: "größer")
    assert run("generate", "--target", checkpoint / "target", "--max-tokens", 1, "def ") == 0
    sys.stdout.flush()
    assert held.getvalue() == b"gr\\xf6\\xdfer\n"


def test_an_interrupt_is_one_line(capsys, monkeypatch):
    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("specmla.cli.generate.load_checkpoint", interrupted)
    assert run("generate", "def ") == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "specmla: interrupted\n")
