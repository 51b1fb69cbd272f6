"""The memory that a captured step's tables stay in: written from the host, moved on by the device.

Shape letters: B requests, T packed rows, M block-table columns, G page tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specmla.staging import send


class CaptureBuffers:
    """One buffer of named integer arrays and a block table, at addresses that never change.

    Args:
        longs, ints: sizes of int64 and int32 arrays by name; zeros at first.
        table: [B, M] int32.

    Attributes:
        views: the arrays by name.
    """

    def __init__(self, longs: Mapping[str, int], ints: Mapping[str, int], table: Tensor) -> None:
        self._longs, self._ints, self.table = longs, ints, table
        num_longs, num_ints = sum(longs.values()), sum(ints.values())
        size = num_longs + -(-num_ints // 2)
        self._flat = torch.zeros(size, dtype=torch.int64, device=table.device)
        parts = self._flat[:num_longs].split_with_sizes(list(longs.values()))
        self.views = dict(zip(longs, parts, strict=True))
        rest = self._flat[num_longs:].view(torch.int32)[:num_ints]
        self.views |= zip(ints, rest.split_with_sizes(list(ints.values())), strict=True)

    def write(self, given: Mapping[str, array[int]], table: array[int], num_requests: int) -> None:
        """Fill every array, and the table's first rows as far as `table` goes, in one copy."""
        fixed = [given[name] for name in (*self._longs, *self._ints)]
        self._copy(fixed, table, num_requests)

    def _copy(self, fixed: Sequence[array[int]], table: array[int], num_requests: int) -> None:
        used = sum(len(values) * values.itemsize for values in fixed)
        size = self._flat.shape[0]
        odd = bytes(4 * (len(table) % 2))
        raw = bytearray().join([*fixed, bytes(size * 8 - used), table, odd])
        sent = send(torch.frombuffer(raw, dtype=torch.int64), self.table.device)
        self._flat.copy_(sent[:size])
        if table:
            cells = sent[size:].view(torch.int32)[: len(table)].view(num_requests, -1)
            self.table[:num_requests, : cells.shape[1]].copy_(cells)

    def follow(self, first: CaptureBuffers) -> None:
        """Stand where the requests of `first` have their last row, until `advance`."""
        mine, given = self.views, first.views
        for name in ("seq_lens", "ends"):
            mine[name].copy_(given[name])
        torch.sub(mine["seq_lens"].long(), 1, out=mine["positions"])
        mine["positions"].clamp_(min=0)  # of a request that is not there
        if "starts" in mine:
            for name in ("starts", "row_start"):
                mine[name].copy_(given["starts"])

    def place(self, first: Tensor, counts: Tensor, page_size: int) -> None:
        """Let `counts` [B] causal rows of the requests begin at positions `first` [B]."""
        v, num = self.views, len(counts)
        place = torch.arange(len(v["positions"]) // num, device=counts.device)
        live = place < counts[:, None]
        positions = (first[:, None] + place) * live
        v["seq_lens"].copy_((first + counts) * (counts > 0))
        v["extent"].copy_(((positions + 1) * live).view(-1))
        v["positions"].copy_(positions.view(-1))
        cell = positions.div(page_size, rounding_mode="floor")
        slots = torch.add(positions, self.table.gather(1, cell) - cell, alpha=page_size)
        v["slots"].copy_(slots.masked_fill_(~live, -1).view(-1))

    def advance(self, page_size: int) -> None:
        """Move every request on by a row, or let it stand still if it has reached its end."""
        v = self.views
        goes_on = v["seq_lens"] < v["ends"]
        v["seq_lens"].add_(goes_on)
        v["extent"].copy_(v["seq_lens"])
        v["positions"].add_(goes_on)
        cell = v["positions"].div(page_size, rounding_mode="floor")
        pages = self.table.gather(1, cell[:, None])[:, 0]
        slots = torch.add(v["positions"], pages - cell, alpha=page_size)
        v["slots"].copy_(slots.masked_fill_(~goes_on, -1))
