"""Launch parameters from tables, and the split plan of a step.

`launch_table.json` holds, per architecture, entries for each kernel keyed by the number of packed
rows of the largest request and by the item size. Nothing is tuned while serving.
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

TOKENS_PER_SPLIT = 512
"""A split should hold at least this many keys, else writing its partial result dominates."""

MAX_WAVES = 3
"""Splits may fill the device at most this often: scratch stays O(tiles + SMs)."""

GOOD_FILL = 0.9
"""Take the fewest splits whose fill of the last wave is within this factor of the best."""


@dataclass(frozen=True)
class LaunchEntry:
    """How to launch one kernel for up to `max_rows` packed rows of an item size.

    Attributes:
        max_rows: largest number of rows (Q * H) of a request that the entry is meant for.
        itemsize: bytes of an element of query and cache.
        block_m: rows of a tile. block_n: keys of a step.
        num_warps, num_stages: Triton's launch options.
        branched: put each step into branches (Hopper tiles of 64 rows; see NOTES.md).
        programs_per_sm: programs that fit one SM at a time.
    """

    max_rows: int
    itemsize: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    branched: bool = False
    programs_per_sm: int = 1


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
    """All entries: architecture, then kernel, then entries by ascending `max_rows`."""
    raw = json.loads((files(__package__) / "launch_table.json").read_text())
    return {
        arch: {
            kernel: tuple(sorted((LaunchEntry(**e) for e in entries), key=lambda e: e.max_rows))
            for kernel, entries in kernels.items()
        }
        for arch, kernels in raw.items()
    }


@lru_cache(maxsize=256)
def find_entry(kernel: str, arch: str, num_rows: int, itemsize: int) -> LaunchEntry:
    """Give the entry of the smallest bucket that holds `num_rows`, or the largest bucket.

    Raises:
        UnsupportedError: no entry for the architecture, the kernel or the item size.
    """
    entries = launch_table().get(arch, {}).get(kernel, ())
    fitting = [e for e in entries if e.itemsize == itemsize]
    if not fitting:
        listed = sorted(launch_table())
        raise UnsupportedError(
            f"kernel {kernel!r}",
            [f"no launch entry for {arch} at {itemsize} bytes an element, listed are {listed}"],
        )
    return next((e for e in fitting if e.max_rows >= num_rows), fitting[-1])


@lru_cache(maxsize=64)
def describe_device(device: torch.device) -> Device:
    """Name the table key of `device` and count its SMs; CPU tensors mean the interpreter."""
    if device.type == "cpu":
        return Device("interpreter", 4)
    props = torch.cuda.get_device_properties(device)
    return Device(_arch_name(props), props.multi_processor_count)


def _arch_name(props: Any) -> str:
    if torch.version.hip is not None:
        name = str(props.gcnArchName).split(":")[0]
        return "gfx942" if name in ("gfx942", "gfx950") else name
    major, minor = props.major, props.minor
    # Shared memory decides: 8.0 holds 163 KiB, the other 8.x and 12.x hold 99.
    if major in (9, 10):
        return f"sm_{major}0"
    return "sm_86" if (major, minor) in ((8, 6), (8, 9)) or major == 12 else f"sm_{major}{minor}"


def choose_num_splits(num_tiles: int, max_seq_len: int, slots: int) -> int:
    """Choose the splits of a request: the one rule for reserving scratch and for launching.

    Starts from min(next_pow2(max(1, S / 512)), 2 * slots); within it and `MAX_WAVES` fills of the
    device, takes the fewest splits that fill their waves about as well as the best count.

    Args:
        num_tiles: programs of one split (tiles of the largest request times requests).
        max_seq_len: host bound of the lengths.
        slots: programs that run at once.
    """
    wanted = 1 << (max(1, max_seq_len // TOKENS_PER_SPLIT) - 1).bit_length()
    most = max(1, min(wanted, 2 * slots, MAX_WAVES * slots // max(num_tiles, 1)))

    def fill(splits: int) -> float:
        waves = -(-num_tiles * splits // slots)
        return num_tiles * splits / (waves * slots)

    best = max(fill(s) for s in range(1, most + 1))
    return next(s for s in range(1, most + 1) if fill(s) >= GOOD_FILL * best)


def reserve(num_splits: int, shape: tuple[int, int, int], device: torch.device) -> SplitPlan:
    """Allocate the partial results of `num_splits` splits of [T, H, C] rows, if there are several."""
    if num_splits == 1:
        return SplitPlan(1, None, None)
    num_rows, num_heads, rank = shape
    out = torch.empty(num_rows, num_heads, num_splits, rank, dtype=torch.float32, device=device)
    lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=device)
    return SplitPlan(num_splits, out, lse)
