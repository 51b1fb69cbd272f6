"""Batch-invariant layers on a GPU, in bfloat16 and float16: equal bits, whatever the batch."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specmla.backends.base import AttentionBackend
from specmla.backends.select import get_backend
from specmla.bench.verify import requirements
from specmla.config import MLAConfig
from specmla.layer import MLAAttention
from specmla.metadata import RequestRows
from specmla.rope import RotaryEmbedding
from specmla.row_local import multiply, multiply_heads
from specmla.testing import assert_within_budget, make_case
from tests.test_invariance import (
    EXTEND,
    PROMPT,
    VERIFY,
    Row,
    Served,
    assert_same,
    make_layer,
    plain_and_exact,
)

pytestmark = pytest.mark.gpu

DIMS = MLAConfig(1024, 16, 512, 128, 64, 128, q_lora_rank=512)
FEW = 40
"""Short requests beside the long ones: their verifies fill several tiles of rows."""
LENS = (2100, 300, 5000, *[24] * FEW)
SHORT = range(3, 3 + FEW)
ALONE: dict[int, list[list[Row]]] = {
    0: [[(0, PROMPT, 2090)], [(0, VERIFY, 4)], [(0, VERIFY, 6)]],
    1: [[(1, PROMPT, 295)], [(1, VERIFY, 5)]],
    2: [[(2, PROMPT, 4995)], [(2, VERIFY, 5)]],
    7: [[(7, PROMPT, 20)], [(7, VERIFY, 4)]],
}
TOGETHER: list[list[Row]] = [
    [(0, PROMPT, 2090), *[(i, PROMPT, 20) for i in SHORT], (1, PROMPT, 295), (2, PROMPT, 4995)],
    [*[(i, VERIFY, 4) for i in SHORT], (2, VERIFY, 5), (0, VERIFY, 4), (1, VERIFY, 5)],
    [(0, VERIFY, 6)],
]
CUT: list[list[Row]] = [
    [(2, PROMPT, 64), (0, PROMPT, 3)],
    [(0, EXTEND, 1), (1, PROMPT, 64), (2, EXTEND, 1)],
    [(7, PROMPT, 20), (1, EXTEND, 231), (2, PROMPT, 3000), (0, EXTEND, 1077)],
    [(2, EXTEND, 1930), (0, EXTEND, 1009), (1, VERIFY, 5), (7, VERIFY, 3)],
    [(0, VERIFY, 10), (2, VERIFY, 5), (7, VERIFY, 1)],
]
CASES = [
    ("triton", torch.bfloat16),
    ("triton", torch.float16),
    ("rows", torch.bfloat16),
    ("hopper", torch.bfloat16),
    ("hopper", torch.float16),
]


def backend_of(name: str, dtype: torch.dtype) -> AttentionBackend:
    backend = get_backend(name, batch_invariant=True)
    case = make_case("1q1s70", num_heads=16, page_size=64, dtype=dtype, device=torch.device("cuda"))
    if reasons := backend.problems(requirements(case)):
        pytest.skip("; ".join(reasons))
    return backend


@functools.cache
def alone(name: str, dtype: torch.dtype) -> dict[int, Tensor]:
    out, layer = {}, make_layer(dtype, DIMS)
    for i, steps in ALONE.items():
        served = Served.make(
            layer, get_backend(name, batch_invariant=True), page_size=64, lens=LENS
        )
        out |= served.run(steps)
        assert out[i].isfinite().all()
    return out


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("steps", [TOGETHER, CUT], ids=["together", "cut"])
def test_in_any_batch_however_cut(name: str, dtype: torch.dtype, steps: list[list[Row]]) -> None:
    layer = make_layer(dtype, DIMS)
    backend = backend_of(name, dtype)
    for workspace_rows in (None, 1024):
        served = Served.make(
            layer, backend, page_size=64, workspace_rows=workspace_rows, lens=LENS, seed=5
        )
        got = served.run(steps)
        assert_same({i: got[i] for i in ALONE}, alone(name, dtype))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_the_prefix_of_another_request_serves_as_well(name: str) -> None:
    backend, layer = backend_of(name, torch.bfloat16), make_layer(torch.bfloat16, DIMS)
    own, shared = (
        Served.make(layer, backend, page_size=64, lens=LENS, workspace_rows=rows)
        for rows in (None, 1024)
    )
    for served in (own, shared):
        served.hidden[2][:1920] = served.hidden[0][:1920]
    shared.pages[2] = (*shared.pages[0][:30], *shared.pages[2][30:])
    want = own.run(ALONE[2])
    shared.run([[(0, PROMPT, 2090)]])
    got = shared.run([[(2, PROMPT, 3075), (1, PROMPT, 295)], [(2, VERIFY, 5)]], cached={2: 1920})
    assert_same({2: got[2]}, want)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_layer_errs_like_the_plain_one(dtype: torch.dtype) -> None:
    """Budget: absorption rounds query and latent once more than MHA does, hence twice."""
    layer = make_layer(dtype, DIMS)
    hidden = Served.make(layer, page_size=64, lens=LENS).hidden
    for i in (1, 7):
        plain, exact = plain_and_exact(layer, hidden[i])
        assert_within_budget(alone("triton", dtype)[i], exact, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_of_deepseek_s_shapes(dtype: torch.dtype) -> None:
    """A row's bits at 1, 65 and 700 rows; error as torch's."""
    draw = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device="cuda").to(dtype)

    for inner, width in ((7168, 576), (1536, 3072), (2048, 7168), (130, 72)):
        rows, weight = normal(700, inner), normal(width, inner)
        whole, exact = multiply(rows, weight), rows.double() @ weight.double().t()
        # Summed product after product, which a BLAS does in blocks: sqrt(K) units, see `budget`.
        floor = max(torch.finfo(dtype).eps, math.sqrt(inner) * 2**-24)
        assert_within_budget(whole, exact, rows @ weight.t(), floor=floor)
        for first, count in ((0, 1), (699, 1), (63, 65), (300, 13)):
            part = slice(first, first + count)
            assert torch.equal(multiply(rows[part].clone(), weight), whole[part])
    heads, weight = normal(150, 16, 192)[..., :128], normal(16, 256, 512)[:, :128]
    whole = multiply_heads(heads, weight)
    exact, plain = (torch.einsum("thi,hio->tho", *pair) for pair in (
        (heads.double(), weight.double()), (heads, weight)
    ))  # fmt: skip
    assert_within_budget(whole, exact, plain)
    assert torch.equal(multiply_heads(heads[77:78], weight)[0], whole[77])


@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_a_captured_verify_has_the_bits_of_an_eager_one(name: str) -> None:
    backend, layer = backend_of(name, torch.bfloat16), make_layer(torch.bfloat16, DIMS)
    served = Served.make(layer, backend, page_size=64, lens=LENS)
    served.run([[(1, PROMPT, 295)], [(7, PROMPT, 20)]])
    requests = [
        RequestRows(VERIFY, 5, 300, served.pages[1]),
        RequestRows(VERIFY, 4, 24, served.pages[7]),
    ]
    metadata = served.builder.build(requests)
    rows = torch.cat((served.hidden[1][295:], served.hidden[7][20:]))
    angles = RotaryEmbedding(DIMS).at(metadata.positions, rows.dtype)

    def run(layer: MLAAttention) -> Tensor:
        return layer(rows, angles, served.cache, 0, metadata, backend)

    eager = run(layer)
    run(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(layer)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, eager)
    assert torch.equal(eager[5:], alone(name, torch.bfloat16)[7][20:])


@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_nothing_waits_for_the_device(name: str) -> None:
    backend, layer = backend_of(name, torch.bfloat16), make_layer(torch.bfloat16, DIMS)
    served = Served.make(layer, backend, page_size=64, lens=LENS, workspace_rows=1024)
    served.run([[(1, PROMPT, 295), (2, PROMPT, 2000)], [(1, VERIFY, 5), (2, PROMPT, 3000)]])
    requests = [
        RequestRows(VERIFY, 5, 300, served.pages[1]),
        RequestRows(PROMPT, 3000, 5000, served.pages[2]),
    ]
    metadata = served.builder.build(requests)
    assert len(metadata.prefill.context) == 5
    rows = torch.cat((served.hidden[1][295:], served.hidden[2][2000:]))
    angles = RotaryEmbedding(DIMS).at(metadata.positions, rows.dtype)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(rows, angles, served.cache, 0, metadata, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
