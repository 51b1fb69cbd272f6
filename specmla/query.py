"""Query shapes of multi-token decode: what a kernel accepts, and how rows are reshaped for it."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.errors import ArgumentError, require


class QueryLenSupport(enum.Enum):
    """How many new rows a request may bring to one decode call (vLLM's spelling).

    SINGLE_ONLY: one row a request; a verify is served through `decode_rows`, each row a request.
    UNIFORM: the same number of rows for every request. VARLEN: any number for each, zero included.
    """

    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class RowTables(NamedTuple):
    """A batch of Q-row requests seen as T single-token decodes.

    seq_lens [T] int32: keys that each row sees. block_table [T, M] int32: its request's pages.
    """

    seq_lens: Tensor
    block_table: Tensor


def reshape_query_for_spec_decode(query: Tensor, num_requests: int) -> Tensor:
    """View packed uniform rows `[B * Q, H, D]` as `[B, Q, H, D]`; the inverse is `flatten(0, 1)`.

    Raises:
        ArgumentError: not three dimensions, or rows that `num_requests` does not divide (a ragged
            batch has no such view: use a VARLEN backend).
    """
    reasons = []
    if query.dim() != 3:
        reasons.append(f"query has shape {tuple(query.shape)}, accepted is [T, H, D]")
    elif num_requests < 1 or query.shape[0] % num_requests:
        reasons.append(
            f"num_requests is {num_requests}, accepted are the divisors of T={query.shape[0]}"
        )
    require(reasons, "reshape_query_for_spec_decode")
    return query.view(num_requests, query.shape[0] // num_requests, *query.shape[1:])


def decode_rows(
    row_extent: Tensor, block_table: Tensor, query_lens: Tensor, num_rows: int
) -> RowTables:
    """Expand a batch into single-token decodes: the portable path for SINGLE_ONLY kernels.

    Args:
        row_extent: [T] int32, keys that each row sees (`specmla.mask.row_extents`, clamped at 0).
        block_table: [B, M] int32.
        query_lens: [B] int32 or int64, rows of each request (zero allowed).
        num_rows: T, given by the host so that nothing waits for the device.
    """
    expanded = torch.repeat_interleave(block_table, query_lens, dim=0, output_size=num_rows)
    return RowTables(row_extent.clamp(min=0), expanded)


def pad_heads(query: Tensor, num_heads_padded: int, workspace: Tensor | None = None) -> Tensor:
    """Copy `[T, H, D]` into storage wide enough for `num_heads_padded` heads, shape unchanged.

    The result has shape and strides of the real heads; its storage goes on for the padded ones, so
    that a kernel whose tile reads a fixed number of heads stays inside the allocation. What the
    slack holds is undefined: surplus output must be dropped.

    Args:
        query: [T, H, D]. num_heads_padded: at least H.
        workspace: written instead of new memory, and returned; its storage grows if it must and
            never shrinks.

    Raises:
        ArgumentError: fewer padded heads than heads, not three dimensions, or a workspace of
            another dtype or device.
    """
    if query.dim() != 3 or num_heads_padded < query.shape[1]:
        raise ArgumentError(
            f"pad_heads: num_heads_padded is {num_heads_padded} and query has shape "
            f"{tuple(query.shape)}; accepted are [T, H, D] and at least H"
        )
    if workspace is not None and (workspace.dtype, workspace.device) != (query.dtype, query.device):
        raise ArgumentError(
            f"pad_heads: workspace is {workspace.dtype} on {workspace.device}, accepted is "
            f"{query.dtype} on {query.device}"
        )
    num_rows, num_heads, width = query.shape
    slack = num_heads_padded - num_heads
    size = (num_rows * num_heads + slack) * width
    flat = query.new_empty(size) if workspace is None else workspace.resize_(size)
    # resize_ to the smaller shape keeps the storage, and with it the slack after the last row.
    padded = flat.resize_(num_rows, num_heads, width)
    padded.copy_(query)
    return padded
