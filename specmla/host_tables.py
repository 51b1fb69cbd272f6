"""A step's integers on the host, laid out for a single copy to the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specmla.mask import DraftMask, row_extents, tree_bits, tree_depths
from specmla.metadata import RequestRows
from specmla.staging import send_arrays


class HostTables:
    """Collects the tables of checked requests; rows of verifies come before those of prompts."""

    def __init__(self, page_size: int, mask: DraftMask) -> None:
        self.page_size, self.mask = page_size, mask
        self.long: dict[str, array[int]] = {"positions": array("q"), "slots": array("q")}
        self.int: dict[str, array[int]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def add_rows(self, r: RequestRows) -> None:
        """Add positions and slots of the new rows; a tree node stands at prefix + depth."""
        first = r.seq_len - r.query_len
        if r.parents:
            self.long["positions"].extend([first + depth for depth in tree_depths(r.parents)])
        else:
            self.long["positions"].extend(range(first, r.seq_len))
        self._add_slots(self.long["slots"], r, first)

    def add_verify(self, requests: Sequence[RequestRows]) -> None:
        """Add the tables of the verify part."""
        if not requests:
            return
        page = self.page_size
        width = max(1, *(-(-r.seq_len // page) for r in requests))
        table, extent, unused = array("i"), array("i"), array("i", [-1]) * width
        for r in requests:
            used = -(-r.seq_len // page)
            table.extend(r.block_ids[:used])
            table.extend(unused[used:])
            extent.extend(row_extents(self.mask, r.query_len, r.seq_len))
        self.int |= {
            "table": table,
            "extent": extent,
            "query_lens": array("i", [r.query_len for r in requests]),
            "query_start": array("i", running_starts(r.query_len for r in requests)),
            "seq_lens": array("i", [r.seq_len for r in requests]),
        }
        self.shapes["table"] = (len(requests), width)
        if any(r.window_start for r in requests if r.query_len):
            self.int["row_start"] = array(
                "i", [r.window_start for r in requests for _ in range(r.query_len)]
            )
        if self.mask is DraftMask.TREE:
            self.long["tree"] = array("q", [word for r in requests for word in _row_words(r)])

    def add_prefill(self, requests: Sequence[RequestRows]) -> None:
        """Add the tables of the prompt part."""
        if not requests:
            return
        self.long["kv_slots"] = array("q")
        for r in requests:
            self._add_slots(self.long["kv_slots"], r, 0)
        self.int["prompt_query_start"] = array("i", running_starts(r.query_len for r in requests))
        self.int["kv_start"] = array("i", running_starts(r.seq_len for r in requests))

    def send(self, device: torch.device) -> dict[str, Tensor]:
        """Send everything in one copy."""
        sent = send_arrays(self.long | self.int, device)
        for name, shape in self.shapes.items():
            sent[name] = sent[name].view(shape)
        return sent

    def _add_slots(self, slots: array[int], r: RequestRows, first: int) -> None:
        """Add the slots of the tokens from `first` on, a run a page."""
        page = self.page_size
        while first < r.seq_len:
            cell, offset = divmod(first, page)
            count = min(page - offset, r.seq_len - first)
            slot = r.block_ids[cell] * page + offset
            slots.extend(range(slot, slot + count))
            first += count


def running_starts(lengths: Iterable[int]) -> list[int]:
    """Give where each length begins if they stand one after another, and the end of all."""
    out = [0]
    for length in lengths:
        out.append(out[-1] + length)
    return out


def _row_words(r: RequestRows) -> list[int]:
    if not r.query_len:
        return []
    return tree_bits(range(-1, r.query_len - 1) if r.parents is None else r.parents)
