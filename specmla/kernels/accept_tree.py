"""Fused acceptance of trees: the rows as of chains (`accept`), then one walk a request.

Children are one-hot, or drawn with or without replacement, as their q says. The path is that of
the pure rules up to the rounding of float32 sums, as chains are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specmla.kernels.accept import RULES, AcceptInputs, Filters, measure_rows
from specmla.kernels.accept_walk import launch_walk

BLOCK = 2048
"""Most ids of a chunk of a walk, which reads its rows itself."""


class TreeAccepted(NamedTuple):
    """Decisions on the device.

    Attributes:
        tokens: [B, K + 1] int64, accepted drafts and the token after them, then -1.
        rows: [B, K] int64, of the accepted path, then -1.
        num_accepted: [B] int64.
        flagged: [B] int64, not 0 where there was no distribution.
        next_token: [B] int64.
        end: [B] int64, last row of the path.
        row_max, row_mass: [B, K + 1] float32, see `Accepted`.
    """

    tokens: Tensor
    rows: Tensor
    num_accepted: Tensor
    flagged: Tensor
    next_token: Tensor
    end: Tensor
    row_max: Tensor
    row_mass: Tensor


def fused_accept_tree(
    inputs: AcceptInputs,
    filters: Filters,
    tree: tuple[Tensor, Tensor, Tensor],
    rule: str,
    *,
    block: int | None = None,
    slots: int | None = None,
) -> TreeAccepted:
    """Decide a step of trees; chains among them are tried as under `token_level`.

    Args:
        inputs: of the step.
        filters: temperatures and what is kept.
        tree: parents (rows), ranks and depths [B, K] int64, of at most 63 nodes.
        rule: one of `RULES`; `block` is `token_level` here.
        block: ids of a chunk, a power of two.
        slots: ids of a row that are held, a power of two.
    """
    logits, table, drafts, q, seeds, positions = inputs
    (b, rows), k = table.shape, drafts.shape[1]
    known = measure_rows(inputs, filters, block, slots)
    is_match = rule == "sample_match"
    options = known.slots | {
        "RULE": RULES["sample_match"] if is_match else RULES["token_level"],
        "DENSE": int(q is not None and not is_match),
        "FILTER": int(filters.any_filter),
        "WIDTH": triton.next_power_of_2(rows),
        "BLOCK": min(known.block, BLOCK),
    }
    packed = torch.empty((b, 2 * k + 3), dtype=torch.int64, device=logits.device)
    token, end = (torch.empty(b, dtype=torch.int64, device=logits.device) for _ in range(2))
    out, request = (packed, token, end), (filters.temperature, seeds, positions)
    looked_at = (logits, table, drafts, q)
    launch_walk(out, tree, looked_at, known.rows, known.held[1:], request, options)
    tokens, path, accepted, flag = packed.split((k + 1, k, 1, 1), dim=1)
    row_max, row_mass = (part.view(b, rows) for part in known.rows[:2])
    return TreeAccepted(tokens, path, accepted[:, 0], flag[:, 0], token, end, row_max, row_mass)
