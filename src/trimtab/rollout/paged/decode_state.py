"""What a step reads and writes on the device: one row per sequence under way, numbers and pages in fixed places.

A CUDA graph holds addresses, so these tensors are made once and only ever copied into.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 64  # tokens per page of the cache: one tile of the attention kernel

# The rows of `State.numbers`.
TOKEN, POSITION, MADE, LIMIT, KEY, HOME, LIVE = range(7)
NUMBERS = 7


@dataclass(frozen=True)
class State:
    """The sequences under way.

    A sequence's row: its last token and that token's position, tokens made so far and their limit, the key of its
    random stream, its home (the row of `tokens` and `logps` where it writes, which never changes), and 1 while it
    lives. `pages` maps a row's positions to pages of the cache, `PAGE` at a time.
    """

    numbers: Tensor  # (NUMBERS, rows) int64
    pages: Tensor  # (rows, pages of the longest sequence) int32
    tokens: Tensor  # (homes, longest response) int32
    logps: Tensor  # (homes, longest response) fp32
    ends: Tensor  # the tokens that end a response, int64
    sampling: Tensor  # temperature, top-p, top-k, fp32

    @classmethod
    def empty(cls, rows: int, pages: int, longest: int, ends: list[int], device: torch.device) -> State:
        """Rows of which none lives."""
        return cls(
            torch.zeros(NUMBERS, rows, dtype=torch.int64, device=device),
            torch.zeros(rows, pages, dtype=torch.int32, device=device),
            torch.zeros(rows, longest, dtype=torch.int32, device=device),
            torch.zeros(rows, longest, device=device),
            torch.tensor(ends, dtype=torch.int64, device=device),
            torch.ones(3, device=device),
        )

    @property
    def rows(self) -> int:
        """How many sequences there is room for."""
        return self.numbers.shape[1]
