"""The decode state: what the device knows about the running sequences, one row of the batch for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows of `DecodeState.scalars`.
LAST_TOKEN, POSITION, NUM_GENERATED, MAX_NEW_TOKENS, RNG_KEY, SLOT, ACTIVE = range(7)
NUM_SCALARS = 7


@dataclass(frozen=True)
class DecodeState:
    """The running sequences, as tensors that are allocated once and only copied into: CUDA graphs hold addresses.

    A sequence's scalars are its last token and that token's position, how many tokens it has generated and may
    generate, the key of its random numbers, its slot, and whether it is active (0 once it has finished). Its row
    changes as others leave the batch; its slot, the row of `tokens` and `logps` that it writes, does not.
    """

    scalars: Tensor  # (NUM_SCALARS, rows) int64
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
            torch.zeros(NUM_SCALARS, rows, dtype=torch.int64, device=device),
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
