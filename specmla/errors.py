"""Exceptions of the library: one base, argument errors that are also the built-in kinds."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from numbers import Integral


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


class ConstraintError(SpecMLAError, RuntimeError):
    """A `TokenConstraint.advance` raised; its step is cancelled and no request has changed.

    What that constraint knows is undefined from here on, and those of `told` are ahead of their
    requests. The rest of the step can be planned again; `request_id` and `told` go on only after
    `remove`, by an `add` of their committed tokens with new constraints.

    Attributes:
        request_id: whose constraint raised.
        told: requests of the step whose constraints had taken its tokens before.
    """

    def __init__(self, request_id: Hashable, told: Sequence[Hashable], error: Exception) -> None:
        self.request_id, self.told = request_id, tuple(told)
        ahead = f"; ahead of their requests are the constraints of {list(told)}" if told else ""
        super().__init__(
            f"the constraint of request {request_id!r} raised {type(error).__name__} in advance: "
            f"{error}; the step is cancelled{ahead}: remove these requests, or add them again with "
            "their committed tokens and new constraints"
        )


class NumericsError(SpecMLAError, ArithmeticError):
    """A row of logits holds NaN or no finite value; no state was changed.

    Attributes:
        request_ids: whose rows they are; the step's other requests can be planned again without.
    """

    def __init__(self, message: str, request_ids: Sequence[Hashable] = ()) -> None:
        self.request_ids = tuple(request_ids)
        super().__init__(message)


def require(reasons: Sequence[str], subject: str) -> None:
    """Raise one `ArgumentError` that lists all `reasons`, or return if there are none."""
    if reasons:
        raise ArgumentError(f"{subject}: " + "; ".join(reasons))


def count_problems(counts: Mapping[str, object], least: int = 1) -> list[str]:
    """List which of these named values are no integers of at least `least`, or 2**31 and more."""
    return [
        f"{name} is {value!r}, accepted are integers >= {least} and below 2**31"
        for name, value in counts.items()
        if not isinstance(value, Integral)
        or isinstance(value, bool)
        or not least <= int(value) < 2**31
    ]


def kind_problem(name: str, value: object, kind: type) -> list[str]:
    """Say what `value` is where it is not of this kind."""
    if isinstance(value, kind):
        return []
    text = repr(value)
    text = text if len(text) < 80 else f"a {type(value).__name__}"
    return [f"{name} is {text}, accepted is a {kind.__module__}.{kind.__name__}"]
