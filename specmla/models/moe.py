"""Dense and expert MLPs of DeepSeek-V2 (arXiv 2405.04434, 2.2) and V3 (arXiv 2412.19437, 2.1.2).

Plain torch, for correctness: the loop over the experts that were hit asks the device which those
are, once a layer. `specmla.models.grouped_experts` has the kernel that does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specmla.config import integer_problems
from specmla.errors import require
from specmla.row_local import Linear, multiply, sum_values, sum_weighted

TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SCORING_FUNCS = ("softmax", "sigmoid")


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Experts and their routing, under the checkpoint's names.

    Attributes:
        n_routed_experts: experts to choose from.
        num_experts_per_tok: experts chosen for a token.
        moe_intermediate_size: width of one expert.
        n_shared_experts: experts that every token takes, as one MLP of that many widths.
        first_k_dense_replace: the first layers, which are dense.
        moe_layer_freq: of the later layers, every such one has experts.
        topk_method: `greedy` and `group_limited_greedy` (V2), `noaux_tc` (V3: a correction bias
            takes part in the choice, not in the weight).
        scoring_func: softmax (V2) or sigmoid (V3).
        n_group, topk_group: groups of experts, and how many of them are open to a token.
        norm_topk_prob: divide the chosen weights by their sum.
        routed_scaling_factor: multiplies the weights.
    """

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    topk_method: str = "greedy"
    scoring_func: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        reasons = integer_problems(
            self, 1, "n_routed_experts", "moe_intermediate_size", "moe_layer_freq"
        )
        reasons += integer_problems(self, 1, "num_experts_per_tok", "n_group", "topk_group")
        reasons += integer_problems(self, 0, "n_shared_experts", "first_k_dense_replace")
        for name, accepted in (("topk_method", TOPK_METHODS), ("scoring_func", SCORING_FUNCS)):
            if getattr(self, name) not in accepted:
                reasons.append(f"{name} is {getattr(self, name)!r}, accepted are {list(accepted)}")
        if self.norm_topk_prob and self.topk_method != "noaux_tc":
            reasons.append(
                f"norm_topk_prob is true with topk_method {self.topk_method!r}, accepted is false "
                "(published implementations disagree on the scaling)"
            )
        require(reasons or self._group_problems(), "MoEConfig")

    def _group_problems(self) -> list[str]:
        grouped = self.topk_method != "greedy"
        groups, open_groups = (self.n_group, self.topk_group) if grouped else (1, 1)
        if self.n_routed_experts % groups:
            return [
                f"n_group is {groups}, accepted are divisors of {self.n_routed_experts} experts"
            ]
        size, reasons = self.n_routed_experts // groups, []
        if open_groups > groups:
            reasons.append(f"topk_group is {open_groups}, accepted are 1 to n_group ({groups})")
        if self.num_experts_per_tok > open_groups * size:
            reasons.append(
                f"num_experts_per_tok is {self.num_experts_per_tok}, accepted are 1 to "
                f"{open_groups * size} (the experts of the open groups)"
            )
        if self.topk_method == "noaux_tc" and size < 2:
            reasons.append(f"n_group is {groups}, noaux_tc needs groups of two experts or more")
        return reasons

    def is_moe_layer(self, layer_id: int) -> bool:
        """Tell whether decoder layer `layer_id` has experts."""
        return layer_id >= self.first_k_dense_replace and layer_id % self.moe_layer_freq == 0


class DeepseekMLP(nn.Module):
    """down(silu(gate x) * up x), over the last dimension."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D]`."""
        gated = nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        out: Tensor = self.down_proj(gated)
        return out


class DeepseekRouter(nn.Module):
    """Chooses experts per token, in float32 or wider.

    Attributes:
        batch_invariant: whether a token's experts, their order (of equal scores the lowest index
            comes first) and the bits of their weights depend on its own row alone.
    """

    e_score_correction_bias: Tensor
    batch_invariant = False

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, hidden_size))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)
        if config.topk_method == "noaux_tc":
            self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Give weights and ids, each `[T, num_experts_per_tok]`, for rows `[T, D]`."""
        config = self.config
        scores = self._scores(hidden)
        chosen = self._best(self._open(scores), config.num_experts_per_tok)
        weights = scores.gather(-1, chosen)
        if config.norm_topk_prob:
            own = self.batch_invariant
            total = sum_values(weights) if own else weights.sum(-1, keepdim=True)
            weights = weights / (total + 1e-20)
        return weights * config.routed_scaling_factor, chosen

    def _scores(self, hidden: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        rows, weight = hidden.to(wide), self.weight.to(wide)
        is_softmax = self.config.scoring_func == "softmax"
        if not self.batch_invariant:
            logits = nn.functional.linear(rows, weight)
            return logits.softmax(-1) if is_softmax else logits.sigmoid()
        logits = multiply(rows, weight)
        if not is_softmax:
            return 1 / (1 + (-logits).exp())
        raised = (logits - logits.amax(-1, keepdim=True)).exp()
        return raised / sum_values(raised)

    def _best(self, scores: Tensor, count: int) -> Tensor:
        """Give the indices of the largest scores, best first."""
        if self.batch_invariant:
            # Which of equal scores `topk` takes is its own affair, and may change with the shape.
            return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        return scores.topk(count, dim=-1).indices

    def _open(self, scores: Tensor) -> Tensor:
        """Give the scores to choose by; experts of closed groups get -inf."""
        config = self.config
        if config.topk_method == "greedy":
            return scores
        if config.topk_method == "noaux_tc":
            scores = scores + self.e_score_correction_bias
        grouped = scores.unflatten(-1, (config.n_group, -1))
        if config.topk_method == "noaux_tc":
            strength = grouped.topk(2, dim=-1).values.sum(-1)  # of two, in any order the same
        else:
            strength = grouped.amax(-1)
        best = self._best(strength, config.topk_group)
        closed = torch.ones_like(strength, dtype=torch.bool).scatter(-1, best, False)
        masked: Tensor = grouped.masked_fill(closed.unsqueeze(-1), float("-inf"))
        return masked.flatten(-2)


class DeepseekMoE(nn.Module):
    """Routed experts, weighted and summed per token, plus the shared ones.

    Attributes:
        grouped: runs the routed experts instead of the loop, see `group_experts`; or None.
        batch_invariant: whether the bits of a row of the result depend on that row alone; those of
            the two forms differ.
    """

    grouped: Callable[..., Tensor] | None = None
    batch_invariant = False

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate = DeepseekRouter(hidden_size, config)
        self.experts = nn.ModuleList(
            DeepseekMLP(hidden_size, config.moe_intermediate_size)
            for _ in range(config.n_routed_experts)
        )
        self.shared_experts: DeepseekMLP | None = None
        if config.n_shared_experts:
            width = config.moe_intermediate_size * config.n_shared_experts
            self.shared_experts = DeepseekMLP(hidden_size, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D]`."""
        rows = hidden.flatten(0, -2)
        weights, chosen = self.gate(rows)
        run, own = self.grouped or self._routed, self.batch_invariant
        out = run(rows, weights, chosen, batch_invariant=own).view_as(hidden)
        return out if self.shared_experts is None else out + self.shared_experts(hidden)

    def _routed(
        self, rows: Tensor, weights: Tensor, chosen: Tensor, *, batch_invariant: bool = False
    ) -> Tensor:
        """Sum in the order of choice, each pair in a row of its own: the result is repeatable."""
        flat, per_token = chosen.flatten(), chosen.shape[1]
        hits = torch.bincount(flat, minlength=len(self.experts)).tolist()
        order = flat.argsort(stable=True)
        pairs = [rows[:0]]
        for expert, group in zip(self.experts, order.split(hits), strict=True):
            if group.shape[0]:
                pairs.append(expert(rows[group // per_token]))
        by_token: Tensor = torch.cat(pairs)[order.argsort()].unflatten(0, (-1, per_token))
        return sum_pairs(by_token, weights, batch_invariant=batch_invariant)


def sum_pairs(by_token: Tensor, weights: Tensor, *, batch_invariant: bool) -> Tensor:
    """Sum `[T, k, D]` over k by weights `[T, k]`, in float32 or wider, to `[T, D]`."""
    if batch_invariant:
        return sum_weighted(by_token, weights)
    summed: Tensor = (by_token * weights.unsqueeze(-1)).sum(1)
    return summed.to(by_token.dtype)
