"""The paged KV cache: its page size, how many pages a sampler gets, and the allocator that hands them out."""

from __future__ import annotations

from collections.abc import Iterable

# Tokens per page of the KV cache. A power of two, 32 or more: the attention kernel reads a page in tiles of
# PAGE_SIZE, or of half of it, and tl.dot takes no fewer than 16 keys.
PAGE_SIZE = 64

# Page tables have a multiple of so many columns, so that a slightly longer prompt does not mean new CUDA graphs.
PAGE_TABLE_MULTIPLE = 4


def pages_per_sequence(tokens: int) -> int:
    """Return how many columns the page table needs for sequences of up to `tokens` tokens."""
    return -(-tokens // (PAGE_SIZE * PAGE_TABLE_MULTIPLE)) * PAGE_TABLE_MULTIPLE


def num_cache_pages(sequences: int, pages_each: int, budget: int) -> int:
    """Return how many pages to allocate: enough for all sequences, but no more than the budget."""
    # A prompt, one sample of it, and the pages kept in reserve always fit, however small the budget.
    return max(min(sequences * pages_each, budget), 2 * pages_each + 2)


def page_bytes(num_layers: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Return the size of a page: keys and values of `PAGE_SIZE` tokens in all layers."""
    return num_layers * 2 * num_kv_heads * PAGE_SIZE * head_dim * itemsize


class PageAllocator:
    """Reference-counted pages: one that several sequences share is free once the last of them releases it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._ref_counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def ref_count(self, page: int) -> int:
        """Return how many sequences hold a page."""
        return self._ref_counts[page]

    def allocate(self, count: int) -> list[int]:
        """Take free pages, each with one reference; the caller has made sure that there are enough."""
        assert count <= len(self._free), f"{count} pages allocated, {len(self._free)} free"
        first = len(self._free) - count
        pages = self._free[first:]
        del self._free[first:]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to pages in use."""
        for page in pages:
            assert self._ref_counts[page] > 0, f"page {page} shared while free"
            self._ref_counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to pages."""
        for page in pages:
            self._ref_counts[page] -= 1
            assert self._ref_counts[page] >= 0, f"page {page} released while free"
            if self._ref_counts[page] == 0:
                self._free.append(page)
