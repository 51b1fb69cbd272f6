"""Routing and experts against loops over tokens, and what a routing accepts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.errors import ArgumentError
from specmla.models.moe import DeepseekMLP, DeepseekMoE, DeepseekRouter, MoEConfig

V2 = MoEConfig(8, 3, 5, n_shared_experts=2)
ROUTINGS = {
    "greedy": V2,
    "grouped": MoEConfig(
        8, 3, 5, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=2.5,
    ),
    "noaux": MoEConfig(
        8, 3, 5, n_shared_experts=1, topk_method="noaux_tc", scoring_func="sigmoid", n_group=4,
        topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
    ),
    "noaux-raw": MoEConfig(8, 2, 5, topk_method="noaux_tc", scoring_func="sigmoid", n_group=2),
}  # fmt: skip


def make_moe(config: MoEConfig) -> DeepseekMoE:
    torch.manual_seed(3)
    moe = DeepseekMoE(6, config).double()
    if config.topk_method == "noaux_tc":
        moe.gate.e_score_correction_bias.normal_(std=0.5)
    return moe


def route_token(router: DeepseekRouter, x: Tensor) -> dict[int, float]:
    """Weights by expert, with sorting in place of tensor tricks."""
    c = router.config
    logits = [float(row @ x) for row in router.weight]
    if c.scoring_func == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        scores = [math.exp(v) / sum(math.exp(u) for u in logits) for v in logits]
    noaux = c.topk_method == "noaux_tc"
    bias = router.e_score_correction_bias.tolist() if noaux else [0.0] * len(scores)
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(scores) // c.n_group
    if c.topk_method == "greedy":
        allowed = list(range(len(scores)))
    else:
        groups = [range(g * size, (g + 1) * size) for g in range(c.n_group)]
        strength = [
            sum(sorted((choice[e] for e in g), reverse=True)[: 2 if noaux else 1]) for g in groups
        ]
        best = sorted(range(c.n_group), key=lambda g: -strength[g])[: c.topk_group]
        allowed = [e for g in best for e in groups[g]]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: c.num_experts_per_tok]
    total = sum(scores[e] for e in chosen) if c.norm_topk_prob else 1.0
    return {e: scores[e] / total * c.routed_scaling_factor for e in chosen}


@pytest.mark.parametrize("name", ROUTINGS)
@torch.no_grad()
def test_routing_and_experts_equal_loops(name: str) -> None:
    moe = make_moe(ROUTINGS[name])
    hidden = torch.randn(2, 20, 6).double()
    got = moe(hidden)
    for x, out in zip(hidden.flatten(0, 1), got.flatten(0, 1), strict=True):
        weights = route_token(moe.gate, x)
        want = sum(w * moe.experts[e](x) for e, w in weights.items())
        if moe.shared_experts is not None:
            want = want + moe.shared_experts(x)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_token_does_not_depend_on_the_others() -> None:
    moe, hidden = make_moe(ROUTINGS["noaux"]), torch.randn(9, 6).double()
    together = moe(hidden)
    for i in range(9):
        torch.testing.assert_close(moe(hidden[i : i + 1])[0], together[i], rtol=0, atol=1e-12)
    assert moe(hidden[:0]).shape == (0, 6)


@torch.no_grad()
def test_router_decides_in_float32_for_half_types() -> None:
    router = make_moe(ROUTINGS["noaux"]).gate.float()
    hidden = torch.randn(50, 6).bfloat16()
    weights, chosen = router(hidden)
    want_weights, want_chosen = router(hidden.float())
    assert weights.dtype == torch.float32
    assert torch.equal(chosen, want_chosen)
    assert torch.equal(weights, want_weights)


def test_mlp_is_gated_silu() -> None:
    mlp, x = DeepseekMLP(6, 5).double(), torch.randn(6).double()
    gate, up = mlp.gate_proj.weight @ x, mlp.up_proj.weight @ x
    want = mlp.down_proj.weight @ (gate / (1 + (-gate).exp()) * up)
    torch.testing.assert_close(mlp(x), want, rtol=0, atol=1e-12)


def test_which_layers_have_experts() -> None:
    config = MoEConfig(8, 2, 5, first_k_dense_replace=3, moe_layer_freq=2)
    assert [i for i in range(9) if config.is_moe_layer(i)] == [4, 6, 8]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_routed_experts": 0}, "n_routed_experts is 0"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok is 9, accepted are 1 to 8"),
        ({"topk_method": "best"}, "topk_method is 'best', accepted are"),
        ({"scoring_func": "relu"}, "scoring_func is 'relu', accepted are"),
        ({"norm_topk_prob": True}, "norm_topk_prob is true with topk_method 'greedy'"),
        ({"topk_method": "noaux_tc", "n_group": 3}, "n_group is 3, accepted are divisors of 8"),
        ({"topk_method": "noaux_tc", "n_group": 8}, "noaux_tc needs groups of two"),
        (
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1},
            "num_experts_per_tok is 3, accepted are 1 to 2",
        ),
        (
            {"topk_method": "noaux_tc", "n_group": 2, "topk_group": 3},
            r"topk_group is 3, accepted are 1 to n_group \(2\)",
        ),
        (
            {"moe_layer_freq": 0, "n_shared_experts": -1},
            "moe_layer_freq is 0.*n_shared_experts is -1",
        ),
    ],
)
def test_routing_that_cannot_be(changed: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 5,
    }
    with pytest.raises(ArgumentError, match=message):
        MoEConfig(**(fields | changed))
