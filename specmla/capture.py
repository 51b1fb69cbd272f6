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

from specmla.backends.base import GraphSupport
from specmla.bucket import Bucket
from specmla.builder import MetadataBuilder
from specmla.capture_buffers import CaptureBuffers
from specmla.capture_fill import grown, padded_arrays
from specmla.errors import require
from specmla.host_tables import HostTables
from specmla.mask import MAX_TREE_NODES, DraftMask
from specmla.metadata import RequestKind, RequestRows, StepMetadata, VerifyPart
from specmla.query import QueryLenSupport, RowTables
from specmla.row_limits import RowLimits

_NO_SIZES: Mapping[str, int] = MappingProxyType({})
_NO_ARRAYS: Mapping[str, array[int]] = MappingProxyType({})


class CapturedMetadata:
    """The tables of one bucket, in memory that never moves: verify rows alone.

    Args:
        builder: of the cache and the backend.
        bucket: the shape.
        along: sizes, by name, of int64 arrays of the caller that travel in the same copy.
        table: [B, ceil(max_seq_len / G)] int32 block table of another one; its own if None.
        windows: requests may have a window start; else all rows see their request from key 0.
        mask: relation among the new rows; in trees, a request without parents is a chain.

    Attributes:
        along: [size] int64 on the device, by name.

    Raises:
        ArgumentError: ragged rows on a UNIFORM backend, a mask that the backend lacks, trees of
            more rows than a word has bits.
    """

    def __init__(
        self,
        builder: MetadataBuilder,
        bucket: Bucket,
        along: Mapping[str, int] = _NO_SIZES,
        table: Tensor | None = None,
        *,
        windows: bool = False,
        mask: DraftMask = DraftMask.CAUSAL,
    ) -> None:
        has, reasons = builder.backend.capabilities, []
        if bucket.ragged and has.query_len_support is QueryLenSupport.UNIFORM:
            reasons.append(
                f"ragged is True; backend {has.name!r} is UNIFORM and accepts ragged=False"
            )
        if has.graphs is GraphSupport.NEVER:
            reasons.append(f"backend {has.name!r} declares graphs 'never', accepted is another")
        elif bucket.ragged and not has.graphs.covers(GraphSupport.RAGGED) and not reasons:
            reasons.append(
                f"ragged is True; backend {has.name!r} declares graphs {has.graphs.value!r} and "
                "accepts ragged=False"
            )
        if mask not in has.masks:
            served = sorted(m.value for m in has.masks)
            reasons.append(f"mask is {mask.value!r}; backend {has.name!r} accepts {served}")
        if mask is DraftMask.TREE and bucket.query_len > MAX_TREE_NODES:
            reasons.append(
                f"query_len is {bucket.query_len}, accepted in trees is 1 to {MAX_TREE_NODES}"
            )
        require(reasons, "CapturedMetadata")
        self.builder, self.bucket, self.windows, self.mask = builder, bucket, windows, mask
        self._limits = RowLimits(builder.page_size, builder.num_pages, builder.max_seq_len)
        rows, requests = bucket.num_rows, bucket.num_requests
        longs = {"positions": rows, "slots": rows}
        longs |= {"tree": rows} if mask is DraftMask.TREE else {}
        longs |= {f"along.{name}": size for name, size in along.items()}
        ints = {"extent": rows, "seq_lens": requests, "ends": requests}
        ints |= {"row_start": rows, "starts": requests} if windows else {}
        columns = -(-builder.max_seq_len // builder.page_size)
        if table is None:
            shape = (requests, columns)
            table = torch.zeros(shape, dtype=torch.int32, device=builder.device)
        self._buffers = CaptureBuffers(longs, ints, table)
        self._views = self._buffers.views
        self._views["slots"].fill_(-1)
        self.along = {name: self._views[f"along.{name}"] for name in along}
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

    def rounds(self) -> CapturedMetadata:
        """Make tables of one row a request over the same pages, for `follow` and `advance`."""
        single = Bucket(self.bucket.num_requests, 1, self.bucket.ragged)
        table, windows = self._buffers.table, self.windows
        return CapturedMetadata(self.builder, single, table=table, windows=windows)

    def follow(self, first: CapturedMetadata) -> None:
        """Take the requests of `first` over, on the device, each at its last row there.

        From there `advance` brings the rows that were declared to be `ahead` of those of `first`.
        """
        self._buffers.follow(first._buffers)

    def place(self, positions: Tensor, counts: Tensor) -> None:
        """Let the requests' rows begin at these positions [B], so many of them [B], on the device.

        int64 both; all rows after a request's count are inert, and with none so is the request.
        """
        self._buffers.place(positions, counts, self.builder.page_size)

    def advance(self) -> None:
        """Move every request on by its next row, on the device: what a captured drafter does.

        A request that has had its rows `ahead` stands still, and stores nothing from there on.

        Raises:
            ArgumentError: a bucket of more than one row.
        """
        length = self.bucket.query_len
        wrong = [f"query_len is {length}, accepted is 1"] if length > 1 else []
        require(wrong, "CapturedMetadata.advance")
        self._buffers.advance(self.builder.page_size)

    def for_replay(
        self,
        requests: Sequence[RequestRows],
        along: Mapping[str, array[int]] = _NO_ARRAYS,
        ahead: Sequence[int] | None = None,
    ) -> None:
        """Check the requests and fill the buffers with them, in one copy from the host.

        Args:
            requests: verifies, no more and no longer than captured; in order of the rows.
            along: typecode 'q', every array of its declared size.
            ahead: rows of each request that `advance` will bring, for which there are pages too;
                None: no request will be advanced.

        Raises:
            ArgumentError: requests of another kind or shape, lengths or pages that can't be served;
                all reasons are listed and nothing was written.
        """
        last = grown(requests, ahead)
        require(self._problems(requests, last, along), "CapturedMetadata.for_replay")
        tables = HostTables(self.builder.page_size, self.mask)
        tables.add_verify(last)
        if not tables.has_pages_below(self.builder.num_pages):
            require(self._limits.problems(last, self.mask), "CapturedMetadata.for_replay")
        table = tables.arrays.get("table", array("i"))
        if ahead is not None:  # the table is that of the last row, all else that of the first
            tables.add_verify(requests)
        tables.add_rows(requests)
        ends = [r.seq_len for r in last]
        given = padded_arrays(self.bucket, requests, ends, tables.arrays, list(self._views))
        given |= {f"along.{name}": values for name, values in along.items()}
        self._buffers.write(given, table, len(requests))

    def _problems(
        self,
        requests: Sequence[RequestRows],
        last: Sequence[RequestRows],
        along: Mapping[str, array[int]],
    ) -> list[str]:
        kinds = sorted({r.kind.value for r in requests if r.kind is not RequestKind.VERIFY})
        found = [f"kind is {kinds}, captured are verifies alone"] if kinds else []
        trees, windows = self.mask is DraftMask.TREE, self.windows
        if any(
            (r.parents is not None and not trees) or (r.window_start and not windows)
            for r in requests
        ):
            captured = f"{self.mask.value} rows from {'any key' if windows else 'key 0'}"
            found.append(f"a request has parents or a window, captured are {captured}")
        found += self.bucket.problems([r.query_len for r in requests])
        sizes = {name: len(values) for name, values in along.items()}
        wanted = {name: view.shape[0] for name, view in self.along.items()}
        if sizes != wanted or any(values.typecode != "q" for values in along.values()):
            found.append(f"along has sizes {sizes}, accepted are {wanted} of typecode 'q'")
        if not self._limits.are_plain(last):
            found += self._limits.problems(last, self.mask)
        return found

    def _verify_part(self) -> VerifyPart:
        num, length = self.bucket.num_requests, self.bucket.query_len
        starts = torch.arange(num + 1, dtype=torch.int32, device=self.builder.device)
        return VerifyPart(
            query_start=starts * length,
            seq_lens=self._views["seq_lens"],
            block_table=self._buffers.table,
            row_extent=self._views["extent"],
            row_start=self._views.get("row_start"),
            tree_bits=self._views.get("tree"),
            rows=None,
            mask=self.mask,
            query_lens=(length,) * num,
            max_query_len=length,
            max_seq_len=self.builder.max_seq_len,
            page_size=self.builder.page_size,
            num_pages=self.builder.num_pages,
        )
