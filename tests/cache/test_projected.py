"""Norm, rotation and store in one kernel, held to the budget of the three plain steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from specmla.cache.formats import cache_format
from specmla.cache.latent import LatentCache
from specmla.cache.projected import store_projected
from specmla.config import MLAConfig
from specmla.errors import ArgumentError
from specmla.rope import RopeAngles, RotaryEmbedding
from specmla.testing import assert_within_budget

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
# Triton's interpreter is exact in these; bfloat16 is tested on a GPU.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def make_angles(rope: int, positions: torch.Tensor, *, interleave: bool) -> RopeAngles:
    config = MLAConfig(
        hidden_size=8,
        num_heads=1,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=rope,
        v_head_dim=8,
        rope_interleave=interleave,
    )
    return RotaryEmbedding(config).at(positions, torch.float32)


def make_pool(num_pages: int, page: int, width: int, gap: int, dtype: Any, impl: Any):
    shape = (2, num_pages, page * width + gap)
    whole = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
    views = [part[:, : page * width].unflatten(1, (page, width)) for part in whole]
    return LatentCache.from_pool(views, impl), whole


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize(
    ("rank", "rope", "page", "gap"),
    [(512, 64, 64, 0), (32, 16, 16, 7), (100, 6, 1, 0), (24, 2, 5, 64), (64, 0, 48, 0)],
)
def test_rows_are_as_good_as_those_of_three_steps(rank, rope, page, gap, interleave, dtype):
    torch.manual_seed(rank)
    width, count = rank + rope, 23
    num_pages = -(-40 // page)
    wider = torch.full((count, width + 5), math.nan, dtype=dtype, device=DEVICE)
    projected = wider[:, :width]
    projected.copy_(torch.randn(count, width) * torch.logspace(-3, 2, count)[:, None])
    weight = (1 + 0.3 * torch.randn(rank)).to(DEVICE, dtype)
    positions = torch.randint(0, 100_000, (count,), device=DEVICE)
    angles = make_angles(rope, positions, interleave=interleave)
    slots = torch.randperm(num_pages * page)[:count].to(DEVICE)
    slots[::5] = -1
    pools = {}
    for impl in ("triton", "torch"):
        cache, whole = make_pool(num_pages, page, width, gap, dtype, impl)
        pages = store_projected(cache, 0, projected, weight, angles, slots, eps=EPS)
        assert pages is cache.layer(0)
        kept = slots[slots >= 0]
        pools[impl] = cache.gather(0, kept)
        # Nothing else was written: other slots, gaps, the other layer.
        flat = pages.reshape(-1, width).clone()
        flat[kept] = math.nan
        assert flat.isnan().all()
        assert whole[:, :, page * width :].isnan().all()
        assert cache.layer(1).isnan().all()
    exact = expected(projected, weight, angles, rank)[slots >= 0]
    assert_within_budget(pools["triton"], exact, pools["torch"])


def expected(projected, weight, angles: RopeAngles, rank: int) -> torch.Tensor:
    """In float64, by definition; the angles are as given."""
    wide = projected.double()
    latent, key = wide[:, :rank], wide[:, rank:]
    normed = weight.double() * latent / (latent.square().mean(-1, keepdim=True) + EPS).sqrt()
    turned = key * angles.cos.double() + key[:, angles.partner] * angles.sin.double()
    return torch.cat([normed, turned], dim=-1)


def test_a_row_of_zeros_is_zeros_and_nan_stays_in_its_row():
    cache, _ = make_pool(2, 4, 12, 0, torch.float32, "triton")
    projected = torch.randn(3, 12, device=DEVICE)
    projected[0], projected[1, 3] = 0.0, math.nan
    weight = torch.ones(8, device=DEVICE)
    slots = torch.tensor([1, 2, 6], device=DEVICE)
    angles = make_angles(4, slots, interleave=True)
    store_projected(cache, 0, projected, weight, angles, slots, eps=EPS)
    rows = cache.gather(0, slots)
    assert (rows[0] == 0).all()
    assert rows[1, :8].isnan().all()
    assert rows[2].isfinite().all()


def test_slots_outside_the_pool_are_skipped():
    from specmla.kernels.store_projected import store_projected_rows

    pool = torch.zeros(2, 4, 12, device=DEVICE)
    slots = torch.tensor([8, 2**40, -7], device=DEVICE)
    angles = make_angles(4, slots.clamp(0, 9), interleave=True)
    rows = torch.randn(3, 12, device=DEVICE)
    weight = torch.ones(8, device=DEVICE)
    store_projected_rows(
        pool, rows, weight, (angles.cos, angles.sin), slots, eps=EPS, interleaved=True
    )
    assert not pool.any()


def test_what_does_not_fit_is_refused_together():
    cache, whole = make_pool(2, 4, 12, 0, torch.float32, "triton")
    slots = torch.tensor([1, 2], device=DEVICE)
    angles = make_angles(4, slots, interleave=True)
    good = {"projected": torch.randn(2, 12), "weight": torch.ones(8), "angles": angles}
    good = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in good.items()}

    def refused(message: str, **bad: Any) -> None:
        with pytest.raises(ArgumentError, match=message):
            store_projected(cache, 0, **(good | {"slots": slots} | bad), eps=EPS)

    refused(r"projected is \(3, 12\).*accepted is \(2, 12\)", projected=torch.randn(3, 12))
    refused(r"angles.cos is \(2, 4\).*accepted is \(2, 5\)", weight=torch.ones(7, device=DEVICE))
    refused("projected is torch.float16", projected=good["projected"].half())
    refused("weight torch.float64", weight=good["weight"].double())
    refused("accepted is a last one of 1", projected=torch.randn(12, 2, device=DEVICE).T)
    refused(r"slots is \(2,\) torch.int32", slots=slots.int())
    assert whole.isnan().all()


def test_quantised_and_wide_caches_are_refused():
    slots = torch.tensor([1, 2])
    angles = make_angles(16, slots, interleave=True)
    packed = LatentCache(
        1,
        2,
        16,
        48,
        torch.float32,
        "cpu",
        "torch",
        cache_format("fp8", 32, 16, dtype=torch.float32),
    )
    rows, weight = torch.randn(2, 48), torch.ones(32)
    with pytest.raises(ArgumentError, match="accepted are plain rows"):
        store_projected(packed, 0, rows, weight, angles, slots, eps=EPS)
    wide = LatentCache(1, 2, 16, 48, torch.float64, "cpu", "torch")
    store_projected(wide, 0, rows.double(), weight.double(), angles, slots, eps=EPS)
    wide.impl = "triton"
    with pytest.raises(ArgumentError, match="the kernel accepts up to 32 bits"):
        store_projected(wide, 0, rows.double(), weight.double(), angles, slots, eps=EPS)
