"""The pages of a cache: which are free, and how many sequences hold each."""

from __future__ import annotations

from collections.abc import Iterable


class Pool:
    """Pages by number. A page that several sequences share is free again when the last one lets go of it."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._held = [0] * pages

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free pages, held once; the caller has looked that there are enough."""
        assert count <= len(self._free), "more pages were taken than there are"
        first = len(self._free) - count
        taken = self._free[first:]
        del self._free[first:]
        for page in taken:
            self._held[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages once more."""
        for page in pages:
            assert self._held[page] > 0, "a free page was shared"
            self._held[page] += 1

    def alone(self, page: int) -> bool:
        """Whether one sequence alone holds a page."""
        return self._held[page] == 1

    def release(self, pages: Iterable[int]) -> None:
        """Let go of pages."""
        for page in pages:
            self._held[page] -= 1
            assert self._held[page] >= 0, "a free page was released"
            if self._held[page] == 0:
                self._free.append(page)
