"""Builds the metadata of a step: checks every request on the host, then sends one copy.

`MetadataBuilder.build` takes one `RequestRows` per request in any order and puts verifies before
prompts; `StepMetadata.order` maps back.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend
from specmla.errors import ArgumentError, require
from specmla.host_tables import HostTables, running_starts
from specmla.mask import MAX_TREE_NODES, DraftMask, tree_bits
from specmla.metadata import PrefillPart, RequestKind, RequestRows, StepMetadata, VerifyPart
from specmla.query import QueryLenSupport, decode_rows


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
        require(
            [
                f"{name} is {got}, accepted are values >= 1"
                for name, got in sizes.items()
                if got < 1
            ],
            "MetadataBuilder",
        )
        self.backend = backend
        self.page_size, self.num_pages = page_size, num_pages
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.device = torch.device(device)
        self.max_seq_len = max_seq_len
        self.dtype = dtype

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
        tables = HostTables(self.page_size, mask)
        for request in ordered:
            tables.add_rows(request)
        tables.add_verify([requests[i] for i in verify])
        tables.add_prefill([requests[i] for i in prompt])
        sent = tables.send(self.device)
        return StepMetadata(
            order=order,
            query_start=tuple(running_starts(r.query_len for r in ordered)),
            positions=sent["positions"],
            slot_mapping=sent["slots"],
            verify=self._verify_part([requests[i] for i in verify], mask, sent),
            prefill=_prefill_part([requests[i] for i in prompt], sent),
        )

    def _problems(self, requests: Sequence[RequestRows], mask: DraftMask) -> list[str]:
        found: list[str] = []
        if not all(map(self._is_plain, requests)) or not self._has_only_pages(requests):
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
            name = self.backend.capabilities.name
            found.append(f"mask is {mask.value!r}; backend {name!r} accepts {names}")
        return found

    def _is_plain(self, r: RequestRows) -> bool:
        """Tell the common case at a glance: a short chain, nothing wrong but its ids, maybe."""
        return (
            r.kind is RequestKind.VERIFY
            and 0 <= r.query_len <= MAX_TREE_NODES
            and r.query_len <= r.seq_len <= self.max_seq_len
            and r.seq_len <= len(r.block_ids) * self.page_size
            and r.parents is None
            and r.window_start == 0
        )

    def _has_only_pages(self, requests: Sequence[RequestRows]) -> bool:
        """Check the ids of all requests in one pass: one by one they would cost the step most."""
        used = array("i")
        try:
            for r in requests:
                used.extend(r.block_ids[: -(-r.seq_len // self.page_size)])
        except (OverflowError, TypeError):  # an id that is no int32: let the detailed check say so
            return False
        if not used:
            return True
        low, high = torch.frombuffer(used, dtype=torch.int32).aminmax()
        return int(low) >= 0 and int(high) < self.num_pages

    def _request_problems(self, r: RequestRows, mask: DraftMask) -> list[str]:
        found = []
        if not isinstance(r.kind, RequestKind):
            found.append(f"kind is {r.kind!r}, accepted are the members of RequestKind")
        least = 1 if r.kind is RequestKind.PROMPT else 0
        if r.query_len < least:
            found.append(f"query_len is {r.query_len}, accepted are values >= {least}")
        if not max(r.query_len, 0) <= r.seq_len <= self.max_seq_len:
            found.append(
                f"seq_len is {r.seq_len}, accepted are query_len ({r.query_len}) to max_seq_len "
                f"({self.max_seq_len})"
            )
        pages = -(-max(r.seq_len, 0) // self.page_size)
        if len(r.block_ids) < pages:
            found.append(
                f"block_ids holds {len(r.block_ids)} pages, {r.seq_len} tokens need {pages}"
            )
        used = r.block_ids[:pages]
        if used and not (min(used) >= 0 and max(used) < self.num_pages):
            outside = [b for b in used if not 0 <= b < self.num_pages]
            found.append(f"block_ids has {outside}, accepted are 0 to {self.num_pages - 1}")
        is_prompt = r.kind is RequestKind.PROMPT
        last_start = 0 if is_prompt else max(r.seq_len, 0)
        if not 0 <= r.window_start <= last_start:
            accepted = "0 for a prompt" if is_prompt else f"0 to seq_len ({r.seq_len})"
            found.append(f"window_start is {r.window_start}, accepted is {accepted}")
        return found + _tree_problems(r, mask)

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
                num_pages=self.num_pages,
            ),
            num_heads=self.num_heads,
            kv_lora_rank=self.kv_lora_rank,
            dtype=self.dtype,
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


def _tree_problems(r: RequestRows, mask: DraftMask) -> list[str]:
    if r.parents is None:
        is_wide_chain = mask is DraftMask.TREE and r.query_len > MAX_TREE_NODES
        if is_wide_chain and r.kind is not RequestKind.PROMPT:
            return [f"query_len is {r.query_len}, a tree holds at most {MAX_TREE_NODES} nodes"]
        return []
    found = []
    if mask is not DraftMask.TREE:
        found.append(f"parents are given but mask is {mask.value!r}, accepted is 'tree'")
    if r.kind is RequestKind.PROMPT:
        found.append("parents are given for a prompt, accepted is None")
    if len(r.parents) != r.query_len:
        found.append(f"parents has {len(r.parents)} nodes, query_len is {r.query_len}")
    if r.parents:
        try:
            tree_bits(r.parents)
        except ArgumentError as error:
            found.append(str(error))
    return found
