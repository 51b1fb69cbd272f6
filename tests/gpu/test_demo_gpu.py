"""The demo on a GPU, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", [False, True])
def test_demo_of_shipped_drafters_on_cuda(graphs):
    """As good as on a CPU (`tests/e2e/test_shipped_drafters.py`), captured or not."""
    words = ["--draft", "mtp,dflash,dspark", "--max-tokens", "48", "-k", "7"]
    summary = run_demo(*words, *["--graphs"] * graphs)
    assert set(summary["drafters"]) == {"mtp", "dflash", "dspark"}
    assert all(drafter["tokens_per_step"] > 2.3 for drafter in summary["drafters"].values())


def test_demo_on_cuda():
    assert set(run_demo()["drafters"]) == {"ngram", "draft_model", "dspark"}


def run_demo(*words):
    """Run it; what differs from plain decoding must be a rounding tie."""
    done = subprocess.run(
        [sys.executable, "-m", "specmla", "demo", "--device", "cuda", "--json", *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["device"] == "cuda"
    for drafter in summary["drafters"].values():
        difference = drafter["first_difference"]
        assert difference is None or difference["top1_margin"] <= 2e-2
    return summary
