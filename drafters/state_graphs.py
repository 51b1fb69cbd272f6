"""Chains over the target's hidden states as captured graphs: what MTP and EAGLE-3 share.

A graph holds as many rows of known states as one step commits. Where a request has more of them (a
prompt, steps without drafts), all but the last are run before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specmla import CapturedChains, PendingRows, RequestKind, RequestRows

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.sheet import Wanted
    from drafters.state_log import StateLog
    from specmla import (
        Bucket,
        ChainNetwork,
        DrawnDrafts,
        MetadataBuilder,
        SamplingCache,
        SamplingParams,
    )


class StateRounds(NamedTuple):
    """A network of functions, see `ChainNetwork`."""

    first: Callable[[Tensor, Any, Any], Tensor]
    later: Callable[[Tensor, Tensor, Any], Tensor]
    logits: Callable[[Tensor], Tensor]


class StateGraphs:
    """Graphs of a drafter on hidden states.

    Args:
        builder: of the cache that its rows go to.
        network: what runs.
        log: what is known of each request.
        states: a tensor of the width and dtype of the target's states.
        sampling: keeps the parameters on the device.
    """

    def __init__(
        self,
        builder: MetadataBuilder,
        network: ChainNetwork,
        log: StateLog,
        states: Tensor,
        sampling: SamplingCache,
    ) -> None:
        self._builder, self._network, self._log = builder, network, log
        self._states, self._sampling = states, sampling
        self._chains: CapturedChains | None = None

    def capture(
        self, buckets: Sequence[Bucket], params: Sequence[SamplingParams], *, windows: bool
    ) -> None:
        """Capture what was not captured before; see `CapturedChains`."""
        if self._chains is None or not self._chains.covers(buckets, params):
            most = max((b.query_len for b in buckets), default=1)
            self._chains = CapturedChains(
                self._builder, self._network, buckets, params, most, self._states, windows
            )

    def run(self, wanted: Sequence[Wanted], rows: Sequence[RequestRows]) -> DrawnDrafts | None:
        """Draft by a graph; None if none was captured that holds the requests, and nothing ran.

        Args:
            wanted: requests in the order of the result, pages of all their rows reserved.
            rows: those of known states, each's last row the one before the anchor's.
        """
        if self._chains is None:
            return None
        batch = self._sampling.get(w.request.sampling for w in wanted)
        graph = self._chains.find([w.drafts for w in wanted], batch)
        if graph is None:
            return None
        states, most = self._log.take(w.request_id for w in wanted), self._chains.most_rows
        if max(r.query_len for r in rows) > most:
            rows, states = self._catch_up(wanted, rows, states)
        pending = []
        for w, r in zip(wanted, rows, strict=True):
            if r.kind is not RequestKind.VERIFY:
                r = r._replace(kind=RequestKind.VERIFY)
            tokens = w.request.tokens
            pending.append(PendingRows(r, tokens[-r.query_len :], w.drafts, len(tokens) - 1))
        return self._chains.draft(graph, pending, batch, states)

    def _catch_up(
        self, wanted: Sequence[Wanted], rows: Sequence[RequestRows], states: Tensor
    ) -> tuple[list[RequestRows], Tensor]:
        """Run all rows but the last of requests with more than a graph holds; give what is left."""
        assert self._chains is not None
        parts = list(states.split([r.query_len for r in rows]))
        left = list(rows)
        behind: list[tuple[Wanted, RequestRows, Tensor]] = []
        for i, (w, r) in enumerate(zip(wanted, rows, strict=True)):
            if r.query_len > self._chains.most_rows:
                behind.append((w, r, parts[i]))
                left[i], parts[i] = r._replace(query_len=1), parts[i][-1:]
        self._run_behind(behind)
        return left, torch.cat(parts)

    def _run_behind(self, behind: Sequence[tuple[Wanted, RequestRows, Tensor]]) -> None:
        """Run all rows of these requests but the last."""
        # As the metadata orders them: verifies, then prompts.
        ordered = sorted(behind, key=lambda b: b[1].kind is RequestKind.PROMPT)
        rows = [r._replace(query_len=r.query_len - 1, seq_len=r.seq_len - 1) for _, r, _ in ordered]
        tokens = array("q")
        for (w, _, _), r in zip(ordered, rows, strict=True):
            tokens.extend(w.request.tokens[-r.query_len - 1 : -1])
        metadata = self._builder.build(rows, along={"tokens": tokens})
        states = torch.cat([given[:-1] for _, _, given in ordered])
        self._network.first(metadata.along["tokens"], states, metadata)
