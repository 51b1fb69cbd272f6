"""A small grammar for batches, the same for tests and benchmarks: `32q4s8k,1q0s65`."""

from __future__ import annotations

import re
from itertools import cycle, islice
from typing import NamedTuple

from specmla.errors import require

_SPEC = re.compile(r"(\d+)?q(\d+k?)(?:-(\d+k?))?s(\d+k?)")


class RequestLens(NamedTuple):
    """Lengths of one request: new rows Q, and cached tokens S with the new rows included."""

    query_len: int
    seq_len: int


def parse_batch(text: str) -> list[RequestLens]:
    """Read a batch: `[count]q<rows>[-<rows>]s<tokens>`, specs joined by commas.

    `32q4s8k` is 32 requests of 4 new rows and 8192 cached tokens, the new rows included. `k` after
    a number multiplies it by 1024. A range as in `32q1-8s8k` is a ragged batch: the requests take
    1, 2, ... 8 rows in turn. A missing count is 1.

    Raises:
        ArgumentError: names every spec that can't be read, has no requests, a falling range or
            more new rows than tokens.
    """
    found: list[str] = []
    lens: list[RequestLens] = []
    for spec in text.split(","):
        match = _SPEC.fullmatch(spec.strip())
        if match is None:
            found.append(f"{spec!r} is not [count]q<rows>[-<rows>]s<tokens>, as in '32q4s8k'")
            continue
        count, low, high, tokens = (
            None if group is None else _number(group) for group in match.groups()
        )
        assert low is not None
        assert tokens is not None
        high = low if high is None else high
        if count == 0:
            found.append(f"{spec!r} has no requests")
        if high < low:
            found.append(f"{spec!r} has a falling range of rows")
        if tokens < max(low, high):
            found.append(f"{spec!r} has more new rows than the {tokens} tokens that include them")
        rows = islice(cycle(range(low, high + 1)), 1 if count is None else count)
        lens += [RequestLens(query_len, tokens) for query_len in rows]
    require(found, f"batch {text!r}")
    return lens


def _number(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)
