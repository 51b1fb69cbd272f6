from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specmla.bench import environment
from specmla.bench.environment import collect_env

FILE = Path(environment.__file__)


def test_names_versions_device_date_and_argv() -> None:
    env = collect_env(["verify", "--heads", "16"])
    assert env["argv"] == ["verify", "--heads", "16"]
    assert env["versions"]["torch"] == torch.__version__
    assert datetime.datetime.fromisoformat(env["date"]).tzinfo is not None
    assert (env["gpu"] is None) == (not torch.cuda.is_available())
    assert json.loads(json.dumps(env)) == env


def test_answers_where_torch_cannot_be_loaded() -> None:
    code = (
        "import runpy, sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise OSError('libtorch_cpu.so: truncated')\n"
        "sys.meta_path.insert(0, Broken())\n"
        f"runpy.run_path({str(FILE)!r}, run_name='__main__')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["gpu"] == (
        "torch is unusable: OSError: libtorch_cpu.so: truncated"
    )


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_of_another_project_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An installed copy may lie inside someone else's checkout."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    inner = tmp_path / "venv" / "site-packages"
    inner.mkdir(parents=True)
    monkeypatch.setattr(environment, "ROOT", inner)
    assert collect_env()["commit"] is None
    monkeypatch.setattr(environment, "ROOT", tmp_path.resolve())
    commit = collect_env()["commit"]
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "new.py").touch()
    assert collect_env()["commit"] == commit + "+changes"
