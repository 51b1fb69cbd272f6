"""Row operations on paged pools in plain torch: the twins of the kernels, and the CPU's path.

Slot s of a pool `[N, G, A]` is row s % G of page s // G; a negative slot means "no row". Every
function waits for the device (it asks whether a slot is negative), so on a GPU the kernels in
`specmla.kernels` are the ones for a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def store_rows(pool: Tensor, kv_latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """Write `[kv_latent | k_rope]` rows ([T, C], [T, R]) at `slots` [T] of `pool` [N, G, C + R]."""
    # One joined copy and one indexed write are faster than two writes into column slices.
    put_rows(pool, torch.cat([kv_latent, k_rope], dim=1).detach(), slots)


def put_rows(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write rows [T, A] as they are at `slots` [T] of `pool` [N, G, A]."""
    keep = slots >= 0
    if not keep.all():
        rows, slots = rows[keep], slots[keep]
    _put(pool, slots, rows)


def gather_rows(pool: Tensor, slots: Tensor, out: Tensor | None = None) -> Tensor:
    """Read rows [n, A] at `slots` [n] of `pool` [N, G, A]; a negative slot gives zeros.

    The rows are read into `out` [n, A] if it is given.
    """
    absent = slots < 0
    if absent.any():
        return _take(pool, slots.clamp(min=0), out).masked_fill_(absent[:, None], 0)
    return _take(pool, slots, out)


def move_rows(pools: Sequence[Tensor], src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy rows `src_slots` [n] to `dst_slots` [n] in every pool, reading all before writing any.

    A pair with a negative slot is skipped.
    """
    keep = (src_slots >= 0) & (dst_slots >= 0)
    if not keep.all():
        src_slots, dst_slots = src_slots[keep], dst_slots[keep]
    for pool in pools:
        _put(pool, dst_slots, _take(pool, src_slots))


def copy_pages(pools: Sequence[Tensor], src_pages: Tensor, dst_pages: Tensor) -> None:
    """Copy pages `src_pages` [n] to `dst_pages` [n] in every pool; no page is in both."""
    for pool in pools:
        pool[dst_pages] = pool[src_pages]


def _slots_are_rows(pool: Tensor) -> bool:
    """Whether pages follow each other without gaps, so that a slot is a row of a 2-D view."""
    num_pages, page_size, _ = pool.shape
    return 1 in (num_pages, page_size) or pool.stride(0) == page_size * pool.stride(1)


def _put(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    num_pages, page_size, width = pool.shape
    if _slots_are_rows(pool):
        pool.view(num_pages * page_size, width).index_copy_(0, slots, rows)
    else:
        pool[slots // page_size, slots % page_size] = rows


def _take(pool: Tensor, slots: Tensor, out: Tensor | None = None) -> Tensor:
    num_pages, page_size, width = pool.shape
    if _slots_are_rows(pool):
        return torch.index_select(pool.view(num_pages * page_size, width), 0, slots, out=out)
    rows = pool[slots // page_size, slots % page_size]
    return rows if out is None else out.copy_(rows)
