"""`specmla info`: versions, devices, backends and why each is or isn't available."""

from __future__ import annotations

import torch
from rich.console import Console

from specmla import __version__
from specmla.backends.base import Requirements
from specmla.backends.select import BACKENDS, get_backend
from specmla.bench.environment import collect_env
from specmla.cli.support import HEADER, support_row
from specmla.errors import require


def run_info(json: bool = False) -> int:
    """Print the environment and a paragraph per backend.

    Raises:
        ArgumentError: JSON is asked for, which only the account of a model has.
    """
    require(["json is True, accepted with --model alone"] if json else [], "info")
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"specmla {__version__}")
    for name, value in collect_env().items():
        if name not in {"argv", "date"} and value is not None:
            console.print(f"{name}: {_flat(value)}", markup=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    need = Requirements(device, dtype, 16, 512, 64, 64)
    console.print(f"\nbackends, asked for {dtype} on {device}, latent 512 + rope 64, page 64:")
    for name in BACKENDS:
        backend = get_backend(name)
        problems = backend.problems(need)
        console.print(f"  {name}: {'available' if not problems else 'not available'}")
        for problem in problems:
            console.print(f"    because {problem}", markup=False)
        for label, cell in zip(HEADER[1:], support_row(backend.capabilities)[1:], strict=True):
            console.print(f"    {label}: {cell}", style="dim")
    return 0


def _flat(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
    return str(value)
