"""Exceptions of the library: one base, argument errors that are also the built-in kinds."""

from __future__ import annotations

from collections.abc import Sequence


class SpecMLAError(Exception):
    """Base of every error that specmla raises on purpose."""


class ArgumentError(SpecMLAError, ValueError):
    """A value that the callee cannot accept; the message names it and what would be accepted."""


class ArgumentTypeError(SpecMLAError, TypeError):
    """An argument of the wrong type or dtype."""


class UnsupportedError(SpecMLAError, ValueError):
    """A backend or layer cannot serve what was asked; `reasons` lists everything in the way."""

    def __init__(self, subject: str, reasons: Sequence[str]) -> None:
        self.subject = subject
        self.reasons = tuple(reasons)
        super().__init__(f"{subject}: " + "; ".join(self.reasons))


class PoolFullError(SpecMLAError, RuntimeError):
    """The page pool cannot give what a step needs; nothing was reserved."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        self.needed, self.free, self.total = needed, free, total
        super().__init__(
            f"the step needs {needed} pages, the pool has {free} free of {total}; nothing was "
            "reserved: finish a request, shorten the drafts or build a larger pool"
        )


class BusyError(SpecMLAError, RuntimeError):
    """A workspace that one call at a time may use was asked for by a second."""


class IntegrityError(SpecMLAError, RuntimeError):
    """The page accounting contradicts itself (a bug, or pages changed behind the manager)."""


class CheckpointError(SpecMLAError, ValueError):
    """A checkpoint is missing, truncated, corrupt or of another architecture."""


class NumericsError(SpecMLAError, ArithmeticError):
    """A row of logits holds NaN or no finite value; no state was changed."""


def require(reasons: Sequence[str], subject: str) -> None:
    """Raise one `ArgumentError` that lists all `reasons`, or return if there are none."""
    if reasons:
        raise ArgumentError(f"{subject}: " + "; ".join(reasons))
