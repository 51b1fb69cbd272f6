"""The prefix index: which page holds which full page of verified tokens.

The key of a page is SHA-256 over its predecessor's key and its G tokens as int64, so it names the
whole prefix that the page's rows depend on. Nobody can make two prefixes share a 256-bit key, so an
equal key is taken for equal tokens; the tokens are kept beside it for `check_integrity`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

ROOT = b""
"""Key before the first page."""


class PublishedPage(NamedTuple):
    """What a page was published as: key, key of the page before it, its tokens as bytes."""

    key: bytes
    parent: bytes
    content: bytes


class PrefixIndex:
    """Finds pages by the tokens that they and all pages before them hold.

    Args:
        page_size: G; only full pages are published.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._page_of: dict[bytes, int] = {}
        self._published: dict[int, PublishedPage] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._published

    def __getitem__(self, page: int) -> PublishedPage:
        return self._published[page]

    def pages(self) -> Iterator[int]:
        """All published pages, oldest publication first."""
        return iter(self._published)

    def walk(self, tokens: array[int]) -> tuple[list[int], list[bytes]]:
        """Give pages and keys of the longest published run of full pages from the start."""
        size, key = self.page_size, ROOT
        pages, keys = [], []
        for start in range(0, len(tokens) - size + 1, size):
            key = page_key(key, tokens[start : start + size].tobytes())
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
            keys.append(key)
        return pages, keys

    def publish(self, page: int, parent: bytes, content: bytes) -> bytes:
        """Give the page's key; publish `page` under it unless another page has it already."""
        key = page_key(parent, content)
        if key not in self._page_of:
            self._page_of[key] = page
            self._published[page] = PublishedPage(key, parent, content)
        return key

    def withdraw(self, page: int) -> None:
        """Forget what a published page holds: it is about to be written."""
        del self._page_of[self._published.pop(page).key]

    def problems(self) -> list[str]:
        """List every contradiction within the index."""
        found = []
        for page, entry in self._published.items():
            if page_key(entry.parent, entry.content) != entry.key:
                found.append(f"page {page} is published under a key that its tokens don't have")
            if self._page_of.get(entry.key) != page:
                found.append(f"the key of page {page} leads to page {self._page_of.get(entry.key)}")
        if len(self._page_of) != len(self._published):
            found.append(
                f"{len(self._page_of)} keys lead to {len(self._published)} published pages"
            )
        return found


def page_key(parent: bytes, content: bytes) -> bytes:
    """Key of a full page: SHA-256 of the key before it and its tokens as bytes."""
    return sha256(parent + content).digest()
