"""The training script end to end on the CPU, in seconds, and its files in other readers' hands."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("tokenizers")
pytest.importorskip("rich")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_pair  # noqa: E402
from pairtrain.corpus import is_held_out  # noqa: E402
from specmla.models.weights import load_checkpoint  # noqa: E402

HELD_OUT = "heapq.py"
SOURCES = ("json", "logging", "argparse.py", "ast.py", "bisect.py", HELD_OUT)
TINY = (
    *("--device", "cpu"),
    *("--no-compile",),
    *("--workers", "1"),
    *("--steps", "20"),
    *("--target-size", "2x32"),
    *("--draft-sizes", "1x32", "1x16"),
    *("--vocab-size", "512"),
    *("--window", "32"),
    *("--batch", "8"),
    *("--pool", "8"),
    *("--prompts", "4"),
    *("--new-tokens", "8"),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few modules of the standard library, one of them held out."""
    root = tmp_path_factory.mktemp("sources")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for name in SOURCES:
        copy = shutil.copytree if (stdlib / name).is_dir() else shutil.copy
        copy(stdlib / name, root / name)
    return root


@pytest.fixture(scope="module")
def pair(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished tiny run."""
    out = tmp_path_factory.mktemp("pair")
    train_pair.main([*TINY, "--out", str(out), "--roots", str(sources)])
    return out


def test_writes_models_report_and_plot(pair: Path) -> None:
    report = json.loads((pair / "report.json").read_text())
    assert report["target"]["steps"] == report["drafts"]["steps"] == 20
    assert report["target"]["tokens_seen"] == 20 * 8 * 32
    assert set(report["evaluation"]["drafts"]) == {"1x32x4x96", "1x16x4x32"}
    for draft in report["evaluation"]["drafts"].values():
        for kind in ("greedy", "temperature_1"):
            assert 1 <= draft[kind]["with_loops"]["tokens_per_step"] <= 5
    chosen = report["evaluation"]["chosen"]
    weights = (pair / "drafts" / chosen / "model.safetensors").read_bytes()
    assert (pair / "draft" / "model.safetensors").read_bytes() == weights
    assert (pair / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_loss_falls(pair: Path) -> None:
    report = json.loads((pair / "report.json").read_text())
    uniform = torch.tensor(512.0).log().item()
    assert report["target"]["held_out_loss"] < uniform - 0.3


def test_held_out_module_is_not_trained_on(pair: Path) -> None:
    assert is_held_out("heapq", 4)
    corpus = json.loads((pair / "report.json").read_text())["corpus"]
    assert corpus["held_out_modules"] == ["heapq"]
    assert corpus["train_modules"] == len(SOURCES) - 1


def test_same_seed_gives_the_same_bits(pair: Path, sources: Path, tmp_path: Path) -> None:
    train_pair.main([*TINY, "--out", str(tmp_path), "--roots", str(sources)])
    for name in ("target/model.safetensors", "target/tokenizer.json", "draft/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (pair / name).read_bytes(), name
    first, second = (
        json.loads((folder / "report.json").read_text())["evaluation"]
        for folder in (pair, tmp_path)
    )
    assert first == second


def test_other_seed_gives_other_weights(pair: Path, sources: Path, tmp_path: Path) -> None:
    arguments = [*TINY, "--out", str(tmp_path), "--roots", str(sources)]
    train_pair.main([*arguments, "--steps", "1", "--seed", "2"])
    ours, theirs = (
        load_file(folder / "target/model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
        for folder in (tmp_path, pair)
    )
    assert (ours - theirs).abs().mean() > 0.5 * theirs.abs().mean()


def test_given_target_stays_as_it_is(pair: Path, sources: Path, tmp_path: Path) -> None:
    arguments = [*TINY, "--out", str(tmp_path), "--roots", str(sources)]
    train_pair.main([*arguments, "--steps", "1", "--target", str(pair / "target")])
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "target" / name).read_bytes() == (pair / "target" / name).read_bytes()
    assert "target" not in json.loads((tmp_path / "report.json").read_text())


@pytest.mark.parametrize("part", ["target", "draft"])
def test_loads_here_and_in_transformers_with_equal_logits(pair: Path, part: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        pair / part, dtype=torch.float32, attn_implementation="eager"
    )
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
    ours, config = load_checkpoint(pair / part, dtype=torch.float32)
    assert config.eos_token_ids == (0,)
    tokens = torch.randint(0, 512, (3, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours.forward_full(tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_bad_options_are_named_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        train_pair.main(
            ["--out", "x", "--steps", "0", "--vocab-size", "99", "--held-out-percent", "100"]
        )
    assert stop.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    for text in ("--steps: 0", "--vocab-size: 99", "--held-out-percent: 100"):
        assert text in message
    assert not Path("x").exists()


def test_corpus_without_held_out_files_is_refused(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="0 held-out files"):
        train_pair.main([*TINY, "--out", str(tmp_path), "--roots", str(sources / "logging")])
