"""Chunked prefill over quantised rows: store and gather by kernels give what torch's do."""

from __future__ import annotations

import copy

import pytest
import torch

from specmla.cache import CacheFormat, LatentCache, cache_format
from tests.mixed_batch import LAYER, MIXED, Absorbing, Batch

pytest.importorskip("triton")

NAMES = ["fp8", "fp8-scaled", "fp8_ds_mla", "fp8_per_token_head", "nvfp4_ds_mla"]
NAMES += ["nvfp4_ds_mla-scaled"]


class KernelBatch(Batch):
    """Stores and gathers by kernels."""

    def _cache(
        self, num_pages: int, page_size: int, cache_format: CacheFormat | None
    ) -> LatentCache:
        plain = super()._cache(num_pages, page_size, cache_format)
        return LatentCache.from_pool([plain.layer(0)], "triton", cache_format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_gathered_alike(name: str, dtype: torch.dtype) -> None:
    scale = 3 * 2.0**-9 if name.endswith("-scaled") else 1.0
    made = cache_format(name.split("-")[0], 128, 32, dtype=dtype, k_scale=scale)
    layer = copy.deepcopy(LAYER).to(dtype)
    torch_batch, kernel_batch = (
        kind(MIXED, 16, layer=layer, backend=Absorbing(made), cache_format=made, workspace_rows=32)
        for kind in (Batch, KernelBatch)
    )
    everyone = range(len(MIXED))
    step = kernel_batch.builder.build(kernel_batch.requests)
    assert step.prefill is not None
    assert step.prefill.context
    for got, want in zip(kernel_batch.run(everyone), torch_batch.run(everyone), strict=True):
        assert torch.equal(got, want)
        assert got.isfinite().all()
    assert torch.equal(kernel_batch.cache.layer(0), torch_batch.cache.layer(0))
