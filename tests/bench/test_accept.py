"""`specmla.bench accept` at sizes that a CPU runs in moments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specmla.bench import accept
from specmla.bench.__main__ import main

SIZES = ["--requests", "2", "--drafts", "1", "--vocab", "50", "--reps", "2", "--device", "cpu"]


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "accept.json"
    status = main(["accept", *words, *SIZES, "--json", str(file)])
    found: dict[str, Any] = json.loads(file.read_text())
    return status, found


def test_every_form_is_checked_and_timed(tmp_path: Path) -> None:
    words = ["--rule", "token_level", "--sampling", "plain", "min-p"]
    status, found = run(tmp_path, *words)
    assert status == 0
    rows = found["rows"]
    forms = {(r["sampling"], r["q"], r["provider"]) for r in rows}
    assert len(forms) == len(rows) == 2 * 2 * 3
    for row in rows:
        if row["provider"] == "triton" and row["status"] == "refused":
            assert "TRITON_INTERPRET" in row["reason"]
            continue
        assert row["status"] == "timed"
        assert row["times_read"] == pytest.approx(row["us"] / row["read_us"])
        logits = 2 * 2 * 50 * 4
        assert row["bytes"] == logits + (2 * 50 * 4 if row["q"] == "dense" else 0)
        assert row["read_us"] == pytest.approx(1e6 * row["bytes"] / found["copy_bytes_per_s"])
    assert {r["aim"] for r in rows} == {2.0, 5.0}
    assert found["env"]["mode"]


def test_wrong_decisions_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def wrong(*args: object) -> torch.Tensor:
        return torch.full((2, 2), -7, dtype=torch.int64)

    monkeypatch.setattr(accept, "_fused", wrong)
    words = ["--rule", "block", "--sampling", "plain", "--q", "dense"]
    status, found = run(tmp_path, *words)
    row = found["rows"][0]
    if row["status"] == "refused":
        pytest.skip("kernels are neither interpreted nor is there a GPU")
    assert status == 1
    assert row["status"] == "wrong"
    assert row["us"] is None
    assert "2 of 2 requests differ" in row["reason"]


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["accept", "--rule", "lossy_typical"])
    assert left.value.code == 2
    assert "lossy_typical" in capsys.readouterr().err
