"""An index of token texts by what occurs in them: a suffix tree that is expanded where it is read.

A node of the tree is the list of places that follow one string; its children are those places
grouped by the token that stands there. Lists of the shortest strings are kept (`STORED` tokens
long), longer ones are filtered from them, so memory grows with the text, not with the depth.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

STORED = (1, 2, 4)
_END = -1  # stands after every text; no string goes across it


class SuffixIndex:
    """Texts, and the places that follow each string in them.

    Args:
        max_tokens: the oldest texts are dropped beyond this; None keeps all.
        max_places: latest places kept of one stored string; those of a frequent one are a sample.
    """

    def __init__(self, *, max_tokens: int | None = None, max_places: int = 256) -> None:
        self.max_tokens, self.max_places = max_tokens, max_places
        self._text = array("i")
        self._places: dict[bytes, list[int]] = {}
        self._start = 0  # of the open text

    def __len__(self) -> int:
        return len(self._text)

    def text(self, start: int) -> array[int]:
        """Give all tokens from a place on, counted from the end if it is negative."""
        return self._text[start:]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the open text."""
        text, places = self._text, self._places
        for token in tokens:
            at = len(text)
            for n in STORED[: sum(at - n >= self._start for n in STORED)]:
                found = places.setdefault(text[at - n :].tobytes(), [])
                found.append(at)
                if len(found) >= 2 * self.max_places:
                    del found[: -self.max_places]
            text.append(token)

    def close(self) -> None:
        """End the open text; what follows is another one."""
        self._text.append(_END)
        self._start = len(self._text)
        if self.max_tokens is not None and self._start > self.max_tokens:
            self._drop(self._start - self.max_tokens * 3 // 4)

    def matches(self, context: Sequence[int], longest: int) -> Iterator[tuple[int, list[int]]]:
        """Give (n, places after the last n tokens of `context`) for n = 1, 2, ... while any is
        found, the last n of those that have the same places."""
        text, last, found = self._text, 0, [0]
        for n in range(1, min(longest, len(context)) + 1):
            if n in STORED:
                key = array("i", context[len(context) - n :]).tobytes()
                narrowed = self._places.get(key, [])[-self.max_places :]
            else:
                token = context[len(context) - n]
                narrowed = [at for at in found if at >= n and text[at - n] == token]
            if last and len(narrowed) != len(found):
                yield last, found
            last, found = n, narrowed
            if not found:
                return
        if last:
            yield last, found

    def children(self, places: Sequence[int]) -> dict[int, list[int]]:
        """Group places by the token that stands there; the lists are the places after it."""
        text, grouped = self._text, dict[int, list[int]]()
        for at in places:
            if at < len(text) and text[at] != _END:
                grouped.setdefault(text[at], []).append(at + 1)
        return grouped

    def _drop(self, count: int) -> None:
        """Forget the first `count` tokens and the rest of the text that they end in."""
        cut = self._text.index(_END, count) + 1
        del self._text[:cut]
        self._start -= cut
        kept = {
            key: [at - cut for at in at_all if at >= cut] for key, at_all in self._places.items()
        }
        self._places = {key: at_all for key, at_all in kept.items() if at_all}
