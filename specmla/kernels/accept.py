"""Fused acceptance: from logits, drafts and draft distributions to decisions, in a few passes.

One read of all logits gives maxima and sums of chunks (`accept_stats`, `accept_rows`). With plain
temperature and one-hot drafts that is all that is read, but for the chunk in which a token is drawn
(`accept_draw`); dense q is read once, and the logits beside it (`accept_mass`): of the one row that
the token comes from, or of all rows for block verification. Of filtered requests the first read
leaves maximum and sum of every 32 ids too; the few that can hold an id which is kept are read
again, and what may be kept is held (`filter_rows`): all that follows looks at no more than that.

Random numbers are those of `specmla.verify.streams`, made in the kernels. Decisions are those of
the pure rules up to the rounding of float32 sums: they differ only where a number falls within
some 2**-20 of a threshold or of the border between two tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specmla.kernels.accept_draw import launch_draw
from specmla.kernels.accept_mass import launch_mass
from specmla.kernels.accept_rows import launch_rows
from specmla.kernels.accept_stats import launch_stats
from specmla.kernels.filter_groups import GROUP
from specmla.kernels.filter_held import FEW
from specmla.kernels.filter_rows import launch_filter_rows

BLOCK = 4096
"""Ids of a chunk, but no more than the vocabulary needs."""

SLOTS = 4096
"""Ids of a row that are held; a row that keeps more is read once for each bit of the search."""

RULES = {"token_level": 0, "block": 1, "sample_match": 2}
"""Rules that are fused, with the kernels' number of each."""


class AcceptInputs(NamedTuple):
    """What a step's acceptance is made of, on one device.

    Attributes:
        logits: [R, W] bfloat16, float16 or float32, contiguous.
        table: [B, K + 1] int64, the row of each place.
        drafts: [B, K] int64.
        q: [B, K, W] float32 contiguous, or None for one-hot drafts.
        seeds: [B] int64.
        positions: [B] int64.
    """

    logits: Tensor
    table: Tensor
    drafts: Tensor
    q: Tensor | None
    seeds: Tensor
    positions: Tensor


class Filters(NamedTuple):
    """Sampling parameters of B requests.

    Attributes:
        temperature: [B] float32.
        top_k: [B] int64. top_p: [B] float32. min_p: [B] float32.
        any_filter: some request that is not greedy sets one of them.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    any_filter: bool


class Accepted(NamedTuple):
    """Decisions on the device.

    Attributes:
        packed: [B, K + 4] int64: emitted tokens, then -1; drafts, accepted ones, flag.
        next_token: [B] int64.
        row_max: [B, K + 1] float32, of the logits; 0 in rows that can't be reached.
        row_mass: [B, K + 1] float32, the sum of exp((logit - row_max) / temperature) over what is
            kept; 1 where greedy and in rows that can't be reached.
    """

    packed: Tensor
    next_token: Tensor
    row_max: Tensor
    row_mass: Tensor


class Measured(NamedTuple):
    """What is known of all rows before anything is decided.

    Attributes:
        parts: maximum, sum and first id of each chunk [B * (K + 1), C].
        rows: maximum, mass, cut and flag of each row [B * (K + 1)].
        held: logits and ids [B * (K + 1), SLOTS] that a filtered row may keep, and how many
            [B * (K + 1)]; None where nothing is filtered.
        block: ids of a chunk.
    """

    parts: tuple[Tensor, Tensor, Tensor]
    rows: tuple[Tensor, Tensor, Tensor, Tensor]
    held: tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]
    block: int

    @property
    def slots(self) -> dict[str, int]:
        """Constants of kernels that look at what is held."""
        slots = 1 if self.held[0] is None else self.held[0].shape[1]
        return {"SLOTS": slots, "FEW": max(slots // FEW, 1)}


def fused_accept(
    inputs: AcceptInputs,
    filters: Filters,
    rule: str,
    *,
    block: int | None = None,
    slots: int | None = None,
) -> Accepted:
    """Decide a step of chains.

    Args:
        inputs: of the step.
        filters: temperatures and what is kept.
        rule: one of `RULES`.
        block: ids of a chunk, a power of two; `BLOCK` or fewer if None.
        slots: ids of a row that are held, a power of two; `SLOTS` or fewer if None.
    """
    logits, table, drafts, q, seeds, positions = inputs
    b, rows = table.shape
    known = measure_rows(inputs, filters, block, slots)
    number, is_dense = RULES[rule], q is not None and rule != "sample_match"
    options = known.slots | {
        "RULE": number,
        "FILTER": int(filters.any_filter),
        "WIDTH": triton.next_power_of_2(rows + 1),
        "BLOCK": known.block,
    }
    request, looked_at = (filters.temperature, seeds, positions), (logits, table, drafts, q)
    masses = None
    if is_dense:
        places, chunks = 1 if number == 0 else rows, known.parts[0].shape[1]
        masses = logits.new_empty((b, places, chunks), dtype=torch.float32)
        launch_mass(masses, known.held, looked_at, known.rows[:3], request, options)
    packed = torch.empty((b, rows + 3), dtype=torch.int64, device=logits.device)
    token = torch.empty(b, dtype=torch.int64, device=logits.device)
    options |= {"DENSE": int(is_dense)}
    launch_draw(
        (packed, token),
        masses,
        known.parts[:2],
        known.held,
        looked_at,
        known.rows,
        request,
        options,
    )
    return Accepted(packed, token, known.rows[0].view(b, rows), known.rows[1].view(b, rows))


def measure_rows(
    inputs: AcceptInputs, filters: Filters, block: int | None, slots: int | None
) -> Measured:
    """Read all logits once, and of filtered requests what they may keep once more."""
    logits, table, drafts = inputs[:3]
    places, width, device = table.numel(), logits.shape[1], logits.device
    whole = max(128, triton.next_power_of_2(width))
    block, slots = block or min(BLOCK, whole), slots or min(SLOTS, whole)
    chunks, group = triton.cdiv(width, block), min(GROUP, block)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((places, *shape), dtype=dtype, device=device)

    parts = (
        empty(torch.float32, chunks),
        empty(torch.float32, chunks),
        empty(torch.int32, chunks),
    )
    rows = (
        empty(torch.float32),
        empty(torch.float32),
        empty(torch.int64),
        empty(torch.int32),
    )
    if not filters.any_filter:
        sampling = (filters.temperature, None, None, None)
        launch_stats(parts, (None, None), logits, table, drafts, sampling, block, group)
        launch_rows(rows, parts, drafts, filters.temperature)
        return Measured(parts, rows, (None, None, None), block)
    kept, number = filters[:4], chunks * (block // group)
    groups = (empty(torch.float32, number), empty(torch.float32, number))
    held = (empty(torch.float32, slots), empty(torch.int32, slots), empty(torch.int32))
    launch_stats(parts, groups, logits, table, drafts, kept, block, group)
    launch_filter_rows(rows, held, parts, groups, (logits, table, drafts), kept, block, group)
    return Measured(parts, rows, held, block)
