"""Launch parameters from tables.

`launch_table.json` holds, per architecture, entries for each kernel keyed by the number of packed
rows of the largest request item size and page size. Nothing is tuned while serving.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import torch

from specmla.errors import UnsupportedError

FP_FUSION = False
"""Whether the compiler may contract a * b + c; off, so that every kernel form rounds alike."""

INTERPRETER = "interpreter"
"""What the table calls Triton's interpreter on a CPU."""


@dataclass(frozen=True)
class LaunchEntry:
    """How to launch one kernel for up to `max_rows` packed rows.

    Attributes:
        max_rows: largest number of rows (Q * H) of a request that the entry is meant for; for the
            prompt kernel, the widest head.
        block_m: rows of a tile. block_n: keys of a step.
        num_warps, num_stages: Triton's launch options.
        branched: put each step into branches (Hopper tiles of 64 rows; see NOTES.md).
        programs_per_sm: programs that fit one SM at a time.
        page_multiple: page sizes are multiples of this.
        itemsize: bytes of an element of query and cache.
    """

    max_rows: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    branched: bool = False
    programs_per_sm: int = 1
    page_multiple: int = 1
    itemsize: int = 2


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a device: the table's key and the number of SMs."""

    arch: str
    num_sms: int


@lru_cache(maxsize=1)
def launch_table() -> dict[str, dict[str, tuple[LaunchEntry, ...]]]:
    """All entries by architecture and kernel, the smallest and most special first."""
    raw = json.loads((files(__package__) / "launch_table.json").read_text())
    return {
        arch: {
            kernel: tuple(
                sorted(
                    (LaunchEntry(**e) for e in entries),
                    key=lambda e: (e.max_rows, -e.page_multiple),
                )
            )
            for kernel, entries in kernels.items()
        }
        for arch, kernels in raw.items()
    }


def gpu_architectures() -> tuple[str, ...]:
    """Give the GPUs that have entries."""
    return tuple(arch for arch in launch_table() if arch != INTERPRETER)


@lru_cache(maxsize=256)
def find_entry(
    kernel: str, arch: str, num_rows: int, itemsize: int, page_size: int = 0
) -> LaunchEntry:
    """Give the entry of the smallest bucket that holds `num_rows`, or of the largest bucket.

    Raises:
        UnsupportedError: no entry for the architecture, the kernel, the item or the page size.
    """
    entries = launch_table().get(arch, {}).get(kernel, ())
    fitting = [e for e in entries if e.itemsize == itemsize and page_size % e.page_multiple == 0]
    if not fitting:
        listed = sorted(launch_table())
        raise UnsupportedError(
            f"kernel {kernel!r}",
            [
                f"no launch entry for {arch}, {itemsize} bytes an element and pages of "
                f"{page_size}; architectures listed are {listed}"
            ],
        )
    largest = max(e.max_rows for e in fitting)
    return next(e for e in fitting if e.max_rows >= min(num_rows, largest))


def next_power_of_2(number: int) -> int:
    """Give the least power of two that is `number` or more, 1 or more (Triton's own is slow)."""
    return 1 << max(number - 1, 0).bit_length()


@lru_cache(maxsize=64)
def describe_device(device: torch.device) -> Device:
    """Name the table key of `device` and count its SMs; CPU tensors mean the interpreter."""
    if device.type == "cpu":
        return Device(INTERPRETER, 4)
    props = torch.cuda.get_device_properties(device)
    return Device(_arch_name(props), props.multi_processor_count)


def _arch_name(props: Any) -> str:
    if torch.version.hip is not None:
        return str(props.gcnArchName).split(":")[0]
    # 9.x and 10.x keep the shared memory of their first member; 8.6 and 8.9 have less than 8.0.
    return f"sm_{props.major}0" if props.major in (9, 10) else f"sm_{props.major}{props.minor}"
