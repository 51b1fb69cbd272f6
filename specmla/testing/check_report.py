"""What `check_backend` found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Skip(NamedTuple):
    """A case that was not run, and why."""

    name: str
    reason: str


class Failure(NamedTuple):
    """A case that failed: its name, how to build it, and what is wrong."""

    name: str
    case: str
    message: str

    def __str__(self) -> str:
        """Write name and message, then the case."""
        return f"{self.name}: {self.message}\n    {self.case}"


@dataclass
class CheckReport:
    """Cases of one backend on one device: passed, skipped with reasons, failed.

    Attributes:
        backend, device: what was checked, as text.
        passed: names of the cases that are right.
        seconds: wall time.
    """

    backend: str
    device: str
    passed: list[str] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_run(self) -> int:
        """Cases that ran, right or wrong."""
        return len(self.passed) + len(self.failures)

    @property
    def summary(self) -> str:
        """One line."""
        return (
            f"{self.backend} on {self.device}: {self.num_run} cases run in {self.seconds:.1f} s, "
            f"{len(self.failures)} failed, {len(self.skipped)} skipped"
        )

    def __str__(self) -> str:
        """Write the summary, what was skipped and why, and every failure."""
        lines = [self.summary]
        lines += [f"  skipped {skip.name}: {skip.reason}" for skip in self.skipped]
        lines += [f"  FAILED {failure}" for failure in self.failures]
        return "\n".join(lines)

    def raise_if_failed(self) -> None:
        """Raise if anything failed, or if nothing ran.

        Raises:
            AssertionError: lists all failures.
        """
        if self.failures:
            raise AssertionError("\n".join([self.summary, *map(str, self.failures)]))
        if not self.num_run:
            raise AssertionError(f"nothing was checked: {self}")
