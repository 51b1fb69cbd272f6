"""`MLAAttention.fused_store`: the rows and results of the plain layer, or a refusal."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from specmla.backends.reference import ReferenceBackend
from specmla.builder import MetadataBuilder
from specmla.cache.formats import cache_format
from specmla.cache.latent import LatentCache
from specmla.compiling import as_operators
from specmla.config import MLAConfig
from specmla.errors import ArgumentError
from specmla.layer import MLAAttention
from specmla.metadata import RequestKind, RequestRows
from specmla.rope import RotaryEmbedding
from specmla.testing.budget import relative_error

PAGE, PAGES = 16, 6
CONFIG = MLAConfig(48, 3, 128, 16, 32, 24, q_lora_rank=20)
has_triton = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_layer(dtype: torch.dtype, *, fused: bool) -> MLAAttention:
    torch.manual_seed(1)
    layer = MLAAttention(CONFIG)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2)
    layer.fused_store = fused
    return layer.to(DEVICE, dtype)


def make_cache(dtype: torch.dtype, impl: str) -> LatentCache:
    cache = LatentCache(1, PAGES, PAGE, CONFIG.cache_width, dtype=dtype, device=DEVICE, impl=impl)
    cache.layer(0).fill_(float("nan"))
    return cache


def run(layer: MLAAttention, cache: LatentCache, dtype: torch.dtype) -> list[Tensor]:
    """A prompt, then a verify of three rows beside another prompt."""
    backend = ReferenceBackend(cache.format)
    builder = MetadataBuilder(
        backend=backend,
        page_size=PAGE,
        num_pages=PAGES,
        num_heads=3,
        kv_lora_rank=128,
        device=DEVICE,
        max_seq_len=90,
        dtype=dtype,
    )
    prompt, verify = RequestKind.PROMPT, RequestKind.VERIFY
    steps = (
        [RequestRows(prompt, 18, 18, [4, 1])],
        [RequestRows(verify, 3, 21, [4, 1]), RequestRows(prompt, 5, 5, [2])],
    )
    torch.manual_seed(2)
    outputs = []
    for requests in steps:
        metadata = builder.build(requests)
        at = RotaryEmbedding(CONFIG).at(metadata.positions, dtype)
        hidden = torch.randn(metadata.num_rows, 48, dtype=torch.float64).to(DEVICE, dtype)
        outputs.append(layer(hidden, at, cache, 0, metadata, backend))
    return outputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_in_torch_the_fused_store_has_the_same_bits(dtype: torch.dtype) -> None:
    caches = [make_cache(dtype, "torch") for _ in range(2)]
    plain = run(make_layer(dtype, fused=False), caches[0], dtype)
    fused = run(make_layer(dtype, fused=True), caches[1], dtype)
    assert all(torch.equal(a, b) for a, b in zip(plain, fused, strict=True))
    raw = [cache.layer(0).view(torch.uint8) for cache in caches]
    assert torch.equal(*raw)
    assert not caches[1].layer(0)[4].isnan().any(), "a page of the prompt"


@pytest.mark.skipif(not has_triton, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_by_the_kernel_it_errs_no_more_than_three_steps(dtype: torch.dtype) -> None:
    double = torch.float64
    exact = run(make_layer(double, fused=False), make_cache(double, "torch"), double)
    errors = []
    for fused in (False, True):
        cache = make_cache(dtype, "triton")
        got = run(make_layer(dtype, fused=fused), cache, dtype)
        errors.append([relative_error(a, b) for a, b in zip(got, exact, strict=True)])
        assert cache.layer(0)[4].isfinite().all()
    for plain, fused in zip(*errors, strict=True):
        assert fused <= 1.5 * plain


def test_what_it_does_not_serve_is_refused_by_name() -> None:
    layer, dtype = make_layer(torch.float32, fused=True), torch.float32
    operators, _ = as_operators(make_cache(dtype, "torch"), ReferenceBackend())
    with pytest.raises(ArgumentError, match="is a OperatorCache, accepted is a LatentCache"):
        run(layer, operators, dtype)
    packed = cache_format("fp8", 128, 32, dtype=dtype)
    cache = LatentCache(
        1, PAGES, PAGE, CONFIG.cache_width, dtype=dtype, device=DEVICE, format=packed
    )
    with pytest.raises(ArgumentError, match=r"Fp8Format.*accepted are plain rows"):
        run(layer, cache, dtype)
