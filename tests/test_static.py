"""Lint, format, types and import directions, as tests so that one command checks everything."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT_IMPORTS = str(Path(sysconfig.get_path("scripts")) / "lint-imports")

TOOLS = {
    "ruff check": ("ruff", [sys.executable, "-m", "ruff", "check", "--no-cache", "."]),
    "ruff format": ("ruff", [sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "."]),
    "mypy": ("mypy", [sys.executable, "-m", "mypy"]),
    "lint-imports": ("importlinter", [LINT_IMPORTS, "--no-cache"]),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tool_is_content(tool: str) -> None:
    package, command = TOOLS[tool]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; it comes with the extra 'dev'")
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_module_has_a_layer() -> None:
    """A module that no layer names would be free to import anything."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    listed = {name.strip(" ()") for layer in contract["layers"] for name in re.split("[|:]", layer)}
    package = ROOT / "specmla"
    rooms = [path for path in package.iterdir() if (path / "__init__.py").exists()]
    present = {path.stem for path in package.glob("*.py")} | {path.name for path in rooms}
    present |= {f"backends.{path.stem}" for path in (package / "backends").glob("*.py")}
    assert present - {"__init__", "backends", "backends.__init__"} - listed == set()
