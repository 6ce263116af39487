"""The decode state: what the device knows about the running sequences, one row of the batch for each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


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
