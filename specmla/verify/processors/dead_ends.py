"""End a request's tokens before a row that allows none.

A grammar allows nothing after its end, and drafts may lead there. Plain decoding has no row there
in that step: it emits the token and asks again in the next one, if the request goes on. So the
draft before such a row is the last token of the step, in place of a correction or bonus token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.verify.accept import Acceptance
from specmla.verify.processors.tables import Masks
from specmla.verify.tree_rules import TreePath


def cut_at_dead_ends(
    found: Acceptance, path: TreePath | None, drafts: Tensor, masks: Masks | None
) -> tuple[Acceptance, TreePath | None]:
    """Give what was decided without what comes from a dead end; requests that met none stay.

    Args:
        found: of the step, decided as if dead ends allowed all.
        path: of its accepted drafts, None in a step of chains.
        drafts: [B, K] int64.
        masks: of the step.
    """
    b, k = drafts.shape
    if masks is None or not k:
        return found, path
    place = torch.arange(k, device=drafts.device)
    rows = path.rows if path is not None else _chain_rows(found.num_accepted, k)
    dead = torch.zeros(b, k + 1, dtype=torch.bool, device=drafts.device)
    dead = dead.index_copy(0, masks.request, masks.dead)
    met = dead.gather(1, rows.clamp(min=0)) & (rows > 0)
    first = torch.where(met, place, k).amin(1)  # drafts before the one that leads there
    stuck = first < k
    last = rows.gather(1, first.clamp(max=k - 1)[:, None]) - 1
    behind = torch.arange(k + 1, device=drafts.device) > first[:, None]
    cut = Acceptance(
        torch.where(stuck, first, found.num_accepted),
        torch.where(stuck, drafts.gather(1, last.clamp(min=0))[:, 0], found.next_token),
        found.tokens.masked_fill(stuck[:, None] & behind, -1),
        found.flagged & ~stuck,
    )
    if path is None:
        return cut, None
    kept = rows.masked_fill(place >= cut.num_accepted[:, None], -1)
    end = torch.nn.functional.pad(kept, (1, 0)).gather(1, cut.num_accepted[:, None])[:, 0]
    return cut, TreePath(kept, cut.num_accepted, torch.where(stuck, end, path.end))


def _chain_rows(num_accepted: Tensor, num_drafts: int) -> Tensor:
    """Give the rows [B, K] of accepted drafts, then -1."""
    row = torch.arange(1, num_drafts + 1, device=num_accepted.device)
    return torch.where(row <= num_accepted[:, None], row, -1)
