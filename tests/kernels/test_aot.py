"""Every kernel and launch-table entry compiles for every listed architecture and fits it.

Runs on any machine: Triton's wheels carry their assemblers. Two Tritons are tested side by side,
the installed one and the oldest that torch 2.11 brings (3.6.0).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("aot_runner.py")

SHARED_LIMIT = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""KiB of shared memory that a program may have."""

OLD_TRITON = Path(os.environ.get("SPECMLA_TRITON_3_6", ROOT / ".triton-3.6.0"))


def run_compiler(report: Path, old: bool, *flags: str) -> list[dict[str, Any]]:
    paths = [str(ROOT)]
    if old:
        if not (OLD_TRITON / "triton").is_dir():
            pytest.skip(
                f"no triton 3.6.0 in {OLD_TRITON}: pip install --no-deps --target .triton-3.6.0 "
                "triton==3.6.0, or name its folder in SPECMLA_TRITON_3_6"
            )
        paths.insert(0, str(OLD_TRITON))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(RUNNER), str(report), *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    built: list[dict[str, Any]] = json.loads(report.read_text())
    return built


def problems(built: list[dict[str, Any]]) -> list[str]:
    found = [f"{b['label']}: {b['error']}" for b in built if b["error"]]
    for b in built:
        if b["error"]:
            continue
        limit = SHARED_LIMIT[b["arch"]] * 1024
        if b["shared"] > limit:
            found.append(f"{b['label']}: {b['shared']} bytes of shared memory, limit {limit}")
        if b["stack"]:
            found.append(f"{b['label']}: {b['stack']} bytes of stack")
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("old", [False, True], ids=["installed", "3.6.0"])
def test_every_launch_entry_compiles_and_fits(old: bool, tmp_path: Path) -> None:
    built = run_compiler(tmp_path / "report.json", old)
    assert {b["arch"] for b in built} == set(SHARED_LIMIT)
    assert not problems(built), "\n".join(problems(built))


def test_a_spilling_tile_is_found(tmp_path: Path) -> None:
    built = run_compiler(tmp_path / "report.json", False, "--spilling")
    assert len(built) == 1
    assert any("bytes of stack" in text for text in problems(built))


def test_too_much_shared_memory_is_found() -> None:
    fake = {"label": "x", "arch": "gfx942", "error": None, "shared": 65537, "stack": 0}
    assert problems([fake]) == ["x: 65537 bytes of shared memory, limit 65536"]
