"""Acceptance by Triton kernels: a plan's tensors as they take them, and what they decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specmla.errors import require
from specmla.verify.accept import Acceptance, Rule
from specmla.verify.plan import StepPlan
from specmla.verify.rules.registry import LOSSLESS
from specmla.verify.tree_judge import chains_from
from specmla.verify.tree_rules import TreePath
from specmla.verify.vocab import dense_probs

if TYPE_CHECKING:
    from specmla.kernels.accept import Accepted, AcceptInputs, Filters

IMPLS = ("torch", "triton")
"""What decides a step: the pure rules in torch, or fused kernels."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Logits that the kernels take."""


def rule_name(rule: Rule) -> str | None:
    """Give the name by which the kernels know a rule, if they do."""
    return next((name for name, known in LOSSLESS.items() if known is rule), None)


def check_impl(impl: str, rule: Rule, device: torch.device) -> None:
    """Refuse what can't decide a step.

    The choice holds for all steps, so that a request's tokens do not depend on its batch mates
    through it. Steps in which all requests are greedy are decided in torch with either.

    Raises:
        ArgumentError: an unknown name, or one that can't serve the rule on the device.
    """
    known = rule_name(rule) is not None
    found = [] if impl in IMPLS else [f"acceptance is {impl!r}, accepted are {IMPLS}"]
    if impl == "triton" and not known:
        found.append(f"acceptance is 'triton' and rule {rule!r}, accepted are {sorted(LOSSLESS)}")
    if impl == "triton":
        from specmla.kernels.inputs import device_problems
        from specmla.kernels.prims import INTERPRETED

        found += device_problems(device, torch.float32, INTERPRETED)
    require(found, "acceptance")


class Fused(NamedTuple):
    """Decisions of a step and what its log-probabilities follow from.

    Attributes:
        acceptance: on the device.
        packed: [B, K + 4] int64, as `Verdict.host`.
        inputs, filters: what they were made from.
        rows: maximum and mass of each row.
    """

    acceptance: Acceptance
    packed: Tensor
    inputs: AcceptInputs
    filters: Filters
    rows: Accepted


def decide_fused(plan: StepPlan, logits: Tensor, rule: Rule) -> Fused:
    """Decide a step of chains by the kernels.

    Args:
        plan: of the step; without trees.
        logits: [R, W] of `DTYPES`, after all processors.
        rule: one that has a name.
    """
    from specmla.kernels.accept import fused_accept

    name = rule_name(rule)
    assert name is not None
    inputs, filters = _fused_inputs(plan, logits)
    got = fused_accept(inputs, filters, name)
    packed = got.packed
    acceptance = Acceptance(packed[:, -2], got.next_token, packed[:, :-3], packed[:, -1] != 0)
    return Fused(acceptance, packed, inputs, filters, got)


def _fused_inputs(plan: StepPlan, logits: Tensor) -> tuple[AcceptInputs, Filters]:
    from specmla.kernels.accept import AcceptInputs, Filters

    sampling, q = plan.sampling, plan.draft_probs
    if q is not None:
        q = dense_probs(q, logits.shape[1]).float().contiguous()
    min_p = sampling.min_p
    if min_p is None:  # read only where something is filtered
        min_p = torch.zeros_like(sampling.top_p) if sampling.any_filter else sampling.top_p
    inputs = AcceptInputs(
        logits.contiguous(), plan.row_table, plan.drafts, q, sampling.seeds, plan.positions
    )
    filters = Filters(
        sampling.temperature, sampling.top_k, sampling.top_p, min_p, sampling.any_filter
    )
    return inputs, filters


def decide_fused_tree(
    plan: StepPlan, logits: Tensor, rule: Rule
) -> tuple[Acceptance, TreePath, Callable[[Acceptance, TreePath], Tensor]]:
    """Decide a step with trees by the kernels.

    Args:
        plan: of the step.
        logits: [R, W] of `DTYPES`, after all processors.
        rule: one that has a name.

    Returns:
        Decisions, paths, and what gives log p [B, K+1] float64 of these under what they were drawn
        from.
    """
    from specmla.kernels.accept_tree import fused_accept_tree

    tree, name = plan.tree, rule_name(rule)
    assert tree is not None
    assert name is not None
    inputs, filters = _fused_inputs(plan, logits)
    got = fused_accept_tree(inputs, filters, (tree.parents, tree.ranks, tree.depths), name)
    acceptance = Acceptance(got.num_accepted, got.next_token, got.tokens, got.flagged != 0)
    path = TreePath(got.rows, got.num_accepted, got.end)
    if name == "block" and not all(tree.is_tree):
        acceptance, path = chains_from(
            decide_fused(plan, logits, rule).acceptance, acceptance, path, tree
        )

    def logprobs(decided: Acceptance, along: TreePath) -> Tensor:
        rows = torch.nn.functional.pad(along.rows, (1, 0)).clamp(min=0)
        table, row_max, row_mass = (
            part.gather(1, rows) for part in (inputs.table, got.row_max, got.row_mass)
        )
        tokens, temperature = decided.tokens, filters.temperature
        return _logprobs(inputs.logits, tokens, temperature, table, row_max, row_mass)

    return acceptance, path, logprobs


def fused_logprobs(found: Fused) -> Tensor:
    """Give log p [B, K+1] float64 of the emitted tokens under what they were drawn from."""
    rows = (found.inputs.table, found.rows.row_max, found.rows.row_mass)
    return _logprobs(found.inputs.logits, found.acceptance.tokens, found.filters.temperature, *rows)


def _logprobs(
    logits: Tensor,
    tokens: Tensor,
    temperature: Tensor,
    table: Tensor,
    row_max: Tensor,
    row_mass: Tensor,
) -> Tensor:
    """Give log p of tokens [B, K+1] in rows whose place, maximum and mass are given."""
    # A flagged row without a largest logit gives an id past them all; nobody reads its value.
    picked = logits[table, tokens.clamp(0, logits.shape[1] - 1)].float()
    temperature = temperature[:, None]
    raised = (picked - row_max) / temperature.clamp(min=1e-30)
    log_p = raised.double() - row_mass.double().log()
    return torch.where(temperature == 0, 0.0, log_p)
