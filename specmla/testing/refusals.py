"""What a backend does not declare must be refused with reasons, and never be served."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from specmla.backends.base import AttentionBackend, Requirements
from specmla.errors import SpecMLAError
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport
from specmla.testing.case import CaseSpec, VerifyCase, make_case
from specmla.testing.check_case import CheckCase

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
PAGE_SIZES = (1, 8, 16, 24, 32, 48, 64, 128)
RANKS = (48, 96, 128, 256, 512, 576)
ROPE_DIMS = (24, 8, 0, 64)


@dataclass(frozen=True)
class Refusal:
    """A need that a backend should not serve.

    Attributes:
        name: short and unique.
        argument, value: what the reasons must name.
        need: for `problems`.
        spec: what to build to see that it is not served; None if nothing can be built.
        declared: the capabilities seem to allow it: whether `problems` refuses it is its choice,
            but if it does, so must the call.
    """

    name: str
    argument: str
    value: str
    need: Requirements
    spec: CaseSpec | None
    declared: bool = False

    def __repr__(self) -> str:
        """Name the spec's call, or the need."""
        return repr(self.need if self.spec is None else CheckCase(self.name, self.spec))


def derive_refusals(backend: AttentionBackend, base: CaseSpec) -> list[Refusal]:
    """List the refusals for what a backend declares, one argument off `base` each."""
    base = dataclasses.replace(base, batch=[(2, 65)])
    found = [*_pages(backend, base), *_rest(backend, base)]
    if base.cache_format is None:
        found += [*_dtypes(backend, base), *_dims(backend, base)]
    else:  # which has its own dtype and dims; plain rows are another one
        plain = dataclasses.replace(base, cache_format=None)
        found.append(_refusal("format", "plain", plain))
    return [r for r in found if not r.declared or backend.problems(r.need)]


def check_refusal(backend: AttentionBackend, refusal: Refusal) -> None:
    """Assert that `problems` says why, and that plan and call refuse.

    Raises:
        AssertionError: says what was served, or which reason lacks what.
    """
    reasons = backend.problems(refusal.need)
    assert reasons, f"problems() lists nothing for {refusal.argument} {refusal.value}"
    naming = [text for text in reasons if refusal.argument in text and refusal.value in text]
    assert naming, (
        f"no reason names {refusal.argument!r} and its value {refusal.value!r}: {reasons}"
    )
    assert any("accepted" in text or "served" in text for text in naming), (
        f"the reason does not say what is accepted: {naming}"
    )
    if refusal.spec is None:
        return
    case = _build(refusal.spec)
    try:
        got = case.attend(backend)
    except SpecMLAError:
        return
    except Exception as error:
        raise AssertionError(
            f"the call failed with {type(error).__name__} ({error}) instead of refusing by an "
            "error of specmla.errors"
        ) from error
    raise AssertionError(
        f"{refusal.argument} {refusal.value} is refused by problems() but was served: "
        f"out {tuple(got.out.shape)} {got.out.dtype}"
    )


def _build(spec: CaseSpec) -> VerifyCase:
    """Build in float32 and convert, so that any dtype can be built; quantised rows have one."""
    if spec.cache_format is not None:
        return make_case(**vars(spec))
    case = make_case(**vars(dataclasses.replace(spec, dtype=torch.float32)))
    return dataclasses.replace(
        case,
        spec=spec,
        q_latent=case.q_latent.to(spec.dtype),
        q_rope=case.q_rope.to(spec.dtype),
        latent_cache=case.latent_cache.to(spec.dtype),
    )


def _refusal(argument: str, value: object, spec: CaseSpec, *, declared: bool = False) -> Refusal:
    name = f"refuses-{argument}-{str(value).removeprefix('torch.')}"
    need = CheckCase(name, spec).need()
    return Refusal(name, argument, str(value), need, spec, declared)


def _dtypes(backend: AttentionBackend, base: CaseSpec) -> Iterator[Refusal]:
    has = backend.capabilities
    for dtype in DTYPES:
        made = _refusal("dtype", dtype, dataclasses.replace(base, dtype=dtype))
        if dtype in has.dtypes:
            # Declared, but not on this machine: `problems` knows that, the call need not.
            made = dataclasses.replace(made, spec=None, declared=True)
        yield made


def _pages(backend: AttentionBackend, base: CaseSpec) -> Iterator[Refusal]:
    multiple = backend.capabilities.page_size_multiple
    for size in PAGE_SIZES:
        spec = dataclasses.replace(base, page_size=size)
        yield _refusal("page_size", size, spec, declared=not size % multiple)
    need = dataclasses.replace(CheckCase("", base).need(), page_size=0)
    yield Refusal("refuses-page_size-0", "page_size", "0", need, None)


def _dims(backend: AttentionBackend, base: CaseSpec) -> Iterator[Refusal]:
    has = backend.capabilities
    for rank in RANKS:
        spec = dataclasses.replace(base, kv_lora_rank=rank)
        yield _refusal("kv_lora_rank", rank, spec, declared=has.ranks is None or rank in has.ranks)
    for rope in ROPE_DIMS:
        spec = dataclasses.replace(base, rope_dim=rope)
        declared = has.rope_dims is None or rope in has.rope_dims
        yield _refusal("qk_rope_head_dim", rope, spec, declared=declared)


def _rest(backend: AttentionBackend, base: CaseSpec) -> Iterator[Refusal]:
    has, need = backend.capabilities, CheckCase("", base).need()
    for mask in sorted(frozenset(DraftMask) - has.masks, key=lambda m: m.value):
        yield _refusal("mask", mask.value, dataclasses.replace(base, mask=mask))
    for kind in sorted({"cpu", "cuda", "xpu"} - set(has.device_types)):
        other = dataclasses.replace(need, device=torch.device(kind))
        yield Refusal(f"refuses-device-{kind}", "device", kind, other, None)
    none = dataclasses.replace(need, num_heads=0)
    yield Refusal("refuses-num_heads-0", "num_heads", "0", none, None)
    if has.query_len_support is QueryLenSupport.UNIFORM:
        ragged = dataclasses.replace(base, batch=[(2, 65), (1, 7)])
        kind = QueryLenSupport.VARLEN.value
        need = CheckCase("", ragged).need()
        yield Refusal("refuses-ragged", "query_len_support", kind, need, ragged)
