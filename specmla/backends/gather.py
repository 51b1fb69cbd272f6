"""The gather plan of the reference backend: a step's tables as indices and one mask.

What must not matter is never read: a key that no row of its request sees is replaced in the gather
by one that some row sees, where its weight is exactly 0, so no foreign bits enter a value product.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specmla.backends.scratch import CpuScratch
from specmla.backends.step_size import StepSize
from specmla.buffers import Buffer
from specmla.metadata import VerifyPart


@dataclass(frozen=True)
class GatherPlan:
    """Indices of one step, padded to Q rows and S keys a request; shared by all layers.

    Attributes:
        num_heads: H that the step was planned for.
        page_size: G.
        slot: [B * S] int64, where key s of request b lies.
        bias: [B, Q * H, S] float32, or [B, 1, S] for one row a request: -inf where the row does not
            see the key, else 0.
        no_keys: [B, Q * H] bool, or [B, 1], true for a row without keys; None if there is none.
        padded_from: [B * Q] int64, packed row of each padded one; None if nothing is padded.
        packed_from: [T] int64, padded row of each packed one; None likewise.
    """

    num_heads: int
    page_size: int
    slot: Tensor
    bias: Tensor
    no_keys: Tensor | None
    padded_from: Tensor | None
    packed_from: Tensor | None
    _index: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def gather(self, latent_cache: Tensor, scratch: CpuScratch) -> Tensor:
        """Gather the planned rows of a layer's cache [N, G, A] as [B, S, A].

        On a CPU they lie in `scratch`, until the next gather.
        """
        num_pages, page_size, width = latent_cache.shape
        page_stride, row_stride, column_stride = latent_cache.stride()
        shape = (self.bias.shape[0], self.bias.shape[2], width)
        if not row_stride or page_stride % row_stride:
            page = self.slot.div(page_size, rounding_mode="floor")
            return latent_cache[page, self.slot - page * page_size].view(shape)
        # Selecting rows of one matrix is several times faster than indexing by page and offset.
        steps = page_stride // row_stride
        rows = latent_cache.as_strided(
            ((num_pages - 1) * steps + page_size, width), (row_stride, column_stride)
        )
        index = self._row_index(steps)
        if latent_cache.device.type != "cpu":
            return rows.index_select(0, index).view(shape)
        out = scratch.empty(shape, latent_cache.dtype)
        torch.index_select(rows, 0, index, out=out.view(-1, width))
        return out

    def _row_index(self, steps: int) -> Tensor:
        """Row of each key in a cache whose pages begin `steps` rows apart."""
        if steps == self.page_size:
            return self.slot
        if steps not in self._index:  # the layers of one cache share their page stride
            page = self.slot.div(self.page_size, rounding_mode="floor")
            self._index[steps] = torch.add(self.slot, page, alpha=steps - self.page_size)
        return self._index[steps]


def plan_buffers(size: StepSize) -> list[Buffer]:
    """Say what a plan holds at most: slots, mask, rows without keys, and padding both ways."""
    padded = size.num_requests * size.max_query_len
    keys = size.num_requests * size.table_keys
    rows = size.max_query_len * size.num_heads if size.max_query_len > 1 else 1
    return [
        Buffer((keys,), torch.int64),
        Buffer((size.num_requests, rows, size.table_keys), torch.float32),
        Buffer((size.num_requests, rows), torch.bool),
        Buffer((padded + size.num_rows if padded != size.num_rows else 0,), torch.int64),
    ]


def build_gather_plan(part: VerifyPart, num_heads: int) -> GatherPlan | None:
    """Compute the indices of a step on its device; None if it has no rows or no keys.

    Nothing waits for a GPU: there, `no_keys` is always given, since to look would be to wait.
    """
    if not part.num_rows or not part.max_seq_len:
        return None
    if part.row_start is None and part.tree_bits is None and part.seq_lens.device.type == "cpu":
        plan = _prefix_plan(part, num_heads)
        if plan is not None:
            return plan
    row, is_row = _padded_rows(part)
    sees = _visible_keys(part, row, is_row)
    no_keys = ~sees.any(-1)
    may_have_none = no_keys.device.type != "cpu" or bool((no_keys & is_row).any())
    is_padded = part.num_rows != row.numel()
    bias = torch.zeros(sees.shape, dtype=torch.float32, device=sees.device).masked_fill_(
        ~sees, -torch.inf
    )
    if part.max_query_len > 1:
        no_keys = _for_heads(no_keys[..., None], num_heads)[..., 0]
        bias = _for_heads(bias, num_heads)
    return GatherPlan(
        num_heads=num_heads,
        page_size=part.page_size,
        slot=_live_slots(part, sees).flatten(),
        bias=bias,
        no_keys=no_keys if may_have_none else None,
        padded_from=row.flatten() if is_padded else None,
        packed_from=_packed_rows(part) if is_padded else None,
    )


def _prefix_plan(part: VerifyPart, num_heads: int) -> GatherPlan | None:
    """Compute what the general way would, by a third of the operations, for the common step on a
    CPU: each row sees the keys from 0 to its extent. None if one of them sees no key.
    """
    padded_from = packed_from = None
    shape = (part.num_requests, part.max_query_len, 1)
    extent = part.row_extent
    if part.num_rows != part.num_requests * part.max_query_len:
        # A missing row is the last one of its request once more, and dropped.
        first, end = part.query_start[:-1, None], part.query_start[1:, None]
        row = first + torch.arange(part.max_query_len)
        packed_from = (row < end).view(-1).nonzero().view(-1)
        padded_from = torch.minimum(row, end - 1).clamp_(min=0).view(-1)
        extent = extent.index_select(0, padded_from)
    extent = torch.minimum(extent.view(shape), part.seq_lens.view(-1, 1, 1))
    longest = extent.amax(1) if part.max_query_len > 1 else extent.view(-1, 1)
    if int(extent.min()) < 1:
        return None
    key = torch.arange(part.max_seq_len)
    at = torch.minimum(key, longest - 1)
    cell = at.div(part.page_size, rounding_mode="floor")
    page = part.block_table.gather(1, cell)
    bias = torch.where(key < extent, 0.0, -torch.inf)
    return GatherPlan(
        num_heads=num_heads,
        page_size=part.page_size,
        slot=torch.add(at, page - cell, alpha=part.page_size).view(-1),
        bias=_for_heads(bias, num_heads) if part.max_query_len > 1 else bias,
        no_keys=None,
        padded_from=padded_from,
        packed_from=packed_from,
    )


def _for_heads(per_row: Tensor, num_heads: int) -> Tensor:
    """Repeat [B, Q, X] for the heads of each row: [B, Q * H, X]."""
    b, q, x = per_row.shape
    return per_row[:, :, None].expand(b, q, num_heads, x).reshape(b, q * num_heads, x)


def _padded_rows(part: VerifyPart) -> tuple[Tensor, Tensor]:
    """Packed row of each padded one, [B, Q] int64, and which are real; the others point at one."""
    step = torch.arange(part.max_query_len, device=part.query_start.device)
    row = part.query_start[:-1, None] + step
    is_row = row < part.query_start[1:, None]
    return row.clamp(max=part.num_rows - 1), is_row


def _packed_rows(part: VerifyPart) -> Tensor:
    """Padded row of each packed one, [T] int64."""
    start = part.query_start[:-1].long()
    shift = torch.arange(start.shape[0], device=start.device) * part.max_query_len - start
    lens = part.query_start.diff()
    shift = shift.repeat_interleave(lens, output_size=part.num_rows)
    return shift + torch.arange(part.num_rows, device=start.device)


def _visible_keys(part: VerifyPart, row: Tensor, is_row: Tensor) -> Tensor:
    """Which keys each padded row sees, [B, Q, S] bool."""
    key = torch.arange(part.max_seq_len, device=row.device)
    extent = torch.minimum(part.row_extent[row], part.seq_lens[:, None])
    sees = key < extent.masked_fill(~is_row, 0)[..., None]
    if part.row_start is not None:
        sees &= key >= part.row_start[row][..., None]
    if part.tree_bits is not None:
        prefix = part.seq_lens - part.query_start.diff()
        node = (key - prefix[:, None])[:, None, :]
        bit = (part.tree_bits[row][..., None] >> node.clamp(0, 63)) & 1
        sees &= (node < 0) | (bit == 1)
    return sees


def _live_slots(part: VerifyPart, sees: Tensor) -> Tensor:
    """Slot of each key, [B, S] int64; a key that no row sees stands for the last seen.

    A request without any visible key reads the first slot of the pool; its rows are zeroed later.
    """
    live = sees.any(1)
    key = torch.arange(live.shape[1], device=live.device)
    last = (live * key).amax(1, keepdim=True)
    at = torch.where(live, key, last)
    cell = at.div(part.page_size, rounding_mode="floor")
    page = part.block_table.gather(1, cell).masked_fill(~live.any(1, keepdim=True), 0)
    return torch.add(at, page - cell, alpha=part.page_size)
