"""Give a planned step what its processors need, and its logits through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from specmla.verify.plan import PlannedRequest, StepPlan, rows_of_requests
from specmla.verify.processors.apply import RowHistory, apply_processors, chain_history
from specmla.verify.processors.constraint import Drafted
from specmla.verify.processors.history import HeldHistory
from specmla.verify.processors.tables import any_processor, build_tables
from specmla.verify.proposal import DraftProposal
from specmla.verify.sampling import SamplingBatch


def with_processors(
    sampling: SamplingBatch,
    planned: Sequence[PlannedRequest],
    proposal: DraftProposal | None,
    vocab_size: int,
    history: HeldHistory | None = None,
) -> SamplingBatch:
    """Give `sampling` with the tables of the step, or itself where no request needs any.

    Drafts of requests with a constraint are read on the host. If they lie on a GPU that waits for
    the drafter: masks can't be made of tokens that nobody knows yet. A node of a tree is masked by
    its own path.

    Args:
        sampling: parameters of the planned requests.
        planned: requests of the step, in its order.
        proposal: their drafts.
        vocab_size: W of the target.
        history: token counts of earlier steps; None: there are none on the device yet.

    Raises:
        ArgumentError: a constraint that gives no masks.
    """
    states = [r.state for r in planned]
    if not any_processor(states):
        return sampling
    nothing = Drafted((), ())
    drafts = [nothing if r.state.constraint is None else _drafted(r, proposal) for r in planned]
    num_rows = 1 + max(r.num_drafts for r in planned)
    device = sampling.seeds.device
    tables = build_tables(states, drafts, num_rows, vocab_size, device, history)
    return dataclasses.replace(sampling, has_processors=True, processors=tables)


def process_step(plan: StepPlan, logits: Tensor) -> tuple[StepPlan, Tensor]:
    """Run a step's processors: logits [R, W] as the model gave them, or a row for each cell of the
    plan's row table, and the plan that says so."""
    tables = plan.sampling.processors
    if tables is None:
        return plan, logits
    rows = apply_processors(rows_of_requests(plan, logits), tables, _history(plan))
    table = torch.arange(plan.row_table.numel(), device=logits.device).view_as(plan.row_table)
    return dataclasses.replace(plan, row_table=table), rows.flatten(0, 1)


def _history(plan: StepPlan) -> RowHistory:
    if plan.tree is None:
        chain = chain_history(plan.drafts)
        return chain if plan.late is None else _behind(plan.late, chain)
    words, k = plan.tree.words, plan.drafts.shape[1]
    bit = torch.arange(1, k + 1, device=words.device)
    sees = ((words[:, :, None] >> bit) & 1).bool()
    pad = torch.nn.functional.pad
    return RowHistory(plan.drafts, pad(sees, (0, 0, 1, 0)), pad(plan.tree.depths, (1, 0)))


def _behind(late: Tensor, history: RowHistory) -> RowHistory:
    """Put tokens [B, E] that the step under way emits before the drafts, in sight of all rows."""
    count, rows = len(late), history.sees.shape[1]
    made = (late >= 0)[:, None].expand(-1, rows, -1)
    sees = torch.cat([made, history.sees.expand(count, -1, -1)], dim=2)
    depth = history.depth + made.sum(2)
    return RowHistory(torch.cat([late, history.drafts], dim=1), sees, depth)


def _drafted(request: PlannedRequest, proposal: DraftProposal | None) -> Drafted:
    """Read what is verified of a request."""
    if proposal is None or not request.num_drafts:
        return Drafted((), ())
    start, tree, flat = request.proposal_offset, request.tree, proposal.tokens.reshape(-1)
    if tree is None:
        return Drafted.chain(flat[start : start + request.num_drafts].tolist())
    made = flat[start : start + 1 + max(tree.nodes)].tolist()  # those not kept lie among them
    return Drafted([made[place] for place in tree.nodes], tree.parents)
