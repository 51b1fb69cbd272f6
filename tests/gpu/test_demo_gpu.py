"""The demo on a GPU, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


def test_demo_on_cuda():
    done = subprocess.run(
        [sys.executable, "-m", "specmla", "demo", "--device", "cuda", "--json"],
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
