"""Which requests of a step take the absorbed path, and in which order a step's rows stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specmla.backends.base import AttentionBackend, Capabilities
from specmla.chunks import fold_step
from specmla.errors import count_problems, require
from specmla.mask import MAX_TREE_NODES, DraftMask
from specmla.metadata import RequestKind, RequestRows
from specmla.query import QueryLenSupport
from specmla.workspace import PrefillWorkspace


@dataclass(frozen=True)
class BatchRules:
    """How an engine's batches are split and its prompts served.

    Attributes:
        num_speculative_tokens: K, most drafts a request brings to a verify.
        parallel_drafting: the drafter's own passes bring 1 + 2K rows.
        workspace: prompts whose keys exceed it attend to cached context chunk by chunk through
            it; None: always in one pass, whose memory grows with the context.
        batch_invariant: prompts, and extends of any length, fold all their keys in order, so that
            a row's bits don't depend on the batch nor on where a prompt is cut into steps or
            chunks (`specmla.invariance`); for backends that were built so.

    Raises:
        ArgumentError: a negative K, a workspace that is none or not locked, a switch that is no
            bool; all reasons are listed.
    """

    num_speculative_tokens: int = 0
    parallel_drafting: bool = False
    workspace: PrefillWorkspace | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        """Refuse what can't be served."""
        found = count_problems({"num_speculative_tokens": self.num_speculative_tokens}, 0)
        for name in ("parallel_drafting", "batch_invariant"):
            if not isinstance(switch := getattr(self, name), bool):
                found.append(f"{name} is {switch!r}, accepted are True, False")
        if not isinstance(self.workspace, PrefillWorkspace | None):
            found.append(f"workspace is {self.workspace!r}, accepted is a PrefillWorkspace or None")
        elif self.workspace is not None and not self.workspace.is_locked:
            found.append("workspace is not locked, accepted is one after claim() and lock()")
        require(found, "BatchRules")

    def problems(
        self, has: Capabilities, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> list[str]:
        """List why these rules don't go with a backend and a cache of these properties."""
        found, workspace = [], self.workspace
        single = has.query_len_support is QueryLenSupport.SINGLE_ONLY
        if single and has.reorder_batch_threshold != 1:
            found.append(
                f"backend {has.name!r} is SINGLE_ONLY and declares reorder_batch_threshold "
                f"{has.reorder_batch_threshold}, accepted is 1"
            )
        if workspace is None:
            return found
        if workspace.page_size != page_size:
            found.append(f"workspace.page_size is {workspace.page_size}, accepted is {page_size}")
        if workspace.dtype != dtype:
            found.append(f"workspace.dtype is {workspace.dtype}, accepted is {dtype}")
        if workspace.device.type != device.type:
            found.append(f"workspace is on {workspace.device}, accepted is {device}")
        least = fold_step(page_size)
        if self.batch_invariant and workspace.num_rows < least:
            found.append(
                f"workspace has {workspace.num_rows} rows, accepted with batch_invariant are "
                f"{least} or more"
            )
        return found

    def backend_problems(self, backend: AttentionBackend) -> list[str]:
        """List why a backend, as it was built, can't serve these rules."""
        if not self.batch_invariant or (backend.batch_invariant and backend.folds_prompts):
            return []
        name = backend.capabilities.name
        return [
            f"rules are batch_invariant; backend {name!r} has batch_invariant "
            f"{backend.batch_invariant} and folds_prompts {backend.folds_prompts}, accepted is True"
        ]

    def reorder_batch_threshold(self, has: Capabilities) -> int:
        """Give the most rows of an extend that takes the absorbed path of a backend.

        What the backend declares, raised to the rows of a verify, 1 + K (1 + 2K with parallel
        drafting): it serves those anyway. A SINGLE_ONLY backend reads the cache once a row, so
        there it stays 1. Batch-invariant ones take that path for verifies alone: 0.
        """
        if self.batch_invariant:
            return 0
        if has.query_len_support is QueryLenSupport.SINGLE_ONLY:
            return 1
        drafts = self.num_speculative_tokens * (2 if self.parallel_drafting else 1)
        return max(has.reorder_batch_threshold, 1 + drafts)


class BatchSplit(NamedTuple):
    """Indices of a step's requests: absorbed (verifies, then short extends), then up-projected
    (long extends, then prompts); each in the caller's order.
    """

    absorbed: tuple[int, ...]
    expanded: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All of them, as the step has them."""
        return self.absorbed + self.expanded


def split_batch(
    requests: Sequence[RequestRows], mask: DraftMask, threshold: int, support: QueryLenSupport
) -> BatchSplit:
    """Split checked requests by their kinds; lengths decide for extends only.

    A verify is absorbed whatever its length, one without rows included. An extend is if it has at
    most `threshold` rows, if `mask` relates its rows causally, and if a UNIFORM backend has no
    other length to serve: that of the verifies, else the one that most of the short extends have.
    """
    kinds = [r.kind for r in requests]
    if kinds.count(RequestKind.VERIFY) == len(kinds):
        return BatchSplit(tuple(range(len(kinds))), ())
    verify = [i for i, kind in enumerate(kinds) if kind is RequestKind.VERIFY]
    extend = [i for i, kind in enumerate(kinds) if kind is RequestKind.EXTEND]
    prompt = [i for i, kind in enumerate(kinds) if kind is RequestKind.PROMPT]
    most = min(threshold, _CAUSAL_ROWS.get(mask, threshold))
    short = [i for i in extend if requests[i].query_len <= most]
    if support is QueryLenSupport.UNIFORM:
        lens = [requests[i].query_len for i in verify if requests[i].query_len]
        lens = lens or [requests[i].query_len for i in short]
        length = max(lens, key=lambda n: (lens.count(n), n), default=0)
        short = [i for i in short if requests[i].query_len == length]
    is_short = set(short)
    return BatchSplit((*verify, *short), (*(i for i in extend if i not in is_short), *prompt))


_CAUSAL_ROWS = {DraftMask.FULL: 1, DraftMask.TREE: MAX_TREE_NODES}
"""Most rows of a chain that a mask still serves: more would see later rows, or have no word."""


def backend_problems(
    requests: Sequence[RequestRows], mask: DraftMask, has: Capabilities
) -> list[str]:
    """List why a backend can't serve the verifies of a step; rows that are none don't count."""
    found = []
    lens = {r.query_len for r in requests if r.kind is RequestKind.VERIFY and r.query_len}
    if has.query_len_support is QueryLenSupport.UNIFORM and len(lens) > 1:
        found.append(
            f"query_len is {sorted(lens)} over the verify requests; backend "
            f"{has.name!r} is UNIFORM and takes one length"
        )
    if mask not in has.masks:
        names = sorted(m.value for m in has.masks)
        found.append(f"mask is {mask.value!r}; backend {has.name!r} accepts {names}")
    return found
