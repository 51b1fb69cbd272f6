"""The file of a grid: rows by point and provider, written after every point, merged on resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specmla.bench.points import Point
from specmla.bench.report import ABSENT
from specmla.errors import ArgumentError

Key = tuple[Point, str]


def key_of(row: Mapping[str, Any]) -> Key:
    """Name a row: its point and its provider."""
    return Point(row["batch"], row["heads"], row["mask"], row["page_size"]), row["provider"]


class Ledger:
    """Rows that are measured already, and where they are kept.

    Every run adds an entry to `env["runs"]`, and a row says which one it is from (`run`).

    Args:
        path: read if it exists; None keeps everything in memory.

    Raises:
        ArgumentError: the file is no grid.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.env: dict[str, Any] = {}
        self.rows: dict[Key, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            self.env = content["env"]
            self.rows = {key_of(row): row for row in content["rows"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"{path} is no file of a grid: {type(error).__name__}: {error}"
            raise ArgumentError(message) from error

    def begin(self, env: Mapping[str, Any]) -> int:
        """Note a run; gives its number. Its environment becomes that of the file."""
        runs = [*self.env.get("runs", [])]
        runs.append({name: env.get(name) for name in ("date", "commit", "argv", "ceilings")})
        self.env = {**env, "runs": runs}
        return len(runs) - 1

    def has(self, point: Point, provider: str, *, present: bool) -> bool:
        """Tell whether there is a row; one of an absent provider counts only while it is absent."""
        row = self.rows.get((point, provider))
        return row is not None and not (present and row["status"] == ABSENT)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Put rows in, in place of earlier ones, and write the file.

        Fields that are None are left out.
        """
        for row in rows:
            kept = {name: value for name, value in row.items() if value is not None}
            self.rows[key_of(kept)] = kept
        self.save()

    def document(self) -> dict[str, Any]:
        """Give `{"env", "rows"}`."""
        return {"env": self.env, "rows": list(self.rows.values())}

    def save(self) -> None:
        """Write the file in one stroke: a run that is killed leaves the one before."""
        if self.path is None:
            return
        beside = self.path.with_name(self.path.name + ".part")
        text = json.dumps(self.document(), indent=1, allow_nan=False)
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, self.path)
