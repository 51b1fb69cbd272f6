"""Finds a backend by name, or the best one that can serve; never a silent fallback."""

from __future__ import annotations

from collections.abc import Callable

from specmla.backends.base import AttentionBackend, Requirements
from specmla.cache.formats.base import CacheFormat
from specmla.cache.formats.plain import quantised
from specmla.errors import ArgumentError, UnsupportedError


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
    name: str, *, batch_invariant: bool = False, cache_format: CacheFormat | None = None
) -> AttentionBackend:
    """Make the backend of that name, whether or not it can run here.

    Raises:
        ArgumentError: an unknown name.
        UnsupportedError: batch-invariant results or a cache format are asked for and it has none.
    """
    if name not in BACKENDS:
        raise ArgumentError(f"backend is {name!r}, accepted are {sorted(BACKENDS)}")
    return BACKENDS[name]().make(batch_invariant=batch_invariant, cache_format=cache_format)


def _made_for(need: Requirements, name: str) -> AttentionBackend:
    """Make it as needed in what it can be; of the rest `problems` will tell."""
    has = get_backend(name).capabilities
    packed = quantised(need.format)
    return get_backend(
        name,
        batch_invariant=need.batch_invariant and has.batch_invariant,
        cache_format=packed if packed and packed.name in has.formats else None,
    )


def _rank(backend: AttentionBackend, need: Requirements) -> tuple[bool, int]:
    """Prefer a backend at home (its first device type): never Triton under its interpreter."""
    has = backend.capabilities
    return has.device_types[0] != need.device.type, -has.priority


def select_backend(
    need: Requirements, name: str | AttentionBackend | None = None
) -> AttentionBackend:
    """Give the backend called `name` (or given as such), or the one of highest priority that can
    serve `need` (at home on its device first).

    Raises:
        UnsupportedError: the named one, or none at all, can serve; every reason is listed.
        ArgumentError: an unknown name.
    """
    if name is not None:
        backend = _made_for(need, name) if isinstance(name, str) else name
        backend.check(need)
        return backend
    reasons = []
    candidates = [_made_for(need, known) for known in BACKENDS]
    for backend in sorted(candidates, key=lambda b: _rank(b, need)):
        problems = backend.problems(need)
        if not problems:
            return backend
        reasons += [f"{backend.capabilities.name}: {text}" for text in problems]
    raise UnsupportedError("no backend can serve", reasons)
