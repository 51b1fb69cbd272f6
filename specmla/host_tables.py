"""A step's integers on the host, laid out for a single copy to the device."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, repeat

import torch
from torch import Tensor

from specmla.mask import DraftMask, row_extents, tree_bits, tree_depths
from specmla.metadata import RequestRows
from specmla.staging import send_arrays


class HostTables:
    """Collects the tables of checked requests; rows of verifies come before those of prompts."""

    def __init__(self, page_size: int, mask: DraftMask) -> None:
        self.page_size, self.mask = page_size, mask
        self.arrays: dict[str, array[int]] = {}
        self._ids = bytearray()  # of the block table's used cells

    def add_rows(self, requests: Sequence[RequestRows]) -> None:
        """Add positions and slots of the new rows; a tree node stands at prefix + depth."""
        ends = [r.seq_len for r in requests]
        firsts = [r.seq_len - r.query_len for r in requests]
        positions: Iterable[Iterable[int]] = map(range, firsts, ends)
        if self.mask is DraftMask.TREE:
            positions = [
                [first + depth for depth in tree_depths(r.parents)] if r.parents else chained
                for r, first, chained in zip(requests, firsts, positions, strict=True)
            ]
        self.arrays["positions"] = array("q", chain.from_iterable(positions))
        self.arrays["slots"] = self.slots(requests, firsts, ends)

    def add_verify(self, requests: Sequence[RequestRows]) -> None:
        """Add the tables of the verify part."""
        if not requests:
            return
        # Columns at once: asking every request for each field would take longer.
        _, query_lens, seq_lens, _, _, starts = zip(*requests, strict=True)
        extents: Iterable[Iterable[int]]
        if self.mask is DraftMask.CAUSAL:
            # What `row_extents` gives for the rows of a checked request, none before its start.
            ends = [end + 1 for end in seq_lens]
            extents = map(range, map(operator.sub, ends, query_lens), ends)
        else:
            extents = map(row_extents, repeat(self.mask), query_lens, seq_lens)
        self.arrays |= {
            "table": self._block_table(requests),
            "extent": array("i", chain.from_iterable(extents)),
            "query_lens": array("i", query_lens),
            "query_start": array("i", running_starts(query_lens)),
            "seq_lens": array("i", seq_lens),
        }
        if any(starts) and any(r.window_start for r in requests if r.query_len):
            self.arrays["row_start"] = array(
                "i", [r.window_start for r in requests for _ in range(r.query_len)]
            )
        if self.mask is DraftMask.TREE:
            self.arrays["tree"] = array("q", [word for r in requests for word in _row_words(r)])

    def add_rounds(self, requests: Sequence[RequestRows], live: Sequence[int]) -> None:
        """Add steps of one row: in step i the first `live[i]` requests bring token i of their rows.

        The steps share one block table, that of the last.
        """
        rows = [(r, i) for i, count in enumerate(live) for r in requests[:count]]
        positions = [r.seq_len - r.query_len + i for r, i in rows]
        ends = [position + 1 for position in positions]
        self.arrays |= {
            "positions": array("q", positions),
            "slots": self.slots([r for r, _ in rows], positions, ends),
            "table": self._block_table(requests),
            "seq_lens": array("i", ends),
            "query_start": array("i", range(len(requests) + 1)),
        }

    def has_pages_below(self, num_pages: int) -> bool:
        """Check all ids of the block table at once: one by one they would cost the step most."""
        if not self._ids:
            return True
        low, high = torch.frombuffer(self._ids, dtype=torch.int32).aminmax()
        return int(low) >= 0 and int(high) < num_pages

    def send(self, device: torch.device, along: Mapping[str, array[int]]) -> dict[str, Tensor]:
        """Send everything in one copy, and `along`, whose names come back as "along.NAME"."""
        guests = {f"along.{name}": values for name, values in along.items()}
        sent = send_arrays({**self.arrays, **guests}, device)
        if "table" in sent:
            sent["table"] = sent["table"].view(-1, self._width)
        return sent

    def _block_table(self, requests: Sequence[RequestRows]) -> array[int]:
        page = self.page_size
        used = [-(-r.seq_len // page) for r in requests]
        self._width = width = max([1, *used])
        unused = array("i", [-1]) * width
        ids: list[array[int]] = []
        cells: list[array[int]] = []
        for r, count in zip(requests, used, strict=True):
            pages = r.block_ids[:count]
            if type(pages) is not array or pages.typecode != "i":
                pages = array("i", pages)
            ids.append(pages)
            cells.append(pages)
            if count < width:
                cells.append(unused[count:])
        self._ids = bytearray().join(ids)
        # Array by array they would be added number by number.
        return array("i", self._ids if len(cells) == len(ids) else b"".join(cells))

    def slots(
        self, requests: Sequence[RequestRows], firsts: Sequence[int], ends: Sequence[int]
    ) -> array[int]:
        """Give the slots of each request's tokens from `first` to before `end`, a run a page."""
        page, runs = self.page_size, []
        for r, first, end in zip(requests, firsts, ends, strict=True):
            while first < end:
                cell = first // page
                stop = (cell + 1) * page
                if stop > end:
                    stop = end
                shift = (r.block_ids[cell] - cell) * page
                runs.append(range(first + shift, stop + shift))
                first = stop
        return array("q", chain.from_iterable(runs))


def running_starts(lengths: Iterable[int]) -> list[int]:
    """Give where each length begins if they stand one after another, and the end of all."""
    return list(accumulate(lengths, initial=0))


def _row_words(r: RequestRows) -> list[int]:
    if not r.query_len:
        return []
    return tree_bits(range(-1, r.query_len - 1) if r.parents is None else r.parents)
