"""The shape of a captured step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from specmla.config import MAX_SIZE, integer_problems
from specmla.errors import require


@dataclass(frozen=True)
class Bucket:
    """The shape that a step is captured in: B requests of Q rows each.

    Attributes:
        num_requests: B, most requests of a replay.
        query_len: Q, rows of a request: 1 + K.
        ragged: requests may bring fewer rows; otherwise Q exactly.
        trees: drafts may be trees; chains are served too, slower than without.

    Raises:
        ArgumentError: a size that is no integer or below 1, or 2**31 rows and more.
    """

    num_requests: int
    query_len: int
    ragged: bool = True
    trees: bool = False

    def __post_init__(self) -> None:
        """Check the sizes."""
        found = integer_problems(self, 1, "num_requests", "query_len")
        if not found and self.num_rows > MAX_SIZE:  # where requests begin is int32
            found.append(
                f"num_requests * query_len is {self.num_requests} * {self.query_len}, accepted is "
                "below 2**31"
            )
        require(found, "Bucket")

    @property
    def num_rows(self) -> int:
        """T, padding included."""
        return self.num_requests * self.query_len

    def problems(self, query_lens: Sequence[int], trees: bool = False) -> list[str]:
        """List why requests of these rows can't be a replay: none is ever cut to fit.

        `trees`: whether some of them bring trees.
        """
        found, least = [], 1 if self.ragged else self.query_len
        if len(query_lens) > self.num_requests:
            found.append(f"there are {len(query_lens)} requests, captured are {self.num_requests}")
        wrong = sorted({n for n in query_lens if not least <= n <= self.query_len})
        if wrong:
            captured = f"1 to {self.query_len}" if self.ragged else f"{self.query_len}"
            found.append(f"query_len is {wrong}, captured is {captured}")
        if trees and not self.trees:
            found.append("there are trees, captured are chains")
        return found

    def spread(self, packed: array[int], query_lens: Sequence[int], fill: int) -> array[int]:
        """Put rows that stand request after request where the bucket has them, `fill` elsewhere.

        Args:
            packed: sum of `query_lens` values.
            query_lens: rows of each request, none of them too long.
            fill: value of rows that nobody brings.
        """
        length, blank = self.query_len, array(packed.typecode, [fill])
        if query_lens.count(length) == len(query_lens):
            out = packed[:]
        else:
            out, at = array(packed.typecode), 0
            for count in query_lens:
                out.extend(packed[at : at + count])
                out.extend(blank * (length - count))
                at += count
        out.extend(blank * (self.num_rows - len(out)))
        return out
