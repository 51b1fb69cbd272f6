"""What the wheel holds: both packages with their data, and nothing else."""

from __future__ import annotations

import email
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import specmla

ROOT = Path(__file__).parents[1]
NOT_SHIPPED = ("__pycache__", "results")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed; it comes with the extra 'dev'")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return path


def test_is_pure_python_of_this_version(wheel: Path) -> None:
    assert wheel.name == f"specmla-{specmla.__version__}-py3-none-any.whl"


def test_holds_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in ("specmla", "drafters")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not set(path.parts) & set(NOT_SHIPPED)
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"specmla/py.typed", "drafters/py.typed", "specmla/kernels/launch_table.json"} <= names
    for part in ("target", "draft", "mtp", "dflash", "dspark"):
        folder = f"specmla/assets/{part}"
        assert {f"{folder}/config.json", f"{folder}/model.safetensors"} <= names
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_base_install_needs_torch_triton_and_safetensors_alone(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    required = metadata.get_all("Requires-Dist") or []
    base = sorted(line for line in required if "extra ==" not in line)
    assert [line.partition(">")[0] for line in base] == ["safetensors", "torch", "triton"]
    assert "platform_system == 'Linux'" in base[2]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra") or []) == {"demo", "hf", "bench", "dev"}
