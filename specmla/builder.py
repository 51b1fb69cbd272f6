"""Builds the metadata of a step: checks every request on the host, then sends one copy.

`MetadataBuilder.build` takes one `RequestRows` per request in any order and puts verifies before
prompts; `StepMetadata.order` maps back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend
from specmla.errors import require
from specmla.mask import DraftMask, row_extents, tree_bits, tree_depths
from specmla.metadata import PrefillPart, RequestKind, RequestRows, StepMetadata, VerifyPart
from specmla.query import QueryLenSupport, decode_rows
from specmla.staging import send_arrays


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
    ) -> None:
        self.backend = backend
        self.page_size, self.num_pages = page_size, num_pages
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.device = torch.device(device)
        self.max_seq_len = max_seq_len

    def build(
        self, requests: Sequence[RequestRows], mask: DraftMask = DraftMask.CAUSAL
    ) -> StepMetadata:
        """Check all requests, order them (verifies first) and send the tables to the device.

        `mask` holds for the verify rows; a request with `parents` needs `DraftMask.TREE`, under
        which a request without them is a chain.

        Raises:
            ArgumentError: lengths, pages, trees or ragged rows that can't be served; all reasons
                of all requests are listed and nothing was sent.
        """
        require(self._problems(requests, mask), "MetadataBuilder.build")
        verify = [i for i, r in enumerate(requests) if r.kind is RequestKind.VERIFY]
        prompt = [i for i, r in enumerate(requests) if r.kind is RequestKind.PROMPT]
        order = (*verify, *prompt)
        ordered = [requests[i] for i in order]
        tables = _HostTables(self.page_size, mask)
        for request in ordered:
            tables.add_rows(request)
        tables.add_verify([requests[i] for i in verify])
        tables.add_prefill([requests[i] for i in prompt])
        sent = tables.send(self.device)
        return StepMetadata(
            order=order,
            query_start=tuple(_starts(r.query_len for r in ordered)),
            positions=sent["positions"],
            slot_mapping=sent["slots"],
            verify=self._verify_part([requests[i] for i in verify], mask, sent),
            prefill=_prefill_part([requests[i] for i in prompt], sent),
        )

    def _problems(self, requests: Sequence[RequestRows], mask: DraftMask) -> list[str]:
        found: list[str] = []
        for i, r in enumerate(requests):
            found += [f"request {i}: {text}" for text in self._request_problems(r, mask)]
        lens = {r.query_len for r in requests if r.kind is RequestKind.VERIFY}
        if self.backend.capabilities.query_len_support is QueryLenSupport.UNIFORM and len(lens) > 1:
            found.append(
                f"query_len is {sorted(lens)} over the verify requests; backend "
                f"{self.backend.capabilities.name!r} is UNIFORM and takes one length"
            )
        if mask not in self.backend.capabilities.masks:
            names = sorted(m.value for m in self.backend.capabilities.masks)
            found.append(
                f"mask is {mask.value!r}; backend {self.backend.capabilities.name!r} accepts {names}"
            )
        return found

    def _request_problems(self, r: RequestRows, mask: DraftMask) -> list[str]:
        found = []
        least = 0 if r.kind is RequestKind.VERIFY else 1
        if r.query_len < least:
            found.append(f"query_len is {r.query_len}, accepted are values >= {least}")
        if not max(r.query_len, 0) <= r.seq_len <= self.max_seq_len:
            found.append(
                f"seq_len is {r.seq_len}, accepted are query_len ({r.query_len}) to max_seq_len "
                f"({self.max_seq_len})"
            )
        pages = -(-r.seq_len // self.page_size)
        if len(r.block_ids) < pages:
            found.append(f"block_ids holds {len(r.block_ids)} pages, {r.seq_len} tokens need {pages}")
        elif any(not 0 <= b < self.num_pages for b in r.block_ids[:pages]):
            found.append(f"block_ids has ids outside 0 .. {self.num_pages - 1}")
        if r.parents is not None and mask is not DraftMask.TREE:
            found.append(f"parents are given but mask is {mask.value!r}, accepted is 'tree'")
        if r.parents is not None and len(r.parents) != r.query_len:
            found.append(f"parents has {len(r.parents)} nodes, query_len is {r.query_len}")
        if mask is DraftMask.TREE and r.kind is RequestKind.VERIFY and r.query_len > 64:
            found.append(f"query_len is {r.query_len}, a tree holds at most 64 nodes")
        if not 0 <= r.window_start <= r.seq_len:
            found.append(f"window_start is {r.window_start}, accepted are 0 to seq_len ({r.seq_len})")
        return found

    def _verify_part(
        self, requests: Sequence[RequestRows], mask: DraftMask, sent: dict[str, Tensor]
    ) -> VerifyPart | None:
        if not requests:
            return None
        lens = tuple(r.query_len for r in requests)
        rows = None
        if self.backend.capabilities.query_len_support is QueryLenSupport.SINGLE_ONLY:
            rows = decode_rows(sent["extent"], sent["table"], sent["query_lens"], sum(lens))
        return self.backend.plan(
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
            ),
            num_heads=self.num_heads,
            kv_lora_rank=self.kv_lora_rank,
        )


def _prefill_part(requests: Sequence[RequestRows], sent: dict[str, Tensor]) -> PrefillPart | None:
    if not requests:
        return None
    return PrefillPart(
        query_start=sent["prompt_query_start"],
        kv_start=sent["kv_start"],
        kv_slots=sent["kv_slots"],
        query_lens=tuple(r.query_len for r in requests),
        seq_lens=tuple(r.seq_len for r in requests),
    )


def _starts(lengths: Iterable[int]) -> list[int]:
    out = [0]
    for length in lengths:
        out.append(out[-1] + length)
    return out


class _HostTables:
    """Collects the step's integers in host arrays and sends them in a single copy."""

    def __init__(self, page_size: int, mask: DraftMask) -> None:
        self.page_size, self.mask = page_size, mask
        self.long: dict[str, array[int]] = {"positions": array("q"), "slots": array("q")}
        self.int: dict[str, array[int]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def add_rows(self, r: RequestRows) -> None:
        """Positions and slots of a request's new rows; a tree node stands at prefix + depth."""
        first, page = r.seq_len - r.query_len, self.page_size
        steps = range(r.query_len) if r.parents is None else tree_depths(r.parents)
        self.long["positions"].extend(first + s for s in steps)
        self.long["slots"].extend(
            r.block_ids[at // page] * page + at % page for at in range(first, r.seq_len)
        )

    def add_verify(self, requests: Sequence[RequestRows]) -> None:
        if not requests:
            return
        page = self.page_size
        width = max(1, *(-(-r.seq_len // page) for r in requests))
        table, extent = array("i"), array("i")
        for r in requests:
            used = -(-r.seq_len // page)
            table.extend(r.block_ids[:used])
            table.frombytes(b"\xff\xff\xff\xff" * (width - used))
            extent.extend(row_extents(self.mask, r.query_len, r.seq_len))
        self.int |= {
            "table": table,
            "extent": extent,
            "query_lens": array("i", [r.query_len for r in requests]),
            "query_start": array("i", _starts(r.query_len for r in requests)),
            "seq_lens": array("i", [r.seq_len for r in requests]),
        }
        self.shapes["table"] = (len(requests), width)
        if any(r.window_start for r in requests):
            self.int["row_start"] = array(
                "i", [r.window_start for r in requests for _ in range(r.query_len)]
            )
        if self.mask is DraftMask.TREE:
            self.long["tree"] = array("q", [bit for r in requests for bit in _row_bits(r)])

    def add_prefill(self, requests: Sequence[RequestRows]) -> None:
        if not requests:
            return
        page, slots = self.page_size, array("q")
        for r in requests:
            for at in range(0, r.seq_len, page):
                first = r.block_ids[at // page] * page
                slots.extend(range(first, first + min(page, r.seq_len - at)))
        self.long["kv_slots"] = slots
        self.int["prompt_query_start"] = array("i", _starts(r.query_len for r in requests))
        self.int["kv_start"] = array("i", _starts(r.seq_len for r in requests))

    def send(self, device: torch.device) -> dict[str, Tensor]:
        """Send everything in one copy."""
        sent = send_arrays(self.long | self.int, device)
        for name, shape in self.shapes.items():
            sent[name] = sent[name].view(shape)
        return sent


def _row_bits(r: RequestRows) -> list[int]:
    if r.parents is not None:
        return tree_bits(r.parents)
    return tree_bits(range(-1, r.query_len - 1)) if r.query_len else []
