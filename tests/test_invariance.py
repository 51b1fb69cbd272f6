"""One layer's bits: a request alone, in any batch, its prompt cut anywhere, its prefix cached."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from specmla.backends.base import AttentionBackend
from specmla.backends.fixed_heads import FixedHeads
from specmla.backends.reference import ReferenceBackend
from specmla.backends.select import get_backend
from specmla.batch_split import BatchRules
from specmla.builder import MetadataBuilder
from specmla.cache import cache_format
from specmla.cache.latent import LatentCache
from specmla.config import MLAConfig
from specmla.errors import ArgumentError, UnsupportedError
from specmla.invariance import make_batch_invariant
from specmla.layer import MLAAttention
from specmla.metadata import RequestKind, RequestRows
from specmla.quant_output import QuantOutput
from specmla.rope import RotaryEmbedding
from specmla.testing import assert_within_budget
from specmla.workspace import PrefillWorkspace
from tests.test_prefill_memory import LiveBytes

pytestmark = pytest.mark.usefixtures("dots_by_row")

VERIFY, EXTEND, PROMPT = RequestKind.VERIFY, RequestKind.EXTEND, RequestKind.PROMPT
CONFIG = MLAConfig(40, 2, 32, 12, 16, 10, q_lora_rank=20)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16]

Row = tuple[int, RequestKind, int]
"""Request, kind and new rows."""
LENS = (100, 38, 136)
ALONE: dict[int, list[list[Row]]] = {
    0: [[(0, PROMPT, 90)], [(0, VERIFY, 4)], [(0, VERIFY, 6)]],
    1: [[(1, PROMPT, 33)], [(1, VERIFY, 5)]],
    2: [[(2, PROMPT, 131)], [(2, VERIFY, 5)]],
}


@functools.cache
def make_layer(dtype: torch.dtype, config: MLAConfig = CONFIG) -> MLAAttention:
    torch.manual_seed(3)
    layer = MLAAttention(config)
    for parameter in layer.parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 9
        torch.nn.init.normal_(parameter, std=1.5 * fan_in**-0.5)
    layer = layer.requires_grad_(False).to(DEVICE, dtype)
    make_batch_invariant(layer)
    return layer


def make_backend(name: str = "triton", **options: object) -> AttentionBackend:
    """Build one with pieces of 64 keys, so that short requests have several."""
    return type(get_backend(name))(batch_invariant=True, piece_keys=64, **options)  # type: ignore


class Served(NamedTuple):
    """A layer with a cache, whose requests have pages and hidden rows of their own."""

    layer: MLAAttention
    cache: LatentCache
    builder: MetadataBuilder
    hidden: list[Tensor]
    pages: list[tuple[int, ...]]

    @classmethod
    def make(
        cls,
        layer: MLAAttention,
        backend: AttentionBackend | None = None,
        *,
        page_size: int = 16,
        workspace_rows: int | None = None,
        lens: Sequence[int] = LENS,
        invariant: bool = True,
        seed: int = 0,
    ) -> Served:
        dims, dtype = layer.config, layer.o_proj.weight.dtype
        draw = torch.Generator().manual_seed(1)
        hidden = [torch.randn(n, dims.hidden_size, generator=draw) for n in lens]
        counts = [-(-n // page_size) for n in lens]
        free = random.Random(seed).sample(range(sum(counts) + 2), sum(counts) + 2)
        backend = backend or make_backend()
        held = backend.cache_format
        stored, width = (dtype, dims.cache_width) if held is None else held.storage
        pool = torch.full((len(free), page_size, width), 0xFF, dtype=stored, device=DEVICE)
        if held is None:
            pool.fill_(torch.nan)
        builder = MetadataBuilder(
            backend=backend, page_size=page_size, num_pages=len(free),
            num_heads=dims.num_heads, kv_lora_rank=dims.kv_lora_rank, device=DEVICE,
            max_seq_len=10_000, dtype=dtype,
        )  # fmt: skip
        workspace = None
        if workspace_rows is not None:
            workspace = PrefillWorkspace(dims.cache_width, page_size, dtype, DEVICE)
            workspace.claim(workspace_rows)
            workspace.lock()
            workspace.rows(workspace.num_rows).fill_(torch.nan)
        builder.configure(BatchRules(4, workspace=workspace, batch_invariant=invariant))
        return cls(
            layer,
            LatentCache.from_pool([pool], format=held),
            builder,
            [h.to(DEVICE, dtype) for h in hidden],
            [tuple(free.pop() for _ in range(count)) for count in counts],
        )

    def run(
        self,
        steps: Sequence[Sequence[Row]],
        cached: dict[int, int] | None = None,
        output: QuantOutput | None = None,
    ) -> dict[int, Tensor]:
        """Run steps one after another; gives all computed rows of each request, or those that
        `output` takes.
        """
        lengths, got = dict(cached or {}), {}
        for step in steps:
            requests = []
            for i, kind, rows in step:
                lengths[i] = lengths.get(i, 0) + rows
                requests.append(RequestRows(kind, rows, lengths[i], self.pages[i]))
            metadata = self.builder.build(requests)
            order = [step[i] for i in metadata.order]
            packed = torch.cat([self.hidden[i][lengths[i] - n : lengths[i]] for i, _, n in order])
            angles = RotaryEmbedding(self.layer.config).at(metadata.positions, packed.dtype)
            given = packed, angles, self.cache, 0, metadata, self.builder.backend
            out = self.layer(*given) if output is None else self.layer.attend(*given, output)
            pieces = out.split([n for _, _, n in order])
            for (i, _, _), piece in zip(order, pieces, strict=True):
                got.setdefault(i, []).append(piece.clone())
        return {i: torch.cat(pieces) for i, pieces in got.items()}


@functools.cache
def alone(dtype: torch.dtype, page_size: int = 16, name: str = "triton") -> dict[int, Tensor]:
    """Each request by itself, its prompt in one step and one chunk."""
    out = {}
    for i, steps in ALONE.items():
        served = Served.make(make_layer(dtype), make_backend(name), page_size=page_size)
        out |= served.run(steps)
        assert out[i].isfinite().all()
    return out


def assert_same(got: dict[int, Tensor], want: dict[int, Tensor]) -> None:
    for i, rows in got.items():
        same = (rows == want[i][len(want[i]) - len(rows) :]).all(-1)
        assert same.all(), f"request {i}: rows {(~same).nonzero().flatten().tolist()} differ"


TOGETHER: list[list[Row]] = [
    [(0, PROMPT, 90), (1, PROMPT, 33), (2, PROMPT, 131)],
    [(2, VERIFY, 5), (0, VERIFY, 4), (1, VERIFY, 5)],
    [(0, VERIFY, 6)],
]
KINDS: list[list[Row]] = [
    [(1, PROMPT, 33)],
    [(0, PROMPT, 90), (1, VERIFY, 2)],
    [(2, PROMPT, 131), (1, VERIFY, 3), (0, VERIFY, 1)],
    [(0, VERIFY, 9), (2, VERIFY, 1)],
    [(2, VERIFY, 4)],
]
CUT: list[list[Row]] = [
    [(2, PROMPT, 64), (0, PROMPT, 3)],
    [(0, EXTEND, 1), (1, PROMPT, 32), (2, EXTEND, 1)],
    [(1, EXTEND, 1), (2, PROMPT, 31), (0, EXTEND, 77)],
    [(2, EXTEND, 35), (0, EXTEND, 9), (1, VERIFY, 5)],
    [(0, VERIFY, 10), (2, VERIFY, 5)],
]


@pytest.mark.parametrize(
    ("steps", "workspace_rows", "dtype", "page_size"),
    [
        (TOGETHER, 80, torch.float32, 16),  # a page more than a chunk may fill: 64 and 64
        (KINDS, 192, torch.float32, 48),  # chunks begin at multiples of 64 and of 48
        (CUT, None, torch.float32, 16),
        (CUT, 64, torch.float16, 64),
    ],
    ids=["together", "kinds", "cut", "cut-half"],
)
def test_in_any_batch_however_cut(
    steps: list[list[Row]], workspace_rows: int | None, dtype: torch.dtype, page_size: int
) -> None:
    layer = make_layer(dtype)
    served = Served.make(layer, page_size=page_size, workspace_rows=workspace_rows, seed=5)
    assert_same(served.run(steps), alone(dtype, page_size))


def test_the_prefix_of_another_request_serves_as_well() -> None:
    """Request 1 has the first 32 tokens of request 0: 2 pages, which its mate has just filled."""
    layer = make_layer(torch.float32)
    own, shared = Served.make(layer), Served.make(layer, workspace_rows=64)
    for served in (own, shared):
        served.hidden[1][:32] = served.hidden[0][:32]
    want = own.run(ALONE[1])
    shared.pages[1] = (*shared.pages[0][:2], *shared.pages[1][2:])
    shared.run([[(0, PROMPT, 90)]])
    got = shared.run([[(1, PROMPT, 1)], [(1, VERIFY, 5)]], cached={1: 32})
    assert len(got[1]) == 6
    assert_same(got, want)


def test_without_it_bits_do_change() -> None:
    """What the option is for; should these ever be equal, the tests above see nothing."""
    layer = copy.deepcopy(make_layer(torch.float32))
    for part in layer.modules():
        part.__dict__.pop("batch_invariant", None)
    backend = get_backend("triton")
    steps = [[(2, PROMPT, 131)]]
    whole = Served.make(layer, backend, invariant=False).run(steps)[2]
    chunked = Served.make(layer, backend, invariant=False, workspace_rows=64)
    cut = chunked.run([[(2, PROMPT, 80)], [(2, PROMPT, 51)]])[2]
    torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-4)
    assert not torch.equal(cut, whole)


def test_the_layer_errs_like_the_plain_one() -> None:
    """Budget: absorption rounds query and latent once more than MHA does, hence twice."""
    layer = make_layer(torch.float16)
    hidden = Served.make(layer).hidden
    for i, rows in alone(torch.float16).items():
        plain, exact = plain_and_exact(layer, hidden[i])
        assert_within_budget(rows, exact, plain)


def plain_and_exact(layer: MLAAttention, hidden: Tensor) -> list[Tensor]:
    """Attend whole sequences by the same weights in torch, in the layer's dtype and in float64."""
    out = []
    for dtype in (hidden.dtype, torch.float64):
        plain = copy.deepcopy(layer).to(dtype)
        for part in plain.modules():
            part.__dict__.pop("batch_invariant", None)
        at = torch.arange(len(hidden), device=DEVICE)
        angles = RotaryEmbedding(layer.config).at(at, dtype)
        with torch.no_grad():
            out.append(plain.forward_full(hidden[None].to(dtype), angles)[0])
    return out


@pytest.mark.parametrize("name", ["rows", "fixed heads"])
def test_other_backends(name: str) -> None:
    layer = make_layer(torch.float32)
    backends = [FixedHeads(make_backend(), 5) if name != "rows" else make_backend(name)] * 2
    own, mixed = (Served.make(layer, backend, workspace_rows=64) for backend in backends)
    want = own.run(ALONE[1])
    got = mixed.run([[(0, PROMPT, 70)], [(1, PROMPT, 33), (0, VERIFY, 3)], [(1, VERIFY, 5)]])
    assert_same({1: got[1]}, want)


FEW: dict[int, list[list[Row]]] = {
    0: [[(0, PROMPT, 70)], [(0, VERIFY, 3)]],
    1: [[(1, PROMPT, 33)], [(1, VERIFY, 5)]],
}
MIXED: list[list[Row]] = [[(0, PROMPT, 69)], [(1, PROMPT, 33), (0, EXTEND, 1)]]
MIXED += [[(1, VERIFY, 5), (0, VERIFY, 3)]]


@pytest.mark.parametrize("name", ["fp8", "fp8_per_token_head"])
def test_over_quantised_rows(name: str) -> None:
    dims = MLAConfig(40, 2, 128, 12, 32, 10)
    layer = make_layer(torch.float32, dims)
    scale = {"k_scale": 2.0**-6} if name == "fp8" else {}
    held = cache_format(name, 128, 32, dtype=torch.float32, **scale)
    own, mixed = (
        Served.make(layer, make_backend(cache_format=held), workspace_rows=rows)
        for rows in (None, 64)
    )
    want = {i: own.run(steps)[i] for i, steps in FEW.items()}
    assert want[0].isfinite().all()
    assert_same(mixed.run(MIXED), want)


@pytest.mark.parametrize("fused", [False, True])
def test_outputs_as_codes(fused: bool) -> None:
    """Verify rows alone or beside others; prompt rows are quantised by themselves in any case."""
    layer = make_layer(torch.float32, dataclasses.replace(CONFIG, v_head_dim=64))

    def run(steps: list[list[Row]]) -> dict[int, Tensor]:
        served = Served.make(layer, lens=(80, 40, 10))
        values = torch.zeros(110, 128, dtype=torch.uint8, device=DEVICE)
        scales = torch.zeros(110, 2, device=DEVICE)
        output = QuantOutput(values.view(torch.float8_e4m3fn), block_scale=scales, fused=fused)
        got = served.run(steps, output=output)
        return {i: rows.view(torch.uint8) for i, rows in got.items()}

    want = run(FEW[0]) | run(FEW[1])
    assert want[0].any()
    assert_same(run(MIXED), want)


def test_what_a_prompt_takes_does_not_grow_with_its_context() -> None:
    layer, largest = make_layer(torch.float32), []
    for context in (130, 300):
        served = Served.make(layer, workspace_rows=64, lens=(context + 9,))
        served.cache.layer(0).normal_()
        with LiveBytes() as counter:
            served.run([[(0, PROMPT, 9)]], cached={0: context})
        largest.append(counter.largest)
    assert largest[0] == largest[1]


def test_all_reasons_at_once() -> None:
    layer = make_layer(torch.float32)
    plain = Served.make(layer, ReferenceBackend(), invariant=False)
    with pytest.raises(ArgumentError) as caught:
        plain.run([[(0, PROMPT, 20)]])
    assert "'reference' has batch_invariant False, the layer's is True" in str(caught.value)
    assert "the prompt part is not folded" in str(caught.value)
    assert plain.cache.layer(0).isnan().all(), "rows were stored"
    with pytest.raises(ArgumentError, match="'reference' has batch_invariant False and folds_"):
        plain.builder.configure(BatchRules(batch_invariant=True))
    small = PrefillWorkspace(48, 16, torch.float32, DEVICE)
    small.claim(48)
    small.lock()
    with pytest.raises(ArgumentError, match=r"workspace has 48 rows, accepted with .* are 64"):
        Served.make(layer).builder.configure(BatchRules(workspace=small, batch_invariant=True))
    hidden = torch.randn(2, 40, device=DEVICE, requires_grad=True)
    with pytest.raises(ArgumentError, match="gradients are asked for"):
        layer.q_a_proj(hidden)


def test_what_can_not_be_invariant_is_refused() -> None:
    layer = MLAAttention(CONFIG).double()
    layer.o_proj = torch.nn.Linear(20, 40, bias=False)
    with pytest.raises(UnsupportedError) as caught:
        make_batch_invariant(layer)
    assert "dtype is torch.float64" in str(caught.value)
    assert "o_proj is a Linear, accepted are specmla.row_local.Linear" in str(caught.value)
    assert not any(getattr(part, "batch_invariant", False) for part in layer.modules())


part_strategy = st.lists(st.integers(1, 70), min_size=1, max_size=3)


@settings(max_examples=6)
@given(cuts=part_strategy, mate=st.integers(1, 60), seed=st.integers(0, 99), last=st.booleans())
def test_any_cut_beside_any_mate(cuts: list[int], mate: int, seed: int, last: bool) -> None:
    layer, length = make_layer(torch.float32), 100
    ends = sorted({min(sum(cuts[: i + 1]), length) for i in range(len(cuts))} | {length})
    rows = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    served = Served.make(layer, workspace_rows=80, seed=seed)
    steps: list[list[Row]] = [[(0, PROMPT, n)] for n in rows]
    steps[-1].insert(0 if last else 1, (2, PROMPT, mate))
    assert_same({0: served.run(steps)[0]}, {0: whole_prompt()})


@functools.cache
def whole_prompt() -> Tensor:
    return Served.make(make_layer(torch.float32)).run([[(0, PROMPT, 100)]])[0]
