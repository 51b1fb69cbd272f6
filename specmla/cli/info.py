"""`specmla info`: versions, devices, backends and why each is or isn't available."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from specmla.backends.base import Capabilities, Requirements
from specmla.backends.select import BACKENDS, get_backend
from specmla.bench.environment import collect_env


def run_info() -> int:
    """Print the environment and one row per backend."""
    console = Console()
    for name, value in collect_env().items():
        console.print(f"{name}: {value}", highlight=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    need = Requirements(device, dtype, 16, 512, 64, 64)
    table = Table(title=f"backends, for {dtype} on {device}, DeepSeek dims, page 64")
    for column in ("backend", "query lengths", "masks", "page sizes", "here"):
        table.add_column(column)
    for name in BACKENDS:
        backend = get_backend(name)
        row = support_row(backend.capabilities)
        table.add_row(*row[:4], "available" if not (p := backend.problems(need)) else "; ".join(p))
    console.print(table)
    return 0


def support_row(has: Capabilities) -> list[str]:
    """The declared capabilities of one backend, as the README's support table shows them."""
    pages = "any" if has.page_size_multiple == 1 else f"multiples of {has.page_size_multiple}"
    return [
        has.name,
        has.query_len_support.value,
        ", ".join(sorted(m.value for m in has.masks)),
        pages,
        ", ".join(str(d).removeprefix("torch.") for d in has.dtypes),
        ", ".join(has.device_types),
        has.summary,
    ]
