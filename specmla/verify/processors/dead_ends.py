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


def cut_at_dead_ends(found: Acceptance, drafts: Tensor, masks: Masks | None) -> Acceptance:
    """Give what was decided without what comes from a dead end; requests in reach of none stay.

    Args:
        found: of the step, decided as if dead ends allowed all.
        drafts: [B, K] int64, chains where a request has a constraint.
        masks: of the step.
    """
    b, k = drafts.shape
    if masks is None or not k:
        return found
    none = torch.full((b,), k + 1, dtype=torch.int64, device=drafts.device)
    ends = none.index_copy(0, masks.request, masks.ends)
    stuck = found.num_accepted >= ends
    last = drafts.gather(1, (ends - 1).clamp(max=k - 1)[:, None])[:, 0]
    behind = torch.arange(k + 1, device=drafts.device) >= ends[:, None]
    return Acceptance(
        torch.where(stuck, ends - 1, found.num_accepted),
        torch.where(stuck, last, found.next_token),
        found.tokens.masked_fill(stuck[:, None] & behind, -1),
        found.flagged & ~stuck,
    )


def cut_path(path: TreePath, cut: Acceptance) -> TreePath:
    """Shorten the paths of a step to what `cut_at_dead_ends` left; only chains were cut."""
    place = torch.arange(path.rows.shape[1], device=path.rows.device)
    count = cut.num_accepted
    rows = path.rows.masked_fill(place >= count[:, None], -1)
    end = torch.where(count < path.num_accepted, count, path.end)
    return TreePath(rows, count, end)
