"""Progress of a long phase: a rich bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

SECONDS_BETWEEN_LINES = 5.0


def say(message: str) -> None:
    """Print a line at once."""
    print(message, flush=True)


class Monitor:
    """Shows one phase's progress from 0 to 1 and a few figures beside it."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._started = time.monotonic()
        self._last_line = 0.0
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[figures]}"),
                console=Console(),
            )
            self._task = self._bar.add_task(title, total=1.0, figures="")

    def __enter__(self) -> Monitor:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, progress: float, figures: str) -> None:
        """Show `progress` and `figures`; without a terminal at most every few seconds."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=progress, figures=figures)
            return
        now = time.monotonic()
        if progress >= 1.0 or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            say(f"{self._title}: {progress:6.1%} {now - self._started:6.1f} s  {figures}")
