"""`kv_b_proj` as e4m3 codes on a GPU, at DeepSeek-V3's sizes: error, memory, captured reloads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specmla.config import MLAConfig
from specmla.testing import assert_within_budget
from tests.models.test_scales import SHAPES, make_codes, make_scale
from tests.test_e4m3_up_projection import draw, make_pair

pytestmark = pytest.mark.gpu

DEEPSEEK = MLAConfig(7168, 16, 512, 128, 64, 128)
# 12 heads of 112 rows: blocks of scales straddle keys, values and heads.
STRADDLING = MLAConfig(1024, 12, 512, 64, 32, 48)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [DEEPSEEK, STRADDLING], ids=["deepseek", "straddling"])
@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_products(kind: str, dims: MLAConfig, dtype: torch.dtype) -> None:
    made, plain, exact = make_pair(dims, kind, dtype)
    heads, nope = dims.num_heads, dims.qk_nope_head_dim
    q_nope = draw(300, heads, dims.qk_head_dim, dtype=dtype)[..., :nope]
    latent = draw(heads, 300, 512, dtype=dtype).transpose(0, 1)
    for name, given in (("absorb", q_nope), ("lift", latent), ("forward", latent[:, 0])):
        got, want, torchs = (getattr(m, name)(given.to(m.dtype)) for m in (made, exact, plain))
        assert_within_budget(got, want, torchs, label=name)
        for first, count in ((0, 1), (299, 1), (130, 70)):
            part = slice(first, first + count)
            assert torch.equal(getattr(made, name)(given[part].clone()), got[part]), name


def test_nothing_is_widened_in_memory() -> None:
    made, _, _ = make_pair(DEEPSEEK, "block", torch.bfloat16)
    q_nope, latent = draw(8, 16, 128, dtype=torch.bfloat16), draw(8, 16, 512, dtype=torch.bfloat16)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made.absorb(q_nope), made.lift(latent), made(latent[:, 0])
        torch.cuda.synchronize()
        grown = torch.cuda.max_memory_allocated() - before
    assert grown < 1 << 20, f"{grown} bytes; the widened weights are 4 MiB"


def test_a_captured_call_computes_with_reloaded_weights() -> None:
    made, _, _ = make_pair(DEEPSEEK, "block", torch.bfloat16)
    latent = draw(5, 16, 512, dtype=torch.bfloat16)
    made.lift(latent)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made.lift(latent)
    shape = tuple(made.weight.shape)
    for seed, kind in ((8, "channel"), (9, "tensor"), (10, "block")):
        made.load(make_codes(shape, seed), make_scale(SHAPES[kind](*shape), seed))
        graph.replay()
        assert torch.equal(captured, made.lift(latent))
