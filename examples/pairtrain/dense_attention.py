"""MLA over whole sequences with any mask and any keys, with gradients: what drafters train with."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pairtrain.network import PairAngles
from specmla import MLAAttention, RopeAngles


class Heads(NamedTuple):
    """Query [B, T, H, P + R], key [B, S, H, P + R] and value [B, S, H, V] of all heads."""

    query: Tensor
    key: Tensor
    value: Tensor


def project(attention: MLAAttention, normed: Tensor, angles: PairAngles | RopeAngles) -> Heads:
    """Project rows [B, T, D]; `angles` are those of their positions."""
    given = cast("RopeAngles", angles)
    q_nope, q_rope, latent, rope = attention._project(normed, given)
    return Heads(torch.cat((q_nope, q_rope), dim=-1), *attention.kv_b_proj.expand(latent, rope))


def attend(
    attention: MLAAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> Tensor:
    """Attend where `mask` (bool, [T, S] or [B, 1, T, S]) is true; [B, T, D]."""
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        scale=attention.softmax_scale,
    )
    projected: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
    return projected
