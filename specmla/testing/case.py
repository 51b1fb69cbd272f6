"""Hostile input for attention: whatever must not matter is NaN, absurd or permuted."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.cache.formats.base import CacheFormat
from specmla.cache.formats.plain import quantised
from specmla.cache.layout import format_problems
from specmla.errors import ArgumentError, require
from specmla.mask import MAX_TREE_NODES, DraftMask
from specmla.metadata import RequestKind, RequestRows, VerifyPart
from specmla.query import QueryLenSupport, decode_rows
from specmla.testing.batch import parse_batch
from specmla.testing.tables import ABSURD_PAGE, make_verify_part

DEEPSEEK_SCALE = 192**-0.5
"""Softmax scale of DeepSeek-V2/V3 without YaRN: (P + R)^-0.5 with P = 128, R = 64."""

QUERY_LAYOUTS = ("packed", "heads_first", "slice")
BYTES = {0.0: 0, math.inf: 0x7F}
"""What stands for a value in unused slots of quantised rows; 0xff for all others, NaN included."""


@dataclass(frozen=True)
class CaseSpec:
    """What `make_case` builds.

    Attributes:
        batch: text for `parse_batch`, or pairs (query_len, seq_len); a pair may have
            seq_len < query_len, which only `make_verify_part` accepts.
        num_heads, kv_lora_rank, rope_dim, page_size: H, C, R, G.
        mask: relation of the new rows; a tree gets random parents in a random node order.
        query_layout: "packed" [T, H, D] contiguous; "heads_first" a transposed [H, T, D]; "slice"
            cut out of a buffer that is wider in heads and in width, NaN around it.
        page_gap: elements between one page's end and the next page's start, NaN.
        spare_pages: pages that no request owns, NaN.
        windows: give every other request a random first visible key.
        poison: value of every slot at or past a request's length, of gaps and of unused pages;
            a quantised cache has bytes 0xff there, NaN as a code and as a scale, for infinity 0x7f.
        unused_cell: value of the block-table cells past a request's pages.
        softmax_scale: never derived from the widths here.
        cache_format: None for plain rows in `dtype`; else of the same widths and dtype.
    """

    batch: str | Sequence[tuple[int, int]]
    num_heads: int = 16
    kv_lora_rank: int = 512
    rope_dim: int = 64
    page_size: int = 64
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    mask: DraftMask = DraftMask.CAUSAL
    seed: int = 0
    query_layout: str = "packed"
    page_gap: int = 0
    spare_pages: int = 3
    windows: bool = False
    poison: float = float("nan")
    unused_cell: int = ABSURD_PAGE
    softmax_scale: float = DEEPSEEK_SCALE
    cache_format: CacheFormat | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown layout and a format of another size.

        Raises:
            ArgumentError: names it and the accepted ones.
        """
        require(format_problems(self.cache_format, self.width, self.dtype), "CaseSpec")
        if self.query_layout not in QUERY_LAYOUTS:
            raise ArgumentError(
                f"query_layout is {self.query_layout!r}, accepted are {list(QUERY_LAYOUTS)}"
            )

    @property
    def width(self) -> int:
        """A = C + R."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class VerifyCase:
    """Queries, cache and requests of one verify call; data is standard normal.

    Attributes:
        q_latent: [T, H, C]. q_rope: [T, H, R]. Strides as `spec.query_layout` says.
        latent_cache: [N, G, C + R], page stride larger than G * (C + R) by `spec.page_gap`; bytes
            [N, G, bytes] with `spec.cache_format`.
        requests: one entry a request, pages permuted over the pool.
    """

    spec: CaseSpec
    q_latent: Tensor
    q_rope: Tensor
    latent_cache: Tensor
    requests: tuple[RequestRows, ...]

    @property
    def softmax_scale(self) -> float:
        """The scale to pass on."""
        return self.spec.softmax_scale

    def rows(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Give what the cache holds as numbers [N, G, C + R]: in `dtype` if they are quantised."""
        packed = quantised(self.spec.cache_format)
        if packed is None:
            return self.latent_cache
        rows = packed.dequantise(self.latent_cache.flatten(0, 1), dtype)
        num_pages, page, _ = self.latent_cache.shape
        return rows.view(num_pages, page, -1)

    def tables(self) -> VerifyPart:
        """Write the tables, unplanned, unused cells absurd."""
        return make_verify_part(
            self.requests,
            self.spec.mask,
            page_size=self.spec.page_size,
            device=self.spec.device,
            unused_cell=self.spec.unused_cell,
        )

    def planned(self, backend: AttentionBackend, tables: VerifyPart | None = None) -> VerifyPart:
        """Let a backend plan the case's tables, or others, with row tables if it needs them."""
        part = tables or self.tables()
        single = backend.capabilities.query_len_support is QueryLenSupport.SINGLE_ONLY
        if single and part.rows is None:
            lens = torch.tensor(part.query_lens, device=part.row_extent.device)
            rows = decode_rows(part.row_extent, part.block_table, lens, part.num_rows)
            part = dataclasses.replace(part, rows=rows)
        return backend.plan(
            part,
            num_heads=self.spec.num_heads,
            kv_lora_rank=self.spec.kv_lora_rank,
            dtype=self.spec.dtype,
        )

    def attend(
        self, backend: AttentionBackend, tables: VerifyPart | None = None
    ) -> AttentionOutput:
        """Plan the case's tables, or others, and run them through `forward_mqa`."""
        return backend.forward_mqa(
            self.q_latent,
            self.q_rope,
            self.latent_cache,
            self.planned(backend, tables),
            softmax_scale=self.softmax_scale,
        )

    def slots(self, request: int) -> Tensor:
        """Flat slots (page * G + offset) of a request's tokens, `[S]` int64."""
        r, page = self.requests[request], self.spec.page_size
        at = [r.block_ids[i // page] * page + i % page for i in range(r.seq_len)]
        return torch.tensor(at, dtype=torch.int64, device=self.spec.device)


def make_case(batch: str | Sequence[tuple[int, int]], **options: Any) -> VerifyCase:
    """Build a hostile case; `options` are the fields of `CaseSpec`.

    The same spec gives the same numbers on every device and, up to rounding, in every dtype.
    """
    spec = CaseSpec(batch, **options)
    generator = torch.Generator().manual_seed(spec.seed)
    rng = random.Random(spec.seed)
    requests, num_pages = _requests(spec, rng)
    num_rows = sum(r.query_len for r in requests)
    return VerifyCase(
        spec=spec,
        q_latent=_query(spec, num_rows, spec.kv_lora_rank, generator),
        q_rope=_query(spec, num_rows, spec.rope_dim, generator),
        latent_cache=_cache(spec, requests, num_pages, generator),
        requests=tuple(requests),
    )


def random_parents(num_nodes: int, rng: random.Random) -> list[int]:
    """Draw a tree: random parents, then a random renumbering, so that no order can be relied on."""
    links = [-1, *[rng.randrange(i) for i in range(1, num_nodes)]]
    names = list(range(num_nodes))
    rng.shuffle(names)
    parents = [-1] * num_nodes
    for node, parent in enumerate(links):
        parents[names[node]] = -1 if parent == -1 else names[parent]
    return parents


def _requests(spec: CaseSpec, rng: random.Random) -> tuple[list[RequestRows], int]:
    lens = parse_batch(spec.batch) if isinstance(spec.batch, str) else spec.batch
    counts = [-(-seq_len // spec.page_size) for _, seq_len in lens]
    num_pages = sum(counts) + spec.spare_pages
    free = list(range(num_pages))
    rng.shuffle(free)
    requests = []
    for i, ((query_len, seq_len), count) in enumerate(zip(lens, counts, strict=True)):
        is_tree = spec.mask is DraftMask.TREE and 1 <= query_len <= MAX_TREE_NODES
        windowed = spec.windows and i % 2 == 0
        requests.append(
            RequestRows(
                kind=RequestKind.VERIFY,
                query_len=query_len,
                seq_len=seq_len,
                block_ids=tuple(free.pop() for _ in range(count)),
                parents=random_parents(query_len, rng) if is_tree else None,
                window_start=rng.randint(0, seq_len) if windowed else 0,
            )
        )
    return requests, num_pages


def _query(spec: CaseSpec, num_rows: int, width: int, generator: torch.Generator) -> Tensor:
    shape = (num_rows, spec.num_heads, width)
    values = torch.randn(shape, generator=generator).to(spec.device, spec.dtype)
    if spec.query_layout == "heads_first":
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if spec.query_layout == "slice":
        wider = values.new_full((num_rows, spec.num_heads + 4, width + 128), float("nan"))
        view = wider[:, : spec.num_heads, 128:]
        view.copy_(values)
        return view
    return values


def _cache(
    spec: CaseSpec, requests: Sequence[RequestRows], num_pages: int, generator: torch.Generator
) -> Tensor:
    page, packed = spec.page_size, quantised(spec.cache_format)
    kind, width = packed.storage if packed else (spec.dtype, spec.width)
    stride = page * width + spec.page_gap
    poison = BYTES.get(spec.poison, 0xFF) if packed else spec.poison
    pool = torch.full((num_pages * stride,), poison, dtype=kind, device=spec.device)
    cache = pool.as_strided((num_pages, page, width), (stride, width, 1))
    for r in requests:
        values = torch.randn((r.seq_len, spec.width), generator=generator)
        values = values.to(spec.device, spec.dtype)
        if packed:
            rank = spec.kv_lora_rank
            values = packed.quantise(values[:, :rank], values[:, rank:])
        for i, block in enumerate(r.block_ids):
            part = values[i * page : (i + 1) * page]
            cache[block, : part.shape[0]] = part
    return cache
