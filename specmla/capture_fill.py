"""Lays requests out for the buffers of a captured step: padding where a bucket has more rows."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from specmla.bucket import Bucket
from specmla.errors import require
from specmla.metadata import RequestRows


def padded_arrays(
    bucket: Bucket,
    requests: Sequence[RequestRows],
    ends: Sequence[int],
    arrays: Mapping[str, array[int]],
    names: Sequence[str],
) -> dict[str, array[int]]:
    """Give the arrays of these names, each as long as its buffer.

    Args:
        bucket: the shape.
        requests: in order of the rows.
        ends: rows of each request once it has been advanced to its end.
        arrays: positions, slots, extents and tree words of the rows, packed.
        names: those that are wanted.
    """
    lens = [r.query_len for r in requests]
    blank = array("i", [0]) * (bucket.num_requests - len(requests))
    found = {
        "positions": bucket.spread(arrays["positions"], lens, 0),
        "slots": bucket.spread(arrays["slots"], lens, -1),
        "extent": bucket.spread(arrays.get("extent", array("i")), lens, 0),
        "seq_lens": array("i", [r.seq_len for r in requests]) + blank,
        "ends": array("i", ends) + blank,
    }
    if "tree" in names:
        words = moved_words(arrays.get("tree", array("q")), lens, bucket.query_len)
        found["tree"] = bucket.spread(words, lens, 0)
    if "starts" in names:
        starts = array("i", [r.window_start for r in requests])
        each = array("i", [s for s, n in zip(starts, lens, strict=True) for _ in range(n)])
        found |= {"starts": starts + blank, "row_start": bucket.spread(each, lens, 0)}
    return found


def moved_words(words: Sequence[int], query_lens: Sequence[int], query_len: int) -> array[int]:
    """Move tree words to where a bucket's rows begin: `query_len` keys before a request's end.

    Of a request with fewer rows the keys between are context, which every row sees.
    """
    found, at = array("q"), 0
    for count in query_lens:
        gap = query_len - count
        for word in words[at : at + count]:
            moved = (word << gap | (1 << gap) - 1) & (1 << 64) - 1
            found.append(moved - (1 << 64) if moved >> 63 else moved)
        at += count
    return found


def grown(requests: Sequence[RequestRows], ahead: Sequence[int] | None) -> list[RequestRows]:
    """Give the requests as they will be, `ahead` rows on.

    Raises:
        ArgumentError: another number of values, or negative ones.
    """
    if ahead is None:
        return list(requests)
    if len(ahead) != len(requests) or min(ahead, default=0) < 0:
        given = f"ahead is {list(ahead)}, accepted are {len(requests)} values >= 0"
        require([given], "CapturedMetadata.for_replay")
    return [r._replace(seq_len=r.seq_len + n) for r, n in zip(requests, ahead, strict=True)]
