"""A step's metadata in buffers that stay: captured once, filled anew before every replay.

A bucket is a rectangle of B requests of Q rows. Row t of request b is packed row b * Q + t; a row
that a request does not bring, and every row of a request that is not there, is inert: its slot is
-1, it sees no key (extent 0), and a missing request has no keys at all (length 0). Nothing else
says what is live, so one graph serves any smaller batch, and ragged rows on any backend that takes
extents row by row.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from specmla.bucket import Bucket
from specmla.builder import MetadataBuilder
from specmla.errors import require
from specmla.host_tables import HostTables
from specmla.mask import DraftMask
from specmla.metadata import RequestKind, RequestRows, StepMetadata, VerifyPart
from specmla.query import QueryLenSupport, RowTables
from specmla.row_limits import RowLimits
from specmla.staging import send

_NO_SIZES: Mapping[str, int] = MappingProxyType({})
_NO_ARRAYS: Mapping[str, array[int]] = MappingProxyType({})


class CapturedMetadata:
    """The tables of one bucket, in memory that never moves: verify rows alone, causal chains.

    Args:
        builder: of the cache and the backend.
        bucket: the shape.
        along: sizes, by name, of int64 arrays of the caller that travel in the same copy.

    Attributes:
        along: [size] int64 on the device, by name.

    Raises:
        ArgumentError: ragged rows on a UNIFORM backend.
    """

    def __init__(
        self, builder: MetadataBuilder, bucket: Bucket, along: Mapping[str, int] = _NO_SIZES
    ) -> None:
        has, reasons = builder.backend.capabilities, []
        if bucket.ragged and has.query_len_support is QueryLenSupport.UNIFORM:
            reasons.append(
                f"ragged is True; backend {has.name!r} is UNIFORM and accepts ragged=False"
            )
        require(reasons, "CapturedMetadata")
        self.builder, self.bucket = builder, bucket
        self._limits = RowLimits(builder.page_size, builder.num_pages, builder.max_seq_len)
        rows = bucket.num_rows
        self._longs = {"positions": rows, "slots": rows}
        self._longs |= {f"along.{name}": size for name, size in along.items()}
        self._ints = {"extent": rows, "seq_lens": bucket.num_requests, "ends": bucket.num_requests}
        self._fixed, self._views = _fixed_buffers(self._longs, self._ints, builder.device)
        self._views["slots"].fill_(-1)
        self.along = {name: self._views[f"along.{name}"] for name in along}
        columns = -(-builder.max_seq_len // builder.page_size)
        self._table = torch.zeros(
            bucket.num_requests, columns, dtype=torch.int32, device=builder.device
        )
        self._part = self._verify_part()

    def for_capture(self) -> StepMetadata:
        """Let the backend plan over the buffers, and give the step: what a graph begins with.

        A backend plans into the buffers of its last call, so the call before the capture reserves
        what the captured one writes.
        """
        part, builder = self._part, self.builder
        if builder.backend.capabilities.query_len_support is QueryLenSupport.SINGLE_ONLY:
            each = part.block_table[:, None].expand(-1, self.bucket.query_len, -1)
            part = dataclasses.replace(part, rows=RowTables(part.row_extent, each.flatten(0, 1)))
        planned = builder.backend.plan(
            part,
            num_heads=builder.num_heads,
            kv_lora_rank=builder.kv_lora_rank,
            dtype=builder.dtype,
        )
        self._part = dataclasses.replace(self._part, plan=planned.plan)
        return self._metadata(planned, self.bucket.num_requests)

    def live(self, num_requests: int) -> StepMetadata:
        """Give the step as last filled, whose first `num_requests` are real, for who reads it."""
        return self._metadata(self._part, num_requests)

    def _metadata(self, part: VerifyPart, num_requests: int) -> StepMetadata:
        length = self.bucket.query_len
        return StepMetadata(
            order=tuple(range(num_requests)),
            query_start=tuple(range(0, num_requests * length + 1, length)),
            positions=self._views["positions"],
            slot_mapping=self._views["slots"],
            verify=part,
            prefill=None,
            along=self.along,
        )

    def advance(self) -> None:
        """Move every request on by its next row, on the device: what a captured drafter does.

        A request that has had its rows `ahead` stands still, and stores nothing from there on.

        Raises:
            ArgumentError: a bucket of more than one row.
        """
        length = self.bucket.query_len
        wrong = [f"query_len is {length}, accepted is 1"] if length > 1 else []
        require(wrong, "CapturedMetadata.advance")
        v, page = self._views, self.builder.page_size
        goes_on = v["seq_lens"] < v["ends"]
        v["seq_lens"].add_(goes_on)
        v["extent"].copy_(v["seq_lens"])
        v["positions"].add_(goes_on)
        cell = v["positions"].div(page, rounding_mode="floor")
        pages = self._table.gather(1, cell[:, None])[:, 0]
        slots = torch.add(v["positions"], pages - cell, alpha=page)
        v["slots"].copy_(slots.masked_fill_(~goes_on, -1))

    def for_replay(
        self,
        requests: Sequence[RequestRows],
        along: Mapping[str, array[int]] = _NO_ARRAYS,
        ahead: Sequence[int] | None = None,
    ) -> None:
        """Check the requests and fill the buffers with them, in one copy from the host.

        Args:
            requests: verifies, causal, no more and no longer than captured; in order of the rows.
            along: typecode 'q', every array of its declared size.
            ahead: rows of each request that `advance` will bring, for which there are pages too;
                None: no request will be advanced.

        Raises:
            ArgumentError: requests of another kind or shape, lengths or pages that can't be served;
                all reasons are listed and nothing was written.
        """
        last = _grown(requests, ahead)
        require(self._problems(requests, last, along), "CapturedMetadata.for_replay")
        tables = HostTables(self.builder.page_size, DraftMask.CAUSAL)
        tables.add_verify(last)
        if not tables.has_pages_below(self.builder.num_pages):
            require(self._limits.problems(last, DraftMask.CAUSAL), "CapturedMetadata.for_replay")
        table = tables.arrays.get("table", array("i"))
        tables.add_verify(requests)
        tables.add_rows(requests)
        ends = array("i", [r.seq_len for r in last])
        fixed = self._fixed_arrays(tables.arrays | {"ends": ends}, requests, along)
        self._send(fixed, table, len(requests))

    def _problems(
        self,
        requests: Sequence[RequestRows],
        last: Sequence[RequestRows],
        along: Mapping[str, array[int]],
    ) -> list[str]:
        kinds = sorted({r.kind.value for r in requests if r.kind is not RequestKind.VERIFY})
        found = [f"kind is {kinds}, captured are verifies alone"] if kinds else []
        if any(r.parents is not None or r.window_start for r in requests):
            found.append("a request has parents or a window, captured are causal chains from key 0")
        found += self.bucket.problems([r.query_len for r in requests])
        sizes = {name: len(values) for name, values in along.items()}
        wanted = {name: view.shape[0] for name, view in self.along.items()}
        if sizes != wanted or any(values.typecode != "q" for values in along.values()):
            found.append(f"along has sizes {sizes}, accepted are {wanted} of typecode 'q'")
        if not self._limits.are_plain(last):
            found += self._limits.problems(last, DraftMask.CAUSAL)
        return found

    def _fixed_arrays(
        self,
        arrays: Mapping[str, array[int]],
        requests: Sequence[RequestRows],
        along: Mapping[str, array[int]],
    ) -> list[array[int]]:
        """Give the arrays of the fixed buffer in its order, each as long as its view."""
        lens, bucket = [r.query_len for r in requests], self.bucket
        given = {f"along.{name}": values for name, values in along.items()}
        given["positions"] = bucket.spread(arrays["positions"], lens, 0)
        given["slots"] = bucket.spread(arrays["slots"], lens, -1)
        given["extent"] = bucket.spread(arrays.get("extent", array("i")), lens, 0)
        blank = array("i", [0]) * (bucket.num_requests - len(requests))
        given["seq_lens"] = array("i", [r.seq_len for r in requests]) + blank
        given["ends"] = arrays["ends"] + blank
        return [given[name] for name in (*self._longs, *self._ints)]

    def _send(self, fixed: Sequence[array[int]], table: array[int], num_requests: int) -> None:
        used = sum(len(values) * values.itemsize for values in fixed)
        room = self._fixed.shape[0] * 8
        odd = bytes(4 * (len(table) % 2))
        raw = bytearray().join([*fixed, bytes(room - used), table, odd])
        sent = send(torch.frombuffer(raw, dtype=torch.int64), self.builder.device)
        self._fixed.copy_(sent[: self._fixed.shape[0]])
        if table:
            cells = sent[self._fixed.shape[0] :].view(torch.int32)[: len(table)]
            cells = cells.view(num_requests, -1)
            self._table[:num_requests, : cells.shape[1]].copy_(cells)

    def _verify_part(self) -> VerifyPart:
        num, length = self.bucket.num_requests, self.bucket.query_len
        starts = torch.arange(num + 1, dtype=torch.int32, device=self.builder.device)
        return VerifyPart(
            query_start=starts * length,
            seq_lens=self._views["seq_lens"],
            block_table=self._table,
            row_extent=self._views["extent"],
            row_start=None,
            tree_bits=None,
            rows=None,
            mask=DraftMask.CAUSAL,
            query_lens=(length,) * num,
            max_query_len=length,
            max_seq_len=self.builder.max_seq_len,
            page_size=self.builder.page_size,
            num_pages=self.builder.num_pages,
        )


def _fixed_buffers(
    longs: Mapping[str, int], ints: Mapping[str, int], device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """Allocate one buffer of zeros and cut it into int64 views, then int32 ones."""
    num_longs, num_ints = sum(longs.values()), sum(ints.values())
    flat = torch.zeros(num_longs + -(-num_ints // 2), dtype=torch.int64, device=device)
    views = dict(zip(longs, flat[:num_longs].split_with_sizes(list(longs.values())), strict=True))
    rest = flat[num_longs:].view(torch.int32)[:num_ints]
    views |= zip(ints, rest.split_with_sizes(list(ints.values())), strict=True)
    return flat, views


def _grown(requests: Sequence[RequestRows], ahead: Sequence[int] | None) -> list[RequestRows]:
    """Give the requests as they will be, `ahead` rows on."""
    if ahead is None:
        return list(requests)
    if len(ahead) != len(requests) or min(ahead, default=0) < 0:
        given = f"ahead is {list(ahead)}, accepted are {len(requests)} values >= 0"
        require([given], "CapturedMetadata.for_replay")
    return [r._replace(seq_len=r.seq_len + n) for r, n in zip(requests, ahead, strict=True)]
