"""Builds the metadata of a step: checks every request on the host, then sends one copy.

`MetadataBuilder.build` takes one `RequestRows` per request in any order and puts verifies before
extends and prompts; `StepMetadata.order` maps back. `build_rounds` makes steps of one row at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend
from specmla.batch_split import BatchRules, backend_problems, split_batch
from specmla.errors import count_problems, kind_problem, require
from specmla.fold_tables import FoldTables
from specmla.host_tables import HostTables, running_starts
from specmla.mask import DraftMask
from specmla.metadata import RequestKind, RequestRows, StepMetadata, VerifyPart
from specmla.prefill_tables import PrefillTables
from specmla.query import QueryLenSupport, RowTables, decode_rows
from specmla.row_limits import RowLimits

_NOTHING: Mapping[str, array[int]] = MappingProxyType({})


class MetadataBuilder:
    """Builds `StepMetadata` for one cache and one backend.

    Args:
        backend: plans the verify part and says which query lengths it takes.
        page_size: G of the cache.
        num_pages: pages of the pool; ids outside it are refused.
        num_heads: query heads H on this rank, for the backend's plan.
        kv_lora_rank: C, for the backend's plan.
        device: where the step runs.
        max_seq_len: longest sequence allowed.
        dtype: of query and cache, for the backend's plan.

    Raises:
        ArgumentError: a size below 1; all of them are listed.
    """

    def __init__(
        self,
        *,
        backend: AttentionBackend,
        page_size: int,
        num_pages: int,
        num_heads: int,
        kv_lora_rank: int,
        device: torch.device | str,
        max_seq_len: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        sizes = {
            "page_size": page_size,
            "num_pages": num_pages,
            "num_heads": num_heads,
            "kv_lora_rank": kv_lora_rank,
            "max_seq_len": max_seq_len,
        }
        found = count_problems(sizes) + kind_problem("dtype", dtype, torch.dtype)
        found += kind_problem("backend", backend, AttentionBackend)
        require(found, "MetadataBuilder")
        self.backend = backend
        self.page_size, self.num_pages = page_size, num_pages
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.device = torch.device(device)
        self.max_seq_len = max_seq_len
        self.dtype = dtype
        self._limits = RowLimits(page_size, num_pages, max_seq_len)
        self.configure(BatchRules())

    def configure(self, rules: BatchRules) -> MetadataBuilder:
        """Split batches and serve prompts by other rules from here on; gives the builder back.

        Raises:
            ArgumentError: a workspace that does not fit the cache, a SINGLE_ONLY backend that
                declares more than one row; all reasons are listed and nothing has changed.
        """
        has = self.backend.capabilities
        found = rules.problems(has, self.page_size, self.dtype, self.device)
        require(found + rules.backend_problems(self.backend), "MetadataBuilder.configure")
        self.rules = rules
        self.reorder_batch_threshold = rules.reorder_batch_threshold(has)
        return self

    def build(
        self,
        requests: Sequence[RequestRows],
        mask: DraftMask = DraftMask.CAUSAL,
        along: Mapping[str, array[int]] = _NOTHING,
        settle: Callable[[dict[str, Tensor]], None] | None = None,
    ) -> StepMetadata:
        """Check all requests, order them (verifies first) and send the tables to the device.

        `mask` holds for the verify rows; a request with `parents` needs `DraftMask.TREE`, under
        which a request without them is a chain. `along` are arrays of the caller, of typecode 'q'
        or 'i', that travel in the same copy: `StepMetadata.along` has them on the device. `settle`
        corrects what was sent, in place, before the backend plans: lengths are bounds until then.

        Raises:
            ArgumentError: lengths, pages, trees or ragged rows that can't be served; all reasons
                of all requests are listed and nothing was sent.
        """
        has = self.backend.capabilities
        require(
            self._row_problems(requests, mask) + backend_problems(requests, mask, has),
            "MetadataBuilder.build",
        )
        support = has.query_len_support
        split = split_batch(requests, mask, self.reorder_batch_threshold, support)
        ordered = [requests[i] for i in split.order]
        absorbed, expanded = ordered[: len(split.absorbed)], ordered[len(split.absorbed) :]
        if support is QueryLenSupport.UNIFORM:
            absorbed = [r for r in absorbed if r.query_len]  # without rows they have no say
        tables = HostTables(self.page_size, mask)
        tables.add_verify(absorbed)
        self._require_pages(tables, requests, mask)
        tables.add_rows(ordered)
        prefill: PrefillTables | FoldTables = PrefillTables(expanded, self.rules.workspace)
        if self.rules.batch_invariant:
            prefill = FoldTables(expanded, self.page_size, self.rules.workspace)
        prefill.add_to(tables)
        sent = tables.send(self.device, along)
        if settle is not None:
            settle(sent)
        return StepMetadata(
            order=split.order,
            query_start=tuple(running_starts(r.query_len for r in ordered)),
            positions=sent["positions"],
            slot_mapping=sent["slots"],
            verify=self._verify_part(absorbed, mask, sent),
            prefill=prefill.part(sent),
            along={name: sent[f"along.{name}"] for name in along},
        )

    def build_rounds(self, requests: Sequence[RequestRows]) -> list[StepMetadata]:
        """Build the steps that run the rows of these requests one at a time, as drafting does.

        Step i runs row i of each request that has one: what `build` gives for that row alone, but
        for unused cells of the block table. All steps are checked and sent at once.

        Args:
            requests: causal chains of verify rows, none longer than the one before it.

        Raises:
            ArgumentError: as for `build`, or requests that are no such chains.
        """
        found = self._row_problems(requests, DraftMask.CAUSAL)
        lens = [r.query_len for r in requests]
        if lens != sorted(lens, reverse=True) or not all(map(_is_chain, requests)):
            found.append(f"the rows are {lens}, accepted are verify chains of falling length")
        require(found, "MetadataBuilder.build_rounds")
        live = [sum(n > i for n in lens) for i in range(max(lens, default=0))]
        if not live:
            return []
        tables = HostTables(self.page_size, DraftMask.CAUSAL)
        tables.add_rounds(requests, live)
        self._require_pages(tables, requests, DraftMask.CAUSAL)
        sent = tables.send(self.device, _NOTHING)
        positions, slots, seq_lens = (
            sent[name].split(live) for name in ("positions", "slots", "seq_lens")
        )
        return [
            StepMetadata(
                order=tuple(range(count)),
                query_start=tuple(range(count + 1)),
                positions=positions[i],
                slot_mapping=slots[i],
                verify=self._round_part(requests[:count], i, seq_lens[i], sent),
                prefill=None,
            )
            for i, count in enumerate(live)
        ]

    def _row_problems(self, requests: Sequence[RequestRows], mask: DraftMask) -> list[str]:
        """List what is wrong but, in the common case, page ids: `_require_pages` looks at those."""
        return [] if self._limits.are_plain(requests) else self._limits.problems(requests, mask)

    def _require_pages(
        self, tables: HostTables, requests: Sequence[RequestRows], mask: DraftMask
    ) -> None:
        if not tables.has_pages_below(self.num_pages):
            require(self._limits.problems(requests, mask), "MetadataBuilder")

    def _verify_part(
        self, requests: Sequence[RequestRows], mask: DraftMask, sent: dict[str, Tensor]
    ) -> VerifyPart | None:
        if not requests:
            return None
        lens = tuple(r.query_len for r in requests)
        rows = None
        if self.backend.capabilities.query_len_support is QueryLenSupport.SINGLE_ONLY:
            rows = decode_rows(sent["extent"], sent["table"], sent["query_lens"], sum(lens))
        return self._planned(
            VerifyPart(
                query_start=sent["query_start"],
                seq_lens=sent["seq_lens"],
                block_table=sent["table"],
                row_extent=sent["extent"],
                row_start=sent.get("row_start"),
                tree_bits=sent.get("tree"),
                rows=rows,
                mask=mask,
                query_lens=lens,
                max_query_len=max(lens),
                max_seq_len=max(r.seq_len for r in requests),
                page_size=self.page_size,
                num_pages=self.num_pages,
            )
        )

    def _round_part(
        self, requests: Sequence[RequestRows], step: int, seq_lens: Tensor, sent: dict[str, Tensor]
    ) -> VerifyPart:
        """A row a request, which sees all keys: a request's length is its row's extent."""
        table = sent["table"][: len(requests)]
        single = self.backend.capabilities.query_len_support is QueryLenSupport.SINGLE_ONLY
        return self._planned(
            VerifyPart(
                query_start=sent["query_start"][: len(requests) + 1],
                seq_lens=seq_lens,
                block_table=table,
                row_extent=seq_lens,
                row_start=None,
                tree_bits=None,
                rows=RowTables(seq_lens, table) if single else None,
                mask=DraftMask.CAUSAL,
                query_lens=(1,) * len(requests),
                max_query_len=1,
                max_seq_len=max(r.seq_len - r.query_len for r in requests) + step + 1,
                page_size=self.page_size,
                num_pages=self.num_pages,
            )
        )

    def _planned(self, part: VerifyPart) -> VerifyPart:
        return self.backend.plan(
            part, num_heads=self.num_heads, kv_lora_rank=self.kv_lora_rank, dtype=self.dtype
        )


def _is_chain(r: RequestRows) -> bool:
    return r.kind is RequestKind.VERIFY and r.parents is None and not r.window_start
