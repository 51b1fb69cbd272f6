"""Says on stderr what is being measured; a progress bar where `rich` and a terminal are there."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

HINT = "progress bars need rich: pip install 'specmla[bench]'"


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Give a function that is called with a label before each of `total` pieces of work.

    Nothing is printed where stderr is no terminal; without rich, plain lines are.
    """
    if not sys.stderr.isatty():
        yield lambda label: None
    elif importlib.util.find_spec("rich") is None:
        print(HINT, file=sys.stderr)
        yield lambda label: print(label, file=sys.stderr)
    else:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=total + 1)
            yield lambda label: bar.update(task, description=label, advance=1)
