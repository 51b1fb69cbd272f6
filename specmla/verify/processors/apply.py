"""Penalties, biases, bans and masks on the logits of a step, each row with its own history.

A row's history is what is committed plus the drafts before that row, so that a draft is judged by
the distribution that plain decoding would have had there. The order is fixed: repetition penalty,
frequency and presence penalties, biases, then bans, `min_tokens` and constraints.

Ids are banned by adding -inf: NaN stays NaN, and its row is flagged.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.verify.processors.tables import Biases, Masks, Penalties, ProcessorTables


class RowHistory(NamedTuple):
    """Which drafts stand before each row.

    Attributes:
        drafts: [B, K] int64.
        sees: [B or 1, K+1, K] bool, whether the draft stands before the row.
        depth: [B or 1, K+1] int64, how many do.
    """

    drafts: Tensor
    sees: Tensor
    depth: Tensor


def chain_history(drafts: Tensor) -> RowHistory:
    """Give the history of chains [B, K]: row j follows the first j drafts."""
    k = drafts.shape[1]
    place = torch.arange(k + 1, device=drafts.device)
    return RowHistory(drafts, (place[None, :k] < place[:, None])[None], place[None])


def apply_processors(logits: Tensor, tables: ProcessorTables, history: RowHistory) -> Tensor:
    """Give the processed logits [B, K+1, W] in float32 (float64 for float64); the given ones stay.

    Args:
        logits: [B, K+1, W] of the model, row by row.
        tables: of the step.
        history: what stands before each row.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    out = logits.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if tables.penalties is not None:
        _penalise_(out, tables.penalties, history)
    if tables.biases is not None:
        _add_(out, tables.biases, history.depth)
    if tables.masks is not None:
        _mask_(out, tables.masks)
    return out


def _penalise_(out: Tensor, given: Penalties, history: RowHistory) -> None:
    """Change the logits of tokens that occurred, and of no others.

    A token may stand in several entries (a draft that occurred before); each of them holds its
    total, so that all write the same value.
    """
    rows, width = out.shape[1:]
    drafts = history.drafts[given.request]
    sees = history.sees.expand(len(out), -1, -1)[given.request]
    made = (drafts >= 0) & (drafts < width)
    drafted = drafts.where(made, given.ids[:, :1])
    known = drafted[:, :, None] == given.ids[:, None, :]
    earlier = torch.where(known, given.outputs[:, None, :], 0).amax(-1)
    ids = torch.cat([given.ids, drafted], dim=1)
    again = ids[:, :, None] == drafts.where(made, -1)[:, None, :]
    fresh = (sees[:, :, None, :] & again[:, None, :, :]).sum(-1)
    times = (torch.cat([given.outputs, earlier], dim=1)[:, None, :] + fresh).to(out.dtype)
    committed = torch.cat([torch.ones_like(given.ids, dtype=torch.bool), known.any(-1)], dim=1)
    seen = committed[:, None, :] | (fresh > 0)
    place = given.request[:, None] * rows + torch.arange(rows, device=out.device)
    cells = place[:, :, None] * width + ids[:, None, :]
    flat = out.view(-1)
    x = flat[cells]
    repetition, presence, frequency = (
        v.to(out.dtype)[:, None, None] for v in (given.repetition, given.presence, given.frequency)
    )
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * times - presence * (times > 0)
    flat.scatter_(0, cells.view(-1), x.view(-1))


def _add_(out: Tensor, given: Biases, depth: Tensor) -> None:
    rows, width = out.shape[1:]
    depth = depth.expand(len(out), -1)[given.request]
    place = given.request[:, None] * rows + torch.arange(rows, device=out.device)
    cells = place * width + given.token[:, None]
    value = torch.where(depth < given.until[:, None], given.value[:, None], 0.0)
    out.view(-1).scatter_add_(0, cells.view(-1), value.to(out.dtype).view(-1))


def _mask_(out: Tensor, given: Masks) -> None:
    ban = torch.zeros(given.allowed.shape, dtype=out.dtype, device=out.device)
    out.index_add_(0, given.request, ban.masked_fill_(~given.allowed, -math.inf))
