"""Device memory of the paged sampler: pages of the KV cache, packed prompts, and all that lasts from step to step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

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


class Scalar(IntEnum):
    """The rows of `DecodeState.scalars`, one number for each sequence."""

    LAST_TOKEN = 0
    POSITION = 1  # of the last token
    NUM_GENERATED = 2
    MAX_NEW_TOKENS = 3
    RNG_KEY = 4
    SLOT = 5  # its row of `tokens` and `logps`; unlike its row of the batch, it does not change as others leave
    ACTIVE = 6  # 0 once it has finished


@dataclass(frozen=True)
class DecodeState:
    """The running sequences, as tensors that are allocated once and only copied into: CUDA graphs hold addresses."""

    scalars: Tensor  # (len(Scalar), rows) int64
    page_table: Tensor  # (rows, pages of the longest sequence) int32
    tokens: Tensor  # (slots, longest response) int32
    logps: Tensor  # (slots, longest response) fp32
    eos_token_ids: Tensor  # (number of them,) int64
    sampling_params: Tensor  # temperature, top-p, top-k; on the device, so that changing them needs no new graph

    @classmethod
    def allocate(
        cls, rows: int, pages: int, max_new_tokens: int, eos_token_ids: list[int], device: torch.device
    ) -> DecodeState:
        """Return a state in which no row is active."""
        return cls(
            torch.zeros(len(Scalar), rows, dtype=torch.int64, device=device),
            torch.zeros(rows, pages, dtype=torch.int32, device=device),
            torch.zeros(rows, max_new_tokens, dtype=torch.int32, device=device),
            torch.zeros(rows, max_new_tokens, device=device),
            torch.tensor(eos_token_ids, dtype=torch.int64, device=device),
            torch.ones(3, device=device),
        )

    @property
    def rows(self) -> int:
        """How many sequences there is room for."""
        return self.scalars.shape[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, pages of the longest sequence, and tokens of the longest response."""
        return self.rows, self.page_table.shape[1], self.tokens.shape[1]


@dataclass(frozen=True)
class PrefillBatch:
    """The tokens of several prefixes, end to end without padding."""

    ids: Tensor  # (tokens,) int64
    position: Tensor  # (tokens,) int64, within the prefix
    page: Tensor  # (tokens,) int64; -1 for padding after the last prefix, whose keys and values are not written
    cu_seqlens: Tensor  # (prefixes + 1,) int32
    max_seqlen: int

    @classmethod
    def padding(cls, tokens: int, prefixes: int, max_seqlen: int, device: torch.device) -> PrefillBatch:
        """Return a batch of so many tokens of padding, and empty prefixes."""
        ids, position = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        cu_seqlens = torch.zeros(prefixes + 1, dtype=torch.int32, device=device)
        return cls(ids, position, torch.full_like(ids, -1), cu_seqlens, max_seqlen)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All but `max_seqlen`."""
        return self.ids, self.position, self.page, self.cu_seqlens


@dataclass(frozen=True)
class CachedKeys:
    """Where the KV cache has the tokens of continued prefixes, end to end: those before the batch's, then the batch's.

    The batch's own tokens are written into the cache before it is read.
    """

    page: Tensor  # (keys,) int64
    offset: Tensor  # (keys,) int64, within the page
    cu_seqlens: Tensor  # (prefixes + 1,) int32
    max_seqlen: int

    @classmethod
    def empty(cls, keys: int, prefixes: int, max_seqlen: int, device: torch.device) -> CachedKeys:
        """Return uninitialised tensors for so many tokens and prefixes."""
        page, offset = torch.empty(2, keys, dtype=torch.int64, device=device)
        return cls(page, offset, torch.empty(prefixes + 1, dtype=torch.int32, device=device), max_seqlen)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All but `max_seqlen`."""
        return self.page, self.offset, self.cu_seqlens

    def gather(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values from one layer's (2, pages, kv heads, PAGE_SIZE, head_dim), (keys, kv heads, ...)."""
        return cache[0][self.page, :, self.offset], cache[1][self.page, :, self.offset]


@dataclass(frozen=True)
class Activations:
    """What a decoding step computes, one row per sequence; in the compute type but for the residual stream."""

    residual: Tensor  # (rows, hidden size) fp32
    normed: Tensor
    qkv: Tensor
    attention: Tensor
    delta: Tensor  # the output of attention or MLP, to be added to the residual stream
    gate_up: Tensor
    mlp: Tensor
    logits: Tensor

    def first(self, rows: int) -> Activations:
        """Return views of the first rows."""
        return Activations(*(getattr(self, name)[:rows] for name in Activations.__dataclass_fields__))


@dataclass(frozen=True)
class DeviceBuffers:
    """KV cache, RoPE table, decode state and activations; `ops` is the module `torch_ops` or `kernels`."""

    kv_cache: Tensor  # (layers, 2, pages, kv heads, PAGE_SIZE, head_dim)
    cos_sin: tuple[Tensor, Tensor]  # (positions, head_dim) fp32 each; the two halves of a head are equal
    state: DecodeState
    activations: Activations
    ops: Any

    @property
    def num_pages(self) -> int:
        """How many pages the KV cache has."""
        return self.kv_cache.shape[2]
