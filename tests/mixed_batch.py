"""Mixed batches through the whole layer, on any device: requests, their rows, a cache of them."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend
from specmla.backends.reference import ReferenceBackend
from specmla.backends.select import get_backend
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


def make_layer(config: MLAConfig = CONFIG, seed: int = 0) -> MLAAttention:
    """Weights that keep rows at size 1 and scores apart, float64."""
    torch.manual_seed(seed)
    layer = MLAAttention(config).double()
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
        self.layer, self.config = layer, layer.config
        weight = layer.o_proj.weight
        self.dtype, self.device = weight.dtype, weight.device
        draw = torch.Generator().manual_seed(seed)
        lens = [q + past for _, q, past in parts]
        self.hidden = [
            torch.randn(n, self.config.hidden_size, generator=draw, dtype=torch.float64).to(weight)
            for n in lens
        ]
        counts = [-(-n // page_size) for n in lens]
        pages = random.Random(seed).sample(range(sum(counts) + 3), sum(counts) + 3)
        ids = [tuple(pages.pop() for _ in range(count)) for count in counts]
        self.requests = [
            RequestRows(kind, q, q + past, own)
            for (kind, q, past), own in zip(parts, ids, strict=True)
        ]
        self.cache = self._cache(sum(counts) + 3, page_size, cache_format)
        self.wrap(self.cache, backend or Absorbing())
        self.builder.configure(BatchRules(4, workspace=self._workspace(page_size, workspace_rows)))
        self.fill()

    def wrap(self, cache: LatentCache, backend: AttentionBackend) -> None:
        """Go on over a cache with the same memory, and a backend."""
        self.cache = cache
        self.builder = MetadataBuilder(
            backend=backend, page_size=cache.page_size,
            num_pages=cache.num_pages, num_heads=self.config.num_heads,
            kv_lora_rank=self.config.kv_lora_rank, device=self.device, max_seq_len=1000,
            dtype=self.dtype,
        )  # fmt: skip

    def _cache(
        self, num_pages: int, page_size: int, cache_format: CacheFormat | None
    ) -> LatentCache:
        """Make a pool with gaps between pages, all of it NaN (0xff bytes are, in e4m3)."""
        dtype, width, fill = self.dtype, self.config.cache_width, torch.nan
        if cache_format is not None:
            (dtype, width), fill = cache_format.storage, 0xFF
        gap = 16 // dtype.itemsize
        shape = (num_pages, page_size * width + gap)
        pool = torch.full(shape, fill, dtype=dtype, device=self.device)
        view = pool[:, : page_size * width].unflatten(1, (page_size, width))
        # Kernels know no quantised rows of float64, which the exact result is made of.
        exact = cache_format is not None and self.dtype == torch.float64
        return LatentCache.from_pool([view], "torch" if exact else None, format=cache_format)

    def _workspace(self, page_size: int, num_rows: int | None) -> PrefillWorkspace | None:
        if num_rows is None:
            return None
        made = PrefillWorkspace(self.config.cache_width, page_size, self.dtype, self.device)
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
        angles = RotaryEmbedding(self.config).at(step.positions, self.dtype)
        out = self.layer(packed, angles, self.cache, 0, step, self.builder.backend)
        pieces = out.tensor_split(step.query_start[1:-1])
        return [pieces[step.order.index(i)] for i in range(len(given))]

    def full(self, i: int) -> Tensor:
        """Attend the request's new rows within its whole sequence, without a cache."""
        places = torch.arange(len(self.hidden[i]), device=self.device)
        angles = RotaryEmbedding(self.config).at(places, self.dtype)
        with torch.no_grad():
            out = self.layer.forward_full(self.hidden[i][None], angles)[0]
        return out[len(out) - self.requests[i].query_len :]


def check_errors(name: str, layer: MLAAttention, format_name: str | None = None) -> None:
    """Hold a backend's rows of `MIXED`, together and alone, to what plain torch errs by.

    Over plain rows that is `full` in the layer's dtype; the exact result is `full` in float64. Over
    quantised ones it is the reference backend, in both: codes of rows that lie at a border may
    differ with the dtype, in all three alike. Budget: absorption rounds the query and the latent
    once more than MHA does, hence twice.

    Args:
        name: of the backend. layer: on its device, in its dtype. format_name: of the cache.
    """
    config, dtype = layer.config, layer.o_proj.weight.dtype
    everyone = range(len(MIXED))

    def batch(of: MLAAttention, by: str) -> Batch:
        given = of.o_proj.weight.dtype
        made = format_name and cache_format(
            format_name, config.kv_lora_rank, config.qk_rope_head_dim, dtype=given
        )
        backend = get_backend(by, cache_format=made or None)
        return Batch(
            MIXED, 64, layer=of, backend=backend, workspace_rows=64, cache_format=made or None
        )

    ours, plain = batch(layer, name), batch(layer, "reference")
    exact = batch(copy.deepcopy(layer).double(), "reference")
    exact.hidden = [h.double() for h in ours.hidden]
    exact.fill()
    together, alone = ours.run(everyone), [ours.run([i])[0] for i in everyone]
    if format_name is None:
        want, near = ([b.full(i) for i in everyone] for b in (exact, plain))
    else:
        want, near = exact.run(everyone), plain.run(everyone)
    most = 2 * relative_error(torch.cat(near), torch.cat(want)) + torch.finfo(dtype).eps
    for rows in (together, alone):
        assert relative_error(torch.cat(rows), torch.cat(want)) <= most
