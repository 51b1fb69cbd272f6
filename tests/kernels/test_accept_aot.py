"""The acceptance kernels compile for every architecture, without spilling, under both Tritons."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels import test_aot


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
    assert not test_aot.problems(built), "\n".join(test_aot.problems(built))
