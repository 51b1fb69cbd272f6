"""What reaches the driver is the same byte by byte, whoever launches: Triton or we.

Needs a C compiler, as Triton does wherever it launches; the driver is one of our own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OLD_TRITON = Path(os.environ.get("SPECMLA_TRITON_3_6", ROOT / ".triton-3.6.0"))
COMPILER = shutil.which("gcc") or shutil.which("cc")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="no C compiler")]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the driver that writes launches down."""
    folder = tmp_path_factory.mktemp("driver")
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    out, name = folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1"
    command = [COMPILER, "-O1", "-shared", "-fPIC", f"-I{include}", name, "-o", out]
    subprocess.run([*map(str, command), str(HERE / "fake_cuda.c")], check=True)
    return folder


@pytest.mark.parametrize("old", [False, True], ids=["installed triton", "triton 3.6.0"])
def test_direct_launches_hand_over_the_same_bytes(old: bool, driver: Path, tmp_path: Path) -> None:
    paths = [str(ROOT)]
    if old:
        if not (OLD_TRITON / "triton").is_dir():
            pytest.skip(f"no triton 3.6.0 in {OLD_TRITON}; see tests/kernels/test_aot.py")
        paths.insert(0, str(OLD_TRITON))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": os.pathsep.join(paths),
        "LD_LIBRARY_PATH": str(driver),
        "TRITON_LIBCUDA_PATH": str(driver),
        "TRITON_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [sys.executable, str(HERE / "direct_runner.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("direct launches are those of Triton") == 3, run.stdout
