"""How far a training run is, by its clock or by its steps, and the learning rate there."""

from __future__ import annotations

import time

WARM_UP = 0.02
STABLE_UNTIL = 0.4


class Schedule:
    """Ends after `steps` if given (the same on every machine), else after `minutes`.

    The clock starts with `start`, called once the first steps have compiled what they need.
    """

    def __init__(self, minutes: float, steps: int | None) -> None:
        if steps is None and minutes <= 0:
            raise ValueError(f"minutes: {minutes}; give a positive number, or steps")
        if steps is not None and steps < 1:
            raise ValueError(f"steps: {steps}; at least 1 is needed")
        self.steps = steps
        self._seconds = minutes * 60
        self._started: float | None = None

    def start(self) -> None:
        """Start the clock."""
        self._started = time.monotonic()

    def progress(self, step: int) -> float:
        """Give the part done before `step`, from 0 to 1."""
        if self.steps is not None:
            return min(step / self.steps, 1.0)
        if self._started is None:
            return 0.0
        return min((time.monotonic() - self._started) / self._seconds, 1.0)


def rate_factor(progress: float) -> float:
    """Give the factor on the peak learning rate: linear warm-up, constant, linear decay to 0."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.02)
    if progress < STABLE_UNTIL:
        return 1.0
    return max((1.0 - progress) / (1.0 - STABLE_UNTIL), 0.0)
