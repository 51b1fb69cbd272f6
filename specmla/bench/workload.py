"""Turns a point of the grid into a case over the shared pool."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.bench.cost import Cost, verify_cost
from specmla.bench.points import Point
from specmla.bench.pool import PagePool
from specmla.bench.timing import num_copies
from specmla.bench.verify import NOPE_HEAD_DIM
from specmla.mask import DraftMask
from specmla.metadata import RequestKind, RequestRows
from specmla.testing import CaseSpec, VerifyCase, parse_batch, random_parents

COLD_FACTOR = 3
"""Windows together are this many times L2: fewer calls to capture than `verify` takes."""


@dataclass(frozen=True)
class GridOptions:
    """What all points share: dtype, C, R, device and the seed of the data."""

    dtype: torch.dtype
    kv_lora_rank: int
    rope_dim: int
    device: torch.device
    seed: int = 0


class Workload(NamedTuple):
    """case: reads the first of `windows`. cost: of one call."""

    case: VerifyCase
    windows: list[Tensor]
    cost: Cost


def make_pool(points: Iterable[Point], options: GridOptions) -> PagePool:
    """Make the pool that these points share: twice the largest, and enough to keep L2 cold."""
    width = options.kv_lora_rank + options.rope_dim
    rows = 2 * max(_num_pages(point) * point.page_size for point in points)
    if options.device.type == "cuda":
        l2_bytes = torch.cuda.get_device_properties(options.device).L2_cache_size
        rows = max(rows, (COLD_FACTOR + 1) * l2_bytes // (width * options.dtype.itemsize))
    return PagePool(rows, width, options.dtype, options.device, options.seed)


def make_workload(point: Point, pool: PagePool, options: GridOptions) -> Workload:
    """Give a point's queries, requests over permuted pages, and the caches it can be run on."""
    spec = CaseSpec(
        point.batch,
        num_heads=point.heads,
        kv_lora_rank=options.kv_lora_rank,
        rope_dim=options.rope_dim,
        page_size=point.page_size,
        dtype=options.dtype,
        device=options.device,
        mask=DraftMask(point.mask),
        seed=options.seed + zlib.crc32(repr(point).encode()),
        softmax_scale=(NOPE_HEAD_DIM + options.rope_dim) ** -0.5,
    )
    requests = _requests(point, random.Random(spec.seed))
    cost = verify_cost(
        [r.query_len for r in requests],
        [r.seq_len for r in requests],
        num_heads=point.heads,
        kv_lora_rank=options.kv_lora_rank,
        qk_rope_head_dim=options.rope_dim,
        itemsize=options.dtype.itemsize,
    )
    most = num_copies(cost.cache_bytes, options.device, COLD_FACTOR)
    windows = pool.windows(point.page_size, _num_pages(point), most)
    generator = torch.Generator(options.device).manual_seed(spec.seed)
    shape = (sum(r.query_len for r in requests), point.heads)
    latent, rope = (
        torch.randn(*shape, width, generator=generator, dtype=options.dtype, device=options.device)
        for width in (options.kv_lora_rank, options.rope_dim)
    )
    return Workload(VerifyCase(spec, latent, rope, windows[0], tuple(requests)), windows, cost)


def _num_pages(point: Point) -> int:
    return sum(-(-lens.seq_len // point.page_size) for lens in parse_batch(point.batch))


def _requests(point: Point, rng: random.Random) -> list[RequestRows]:
    free = list(range(_num_pages(point)))
    rng.shuffle(free)
    requests = []
    for query_len, seq_len in parse_batch(point.batch):
        count = -(-seq_len // point.page_size)
        is_tree = point.mask == DraftMask.TREE.value
        requests.append(
            RequestRows(
                kind=RequestKind.VERIFY,
                query_len=query_len,
                seq_len=seq_len,
                block_ids=tuple(free.pop() for _ in range(count)),
                parents=random_parents(query_len, rng) if is_tree and query_len else None,
            )
        )
    return requests
