"""Launch parameters from tables, and the split plan of a step.

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
from torch import Tensor

from specmla.errors import UnsupportedError

FP_FUSION = False
"""Whether the compiler may contract a * b + c; off, so that every kernel form rounds alike."""

MAX_WAVES = 3
"""Splits may fill the device at most this often: scratch stays O(tiles + SMs)."""

LEAST_RUN = 2
"""Steps (of `block_n` keys) that a split should hold at least."""

PROGRAM_STEPS = 4
"""What a program costs besides its steps, in steps: start, query, partial result and its merge."""


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


@dataclass(frozen=True)
class SplitPlan:
    """Splits and scratch of a step, shared by all layers.

    Attributes:
        num_splits: upper bound of the splits of a request; 1 writes results directly.
        partial_out: [T, H, num_splits, C] float32, normalised within a split; None if unsplit.
        partial_lse: [T, H, num_splits] float32, natural log; None if unsplit.
    """

    num_splits: int
    partial_out: Tensor | None
    partial_lse: Tensor | None

    def targets(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Where the attention kernel writes, as [T, H, splits, C] and [T, H, splits]."""
        if self.partial_out is None or self.partial_lse is None:
            return out[:, :, None], lse[:, :, None]
        return self.partial_out, self.partial_lse


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


@lru_cache(maxsize=64)
def describe_device(device: torch.device) -> Device:
    """Name the table key of `device` and count its SMs; CPU tensors mean the interpreter."""
    if device.type == "cpu":
        return Device("interpreter", 4)
    props = torch.cuda.get_device_properties(device)
    return Device(_arch_name(props), props.multi_processor_count)


def _arch_name(props: Any) -> str:
    if torch.version.hip is not None:
        return str(props.gcnArchName).split(":")[0]
    # 9.x and 10.x keep the shared memory of their first member; 8.6 and 8.9 have less than 8.0.
    return f"sm_{props.major}0" if props.major in (9, 10) else f"sm_{props.major}{props.minor}"


def choose_num_splits(num_tiles: int, num_steps: int, slots: int) -> int:
    """Choose the splits of a request: the one rule for reserving scratch and for launching.

    Counts waves of programs, each as long as its steps plus a constant, for as many splits as fill
    the device once, twice, thrice, and takes the shortest; ties go to fewer splits.

    Args:
        num_tiles: programs of one split, over all requests.
        num_steps: steps of the longest request (its length over `block_n`, rounded up).
        slots: programs that run at once.
    """
    best, least_cost = 1, _cost(num_tiles, num_steps, slots, 1)
    for waves in range(1, MAX_WAVES + 1):
        most = min(waves * slots // max(num_tiles, 1), num_steps // LEAST_RUN)
        if most > 1:
            splits = -(-num_steps // -(-num_steps // most))  # no split that would be empty
            cost = _cost(num_tiles, num_steps, slots, splits)
            if cost < least_cost:
                best, least_cost = splits, cost
    return best


def _cost(num_tiles: int, num_steps: int, slots: int, splits: int) -> int:
    waves = -(-num_tiles * splits // slots)
    return waves * (-(-num_steps // splits) + PROGRAM_STEPS)


def reserve(num_splits: int, shape: tuple[int, int, int], device: torch.device) -> SplitPlan:
    """Allocate the partial results of [T, H, C] rows, if there are several splits."""
    if num_splits == 1:
        return SplitPlan(1, None, None)
    num_rows, num_heads, rank = shape
    out = torch.empty(num_rows, num_heads, num_splits, rank, dtype=torch.float32, device=device)
    lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=device)
    return SplitPlan(num_splits, out, lse)
