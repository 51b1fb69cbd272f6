"""How often each token occurs in a request, kept up as tokens are committed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class TokenCounts:
    """The distinct tokens of a request, in order of their first occurrence.

    Attributes:
        ids: the tokens, of prompt and output.
        outputs: times that each is in the output; 0 for those of the prompt alone.
        changed: places in both that were written since whoever copies them cleared the list; a
            place may stand there twice.
    """

    __slots__ = ("__weakref__", "_place", "changed", "ids", "outputs")

    def __init__(self, prompt: Iterable[int]) -> None:
        self.ids, self.outputs = array("q"), array("q")
        self.changed: list[int] = []
        self._place: dict[int, int] = {}
        for token in prompt:
            self._at(token)

    def add(self, tokens: Iterable[int]) -> None:
        """Count committed tokens of the output."""
        for token in tokens:
            place = self._at(token)
            self.outputs[place] += 1
            self.changed.append(place)

    def _at(self, token: int) -> int:
        place = self._place.setdefault(token, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token)
            self.outputs.append(0)
        return place
