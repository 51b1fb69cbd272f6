"""From the logits of a planned step to decisions on the host: probabilities, rule, draw, copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.cache.layout import DTYPES
from specmla.verify.accept import Acceptance, decide, greedy, step_numbers
from specmla.verify.plan import StepPlan
from specmla.verify.rules.terms import Rule, num_drafts
from specmla.verify.sampling import processed_probs, row_top
from specmla.verify.tree import TreeTables
from specmla.verify.tree_judge import TreeStep, decide_trees
from specmla.verify.tree_rules import TreePath, follow, num_judged


class Decision(NamedTuple):
    """What was decided for one request.

    Attributes:
        tokens: the accepted drafts, then the correction or bonus token.
        num_drafts: drafts judged, those before the first -1.
        num_accepted: drafts accepted.
        flagged: its logits have no distribution; nothing of this may be used.
        path: rows of the accepted drafts in a step with trees, the anchor's being 0; else None.
    """

    tokens: list[int]
    num_drafts: int
    num_accepted: int
    flagged: bool
    path: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Verdict:
    """Decisions on their way to the host.

    Attributes:
        plan: the step that was judged.
        acceptance: on the device, for whoever goes on there.
        host: [B, K + 4] int64: emitted tokens (-1 after them), drafts, accepted ones, flag; with
            trees [B, 2 K + 4], the path's rows after the tokens.
        event: recorded after the copy on CUDA, else None.
    """

    plan: StepPlan
    acceptance: Acceptance
    host: Tensor
    event: torch.cuda.Event | None

    def wait(self) -> list[Decision]:
        """Await the copy and read it."""
        if self.event is not None:
            self.event.synchronize()
        k = None if self.plan.tree is None else self.plan.drafts.shape[1]
        return [
            Decision(
                row[: row[-2] + 1],
                row[-3],
                row[-2],
                bool(row[-1]),
                None if k is None else tuple(row[k + 1 : k + 1 + row[-2]]),
            )
            for row in self.host.tolist()
        ]


def logits_problems(plan: StepPlan, logits: Tensor, vocab_size: int) -> list[str]:
    """List why `logits` can't be those of the step."""
    found, shape = [], [plan.logit_rows.shape[0], vocab_size]
    if list(logits.shape) != shape:
        found.append(f"logits has shape {tuple(logits.shape)}, accepted is [R, W] = {shape}")
    if logits.dtype not in DTYPES:
        found.append(f"logits has dtype {logits.dtype}, accepted are {[str(d) for d in DTYPES]}")
    if logits.device != plan.logit_rows.device:
        found.append(f"logits is on {logits.device}, accepted is {plan.logit_rows.device}")
    return found


def judge(plan: StepPlan, logits: Tensor, rule: Rule) -> Verdict:
    """Accept or reject every draft of the step; greedy requests alone need no probabilities."""
    return send_verdict(plan, *decide_step(plan, logits, rule))


def decide_step(plan: StepPlan, logits: Tensor, rule: Rule) -> tuple[Acceptance, Tensor]:
    """Give the decisions on the device, the second time packed as `Verdict.host`.

    Nothing is read back, and nothing of the plan's host side is looked at but the sampling flags:
    it can be captured.
    """
    if plan.sampling.all_greedy:
        top = row_top(logits)
        flagged = top.flagged[plan.row_table]
        target = top.token[plan.row_table]
        if plan.tree is not None:
            return _pack_trees(plan, plan.tree, flagged, follow(target, plan.drafts, plan.tree))
        acceptance = greedy(target, plan.drafts)
    else:
        rows = processed_probs(_rows_of_requests(plan, logits), plan.sampling)
        flagged = rows.flagged
        seeds, k = plan.sampling.seeds, plan.drafts.shape[1]
        if plan.tree is not None:
            step = TreeStep(plan.tree, rows.probs, plan.drafts, plan.draft_probs)
            return _pack_trees(
                plan, plan.tree, flagged, decide_trees(rule, step, seeds, plan.positions)
            )
        terms = rule(rows.probs, plan.drafts, plan.draft_probs)
        u = step_numbers(terms.ending, seeds, plan.positions, k)
        acceptance = decide(terms, plan.drafts, u.accept, u.correction)
    return acceptance, _pack(acceptance, num_drafts(plan.drafts), flagged, acceptance.tokens)


def _pack_trees(
    plan: StepPlan, tree: TreeTables, flagged: Tensor, decided: tuple[Acceptance, TreePath]
) -> tuple[Acceptance, Tensor]:
    acceptance, path = decided
    tokens_and_rows = torch.cat([acceptance.tokens, path.rows], dim=1)
    return acceptance, _pack(acceptance, num_judged(plan.drafts, tree), flagged, tokens_and_rows)


def _pack(acceptance: Acceptance, judged: Tensor, flagged: Tensor, lead: Tensor) -> Tensor:
    unusable = (flagged.any(dim=1) | acceptance.flagged).long()
    tail = torch.stack([judged, acceptance.num_accepted, unusable], dim=1)
    return torch.cat([lead, tail], dim=1)


def _rows_of_requests(plan: StepPlan, logits: Tensor) -> Tensor:
    """Arrange logits [R, W] as [B, K + 1, W]; without repeated rows they stand so already."""
    if len(logits) == plan.row_table.numel():
        return logits.view(*plan.row_table.shape, -1)
    return logits[plan.row_table]


def send_verdict(plan: StepPlan, acceptance: Acceptance, packed: Tensor) -> Verdict:
    """Start the copy to the host, of as many rows as the plan has requests."""
    packed = packed[: len(plan.requests)]
    if packed.device.type != "cuda":
        return Verdict(plan, acceptance, packed, None)
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(packed.device))
    return Verdict(plan, acceptance, host, event)
