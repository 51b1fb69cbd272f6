"""Which buckets serve batches that shrink as their requests finish; what can't be captured."""

from __future__ import annotations

from collections.abc import Sequence

from specmla.bucket import Bucket
from specmla.verify.sampling import SamplingParams


def capture_problems(buckets: object, sampling: object, name: str = "buckets") -> list[str]:
    """List what of buckets (the argument `name`) and sampling parameters is none."""
    found = []
    for argument, given, kind in ((name, buckets, Bucket), ("sampling", sampling, SamplingParams)):
        if not isinstance(given, Sequence) or not all(isinstance(part, kind) for part in given):
            found.append(f"{argument} is {given!r}, accepted is a sequence of {kind.__name__}")
    return found


def doubling_buckets(
    num_requests: int, query_len: int, *, ragged: bool = True, trees: bool = False
) -> list[Bucket]:
    """Give buckets of 1, 2, 4 ... and `num_requests` requests, of `query_len` rows and of one.

    A step pads its batch to twice its size at most. Those of one row serve steps without drafts.

    Args:
        num_requests: most requests of a step.
        query_len: most rows of a request, 1 + K.
        ragged: requests may bring fewer rows.
        trees: drafts may be trees.

    Raises:
        ArgumentError: a size below 1.
    """
    Bucket(num_requests, query_len)  # checks the sizes
    sizes = {min(1 << i, num_requests) for i in range(num_requests.bit_length() + 1)}
    return [
        Bucket(n, q, ragged, trees and q > 1) for n in sorted(sizes) for q in sorted({1, query_len})
    ]
