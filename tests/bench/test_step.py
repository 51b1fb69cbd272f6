from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specmla.bench.__main__ import main
from specmla.bench.step import StepOptions, measure_step

OPTIONS = StepOptions(
    num_requests=5,
    num_drafts=3,
    prompt_len=20,
    page_size=4,
    backend="reference",
    device=torch.device("cpu"),
    dtype=torch.float32,
    reps=8,
)


def test_accepts_every_number_of_drafts_equally_often() -> None:
    """Request i accepts (i + step) mod 4 of 3 drafts: over 8 steps 1.5 on average, plus one."""
    figures = measure_step(OPTIONS)
    assert figures["tokens_per_step"] == 2.5
    assert 0 < figures["commit_us"] < figures["plan_commit_us"]
    assert 0 < figures["plan_us"] < figures["plan_commit_us"]


def test_command_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    words = ["step", "--requests", "2", "--drafts", "0", "--prompt-len", "1", "--reps", "2"]
    words += ["--impl", "reference", "--device", "cpu", "--json", str(file)]
    assert main(words) == 0
    content = json.loads(file.read_text())
    assert content["env"]["argv"] == words
    (row,) = content["rows"]
    assert (row["requests"], row["drafts"], row["backend"]) == (2, 0, "reference")
    assert row["tokens_per_step"] == 1.0
    assert "B=2 K=0" in capsys.readouterr().out


def test_unfit_backend_costs_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["step", "--requests", "1", "--prompt-len", "4", "--device", "cpu", "--impl", "nope"]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "accepted are" in err
    assert err.count("\n") == 1
