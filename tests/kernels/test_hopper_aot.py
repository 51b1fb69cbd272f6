"""The Hopper kernels compile for sm_90 on both Tritons and fit a multiprocessor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
OLD_TRITON = Path(os.environ.get("SPECMLA_TRITON_3_6", ROOT / ".triton-3.6.0"))

SHARED_LIMIT = 227 * 1024
STACK_LIMIT = {"3.6.0": 0}
OTHER_STACK_LIMIT = 40
"""Bytes of spilled registers a thread, all outside the loops, that newer compilers need where the
heads are no power of two; Triton 3.8 needs 56 over e4m3 rows, 3.9 no more than 40."""


@pytest.mark.parametrize("old", [False, True], ids=["installed", "3.6.0"])
@pytest.mark.parametrize(
    ("form", "most_stack"),
    [("hopper", OTHER_STACK_LIMIT), ("hopper_small", 0), ("hopper_fp8", 56)],
)
def test_hopper_kernels_fit(tmp_path: Path, form: str, most_stack: int, old: bool) -> None:
    paths = [str(ROOT)]
    if old:
        if not (OLD_TRITON / "triton").is_dir():
            pytest.skip(f"no triton 3.6.0 in {OLD_TRITON}; SPECMLA_TRITON_3_6 may name its folder")
        paths.insert(0, str(OLD_TRITON))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    runner = Path(__file__).with_name(f"{form}_aot_runner.py")
    report = tmp_path / "report.json"
    run = subprocess.run(
        [sys.executable, str(runner), str(report)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(report.read_text())
    assert len(found["built"]) == {"hopper": 6, "hopper_small": 2, "hopper_fp8": 2}[form]
    for built in found["built"]:
        assert built["shared"] <= SHARED_LIMIT, built
        assert built["stack"] <= STACK_LIMIT.get(found["triton"], most_stack), built


def test_the_form_follows_the_rows_of_a_request() -> None:
    from specmla.kernels.hopper.launch import small_rows

    assert [small_rows(rows, 0) for rows in (1, 16, 17, 32, 33)] == [16, 16, 32, 32, None]
    assert small_rows(1, 16) is None  # batch-invariant: one form for all
