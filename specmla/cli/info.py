"""`specmla info`: versions, devices, backends and why each is or isn't available."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from rich.console import Console

from specmla import __version__
from specmla.backends.base import Requirements
from specmla.backends.select import choose_backend
from specmla.bench.environment import collect_env
from specmla.cli.support import HEADER, support_row
from specmla.errors import require
from specmla.kernels.raw_launcher import launcher_problems


def run_info(given: Sequence[str] = ()) -> int:
    """Print the environment and a paragraph per backend.

    Args:
        given: names of the options that were given.

    Raises:
        ArgumentError: there are any: all of them ask for the account of a model.
    """
    require([f"{name} is given, accepted with --model alone" for name in given], "info")
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"specmla {__version__}")
    for name, value in collect_env().items():
        if name not in {"argv", "date"} and value is not None:
            console.print(f"{name}: {_flat(value)}", markup=False)
    console.print(launch_line(), markup=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    need = Requirements(device, dtype, 16, 512, 64, 64)
    console.print(f"\nbackends, asked for {dtype} on {device}, latent 512 + rope 64, page 64:")
    for line in backend_lines(need):
        console.print(line, markup=False)
    return 0


def backend_lines(need: Requirements) -> Iterator[str]:
    """Say which backend would serve `need`, why each other one would not, and what all declare."""
    chosen = choose_backend(need)
    ranked = [chosen.backend, *chosen.others]
    for backend in ranked:
        has = backend.capabilities
        state = "not available" if backend.problems(need) else "available"
        yield f"  {has.name}: {'preferred' if backend is chosen.backend else state}"
        yield from (f"    because {reason}" for reason in chosen.reasons.get(has.name, ()))
        cells = zip(HEADER[1:], support_row(has)[1:], strict=True)
        yield from (f"    {label}: {cell}" for label, cell in cells)


def launch_line() -> str:
    """Say whether known kernels start directly, or why every launch goes through Triton."""
    found = launcher_problems()
    return f"launches: all through Triton ({'; '.join(found)})" if found else "launches: direct"


def _flat(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
    return str(value)
