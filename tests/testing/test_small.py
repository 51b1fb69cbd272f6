"""The small cases for compute-sanitizer, run without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specmla.backends.base import AttentionOutput
from specmla.backends.reference import ReferenceBackend
from specmla.testing import small


class ScalesItsOutput(ReferenceBackend):
    def forward_mqa(self, *tensors: Any, **options: Any) -> AttentionOutput:
        got = super().forward_mqa(*tensors, **options)
        return AttentionOutput(got.out * 1.01, got.lse)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_small_runs_each_case_once(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert small.main(["--backend", backend, "--device", device]) == 0
    assert f"{backend} on {device}: 6 of 6 cases right" in capsys.readouterr().out


def test_small_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(small, "get_backend", lambda name: ScalesItsOutput())
    assert small.main(["--backend", "reference", "--device", "cpu", "--only", "split"]) == 1
    assert "WRONG split: " in capsys.readouterr().out


def test_small_refuses_a_backend_that_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert small.main(["--backend", "hopper", "--device", "cpu"]) == 2
    assert "device is 'cpu'" in capsys.readouterr().err
