"""Mixed batches through the whole layer on a GPU, over every format, and what a lift takes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.select import get_backend
from specmla.compiling import as_operators
from specmla.config import MLAConfig
from specmla.testing import relative_error
from specmla.up_projection import UpProjection
from tests.mixed_batch import VERIFY, Batch, check_errors, make_layer

pytestmark = pytest.mark.gpu

DIMS = MLAConfig(256, 16, 512, 128, 64, 128)
FORMATS = [
    ("triton", None),
    ("rows", None),
    ("hopper", None),
    ("reference", None),
    ("hopper", "fp8"),
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


def step_bytes(batch: Batch) -> int:
    """Measure the most bytes that a step of all requests asks for at a time."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    batch.run(range(64))
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)


@pytest.mark.slow
# Inductor's own imports say so.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_a_compiled_layer_takes_no_memory_of_the_cache_s_size() -> None:
    """64 requests of 1000 tokens, a pool of 80 MB: a step takes little more than it does eager."""
    plain = make_layer(DIMS).to("cuda", torch.bfloat16)
    batch = Batch([(VERIFY, 4, 990)] * 64, 64, layer=plain, backend=get_backend("triton"))
    everyone = range(64)
    want = torch.cat(batch.run(everyone))
    eager = step_bytes(batch)
    cache, backend = as_operators(batch.cache, batch.builder.backend)
    batch.wrap(cache, backend)
    batch.layer = torch.compile(plain, fullgraph=True)
    for _ in range(3):  # the second step may compile again, for sizes that change
        batch.run(everyone)
    got = torch.cat(batch.run(everyone))
    pool = cache.layer(0).numel() * 2
    assert step_bytes(batch) - eager < pool / 4
    assert relative_error(got, want.double()) <= 4 * torch.finfo(torch.bfloat16).eps
