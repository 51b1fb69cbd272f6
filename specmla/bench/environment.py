"""Where a figure comes from: versions, device, commit, date.

Standard library only, and it answers on a broken installation too: where torch can't be loaded,
`python specmla/bench/environment.py` says why.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("specmla", "torch", "triton", "safetensors", "numpy", "transformers", "tokenizers")
ROOT = Path(__file__).resolve().parents[2]


def collect_env(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Collect provenance as plain JSON values.

    Args:
        argv: the command's arguments, kept as they are.

    Returns:
        versions, cpu, gpu (None where torch sees none, a reason where torch is unusable), commit
        (None outside a checkout, "+changes" appended for a modified one), date (UTC), argv.
    """
    return {
        "argv": list(argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {name: _version(name) for name in PACKAGES},
        "cpu": {"count": os.cpu_count(), "name": _cpu_name()},
        "gpu": _gpu(),
    }


def place_of(env: Mapping[str, Any]) -> str:
    """Name the device that a collected environment is about: its GPU, else its CPU."""
    gpu = env["gpu"]
    return str(gpu["name"]) if isinstance(gpu, dict) else f"CPU ({env['cpu']['name']})"


def command_of(env: Mapping[str, Any]) -> str:
    """Give the benchmark's command in backticks; absolute paths, which name a machine, as FILE."""
    words = ["FILE" if os.path.isabs(word) else word for word in env["argv"]]
    return f"`python -m specmla.bench {' '.join(words)}`"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpu() -> dict[str, Any] | str | None:
    try:
        import torch

        if not torch.cuda.is_available():
            return None
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {
            "name": found.name,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "memory_bytes": found.total_memory,
            "l2_bytes": found.L2_cache_size,
            "cuda": torch.version.cuda,
            "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    except Exception as error:  # a broken torch fails in any way it likes; the rest still counts
        return f"torch is unusable: {type(error).__name__}: {error}"


def _commit() -> str | None:
    git = ("git", "-C", str(ROOT))
    top = _run(*git, "rev-parse", "--show-toplevel")
    # An installed copy inside another project's checkout must not report that project's commit.
    if top is None or Path(top).resolve() != ROOT:
        return None
    sha = _run(*git, "rev-parse", "HEAD")
    return f"{sha}+changes" if sha and _run(*git, "status", "--porcelain") else sha


def _run(*command: str) -> str | None:
    """First line of a program's output, or None if it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines else None


if __name__ == "__main__":
    print(json.dumps(collect_env(sys.argv[1:]), indent=1))
