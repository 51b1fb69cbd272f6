"""The page pool: reference counts, free pages, and free pages that still hold a known prefix."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

from specmla.cache.prefix import PrefixIndex


class PagePool:
    """Counts the owners of each page and hands out free ones.

    A page without owners that is published stays findable and counts as free: it is taken, and
    withdrawn, only when no plain free page is left, the one released longest ago first.

    Args:
        num_pages: N.
        index: knows which pages are published.
    """

    def __init__(self, num_pages: int, index: PrefixIndex) -> None:
        self.num_pages = num_pages
        self.refs = array("i", bytes(4 * num_pages))
        self.index = index
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages without owners."""
        return len(self._free) + len(self._cached)

    def take(self) -> int:
        """Own a free page; the caller has made sure that there is one."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self.index.withdraw(page)
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add an owner to a page that is owned or cached."""
        if self.refs[page] == 0:
            del self._cached[page]
        self.refs[page] += 1

    def release(self, page: int) -> None:
        """Take an owner away."""
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if page in self.index:
                self._cached[page] = None
            else:
                self._free.append(page)

    def problems(self, tables: Iterable[array[int]]) -> list[str]:
        """List every contradiction between owners, reference counts and free lists."""
        owners = Counter(page for table in tables for page in table)
        found = []
        if len(set(self._free)) < len(self._free):
            found.append(f"a page is free twice in {sorted(self._free)}")
        free, cached = set(self._free), set(self._cached)
        for text, pages in (
            ("free and cached at once", free & cached),
            ("free and owned", (free | cached) & owners.keys()),
            ("free but published", {p for p in free if p in self.index}),
            ("cached but not published", {p for p in cached if p not in self.index}),
            ("outside the pool", {p for p in free | cached | owners.keys() if not self._has(p)}),
        ):
            if pages:
                found.append(f"pages {sorted(pages)} are {text}")
        wrong = [p for p in range(self.num_pages) if self.refs[p] != owners[p]]
        if wrong:
            found.append(f"reference counts of pages {wrong} are not their numbers of owners")
        if self.num_free + len(owners) != self.num_pages:
            found.append(
                f"{self.num_free} free and {len(owners)} owned pages are not {self.num_pages}"
            )
        return found

    def _has(self, page: int) -> bool:
        return 0 <= page < self.num_pages
