"""Step tables for tests, written out plainly: hostile cells, no checks, no backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specmla.mask import DraftMask, row_extents, tree_bits
from specmla.metadata import RequestRows, VerifyPart

ABSURD_PAGE = 2**31 - 1
"""A page id that no pool has: whoever follows it leaves the cache."""


def make_verify_part(
    requests: Sequence[RequestRows],
    mask: DraftMask,
    *,
    page_size: int,
    device: torch.device | str = "cpu",
    unused_cell: int = ABSURD_PAGE,
) -> VerifyPart:
    """Write the tables of verify requests as they stand, unplanned, unused cells absurd.

    Nothing is checked: `seq_len < query_len` is accepted and gives rows without keys, which
    `MetadataBuilder` refuses. One spare column of unused cells is always there.
    """
    pages = [-(-max(0, r.seq_len) // page_size) for r in requests]
    width = max([0, *pages]) + 1
    cells = [
        [*r.block_ids[:used], *[unused_cell] * (width - used)]
        for r, used in zip(requests, pages, strict=True)
    ]
    lens = tuple(r.query_len for r in requests)
    extents = [e for r in requests for e in row_extents(mask, r.query_len, r.seq_len)]
    starts = [r.window_start for r in requests for _ in range(r.query_len)]
    words = [word for r in requests for word in _tree_words(r)] if mask is DraftMask.TREE else None
    return VerifyPart(
        query_start=_int32([0, *accumulate(lens)], device),
        seq_lens=_int32([r.seq_len for r in requests], device),
        block_table=_int32(cells, device).view(len(requests), width),
        row_extent=_int32(extents, device),
        row_start=_int32(starts, device) if any(starts) else None,
        tree_bits=None if words is None else torch.tensor(words, dtype=torch.int64, device=device),
        rows=None,
        mask=mask,
        query_lens=lens,
        max_query_len=max(lens, default=0),
        max_seq_len=max((r.seq_len for r in requests), default=0),
        page_size=page_size,
    )


def overwrite_unused_cells(part: VerifyPart, unused_cell: int = ABSURD_PAGE) -> VerifyPart:
    """Give `part` with other values in the block-table cells past each request's pages.

    `MetadataBuilder` writes -1 there; a result must not depend on it. The tables are copies, and
    `plan` is dropped: call the backend's `plan` on what comes back.
    """
    pages = (part.seq_lens + part.page_size - 1) // part.page_size
    columns = torch.arange(part.block_table.shape[1], device=part.block_table.device)
    table = part.block_table.masked_fill(columns >= pages[:, None], unused_cell)
    rows = part.rows
    if rows is not None:
        lens = torch.tensor(part.query_lens, device=table.device)
        rows = rows._replace(block_table=table.repeat_interleave(lens, dim=0))
    return dataclasses.replace(part, block_table=table, rows=rows, plan=None)


def _tree_words(r: RequestRows) -> list[int]:
    if not r.query_len:
        return []
    return tree_bits(range(-1, r.query_len - 1) if r.parents is None else r.parents)


def _int32(values: Iterable[int] | Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)
