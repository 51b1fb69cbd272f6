"""What a request of a step may look like: lengths, pages, windows, trees."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from specmla.errors import ArgumentError
from specmla.mask import MAX_TREE_NODES, DraftMask, tree_bits
from specmla.metadata import RequestKind, RequestRows


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The sizes that requests are checked against.

    Attributes:
        page_size: G.
        num_pages: pages of the pool; ids outside it are refused.
        max_seq_len: longest sequence allowed.
    """

    page_size: int
    num_pages: int
    max_seq_len: int

    def are_plain(self, requests: Sequence[RequestRows]) -> bool:
        """Tell the common step at a glance: short chains, nothing wrong but page ids, maybe."""
        if not requests:
            return True
        kinds, query_lens, seq_lens, block_ids, parents, starts = zip(*requests, strict=True)
        count, page = len(requests), self.page_size
        return (
            kinds.count(RequestKind.VERIFY) == count
            and parents.count(None) == count
            and starts.count(0) == count
            and min(query_lens) >= 0
            and max(query_lens) <= MAX_TREE_NODES
            and max(seq_lens) <= self.max_seq_len
            and all(map(operator.le, query_lens, seq_lens))
            and all(
                type(ids) is array and ids.typecode == "i" and len(ids) * page >= length
                for ids, length in zip(block_ids, seq_lens, strict=True)
            )
        )

    def problems(self, requests: Sequence[RequestRows], mask: DraftMask) -> list[str]:
        """List every reason why these requests can't be a step."""
        return [
            f"request {i}: {text}"
            for i, r in enumerate(requests)
            for text in self._problems(r, mask)
        ]

    def _problems(self, r: RequestRows, mask: DraftMask) -> list[str]:
        found = []
        if not isinstance(r.kind, RequestKind):
            found.append(f"kind is {r.kind!r}, accepted are the members of RequestKind")
        is_verify, is_extend = r.kind is RequestKind.VERIFY, r.kind is RequestKind.EXTEND
        least = 0 if is_verify else 1
        if r.query_len < least:
            found.append(f"query_len is {r.query_len}, accepted are values >= {least}")
        if not max(r.query_len, 0) <= r.seq_len <= self.max_seq_len:
            found.append(
                f"seq_len is {r.seq_len}, accepted are query_len ({r.query_len}) to max_seq_len "
                f"({self.max_seq_len})"
            )
        if is_extend and r.seq_len == r.query_len:
            found.append(f"seq_len is {r.seq_len} for an extend, accepted are values > query_len")
        pages = -(-max(r.seq_len, 0) // self.page_size)
        if len(r.block_ids) < pages:
            found.append(
                f"block_ids holds {len(r.block_ids)} pages, {r.seq_len} tokens need {pages}"
            )
        used = r.block_ids[:pages]
        if used and not (min(used) >= 0 and max(used) < self.num_pages):
            outside = [b for b in used if not 0 <= b < self.num_pages]
            found.append(f"block_ids has {outside}, accepted are 0 to {self.num_pages - 1}")
        last_start = max(r.seq_len, 0) if is_verify else 0
        if not 0 <= r.window_start <= last_start:
            accepted = f"0 to seq_len ({r.seq_len})" if is_verify else f"0 for {_one(r)}"
            found.append(f"window_start is {r.window_start}, accepted is {accepted}")
        return found + _tree_problems(r, mask)


def _tree_problems(r: RequestRows, mask: DraftMask) -> list[str]:
    if r.parents is None:
        is_wide_chain = mask is DraftMask.TREE and r.query_len > MAX_TREE_NODES
        if is_wide_chain and r.kind is RequestKind.VERIFY:
            return [f"query_len is {r.query_len}, a tree holds at most {MAX_TREE_NODES} nodes"]
        return []
    found = []
    if mask is not DraftMask.TREE:
        found.append(f"parents are given but mask is {mask.value!r}, accepted is 'tree'")
    if r.kind is not RequestKind.VERIFY:
        found.append(f"parents are given for {_one(r)}, accepted is None")
    if len(r.parents) != r.query_len:
        found.append(f"parents has {len(r.parents)} nodes, query_len is {r.query_len}")
    if r.parents:
        try:
            tree_bits(r.parents)
        except ArgumentError as error:
            found.append(str(error))
    return found


def _one(r: RequestRows) -> str:
    return "an extend" if r.kind is RequestKind.EXTEND else "a prompt"
