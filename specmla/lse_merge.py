"""Attention over two disjoint sets of keys, merged by their LSE."""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.errors import ArgumentError


def merged_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine two states into attention over the union of their keys.

    Weights are exp(lse) (natural log). An empty state (LSE -inf) changes no bit of the other one,
    whatever its output holds, NaN included; two empty states give the empty state. Computed in
    float32, or in float64 if an input is.

    Args:
        out_a: [T, H, D]. lse_a: [T, H]. out_b, lse_b: likewise.

    Returns:
        Output [T, H, D] in the dtype of `out_a`, and LSE [T, H].

    Raises:
        ArgumentError: shapes that do not agree.
    """
    if not (out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:-1]):
        raise ArgumentError(
            f"merge_attention_states: out_a {tuple(out_a.shape)}, lse_a {tuple(lse_a.shape)}, "
            f"out_b {tuple(out_b.shape)}, lse_b {tuple(lse_b.shape)}; accepted are [T, H, D] twice "
            "and [T, H] twice"
        )
    dtype = torch.promote_types(torch.promote_types(out_a.dtype, out_b.dtype), torch.float32)
    top = torch.maximum(lse_a, lse_b)
    # Two empty states: -inf - (-inf) would be NaN.
    safe = top.masked_fill(top == -torch.inf, 0.0)
    weight_a, weight_b = (lse_a - safe).exp(), (lse_b - safe).exp()
    total = weight_a + weight_b
    share_a, share_b = ((w / total).to(dtype)[..., None] for w in (weight_a, weight_b))
    blend = (share_a * out_a.to(dtype) + share_b * out_b.to(dtype)).to(out_a.dtype)
    empty_a, empty_b = (lse[..., None] == -torch.inf for lse in (lse_a, lse_b))
    out = torch.where(empty_b, torch.where(empty_a, 0.0, out_a), torch.where(empty_a, out_b, blend))
    return out, safe.add(total.log())
