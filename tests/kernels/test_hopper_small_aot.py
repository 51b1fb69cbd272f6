"""The Hopper form for few rows compiles for sm_90 on both Tritons, without stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("hopper_small_aot_runner.py")
OLD_TRITON = Path(os.environ.get("SPECMLA_TRITON_3_6", ROOT / ".triton-3.6.0"))
SHARED_LIMIT = 227 * 1024


@pytest.mark.parametrize("old", [False, True], ids=["installed", "3.6.0"])
def test_small_form_fits(tmp_path: Path, old: bool) -> None:
    paths = [str(ROOT)]
    if old:
        if not (OLD_TRITON / "triton").is_dir():
            pytest.skip(f"no triton 3.6.0 in {OLD_TRITON}; SPECMLA_TRITON_3_6 may name its folder")
        paths.insert(0, str(OLD_TRITON))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    report = tmp_path / "report.json"
    run = subprocess.run(
        [sys.executable, str(RUNNER), str(report)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    built = json.loads(report.read_text())["built"]
    assert len(built) == 2
    for form in built:
        assert form["shared"] <= SHARED_LIMIT, form
        assert form["stack"] == 0, form


def test_the_form_follows_the_rows_of_a_request() -> None:
    from specmla.kernels.hopper.launch import small_rows

    assert [small_rows(rows, 0) for rows in (1, 16, 17, 32, 33)] == [16, 16, 32, 32, None]
    assert small_rows(1, 16) is None  # batch-invariant: one form for all
