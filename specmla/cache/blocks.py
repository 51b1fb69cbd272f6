"""Page accounting of the latent cache, on the host: who owns which page, and what may be shared.

A request owns the pages of its committed tokens, in order, and between `reserve` and `commit` (plus
the declared look-ahead) the pages of rows yet to come. Roll-back is bookkeeping: lengths shrink and
pages return, no row is erased. Two rules keep shared pages true:

* only full pages of committed tokens are published for prefix reuse, never a draft's row;
* a page is written only while it has one owner and is not published: `reserve` gives a request
  whose next row falls into a shared page a copy of it, and withdraws one that it owns alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence

from specmla.cache.pages import PagePool
from specmla.cache.prefix import PrefixIndex
from specmla.cache.sequence import CachedSequence, Sequences, token_array
from specmla.errors import ArgumentError, IntegrityError, PoolFullError, count_problems, require


class BlockManager:
    """Gives pages to requests, shares prefixes, rolls back and accounts for every page.

    After every step a request owns at most ceil((length + lookahead) / G) pages, and at all times
    free plus distinct owned pages are `num_pages`.

    Args:
        num_pages: N, pages of the pool.
        page_size: G, any value >= 1.
        lookahead: rows that a request keeps in reserve behind what `reserve` is asked for, so that
            a step can be planned before the last one's outcome is known.
        prefix_caching: whether requests share full pages of equal prefixes.
        prompts_only: share rows that prompts wrote, none of verifies, which round otherwise.

    Raises:
        ArgumentError: sizes below 1, a negative look-ahead.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        lookahead: int = 0,
        prefix_caching: bool = True,
        prompts_only: bool = False,
    ) -> None:
        found = count_problems({"num_pages": num_pages, "page_size": page_size})
        require(found + count_problems({"lookahead": lookahead}, 0), "BlockManager")
        self.num_pages, self.page_size = num_pages, page_size
        self.lookahead, self.prefix_caching = lookahead, prefix_caching
        self.prompts_only = prompts_only
        self._index = PrefixIndex(page_size)
        self._pool = PagePool(num_pages, self._index)
        self._sequences = Sequences()

    @property
    def num_free(self) -> int:
        """Pages without owners, those that still hold a finished request's prefix included."""
        return self._pool.num_free

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._sequences

    def add(self, request_id: Hashable, tokens: Sequence[int]) -> int:
        """Register a request and share the longest cached prefix of its prompt, in full pages.

        Returns:
            The matched tokens, which are its length now. At least the last token is computed, with
            `prompts_only` the last two: one alone would be a verify.

        Raises:
            ArgumentError: a name in use, negative token ids.
            ArgumentTypeError: tokens that are not integers.
        """
        self._sequences.refuse_known(request_id, "BlockManager.add")
        prompt = token_array(tokens)
        pages, keys = self._index.walk(prompt[: -1 - self.prompts_only])
        for page in pages:
            self._pool.share(page)
        matched = len(pages) * self.page_size
        blocks = array("i", pages)
        self._sequences[request_id] = CachedSequence(
            prompt[:matched], blocks, keys, matched, matched
        )
        return matched

    def length(self, request_id: Hashable) -> int:
        """Committed tokens in the cache."""
        return len(self._sequences[request_id].tokens)

    def block_ids(self, request_id: Hashable) -> array[int]:
        """Pages of a request in order, int32; read-only, and current until its next change."""
        return self._sequences[request_id].blocks

    def owned(self, request_id: Hashable) -> int:
        """Number of pages that a request owns, shared and reserved ones included."""
        return len(self._sequences[request_id].blocks)

    def match(self, tokens: Sequence[int]) -> int:
        """Count the tokens that cached full pages cover, from the first on; takes nothing."""
        return len(self._index.walk(token_array(tokens))[0]) * self.page_size

    def reserve(self, needs: Mapping[Hashable, int]) -> list[tuple[int, int]]:
        """Make room for new rows of a batch: all of it, or nothing.

        Args:
            needs: new rows of each request (anchor or prompt, and drafts), written after its
                length; `lookahead` is added.

        Returns:
            Pages (source, destination) to be copied in all layers before anything is written.

        Raises:
            ArgumentError: unknown requests, negative rows; all are listed.
            PoolFullError: too few free pages; nothing was reserved.
        """
        size, spare, refs = self.page_size, self.lookahead, self._pool.refs
        sequences = self._sequences
        found: list[str] = []
        wanted: list[tuple[CachedSequence, int]] = []
        owners: dict[int, int] = {}
        missing = 0
        for request_id, rows in needs.items():
            sequence = sequences.get(request_id)
            if sequence is None or rows < 0:
                found.append(sequences.need_problem(request_id, rows))
                continue
            end = len(sequence.tokens) + rows + spare
            if end > sequence.writable:
                missing += sequence.missing(end, size, refs, owners)
                wanted.append((sequence, end))
        require(found, "BlockManager.reserve")
        if missing > self._pool.num_free:
            raise PoolFullError(missing, self._pool.num_free, self.num_pages)
        copies = [sequence.reserve(end, size, self._pool) for sequence, end in wanted]
        return [copy for copy in copies if copy is not None]

    def commit(
        self,
        request_id: Hashable,
        length: int,
        tokens: Sequence[int],
        *,
        ahead: int = 0,
        is_prompt: bool = False,
    ) -> None:
        """Declare the rows up to `length` true, publish full pages, give surplus pages back.

        Args:
            request_id: the request.
            length: cached tokens from now on; at least the length before, at most what is
                reserved. A step that verified an anchor and accepted a drafts adds 1 + a.
            tokens: all tokens of the sequence from its first one on, at least `length`; what
                follows (the new anchor) is ignored. Only those after the old length are read.
            ahead: reserved rows after `length` to keep, as a step under way writes them.
            is_prompt: whether a prompt wrote the new rows; read with `prompts_only`.

        Raises:
            ArgumentError: a length below the present one (use `roll_back`) or past the reserved
                rows, tokens too few or of another sequence; nothing was changed.
            ArgumentTypeError: tokens that are not integers.
        """
        sequence = self._sequences[request_id]
        if found := sequence.commit_problems(length, tokens):
            require(found, "BlockManager.commit")
        new = token_array(tokens[len(sequence.tokens) : length])
        sequence.extend(new, shared=is_prompt or not self.prompts_only)
        if self.prefix_caching and sequence.shareable // self.page_size > len(sequence.keys):
            sequence.publish(self.page_size, self._index)
        self._trim(sequence, length + max(self.lookahead, ahead))

    def roll_back(self, request_id: Hashable, length: int) -> None:
        """Shrink a request to `length` tokens and give back every page after them.

        Reserved rows are given back too: reserve again before writing. A page that others share
        stays as it is and is copied by the next `reserve`.

        Raises:
            ArgumentError: a length below 0 or above the present one.
        """
        sequence = self._sequences[request_id]
        held = len(sequence.tokens)
        if not 0 <= length <= held:
            raise ArgumentError(
                f"BlockManager.roll_back: length is {length}, accepted are 0 .. {held}"
            )
        sequence.cut(length, self.page_size)
        self._trim(sequence, length)
        if length % self.page_size:
            tail = sequence.blocks[-1]
            if self._pool.refs[tail] == 1 and tail in self._index:
                self._index.withdraw(tail)

    def _trim(self, sequence: CachedSequence, rows: int) -> None:
        """Release pages past those of `rows`, the last one first: prefixes are evicted last."""
        blocks, keep = sequence.blocks, -(-rows // self.page_size)
        while len(blocks) > keep:
            self._pool.release(blocks.pop())
        sequence.writable = min(sequence.writable, len(blocks) * self.page_size)

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Register a request that shares all committed tokens of another one.

        Rows that the parent had reserved must be reserved again: its last page is shared now.

        Raises:
            ArgumentError: an unknown parent, a child's name in use.
        """
        parent = self._sequences[parent_id]
        self._sequences.refuse_known(child_id, "BlockManager.fork")
        length = len(parent.tokens)
        pages = parent.blocks[: -(-length // self.page_size)]
        for page in pages:
            self._pool.share(page)
        parent.writable = length
        self._sequences[child_id] = parent.forked(pages)

    def free(self, request_id: Hashable) -> None:
        """Forget a request and release its pages; published ones can still be matched.

        Raises:
            ArgumentError: an unknown request.
        """
        self._trim(self._sequences[request_id], 0)
        del self._sequences[request_id]

    def check_integrity(self) -> None:
        """Compare everything with everything; meant for tests and debugging.

        Raises:
            IntegrityError: lists every contradiction.
        """
        sequences = self._sequences
        found = self._pool.problems(s.blocks for s in sequences.values()) + self._index.problems()
        for request_id, sequence in sequences.items():
            found += [
                f"request {request_id!r}: {text}"
                for text in sequence.problems(self.page_size, self._pool, self.prefix_caching)
            ]
        if found:
            raise IntegrityError("; ".join(found))
