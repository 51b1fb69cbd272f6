"""Makes a step's bounds exact on the device, from a verdict that the host has not seen.

Every verify has 1 + K rows, laid out for the highest position that its anchor may have. Here the
anchor moves down to where it is, with its rows, slots, extents and length. A row past the request's
limit becomes inert, as padding of a captured step is: position 0, no key, slot -1; where logits are
taken the last real row stands for it, so that nothing of it is judged. All rows of a request that
has just reached its limit are inert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.staging import send
from specmla.verify.accept import Acceptance
from specmla.verify.proposal import DraftProposal
from specmla.verify.sparse import DraftProbs
from specmla.verify.vocab import pick_probs, send_probs


class Anchors(NamedTuple):
    """Where requests stand after all steps under way, on the device.

    Attributes:
        tokens: [B] int64, the last committed token of each.
        positions: [B] int64, its index in the sequence.
    """

    tokens: Tensor
    positions: Tensor


class DraftedRows(NamedTuple):
    """Tokens of all rows, and what is judged of the B requests, prompts last.

    token_ids [T] int64, drafts [B, K] int64, draft_probs [B, K, ...] or None.
    """

    token_ids: Tensor
    drafts: Tensor
    draft_probs: DraftProbs


class Settler:
    """Corrects one step's tables; nothing waits for the device.

    Args:
        before: decisions of the step under way, None if the host knows all.
        page_size: G.
        vocab_size: W.
    """

    def __init__(self, before: Acceptance | None, page_size: int, vocab_size: int) -> None:
        self.before, self.page_size, self.vocab_size = before, page_size, vocab_size
        self._emitted: Tensor | None = None
        self._room: Tensor | None = None

    def __call__(self, sent: dict[str, Tensor]) -> None:
        """Move anchors, rows, slots, extents and lengths down to the real ones, in place.

        `sent` has the tables of `MetadataBuilder.build` and, as "along.NAME", those of
        `late_arrays`; those of the verifies come first.
        """
        along = {name[6:]: t for name, t in sent.items() if name.startswith("along.")}
        if not len(along["source"]):
            return
        found = self.anchors(along)
        along["positions"][: len(found.positions)] = found.positions
        starts = sent["query_start"][:-1].long()
        along["tokens"].index_copy_(0, starts, found.tokens)
        # The last token that may be emitted gets no row, so an anchor there has none either.
        room = self._room = along["limit"] - 2 - found.positions
        request, place = along["row_request"], along["row_place"]
        ends = (found.positions + 1 + torch.minimum(along["num_drafts"], room)) * (room >= 0)
        sent["seq_lens"].copy_(ends)
        live = place <= room[request]
        positions = (found.positions[request] + place) * live
        sent["positions"][: len(place)] = positions
        sent["extent"].copy_((positions + 1) * live)
        cell = positions.div(self.page_size, rounding_mode="floor")
        page = sent["table"].flatten()[request * sent["table"].shape[1] + cell]
        slots = (page - cell) * self.page_size + positions
        sent["slots"][: len(place)] = slots.masked_fill(~live, -1)
        last = room.clamp(min=0)[request]
        along["logit_rows"][: len(place)] = starts[request] + torch.minimum(place, last)

    def anchors(self, along: Mapping[str, Tensor]) -> Anchors:
        """Give the real anchors of "tokens" (one each) or the bounds in "positions"."""
        source, behind = along["source"], along["behind"]
        positions, tokens = along["positions"][: len(source)], along["anchors"]
        if self.before is None:
            self._emitted = torch.zeros_like(source)
            return Anchors(tokens, positions)
        at, is_late = source.clamp(min=0), source >= 0
        # Of a flagged row anything may come; it must only stay within what was reserved.
        accepted = torch.minimum(self.before.num_accepted[at].clamp(min=0), behind)
        decided = self.before.next_token[at].clamp(0, self.vocab_size - 1)
        self._emitted = (accepted + 1) * is_late
        return Anchors(torch.where(is_late, decided, tokens), positions - behind + accepted)

    def late_tokens(self, along: Mapping[str, Tensor], num_requests: int) -> Tensor | None:
        """Give the tokens [B, E] that the step under way emits of each request, then -1."""
        if self.before is None:
            return None
        source, tokens = along["source"], self.before.tokens
        late = tokens.new_full((num_requests, tokens.shape[1]), -1)
        known = (source < 0)[:, None]
        late[: len(source)] = tokens[source.clamp(min=0)].masked_fill(known, -1)
        return late

    def place_drafts(
        self, along: Mapping[str, Tensor], proposal: DraftProposal | None, num_requests: int
    ) -> DraftedRows:
        """Pick the drafts of the settled step and put them among its tokens."""
        tokens, count = along["tokens"], along["source"].shape[0]
        width = along["row_table"].shape[0] // num_requests - 1
        drafts = tokens.new_full((num_requests, width), -1)
        if proposal is None or not width or self._emitted is None or self._room is None:
            return DraftedRows(tokens, drafts, None)
        given = send(proposal.tokens, tokens.device)
        flat = torch.cat([given.reshape(-1), given.new_full((1,), -1)])
        place = torch.arange(width, device=tokens.device)
        skipped = self._emitted * along["skips"]
        cells = (along["first_draft"] + skipped)[:, None] + place
        most = torch.minimum(along["num_drafts"], self._room)[:, None]
        made = (place < most) & (cells < along["end_draft"][:, None])
        cells = cells.where(made, flat.shape[0] - 1)
        drafts[:count] = flat[cells]
        probs: DraftProbs = None
        if proposal.probs is not None:  # of what is no draft any row will do
            padded = torch.zeros_like(drafts)
            padded[:count] = cells.clamp(max=flat.shape[0] - 2)
            probs = pick_probs(send_probs(proposal.probs, tokens.device, self.vocab_size), padded)
        request, row = along["row_request"], along["row_place"]
        # An id outside the vocabulary is refused by the rule; the look-up must survive it.
        safe = drafts.clamp(0, self.vocab_size - 1)[request, (row - 1).clamp(min=0)]
        tokens[: len(row)] = torch.where(row > 0, safe, tokens[: len(row)])
        return DraftedRows(tokens, drafts, probs)
