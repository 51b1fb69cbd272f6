"""Tables of the README, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

LONG = 14
"""Rows from which on a table with a summary is folded."""


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "l", summary: str = ""
) -> str:
    """Format a table.

    Args:
        header: titles of the columns.
        rows: cells, as many as columns.
        align: "l" or "r" for each column; those that are left out are "r".
        summary: what stands for a long table until a reader opens it.
    """
    marks = ["---" if side == "l" else "---:" for side in align.ljust(len(header), "r")]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in (header, marks, *rows))
    if not summary or len(rows) < LONG:
        return text
    # GitHub needs the blank lines to see a table within HTML.
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"
