"""Mixed batches through the whole layer on a GPU, over every format, and what a lift takes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specmla.config import MLAConfig
from specmla.testing import relative_error
from specmla.up_projection import UpProjection
from tests.mixed_batch import check_errors, make_layer

pytestmark = pytest.mark.gpu

DIMS = MLAConfig(256, 16, 512, 128, 64, 128)
FORMATS = [
    ("triton", None),
    ("rows", None),
    ("hopper", None),
    ("reference", None),
    ("triton", "fp8"),
    ("triton", "fp8_ds_mla"),
    ("triton", "fp8_per_token_head"),
    ("reference", "fp8"),
    ("reference", "nvfp4_ds_mla"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "format_name"), FORMATS)
def test_a_mixed_batch_equals_each_request_alone(
    name: str, format_name: str | None, dtype: torch.dtype
) -> None:
    if name == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90 only")
    check_errors(name, make_layer(DIMS).to("cuda", dtype), format_name)


@torch.no_grad()
def test_a_lift_takes_the_memory_of_its_values() -> None:
    made = UpProjection(DIMS).to("cuda", torch.bfloat16)
    latent = torch.randn(128, 16, 512, device="cuda", dtype=torch.bfloat16)
    made.lift(latent)  # the library reserves what it needs
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = made.lift(latent)
    assert torch.cuda.max_memory_allocated() - before <= got.nbytes
    w_uv = made.weight.double().view(16, 256, 512)[:, 128:]
    want = torch.einsum("thc,hvc->thv", latent.double(), w_uv).flatten(1)
    assert relative_error(got, want) <= 2 * torch.finfo(torch.bfloat16).eps
