"""What importing the library may cost: torch and safetensors, no Triton, no extra, no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Triton is imported when a kernel is launched; the others belong to extras.
ABSENT = ("triton", "transformers", "tokenizers", "typer", "rich", "matplotlib", "numpy")
ENGINES = ("vllm", "sglang", "flash_mla", "flashinfer", "flash_attn", "tensorrt_llm")

PROBE = """
import importlib, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, Blocked())
import torch
before = set(sys.modules)
module = importlib.import_module(NAME)
public = getattr(module, "__all__", [])
missing = [name for name in public if not hasattr(module, name)]
new = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"public": list(public), "missing": missing, "new": new}))
"""


def probe(name: str, blocked: tuple[str, ...]) -> dict[str, list[str]]:
    """Import `name` in a fresh process where `blocked` packages can't be imported."""
    code = f"BLOCKED, NAME = {blocked!r}, {name!r}\n{PROBE}"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, list[str]] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("name", ["specmla", "drafters"])
def test_import_needs_no_extra_and_no_triton(name: str) -> None:
    found = probe(name, ABSENT + ENGINES)
    assert found["public"], f"{name}.__all__ is empty"
    assert found["missing"] == []
    assert len(set(found["public"])) == len(found["public"])


@pytest.mark.parametrize("name", ["specmla", "drafters"])
def test_import_takes_nothing_it_could_leave(name: str) -> None:
    """The same where everything is installed: nothing optional is pulled in on the way."""
    assert set(probe(name, ())["new"]).isdisjoint(ABSENT + ENGINES)


def test_library_knows_no_drafter() -> None:
    assert "drafters" not in probe("specmla", ABSENT + ENGINES)["new"]


def test_command_modules_import_without_extras() -> None:
    """They must live long enough to print which extra is missing."""
    for name in ("specmla.__main__", "specmla.bench.__main__"):
        assert probe(name, ABSENT + ENGINES)["missing"] == []


def test_block_really_blocks() -> None:
    code = f"BLOCKED, NAME = {ABSENT!r}, 'typer'\n{PROBE}"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "(blocked)" in run.stderr
