"""Finds a backend by name, or the best one that can serve; never a silent fallback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from specmla.backends.base import AttentionBackend, Requirements
from specmla.backends.requirements import form_kinds
from specmla.cache.formats.base import CacheFormat
from specmla.cache.formats.plain import quantised
from specmla.errors import ArgumentError, UnsupportedError, require
from specmla.query_form import Fp8Query


def _reference() -> type[AttentionBackend]:
    from specmla.backends.reference import ReferenceBackend

    return ReferenceBackend


def _triton() -> type[AttentionBackend]:
    from specmla.backends.triton import TritonBackend

    return TritonBackend


def _rows() -> type[AttentionBackend]:
    from specmla.backends.rows import RowsBackend

    return RowsBackend


def _hopper() -> type[AttentionBackend]:
    from specmla.backends.hopper import HopperBackend

    return HopperBackend


def _flashmla() -> type[AttentionBackend]:
    from specmla.backends.flashmla import FlashMLABackend

    return FlashMLABackend


BACKENDS: dict[str, Callable[[], type[AttentionBackend]]] = {
    "triton": _triton,
    "rows": _rows,
    "hopper": _hopper,
    "flashmla": _flashmla,
    "reference": _reference,
}


def get_backend(
    name: str,
    *,
    batch_invariant: bool = False,
    cache_format: CacheFormat | None = None,
    query_form: Fp8Query | None = None,
) -> AttentionBackend:
    """Make the backend of that name, whether or not it can run here.

    Raises:
        ArgumentError: an unknown name, or one in the place of a format.
        UnsupportedError: batch-invariant results, a cache format or a query form are asked for and
            it has none.
    """
    if not isinstance(name, str) or name not in BACKENDS:
        raise ArgumentError(f"backend is {name!r}, accepted are {sorted(BACKENDS)}")
    require(form_kinds({"cache_format": cache_format, "query_form": query_form}), "get_backend")
    return BACKENDS[name]().make(
        batch_invariant=batch_invariant, cache_format=cache_format, query_form=query_form
    )


def backend_for(need: Requirements, name: str) -> AttentionBackend:
    """Make the backend of that name as needed in what it can be; of the rest `problems` tells.

    Raises:
        ArgumentError: an unknown name.
    """
    has = get_backend(name).capabilities
    packed = quantised(need.format)
    packed = packed if packed and packed.name in has.formats else None
    return get_backend(
        name,
        batch_invariant=need.batch_invariant and has.batch_invariant,
        cache_format=packed,
        query_form=need.query_form if packed and packed.name in has.fp8_query else None,
    )


def _rank(backend: AttentionBackend, need: Requirements) -> tuple[bool, int]:
    """Prefer a backend at home (its first device type): never Triton under its interpreter."""
    has = backend.capabilities
    return has.device_types[0] != need.device.type, -has.priority


@dataclass(frozen=True)
class Selection:
    """A backend that can serve, and what spoke against each other one.

    Attributes:
        backend: the chosen one.
        need: what it was chosen for.
        others: the backends that were not chosen, the better ones first.
        pinned: whether the caller named it.
    """

    backend: AttentionBackend
    need: Requirements
    others: tuple[AttentionBackend, ...]
    pinned: bool

    @cached_property
    def reasons(self) -> dict[str, tuple[str, ...]]:
        """Every reason against each other backend, by name; asked for on first use."""
        return {
            other.capabilities.name: tuple(other.problems(self.need)) or (self._why_not(other),)
            for other in self.others
        }

    def _why_not(self, other: AttentionBackend) -> str:
        chosen, has, device = self.backend.capabilities, other.capabilities, self.need.device.type
        if self.pinned:
            return f"can serve, but {chosen.name!r} was asked for"
        if has.device_types[0] != device == chosen.device_types[0]:
            return f"can serve, but is at home on {has.device_types[0]!r}, {chosen.name!r} here"
        return (
            f"can serve, but its priority is {has.priority}, that of {chosen.name!r} "
            f"{chosen.priority}"
        )


def choose_backend(need: Requirements, name: str | AttentionBackend | None = None) -> Selection:
    """Choose as `select_backend` does, and keep the reasons against each other backend.

    Raises:
        UnsupportedError: the named one, or none at all, can serve; every reason is listed.
        ArgumentError: an unknown name.
    """
    if isinstance(name, str):
        name = backend_for(need, name)
    if not isinstance(name, AttentionBackend | None):
        known = sorted(BACKENDS)
        raise ArgumentError(f"backend is {name!r}, accepted are {known}, None, an AttentionBackend")
    kept = name.capabilities.name if name is not None else None
    candidates = [backend_for(need, known) for known in BACKENDS if known != kept]
    candidates.sort(key=lambda b: _rank(b, need))
    if name is not None:
        name.check(need)
        return Selection(name, need, tuple(candidates), pinned=True)
    reasons = []
    for backend in candidates:
        problems = backend.problems(need)
        if not problems:
            others = tuple(other for other in candidates if other is not backend)
            return Selection(backend, need, others, pinned=False)
        reasons += [f"{backend.capabilities.name}: {text}" for text in problems]
    raise UnsupportedError("no backend can serve", reasons)


def select_backend(
    need: Requirements, name: str | AttentionBackend | None = None
) -> AttentionBackend:
    """Give the backend called `name` (or given as such), or the one of highest priority that can
    serve `need` (at home on its device first).

    Raises:
        UnsupportedError: the named one, or none at all, can serve; every reason is listed.
        ArgumentError: an unknown name.
    """
    return choose_backend(need, name).backend
