"""What a planned step of the Triton kernels holds, and the bounds that size it.

Nothing here depends on a length: rows, requests and the width of the block table bound what a
replay of a captured step can bring.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from specmla.buffers import Buffer
from specmla.kernels.launch import Device, LaunchEntry, describe_device

PIECE_FIELDS = 8
"""Ints of a record; `pieces.FIELDS` says which."""

MAX_WAVES = 3
"""Pieces may fill the device at most this often: scratch stays O(tiles + SMs)."""

LEAST_RUN = 2
"""Steps (of `block_n` keys) that a piece of a cut tile should hold at least."""

PIECE_STEPS = 4
"""What a piece costs besides its steps, in steps: start, query, partial result and its merge."""


@dataclass(frozen=True)
class CutRule:
    """How tiles are cut; with neither of them set the pieces are balanced over the device.

    Attributes:
        num_splits: even pieces of every tile, whatever its length.
        piece_keys: keys of a piece, which starts at a multiple of it: what a row gets depends on
            nothing but its own keys.
    """

    num_splits: int | None = None
    piece_keys: int | None = None


@dataclass(frozen=True)
class StepShape:
    """What a plan fits: T rows of B requests, H heads of C latents; bytes of an element."""

    rows: int
    requests: int
    heads: int
    rank: int
    itemsize: int


@dataclass(frozen=True)
class PlanBounds:
    """Most tiles, programs and scratch slots (of one tile's partial result) of a step."""

    tiles: int
    programs: int
    slots: int


@dataclass(frozen=True)
class PiecePlan:
    """Records and scratch of a step on the device, shared by all layers.

    Attributes:
        shape, entry, rule, bounds: what it was made for, and how.
        pieces: [programs, 8] int32. merges: [1 + cut tiles, 8] int32. See `pieces.FIELDS`.
        partial_out: [slots, block_m, C] float32, normalised within a piece.
        partial_lse: [slots, block_m] float32, natural log.
    """

    shape: StepShape
    entry: LaunchEntry
    rule: CutRule
    bounds: PlanBounds
    pieces: Tensor
    merges: Tensor
    partial_out: Tensor
    partial_lse: Tensor


def num_resident(entry: LaunchEntry, device: torch.device | Device) -> int:
    """Count the programs that a device runs at once."""
    found = device if isinstance(device, Device) else describe_device(device)
    return found.num_sms * entry.programs_per_sm


def max_waves(tiles: int, resident: int) -> int:
    """Say how often pieces may fill the device: for few tiles, two waves fill it well enough."""
    return MAX_WAVES if 2 * tiles > resident else MAX_WAVES - 1


def lane_options(lanes: int) -> dict[str, int]:
    """Give the options of `pieces_kernel` for so many requests, that of nobody's rows included."""
    classes, width = 8 if lanes <= 512 else 4, max(1, 256 // lanes)
    num_warps = 4 if lanes <= 16 else 8 if lanes <= 128 else 16
    return {"CLASSES": classes, "BLOCK_B": lanes, "WIDTH": width, "num_warps": num_warps}


def plan_bounds(
    shape: StepShape, entry: LaunchEntry, rule: CutRule, table_keys: int, resident: int
) -> PlanBounds:
    """Bound a step by shapes alone, so that a replay may share out its rows and keys anew.

    Args:
        shape: of the step. entry: launch parameters. rule: how tiles are cut.
        table_keys: keys of a request that the block table has room for.
        resident: programs that the device runs at once.
    """
    # The last tile of a request lacks at most block_m - gcd rows; rows of no request are one more.
    spare = entry.block_m - gcd(entry.block_m, shape.heads)
    tiles = (shape.rows * shape.heads + (shape.requests + 1) * spare) // entry.block_m
    steps = -(-table_keys // entry.block_n)
    if rule.piece_keys is not None:
        most = -(-table_keys // rule.piece_keys)
    elif rule.num_splits is not None:
        most = min(rule.num_splits, steps)
    else:
        most = -(-steps // LEAST_RUN)
        cut = min(max_waves(tiles, resident) * resident, tiles * most) if most > 1 else 0
        return PlanBounds(tiles, min(tiles * max(most, 1), tiles + cut), cut)
    return PlanBounds(tiles, tiles * max(most, 1), tiles * most if most > 1 else 0)


def plan_buffers(
    shape: StepShape, entry: LaunchEntry, bounds: PlanBounds
) -> tuple[Buffer, Buffer, Buffer]:
    """Say what a plan reserves: records (pieces, then merges), partial outputs, partial LSE."""
    cut_tiles = min(bounds.tiles, bounds.slots // 2)
    return (
        Buffer((bounds.programs + 1 + cut_tiles, PIECE_FIELDS), torch.int32),
        Buffer((bounds.slots, entry.block_m, shape.rank), torch.float32),
        Buffer((bounds.slots, entry.block_m), torch.float32),
    )


def fitting_plan(
    earlier: object,
    shape: StepShape,
    entry: LaunchEntry,
    rule: CutRule,
    table_keys: int,
    device: torch.device,
) -> PiecePlan:
    """Give `earlier` if it is a plan that fits the step, else reserve one.

    Either way `pieces.fill_plan` has to fill its records.
    """
    bounds = plan_bounds(shape, entry, rule, table_keys, num_resident(entry, device))
    if (
        isinstance(earlier, PiecePlan)
        and (earlier.shape, earlier.entry, earlier.rule) == (shape, entry, rule)
        and (earlier.bounds, earlier.pieces.device) == (bounds, device)
    ):
        return earlier
    records, partial_out, partial_lse = (
        buffer.empty(device) for buffer in plan_buffers(shape, entry, bounds)
    )
    return PiecePlan(
        shape,
        entry,
        rule,
        bounds,
        records[: bounds.programs],
        records[bounds.programs :],
        partial_out,
        partial_lse,
    )
