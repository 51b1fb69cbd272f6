"""From the logits of a planned step to decisions on the host: probabilities, rule, draw, copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.cache.layout import DTYPES
from specmla.errors import require
from specmla.verify.accept import Acceptance, decide, find_rule, greedy, step_numbers
from specmla.verify.fused import DTYPES as FUSED_DTYPES
from specmla.verify.fused import decide_fused, decide_fused_tree, fused_logprobs
from specmla.verify.logprobs import emitted_logprobs, raw_logprobs, split_logprobs
from specmla.verify.plan import StepPlan, rows_of_requests
from specmla.verify.processors.attach import process_step
from specmla.verify.processors.dead_ends import cut_at_dead_ends
from specmla.verify.rules.terms import Rule, num_drafts, term_problems
from specmla.verify.sampling import SamplingParams, processed_probs, row_top
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
        logprobs: of the tokens, empty where no request of the step asks for any.
    """

    tokens: list[int]
    num_drafts: int
    num_accepted: int
    flagged: bool
    path: tuple[int, ...] | None = None
    logprobs: Sequence[float] = ()

    def logprobs_of(self, count: int, params: SamplingParams) -> tuple[float, ...] | None:
        """Give those of the first `count` tokens, if `params` asks for any."""
        return None if params.logprobs is None else tuple(self.logprobs[:count])


@dataclass(frozen=True)
class Verdict:
    """Decisions on their way to the host.

    Attributes:
        plan: the step that was judged.
        acceptance: on the device, for whoever goes on there.
        host: [B, K + 4] int64: emitted tokens (-1 after them), drafts, accepted ones, flag; with
            trees [B, 2 K + 4], the path's rows after the tokens. K + 1 columns more at the end if
            log-probabilities are asked for, float64 by their bits.
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
        words, reals = split_logprobs(self.plan.sampling, self.host, self.acceptance)
        return [
            Decision(
                row[: row[-2] + 1],
                row[-3],
                row[-2],
                bool(row[-1]),
                None if k is None else tuple(row[k + 1 : k + 1 + row[-2]]),
                real[: row[-2] + 1],
            )
            for row, real in zip(words, reals, strict=True)
        ]


def logits_problems(
    plan: StepPlan, logits: Tensor, vocab_size: int, impl: str = "torch"
) -> list[str]:
    """List why `logits` can't be those of the step, or a plan is not judged like this."""
    found, shape = [], [plan.logit_rows.shape[0], vocab_size]
    places, requests = plan.row_table.shape[0], len(plan.sampling.temperature)
    looks_at_requests = plan.sampling.has_processors or not plan.sampling.all_greedy
    if places != requests and looks_at_requests:
        found.append(
            f"plan is laid out for a captured step of {places} requests and has {requests}, "
            "accepted are plans of VerifyStep.plan: CapturedStep.verify takes this one"
        )
    if list(logits.shape) != shape:
        found.append(f"logits has shape {tuple(logits.shape)}, accepted is [R, W] = {shape}")
    dtypes = DTYPES if impl == "torch" else FUSED_DTYPES
    if logits.dtype not in dtypes:
        found.append(
            f"logits has dtype {logits.dtype}, accepted with acceptance={impl!r} are "
            f"{[str(d) for d in dtypes]}"
        )
    if logits.device != plan.logit_rows.device:
        found.append(f"logits is on {logits.device}, accepted is {plan.logit_rows.device}")
    return found


def judge(plan: StepPlan, logits: Tensor, rule: str | Rule, impl: str = "torch") -> Verdict:
    """Accept or reject every draft of the step; greedy requests alone need no probabilities."""
    return send_verdict(plan, *decide_step(plan, logits, rule, impl))


def decide_step(
    plan: StepPlan, logits: Tensor, rule: str | Rule, impl: str = "torch"
) -> tuple[Acceptance, Tensor]:
    """Give the decisions on the device, the second time packed as `Verdict.host`.

    Nothing is read back, and nothing of the plan's host side is looked at but the sampling flags:
    it can be captured.
    """
    is_fused = impl == "triton" and not plan.sampling.all_greedy
    if is_fused and plan.tree is None:
        return _decide_fused(plan, logits, find_rule(rule))
    decided = _decide_fused_tree if is_fused else _decide
    found = decided(*process_step(plan, logits), find_rule(rule))
    acceptance, path = _cut(plan, found.acceptance, found.path)
    parts, judged, flagged = [acceptance.tokens], num_drafts(plan.drafts), found.flagged
    if plan.tree is not None and path is not None:
        parts.append(path.rows)
        judged = num_judged(plan.drafts, plan.tree)
    if not is_fused:  # the kernels look at no others
        flagged = flagged & _reachable(plan, judged)
    unusable = (flagged.any(dim=1) | acceptance.flagged).long()
    parts.append(torch.stack([judged, acceptance.num_accepted, unusable], dim=1))
    if plan.sampling.raw_logprobs is not None:
        raw = rows_of_requests(plan, logits)
        rows = None if path is None else path.rows
        drawn = found.logprobs(acceptance, path) if found.logprobs and path is not None else None
        real = emitted_logprobs(raw, found.probs, plan.sampling, acceptance.tokens, rows, drawn)
        parts.append(real.view(torch.int64))
    return acceptance, torch.cat(parts, dim=1)


def _reachable(plan: StepPlan, judged: Tensor) -> Tensor:
    """Tell the rows [B, K + 1] that may be reached: none stands behind a draft that is missing."""
    if plan.tree is not None:
        return torch.nn.functional.pad(plan.drafts >= 0, (1, 0), value=True)
    place = torch.arange(plan.row_table.shape[1], device=judged.device)
    return place <= judged[:, None]


def _decide_fused(plan: StepPlan, logits: Tensor, rule: Rule) -> tuple[Acceptance, Tensor]:
    found = decide_fused(*process_step(plan, logits), rule)
    cut, _ = _cut(plan, found.acceptance)
    if cut is not found.acceptance:
        judged, flag = found.packed[:, -3:-2], found.packed[:, -1:]
        packed = torch.cat([cut.tokens, judged, cut.num_accepted[:, None], flag], dim=1)
        found = found._replace(acceptance=cut, packed=packed)
    if plan.sampling.raw_logprobs is None:
        return found.acceptance, found.packed
    place = torch.arange(plan.row_table.shape[1], device=logits.device)
    tokens, is_raw = found.acceptance.tokens, plan.sampling.raw_logprobs.bool()[:, None]
    raw = raw_logprobs(rows_of_requests(plan, logits), place.expand_as(tokens), tokens)
    real = torch.where(is_raw, raw, fused_logprobs(found))
    return found.acceptance, torch.cat([found.packed, real.view(torch.int64)], dim=1)


def _cut(
    plan: StepPlan, acceptance: Acceptance, path: TreePath | None = None
) -> tuple[Acceptance, TreePath | None]:
    tables = plan.sampling.processors
    if tables is None:
        return acceptance, path
    return cut_at_dead_ends(acceptance, path, plan.drafts, tables.masks)


class _Decided(NamedTuple):
    """Decisions on the device, the path of trees, flags [B, K + 1] and what tokens came from, or
    what gives their log-probabilities."""

    acceptance: Acceptance
    path: TreePath | None
    flagged: Tensor
    probs: Tensor | None
    logprobs: Callable[[Acceptance, TreePath], Tensor] | None = None


def _decide_fused_tree(plan: StepPlan, logits: Tensor, rule: Rule) -> _Decided:
    acceptance, path, logprobs = decide_fused_tree(plan, logits, rule)
    return _Decided(acceptance, path, acceptance.flagged[:, None], None, logprobs)


def _decide(plan: StepPlan, logits: Tensor, rule: Rule) -> _Decided:
    if plan.sampling.all_greedy:
        top = row_top(logits)
        flagged = top.flagged[plan.row_table]
        target = top.token[plan.row_table]
        if plan.tree is not None:
            return _Decided(*follow(target, plan.drafts, plan.tree), flagged, None)
        return _Decided(greedy(target, plan.drafts), None, flagged, None)
    probs, flagged = processed_probs(rows_of_requests(plan, logits), plan.sampling)
    seeds, k = plan.sampling.seeds, plan.drafts.shape[1]
    if plan.tree is not None:
        step = TreeStep(plan.tree, probs, plan.drafts, plan.draft_probs)
        return _Decided(*decide_trees(rule, step, seeds, plan.positions), flagged, probs)
    terms = rule(probs, plan.drafts, plan.draft_probs)
    require(term_problems(rule, terms, probs, plan.drafts), "VerifyStep.verify")
    u = step_numbers(terms.ending, seeds, plan.positions, k)
    return _Decided(decide(terms, plan.drafts, u.accept, u.correction), None, flagged, probs)


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
