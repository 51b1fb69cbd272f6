"""What one step tells every layer: which rows there are, what they see and where they are stored.

`specmla.builder.MetadataBuilder` makes it from one `RequestRows` per request. It is frozen and
shared by all layers: nothing of it is computed per layer.

Shape letters: B requests, T packed rows (sum of Q), M block-table columns, S keys of a request.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from specmla.mask import DraftMask
from specmla.query import RowTables
from specmla.workspace import PrefillWorkspace


class RequestKind(enum.Enum):
    """What a request brings: the caller says it, it is never guessed from lengths.

    VERIFY: the anchor and its drafts (or the anchor alone), absorbed MQA. PROMPT: new prompt
    tokens, with or without cached context, up-projected MHA. EXTEND: known tokens after cached
    context, neither drafted nor a first prompt (the next turn of a conversation, the rest of a
    chunked prompt); few rows take the absorbed path (`specmla.batch_split`), more the other.
    """

    VERIFY = "verify"
    EXTEND = "extend"
    PROMPT = "prompt"


class RequestRows(NamedTuple):
    """One request's part of a step, on the host.

    Attributes:
        kind: verify, extend or prompt.
        query_len: new rows Q of the request; zero (padding) is allowed for a verify.
        seq_len: cached tokens S, the new rows included.
        block_ids: pages of the request in order, at least ceil(S / G).
        parents: for a tree, the parent of each of the Q nodes (the anchor has -1); else None.
        window_start: first key that the rows see (0, or the start of a shard or window).
    """

    kind: RequestKind
    query_len: int
    seq_len: int
    block_ids: Sequence[int]
    parents: Sequence[int] | None = None
    window_start: int = 0


@dataclass(frozen=True)
class VerifyPart:
    """The verify rows of a step, as `forward_mqa` takes them; row t of a request sees the keys
    `row_start <= key < row_extent`, and in a tree only the new rows whose bit is set.

    Attributes:
        query_start: [B + 1] int32, first packed row of each request.
        seq_lens: [B] int32, new rows included.
        block_table: [B, M] int32; cells past a request's pages hold -1.
        row_extent: [T] int32.
        row_start: [T] int32, or None where every row starts at key 0.
        tree_bits: [T] int64, or None without trees; bit j of row t: it sees new row j.
        rows: the single-token tables, built only for a SINGLE_ONLY backend.
        query_lens: rows of each request, on the host.
        max_query_len, max_seq_len: host bounds; no result depends on how tight they are.
        page_size: G.
        num_pages: the ids of the table are below it, so the cache must have as many pages; 0 if
            nobody checked.
        plan: what the backend prepared for this step (splits, scratch), shared by all layers.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    row_extent: Tensor
    row_start: Tensor | None
    tree_bits: Tensor | None
    rows: RowTables | None
    mask: DraftMask
    query_lens: tuple[int, ...]
    max_query_len: int
    max_seq_len: int
    page_size: int
    num_pages: int = 0
    plan: Any = None

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self.query_lens)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.row_extent.shape[0]


@dataclass(frozen=True)
class PrefillPart:
    """The prompt rows of a step, as `forward_mha` takes them; causal, aligned bottom right.

    In one pass, the keys of a request are its cached rows, new ones included. Chunk by chunk, they
    are its last ones, at least its new rows, and `context` has those before them. Folded, there are
    no keys here: `context` has all of them, new rows included, from the first one on and in order.

    Attributes:
        query_start: [B + 1] int32, first packed row of each request, from 0 within this part.
        kv_start: [B + 1] int32, first packed key of each request.
        kv_slots: [sum of S] int64, slots of all keys in that order.
        query_lens, seq_lens: rows and keys of each request, on the host.
        context: chunks of cached rows that these rows see in full.
        workspace: where rows are gathered if it has as many; None: into new memory.
        folded: whether all keys are in `context`, for batch-invariant results.
        first_extent: [B] int32, in a chunk of folded keys: how many of these the first row of each
            request sees (below 1: none), each row one more than the row before it.
    """

    query_start: Tensor
    kv_start: Tensor
    kv_slots: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    context: tuple[ContextPart, ...] = ()
    workspace: PrefillWorkspace | None = None
    folded: bool = False
    first_extent: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """T of this part."""
        return sum(self.query_lens)


@dataclass(frozen=True)
class ContextPart:
    """One chunk of cached context and the rows that see it, not causal: all of its keys. (Of
    folded keys: those before `first_extent`.)

    Attributes:
        first_row, end_row: packed rows of the prompt part that it is for.
        keys: rows, keys and slots of the requests that these rows belong to; a request may have no
            keys in this chunk.
    """

    first_row: int
    end_row: int
    keys: PrefillPart


@dataclass(frozen=True)
class StepMetadata:
    """One step. Rows `[0, num_verify_rows)` take the absorbed path (verifies, then short extends),
    the rest the up-projected one (long extends, then prompts).

    Attributes:
        order: `order[i]` is the caller's index of the i-th request here.
        query_start: first row of each request here, on the host ([B + 1]).
        positions: [T] int64, position of each row's token.
        slot_mapping: [T] int64, slot that each row's latent is stored at; -1 is skipped.
        along: 1-d tensors by name, of the arrays that the caller sent in the same copy.
    """

    order: tuple[int, ...]
    query_start: tuple[int, ...]
    positions: Tensor
    slot_mapping: Tensor
    verify: VerifyPart | None
    prefill: PrefillPart | None
    along: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.positions.shape[0]

    @property
    def num_verify_rows(self) -> int:
        """Rows that take the absorbed path."""
        return 0 if self.verify is None else self.verify.num_rows
