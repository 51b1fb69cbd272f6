"""What the page accounting knows of one request."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from specmla.cache.pages import PagePool
from specmla.cache.prefix import ROOT, PrefixIndex, page_key
from specmla.errors import ArgumentError, ArgumentTypeError, require


@dataclass(slots=True)
class CachedSequence:
    """Committed tokens of a request and the pages that hold, or will hold, their rows.

    Attributes:
        tokens: committed ones, int64; their number is the request's length.
        blocks: pages in order, int32; those past ceil(length / G) are reserved.
        keys: prefix keys of the full pages that are shareable; empty without prefix caching.
        writable: rows from the length up to here have been reserved and may be written.
        shareable: rows before this one may be published.
    """

    tokens: array[int]
    blocks: array[int]
    keys: list[bytes]
    writable: int
    shareable: int

    def missing(self, end: int, page_size: int, refs: Sequence[int], owners: dict[int, int]) -> int:
        """Count the pages that `reserve` up to row `end` will take.

        Args:
            end: first row that need not be writable.
            page_size: G.
            refs: owners of each page of the pool now.
            owners: owners left of the shared pages that earlier requests of the batch part with;
                updated. Of several sharers in one batch the last one keeps the page.
        """
        length = len(self.tokens)
        grown = max(0, -(-end // page_size) - len(self.blocks))
        if self.writable > length or not length % page_size:
            return grown
        tail = self.blocks[length // page_size]
        left = owners.get(tail, refs[tail])
        owners[tail] = left - 1
        return grown + (left > 1)

    def reserve(self, end: int, page_size: int, pool: PagePool) -> tuple[int, int] | None:
        """Make rows up to `end` writable; the pool has the pages.

        Returns:
            The pages (source, destination) to be copied if the next row falls into a shared page.
        """
        length, copy = len(self.tokens), None
        if self.writable <= length and length % page_size:
            tail = self.blocks[length // page_size]
            if pool.refs[tail] > 1:
                copy = tail, pool.take()
                self.blocks[length // page_size] = copy[1]
                pool.release(tail)
            elif tail in pool.index:
                pool.index.withdraw(tail)
        for _ in range(len(self.blocks), -(-end // page_size)):
            self.blocks.append(pool.take())
        self.writable = end
        return copy

    def extend(self, tokens: array[int], *, shared: bool) -> None:
        """Append committed tokens; none behind one that is not shared is shareable."""
        if shared and self.shareable == len(self.tokens):
            self.shareable += len(tokens)
        self.tokens.extend(tokens)

    def cut(self, length: int, page_size: int) -> None:
        """Forget the tokens from `length` on, and that rows after it were reserved."""
        del self.tokens[length:]
        del self.keys[length // page_size :]
        self.writable, self.shareable = length, min(length, self.shareable)

    def forked(self, blocks: array[int]) -> CachedSequence:
        """Give another sequence of the same committed tokens, in `blocks`."""
        length = len(self.tokens)
        return CachedSequence(self.tokens[:], blocks, self.keys[:], length, self.shareable)

    def publish(self, page_size: int, index: PrefixIndex) -> None:
        """Publish the full pages of shareable rows that have no key yet."""
        keys = self.keys
        for i in range(len(keys), self.shareable // page_size):
            content = self.tokens[i * page_size : (i + 1) * page_size].tobytes()
            keys.append(index.publish(self.blocks[i], keys[-1] if keys else ROOT, content))

    def commit_problems(self, length: int, tokens: Sequence[int]) -> list[str]:
        """List every reason why `tokens[:length]` can't be this sequence's next state."""
        held, given = len(self.tokens), len(tokens)
        limit = max(self.writable, held)
        found = []
        if not held <= length <= limit:
            found.append(f"length is {length}, accepted are {held} (held) .. {limit} (reserved)")
        if given < length:
            found.append(f"tokens has {given} entries, accepted are at least {length}")
        if 0 < held <= given and tokens[held - 1] != self.tokens[-1]:
            found.append(
                f"tokens[{held - 1}] is {tokens[held - 1]}, the sequence holds {self.tokens[-1]} "
                "there: pass all tokens from the first one on"
            )
        return found

    def problems(self, page_size: int, pool: PagePool, has_keys: bool) -> list[str]:
        """List every contradiction between tokens, pages, keys and what pages are published as."""
        found, length = [], len(self.tokens)
        used = -(-length // page_size)
        if len(self.blocks) < used or self.writable > len(self.blocks) * page_size:
            found.append(
                f"{len(self.blocks)} pages don't hold {length} tokens and {self.writable} rows"
            )
        if len(set(self.blocks)) < len(self.blocks):
            found.append(f"a page occurs twice in {self.blocks.tolist()}")
        reserved = self.blocks[used:]
        if self.writable > length and length % page_size:
            reserved.extend(self.blocks[used - 1 : used])
        for page in reserved:
            inside = 0 <= page < pool.num_pages  # the pool reports those outside
            if inside and (pool.refs[page] != 1 or page in pool.index):
                found.append(f"page {page} may be written but is shared or published")
        if self.shareable > length:
            found.append(f"{self.shareable} rows may be published, {length} are held")
        num_keys = self.shareable // page_size if has_keys else 0
        if len(self.keys) != num_keys:
            found.append(f"{len(self.keys)} keys are held, {num_keys} are due")
        return found + self._key_problems(page_size, pool.index)

    def _key_problems(self, page_size: int, index: PrefixIndex) -> list[str]:
        found, parent = [], ROOT
        for i, page in enumerate(self.blocks):
            content = self.tokens[i * page_size : (i + 1) * page_size].tobytes()
            if page in index and (
                index[page].parent != parent or not index[page].content.startswith(content)
            ):
                found.append(f"page {page} is published with other tokens than it holds")
            parent = page_key(parent, content)
            if i < len(self.keys) and self.keys[i] != parent:
                found.append(f"the key of page {page} is not that of its tokens")
        return found


class Sequences(dict[Hashable, CachedSequence]):
    """Requests by name, of which an unknown one is refused."""

    def __missing__(self, request_id: Hashable) -> CachedSequence:
        known = list(self)[:16]
        raise ArgumentError(f"request_id {request_id!r} is unknown, accepted are {known}")

    def refuse_known(self, request_id: Hashable, subject: str) -> None:
        """Refuse a name that is in use."""
        if request_id in self:
            raise ArgumentError(
                f"{subject}: request_id {request_id!r} is in use, accepted is a new name"
            )

    def need_problem(self, request_id: Hashable, rows: int) -> str:
        """Say why nothing can be reserved for a request."""
        if request_id not in self:
            return f"request_id {request_id!r} is unknown"
        return f"needs[{request_id!r}] is {rows}, accepted are values >= 0"


def token_array(tokens: Sequence[int]) -> array[int]:
    """Copy token ids into an int64 array.

    Raises:
        ArgumentTypeError: anything but integers of 64 bits.
        ArgumentError: negative ids (a padded draft is never a token of a sequence).
    """
    ids = tokens[:] if type(tokens) is array and tokens.typecode == "q" else _converted(tokens)
    if ids and min(ids) < 0:
        require([f"tokens holds {min(ids)}, accepted are ids >= 0"], "tokens")
    return ids


def _converted(tokens: Sequence[int]) -> array[int]:
    try:
        # Given bytes, array would take eight of them for one number.
        return array("q", list(tokens) if isinstance(tokens, bytes | bytearray) else tokens)
    except (TypeError, OverflowError) as error:
        raise ArgumentTypeError(f"tokens accepts integers of 64 bits: {error}") from error
