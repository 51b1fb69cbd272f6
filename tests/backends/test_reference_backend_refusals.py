"""What the reference backend refuses, and odd strides that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specmla.backends.reference import ReferenceBackend
from specmla.builder import MetadataBuilder
from specmla.errors import ArgumentError
from specmla.metadata import PrefillPart, RequestKind, RequestRows, VerifyPart

T, H, C, R, G = 5, 3, 16, 8, 4
BACKEND = ReferenceBackend()
BUILDER = MetadataBuilder(
    backend=BACKEND,
    page_size=G,
    num_pages=8,
    num_heads=H,
    kv_lora_rank=C,
    device="cpu",
    max_seq_len=32,
)


def verify_part() -> VerifyPart:
    rows = [
        RequestRows(RequestKind.VERIFY, 2, 6, [1, 4]),
        RequestRows(RequestKind.VERIFY, 3, 3, [2]),
    ]
    part = BUILDER.build(rows).verify
    assert part is not None
    return part


def prefill_part() -> PrefillPart:
    part = BUILDER.build([RequestRows(RequestKind.PROMPT, T, T, [1, 4])]).prefill
    assert part is not None
    return part


def tensors() -> dict[str, Any]:
    return {
        "q_latent": torch.randn(T, H, C),
        "q_rope": torch.randn(T, H, R),
        "latent_cache": torch.randn(8, G, C + R),
    }


@pytest.mark.parametrize("shape", [(), (T,), (T, C), (T, 0, C)])
@pytest.mark.parametrize("name", ["q_latent", "q_rope", "latent_cache"])
def test_other_shapes(name, shape):
    given = tensors() | {name: torch.randn(shape)}
    with pytest.raises(ArgumentError, match=r"forward_mqa: .*accepted"):
        BACKEND.forward_mqa(**given, part=verify_part(), softmax_scale=1.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_other_dtypes(dtype):
    given = {name: t.to(dtype) for name, t in tensors().items()}
    with pytest.raises(ArgumentError, match="accepted is one dtype of"):
        BACKEND.forward_mqa(**given, part=verify_part(), softmax_scale=1.0)
    rows = torch.ones(T, H, C, dtype=dtype)
    with pytest.raises(ArgumentError, match="accepted is one dtype of"):
        BACKEND.forward_mha(rows, rows, rows, prefill_part(), softmax_scale=1.0)


@pytest.mark.parametrize("name", ["q_latent", "q_rope", "latent_cache"])
def test_mixed_devices(name):
    given = tensors()
    given[name] = given[name].to("meta")
    with pytest.raises(ArgumentError, match="accepted is one device"):
        BACKEND.forward_mqa(**given, part=verify_part(), softmax_scale=1.0)


def test_expanded_rows_are_read_as_they_are():
    given, part = tensors(), verify_part()
    given["latent_cache"] = given["latent_cache"][:, :1].expand(-1, G, -1)
    got = BACKEND.forward_mqa(**given, part=part, softmax_scale=1.0)
    given["latent_cache"] = given["latent_cache"].contiguous()
    want = BACKEND.forward_mqa(**given, part=part, softmax_scale=1.0)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
