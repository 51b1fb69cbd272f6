"""The cases of `check_backend`: what a backend declares, times what has broken kernels before.

A compiled form (dtype, heads, dims, page size, tree or not, windows or not) is expensive, lengths
and rows are not: one ragged batch holds many of them, and few forms are used.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from specmla.backends.base import AttentionBackend, Capabilities
from specmla.cache.formats.plain import quantised
from specmla.errors import UnsupportedError
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport
from specmla.testing.case import QUERY_LAYOUTS, CaseSpec
from specmla.testing.check_case import Check, CheckCase, spec_lens

LENGTHS = (0, 1, 63, 64, 65, 127, 128)
LONG = 8191
QUERY_LENS = range(1, 17)
HEADS = (1, 3, 8, 12, 20, 40, 63, 64, 96, 126, 128)
"""Besides 16, which all other cases have."""
PAGE_SIZES = (64, 16, 32, 48, 128)
"""Sizes that are tried, the usual one first."""
USUAL_DIMS = (512, 64)
RAGGED = ((4, 777), (8, 1290), (3, 64), (1, 9), (0, 0), (0, 100), (3, 2), (2, 2191))
TREES = (*RAGGED, (64, 500), (64, 64), (33, 97))


def derive_cases(
    backend: AttentionBackend,
    *,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    thorough: bool = False,
) -> list[CheckCase]:
    """List the cases for what a backend declares; `problems` may still refuse some of them.

    One that was built for a quantised cache gets that format, its dims and its dtype. The first of
    `dtypes` gets every case, the others a few; all of them every case if `thorough`.

    Raises:
        UnsupportedError: the backend can't serve its own dtypes on `device` at any page size.
    """
    base = find_base(backend, device, dtypes)
    has = backend.capabilities
    cases: list[CheckCase] = []
    wanted = (base.dtype,) if base.cache_format else dtypes  # a format has one
    for dtype in sorted(wanted, key=lambda d: d is not base.dtype):
        spec = dataclasses.replace(base, dtype=dtype)
        mark = "" if dtype is base.dtype else f"-{str(dtype).removeprefix('torch.')}"
        full = thorough or not mark
        made = [*_lengths(spec, has), *_forms(spec, has)] if full else [*_few(spec, has)]
        if thorough:
            made += [*_alone(spec), *_products(spec, has)]
        cases += [dataclasses.replace(case, name=case.name + mark) for case in made]
    if has.query_len_support is QueryLenSupport.UNIFORM:
        return [part for case in cases for part in _uniform(case)]
    return cases


def find_base(
    backend: AttentionBackend, device: torch.device, dtypes: Sequence[torch.dtype]
) -> CaseSpec:
    """Find dtype, page size and dims that all other cases start from.

    Raises:
        UnsupportedError: as `derive_cases`.
    """
    has, packed = backend.capabilities, quantised(backend.cache_format)
    rank = packed.kv_lora_rank if packed else _usual(has.ranks, USUAL_DIMS[0])
    rope = packed.qk_rope_head_dim if packed else _usual(has.rope_dims, USUAL_DIMS[1])
    mask = DraftMask.CAUSAL if DraftMask.CAUSAL in has.masks else min(has.masks, key=str)
    reasons: list[str] = []
    for dtype in (packed.dtype,) if packed else dtypes:
        for page_size in (*PAGE_SIZES, has.page_size_multiple):
            spec = CaseSpec(
                RAGGED,
                kv_lora_rank=rank,
                rope_dim=rope,
                page_size=page_size,
                dtype=dtype,
                device=device,
                mask=mask,
                cache_format=packed,
            )
            found = backend.problems(CheckCase("base", _one_length(spec)).need())
            if not found:
                return spec
            reasons += [text for text in found if text not in reasons]
    raise UnsupportedError(f"backend {has.name!r} can't be checked on {device}", reasons)


def _usual(accepted: tuple[int, ...] | None, usual: int) -> int:
    return usual if accepted is None or usual in accepted else max(accepted)


def _one_length(spec: CaseSpec) -> CaseSpec:
    return dataclasses.replace(spec, batch=[(2, 65)])


def _case(
    name: str, spec: CaseSpec, *checks: Check, far: bool = False, **changes: Any
) -> CheckCase:
    return CheckCase(name, dataclasses.replace(spec, **changes), frozenset(checks), far)


def _lengths(spec: CaseSpec, has: Capabilities) -> Iterator[CheckCase]:
    """Lengths and rows over the form of `spec`: nothing more is compiled but a one-row form."""
    contexts = [(q, q + n) for n in LENGTHS for q in QUERY_LENS]
    yield _case("contexts", spec, batch=contexts)
    totals = [(q, n) for n in LENGTHS for q in (0, 1, 2, 3, 5, 8, 16)]
    yield _case("totals", spec, Check.FILLS, batch=totals)
    yield _case("decodes", spec, batch=[(1, n) for n in (*LENGTHS, LONG)])
    longest = [(1, LONG), (4, LONG), (16, LONG), (2, LONG + 15), (0, LONG), (3, 5)]
    yield _case("long", spec, batch=longest)
    for query_len, seq_len in ((16, 4097), (16, 4098), (16, 4111), (8, 2051), (4, 1025), (2, 513)):
        # Key ranges cut at any multiple of a power of two are cut inside the new rows here.
        yield _case(f"tail-q{query_len}s{seq_len}", spec, batch=[(query_len, seq_len)])
    yield _case("wide", spec, batch=[(40, 100), (2, 70)])
    yield _case("no-rows", spec, batch=[(0, 5), (0, 0)])
    yield _case("no-keys", spec, batch=[(4, 0), (1, 0)])
    yield _case("repeats-one", spec, Check.REPEATS, batch=[(4, LONG)])
    many = [(1 + i % 8, 40 + 37 * i % 300) for i in range(32)]
    yield _case("repeats-many", spec, Check.REPEATS, Check.LAYERS, batch=many)
    rows = [(16, 200), (5, 129), (8, 64), (3, 2), (1, 777), (4, 4099)]
    checks = [Check.DECODES, *([Check.LEAK] if spec.mask is DraftMask.CAUSAL else [])]
    yield _case("rows", spec, *checks, batch=rows)
    yield _case("far-pages", spec, batch=[(3, 65), (2, 130)], spare_pages=0, far=True)
    if DraftMask.FULL in has.masks:
        yield _case("mask-full", spec, Check.DECODES, batch=RAGGED, mask=DraftMask.FULL)


def _forms(spec: CaseSpec, has: Capabilities) -> Iterator[CheckCase]:
    """Forms that are compiled one by one."""
    few = [(1, 63), (2, 65), (4, 300), (7, 128), (0, 5), (3, 2)]
    for heads, layout in zip(HEADS, itertools.cycle(QUERY_LAYOUTS)):
        yield _case(f"heads-{heads}", spec, batch=few, num_heads=heads, query_layout=layout)
    for page_size in PAGE_SIZES:
        if page_size != spec.page_size and not page_size % has.page_size_multiple:
            changes: dict[str, Any] = {"page_size": page_size, "page_gap": 640}
            yield _case(f"page-{page_size}", spec, batch=RAGGED, **changes)
    yield _case("windows", spec, Check.DECODES, batch=RAGGED, windows=True)
    if DraftMask.FULL in has.masks:
        yield _case("windows-full", spec, batch=RAGGED, mask=DraftMask.FULL, windows=True)
    if DraftMask.TREE in has.masks:
        tree: dict[str, Any] = {"batch": TREES, "mask": DraftMask.TREE}
        yield _case("mask-tree", spec, **tree)
        small = [(8, 700), (3, 65), (1, 9)]
        yield _case("repeats-tree", spec, Check.REPEATS, batch=small, mask=DraftMask.TREE)
        yield _case("windows-tree", spec, windows=True, **tree)
    yield _case("heads-first", spec, batch=RAGGED, query_layout="heads_first")
    yield _case("slice", spec, batch=RAGGED, query_layout="slice", page_gap=64)
    for rank, rope in _dims(spec, has):
        yield _case(f"dims-{rank}-{rope}", spec, batch=few, kv_lora_rank=rank, rope_dim=rope)
    yield from _few(spec, has, prefix="small-page-")


def _few(spec: CaseSpec, has: Capabilities, prefix: str = "") -> Iterator[CheckCase]:
    """Two forms that differ in all that a form can differ in."""
    if not prefix:
        yield _case("ragged", spec, Check.REPEATS, batch=RAGGED)
    small = max(16, has.page_size_multiple)
    mask = DraftMask.TREE if DraftMask.TREE in has.masks else spec.mask
    changes: dict[str, Any] = {"mask": mask, "windows": True, "query_layout": "slice"}
    batch = TREES if mask is DraftMask.TREE else RAGGED
    name = f"{prefix}{mask.value}-windows"
    yield _case(name, spec, batch=batch, page_size=small, page_gap=64, **changes)


def _dims(spec: CaseSpec, has: Capabilities) -> list[tuple[int, int]]:
    """Other dims: the smallest rank with the widest rope, another one without rope if allowed."""
    if spec.cache_format is not None:
        return []
    ranks = (16, 40) if has.ranks is None else sorted(set(has.ranks) - {spec.kv_lora_rank})
    ropes = (0, 24) if has.rope_dims is None else sorted(has.rope_dims)
    if not ranks:
        others = [rope for rope in ropes if rope != spec.rope_dim]
        return [(spec.kv_lora_rank, rope) for rope in others[:2]]
    return list(dict.fromkeys([(ranks[0], ropes[-1]), (ranks[-1], ropes[0])]))


def _alone(spec: CaseSpec) -> Iterator[CheckCase]:
    """Requests by themselves: each is planned and cut as no batch would be."""
    for length in (*LENGTHS, LONG):
        for query_len in (1, 2, 5, 8, 16):
            name = f"alone-q{query_len}c{length}"
            yield _case(name, spec, batch=[(query_len, query_len + length)])


def _products(spec: CaseSpec, has: Capabilities) -> Iterator[CheckCase]:
    """Every declared mask with every page size and with windows, heads with trees."""
    for mask in sorted(has.masks, key=lambda m: m.value):
        batch = TREES if mask is DraftMask.TREE else RAGGED
        for page_size in PAGE_SIZES:
            if not page_size % has.page_size_multiple:
                name = f"{mask.value}-windows-page-{page_size}"
                changes: dict[str, Any] = {"mask": mask, "page_size": page_size, "windows": True}
                yield _case(name, spec, batch=batch, page_gap=64, query_layout="slice", **changes)
        for heads in HEADS:
            name = f"{mask.value}-heads-{heads}"
            yield _case(name, spec, batch=RAGGED, num_heads=heads, mask=mask, page_gap=64)


def _uniform(case: CheckCase) -> Iterator[CheckCase]:
    """Cut a ragged case by query length, for a backend that takes one length a call."""
    lens = spec_lens(case.spec)
    for query_len in sorted({q for q, _ in lens}):
        batch = [(q, s) for q, s in lens if q == query_len]
        spec = dataclasses.replace(case.spec, batch=batch)
        yield dataclasses.replace(case, name=f"{case.name}-q{query_len}", spec=spec)
