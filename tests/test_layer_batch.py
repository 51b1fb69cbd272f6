"""Mixed batches through the whole layer: every request as if it were alone."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specmla.backends.base import AttentionBackend
from specmla.backends.reference import ReferenceBackend
from specmla.batch_split import BatchRules
from specmla.builder import MetadataBuilder
from specmla.cache import CacheFormat, cache_format
from specmla.cache.latent import LatentCache
from specmla.config import MLAConfig
from specmla.layer import MLAAttention
from specmla.metadata import RequestKind, RequestRows
from specmla.rope import RotaryEmbedding
from specmla.testing import relative_error
from specmla.workspace import PrefillWorkspace

VERIFY, EXTEND, PROMPT = RequestKind.VERIFY, RequestKind.EXTEND, RequestKind.PROMPT
CONFIG = MLAConfig(24, 3, 128, 12, 32, 10)
Part = tuple[RequestKind, int, int]
"""Kind, new rows, cached rows before them."""

EXACT = {"rtol": 0.0, "atol": 1e-11}
# Outputs are of size 1; LSEs below 16 are rounded to float32 in each of up to 40 merges.
MERGED = {"rtol": 0.0, "atol": 40 * 2 * 16 * 2.0**-24}

MIXED: list[Part] = [
    (PROMPT, 9, 0),
    (EXTEND, 3, 40),  # short: 1 + K = 5
    (VERIFY, 5, 61),
    (VERIFY, 1, 17),
    (VERIFY, 0, 0),
    (PROMPT, 20, 100),
    (EXTEND, 30, 5),  # long, and more rows than context
    (VERIFY, 0, 33),
    (PROMPT, 1, 64),
    (VERIFY, 4, 0),
]


def make_layer(seed: int = 0) -> MLAAttention:
    torch.manual_seed(seed)
    layer = MLAAttention(CONFIG).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 9
            parameter.normal_(std=1.5 * fan_in**-0.5)
    return layer


LAYER = make_layer()


class Absorbing(ReferenceBackend):
    """Sends extends of more rows than a verify, 1 + K = 5, the other way."""

    capabilities = dataclasses.replace(ReferenceBackend.capabilities, reorder_batch_threshold=1)


class Batch:
    """A batch's requests, their hidden rows from position 0 on, and a cache of their context."""

    def __init__(
        self,
        parts: Sequence[Part],
        page_size: int,
        *,
        layer: MLAAttention = LAYER,
        backend: AttentionBackend | None = None,
        workspace_rows: int | None = None,
        cache_format: CacheFormat | None = None,
        seed: int = 0,
    ) -> None:
        self.layer, self.dtype = layer, layer.o_proj.weight.dtype
        draw = torch.Generator().manual_seed(seed)
        lens = [q + past for _, q, past in parts]
        self.hidden = [
            torch.randn(n, 24, generator=draw, dtype=torch.float64).to(self.dtype) for n in lens
        ]
        counts = [-(-n // page_size) for n in lens]
        pages = random.Random(seed).sample(range(sum(counts) + 3), sum(counts) + 3)
        ids = [tuple(pages.pop() for _ in range(count)) for count in counts]
        self.requests = [
            RequestRows(kind, q, q + past, own)
            for (kind, q, past), own in zip(parts, ids, strict=True)
        ]
        self.cache = self._cache(sum(counts) + 3, page_size, cache_format)
        self.builder = MetadataBuilder(
            backend=backend or Absorbing(), page_size=page_size,
            num_pages=sum(counts) + 3, num_heads=CONFIG.num_heads,
            kv_lora_rank=CONFIG.kv_lora_rank, device="cpu", max_seq_len=1000, dtype=self.dtype,
        )  # fmt: skip
        self.builder.configure(BatchRules(4, workspace=self._workspace(page_size, workspace_rows)))
        self.fill()

    def _cache(
        self, num_pages: int, page_size: int, cache_format: CacheFormat | None
    ) -> LatentCache:
        """Make a pool with gaps between pages, all of it NaN (0xff bytes are, in e4m3)."""
        dtype, width, fill = self.dtype, CONFIG.cache_width, torch.nan
        if cache_format is not None:
            (dtype, width), fill = cache_format.storage, 0xFF
        pool = torch.full((num_pages, page_size * width + 8), fill, dtype=dtype)
        view = pool[:, : page_size * width].unflatten(1, (page_size, width))
        return LatentCache.from_pool([view], format=cache_format)

    def _workspace(self, page_size: int, num_rows: int | None) -> PrefillWorkspace | None:
        if num_rows is None:
            return None
        made = PrefillWorkspace(CONFIG.cache_width, page_size, self.dtype, "cpu")
        made.claim(max(num_rows, page_size))
        made.lock()
        made.rows(made.num_rows).fill_(torch.nan)
        return made

    def fill(self) -> None:
        """Store the context of each request as a prompt of its own."""
        past = [r._replace(kind=PROMPT, query_len=r.seq_len - r.query_len) for r in self.requests]
        for i, r in enumerate(past):
            if r.query_len:
                self.run([i], [r._replace(seq_len=r.query_len)])

    def run(
        self, which: Sequence[int], requests: Sequence[RequestRows] | None = None
    ) -> list[Tensor]:
        """Run some of the requests as one step; outputs in the order of `which`."""
        given = [self.requests[i] for i in which] if requests is None else requests
        step = self.builder.build(given)
        rows = [
            self.hidden[i][r.seq_len - r.query_len : r.seq_len]
            for i, r in zip(which, given, strict=True)
        ]
        packed = torch.cat([rows[i] for i in step.order])
        angles = RotaryEmbedding(CONFIG).at(step.positions, self.dtype)
        out = self.layer(packed, angles, self.cache, 0, step, self.builder.backend)
        pieces = out.tensor_split(step.query_start[1:-1])
        return [pieces[step.order.index(i)] for i in range(len(given))]

    def full(self, i: int) -> Tensor:
        """Attend the request's new rows within its whole sequence, without a cache."""
        angles = RotaryEmbedding(CONFIG).at(torch.arange(len(self.hidden[i])), self.dtype)
        with torch.no_grad():
            out = self.layer.forward_full(self.hidden[i][None], angles)[0]
        return out[len(out) - self.requests[i].query_len :]


def test_long_extends_and_prompts_take_the_other_path() -> None:
    batch = Batch(MIXED, 16)
    step = batch.builder.build(batch.requests)
    assert step.order == (2, 3, 4, 7, 9, 1, 6, 0, 5, 8)
    assert step.verify.query_lens == (5, 1, 0, 0, 4, 3)
    assert step.prefill.query_lens == (30, 9, 20, 1)
    step = Batch(MIXED, 16, backend=ReferenceBackend()).builder.build(batch.requests)
    assert step.verify.query_lens == (5, 1, 0, 0, 4, 3, 30)


def check(batch: Batch) -> None:
    everyone = range(len(batch.requests))
    within = EXACT if batch.builder.rules.workspace is None else MERGED
    for i, got in zip(everyone, batch.run(everyone), strict=True):
        alone = batch.run([i])[0]
        torch.testing.assert_close(got, alone, **within)
        if batch.requests[i].query_len:
            torch.testing.assert_close(got, batch.full(i), **within)


@pytest.mark.parametrize("workspace_rows", [None, 16, 64, 1000])
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_a_mixed_batch_equals_each_request_alone(
    page_size: int, workspace_rows: int | None
) -> None:
    check(Batch(MIXED, page_size, workspace_rows=workspace_rows))


@pytest.mark.parametrize("workspace_rows", [None, 16, 64])
@pytest.mark.parametrize("name", ["fp8", "fp8_ds_mla", "fp8_per_token_head", "nvfp4_ds_mla"])
def test_a_mixed_batch_over_quantised_rows_equals_each_request_alone(
    name: str, workspace_rows: int | None
) -> None:
    """New rows are read as they are stored, in one pass, in chunks and absorbed."""
    scale = {"k_scale": 2.0**-6} if name == "fp8" else {}
    made = cache_format(name, 128, 32, dtype=torch.float64, **scale)
    batch = Batch(
        MIXED, 16, backend=Absorbing(made), cache_format=made, workspace_rows=workspace_rows
    )
    everyone = range(len(MIXED))
    for i, got in zip(everyone, batch.run(everyone), strict=True):
        torch.testing.assert_close(got, batch.run([i])[0], **MERGED)
        assert got.isfinite().all()
    differs = (got - batch.full(len(MIXED) - 1)).abs().max()
    assert differs > 1e-4, "the rows are not quantised"


part_strategy = st.one_of(
    st.tuples(st.just(VERIFY), st.integers(0, 6), st.integers(0, 70)),
    st.tuples(st.just(EXTEND), st.integers(1, 12), st.integers(1, 70)),
    st.tuples(st.just(PROMPT), st.integers(1, 24), st.sampled_from([0, 0, 1, 16, 50])),
)


@given(
    st.lists(part_strategy, min_size=1, max_size=6),
    st.sampled_from([1, 7, 16]),
    st.sampled_from([None, 1, 20, 60]),
    st.integers(0, 99),
)
@settings(max_examples=25)
def test_any_batch_equals_each_request_alone(
    parts: list[Part], page_size: int, workspace_rows: int | None, seed: int
) -> None:
    check(Batch(parts, page_size, workspace_rows=workspace_rows, seed=seed))


@pytest.mark.parametrize("name", ["triton", "rows"])
def test_a_mixed_batch_by_triton_errs_like_full(name: str) -> None:
    """`rows` is SINGLE_ONLY: its extends of more than one row go the other way. Budget: absorption
    rounds the query and the latent once more than MHA does, hence twice."""
    pytest.importorskip("triton")
    from specmla.backends.select import get_backend

    layer = copy.deepcopy(LAYER).float()
    batch = Batch(MIXED, 16, layer=layer, backend=get_backend(name), workspace_rows=32)
    exact = Batch(MIXED, 16, layer=copy.deepcopy(layer).double())
    exact.hidden = [h.double() for h in batch.hidden]
    got = torch.cat(batch.run(range(len(MIXED))))
    want, plain = (torch.cat([b.full(i) for i in range(len(MIXED))]) for b in (exact, batch))
    assert (
        relative_error(got, want)
        <= 2 * relative_error(plain, want) + torch.finfo(torch.float32).eps
    )
