"""Fused acceptance: from logits, drafts and draft distributions to decisions, in a few passes.

One read of all logits gives maxima and sums of chunks (`accept_stats`, `accept_rows`). With plain
temperature and one-hot drafts that is all that is read, but for the chunk in which a token is drawn
(`accept_draw`); dense q is read once, and the logits beside it (`accept_mass`): of the one row that
the token comes from, or of all rows for block verification. Top-k and top-p look for the least
logit that is kept (`filter_hist`, `filter_collect`, `filter_cut`), reading the row twice more.

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
from specmla.kernels.filter_collect import launch_collect
from specmla.kernels.filter_cut import launch_cut
from specmla.kernels.filter_hist import BINS, launch_hist

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
    parts, reduced, block = measure_rows(inputs, filters, block, slots)
    chunks = parts[0].shape[1]
    number = RULES[rule]
    options = {
        "RULE": number,
        "FILTER": int(filters.any_filter),
        "DENSE": int(q is not None and number != RULES["sample_match"]),
        "WIDTH": triton.next_power_of_2(rows + 1),
        "BLOCK": block,
    }
    request = (filters.temperature, seeds, positions)
    masses = None
    if options["FILTER"] or options["DENSE"]:
        places = 1 if number == 0 else rows
        masses = logits.new_empty((b, places, chunks), dtype=torch.float32)
        launch_mass(masses, logits, table, drafts, q, reduced[:3], request, options)
    packed = torch.empty((b, rows + 3), dtype=torch.int64, device=logits.device)
    token = torch.empty(b, dtype=torch.int64, device=logits.device)
    launch_draw(
        (packed, token), masses, parts[:2], (logits, table, drafts, q), reduced, request, options
    )
    return Accepted(packed, token, reduced[0].view(b, rows), reduced[1].view(b, rows))


def measure_rows(
    inputs: AcceptInputs, filters: Filters, block: int | None, slots: int | None
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor], int]:
    """Read all logits once, those of filtered requests twice more.

    Returns:
        Maximum, sum and first id of each chunk [B * (K + 1), C]; maximum, mass, cut and flag of
        each row [B * (K + 1)]; ids of a chunk.
    """
    logits, table, drafts = inputs[:3]
    (b, rows), width = table.shape, logits.shape[1]
    whole = max(128, triton.next_power_of_2(width))
    block, slots = block or min(BLOCK, whole), slots or min(SLOTS, whole)
    chunks = triton.cdiv(width, block)
    parts = _parts(b * rows, chunks, logits.device)
    launch_stats(parts, logits, table, drafts, filters.temperature, block)
    reduced = _rows(b * rows, logits.device)
    launch_rows(reduced, parts, drafts, filters.temperature)
    if filters.any_filter:
        _cut(inputs, filters, reduced, chunks, block, slots)
    return parts, reduced, block


def _cut(
    inputs: AcceptInputs,
    filters: Filters,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    chunks: int,
    block: int,
    slots: int,
) -> None:
    """Find the cut of filtered rows."""
    logits, table, drafts = inputs[:3]
    places, device = len(rows[0]), logits.device
    hist = torch.empty((places, chunks, BINS.value), dtype=torch.int32, device=device)
    sampling = (filters.temperature, filters.top_k, filters.top_p, filters.min_p)
    launch_hist(hist, logits, table, drafts, rows[0], sampling[:3], block)
    found = (
        torch.empty((places, slots), dtype=torch.float32, device=device),
        torch.empty((places, slots), dtype=torch.int32, device=device),
        torch.empty(places, dtype=torch.int32, device=device),
        torch.empty((places, chunks), dtype=torch.float32, device=device),
    )
    launch_collect(found, hist, logits, table, drafts, rows[:2], sampling, block)
    launch_cut(rows, found, logits, table, drafts, sampling, block)


def _parts(places: int, chunks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    shape = (places, chunks)
    return (
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
    )


def _rows(places: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty(places, dtype=torch.float32, device=device),
        torch.empty(places, dtype=torch.float32, device=device),
        torch.empty(places, dtype=torch.int64, device=device),
        torch.empty(places, dtype=torch.int32, device=device),
    )
