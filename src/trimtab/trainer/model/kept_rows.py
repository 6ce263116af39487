"""Logits restricted to the tokens that the sampler could choose from, for a micro-batch on its device.

Logits of all other tokens become -inf, so log-probabilities, moments and gradients are those of the distribution over
the kept tokens alone: the one that top-k and top-p made the sampler draw from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.data import KeptTokens, words_of_bits

BLOCK = 64  # rows whose bits are unpacked at one time: a bool and an int32 for each token of the vocabulary


@dataclass(frozen=True)
class KeptRows:
    """The kept tokens of consecutive rows: `ids` end to end, or `bits` for the rows numbered `in_bits`.

    `ends` says where the ids of each row end, and with `in_bits` is on the host: a slice must not wait for a GPU.
    """

    vocabulary: int
    ids: Tensor
    row: Tensor  # of each id
    ends: np.ndarray
    bits: Tensor  # (rows in bits, words) int32
    in_bits: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[KeptTokens | None], device: torch.device) -> KeptRows | None:
        """Return the rows of several responses, or None if none of them has kept tokens."""
        given = [part for part in parts if part is not None]
        if not given:
            return None
        if len(given) < len(parts):
            raise ValueError(
                f"{len(parts) - len(given)} of {len(parts)} responses came without the tokens that top-k and top-p "
                "kept, the others with them: the sampler must return `Response.kept` for all, or for none"
            )
        kept = KeptTokens.concat(given)
        is_bits, sizes = kept.in_bits, kept.sizes
        from_bits = np.repeat(is_bits, sizes)
        ends = np.concatenate([[0], np.where(is_bits, 0, sizes).cumsum()])
        row = np.repeat(np.arange(len(kept)), sizes)[~from_bits]
        ids = kept.words[~from_bits].astype(np.int64)
        bits = kept.words[from_bits].reshape(-1, words_of_bits(kept.vocabulary))
        on_device = [torch.from_numpy(each).to(device) for each in (ids, row, bits)]
        return cls(kept.vocabulary, on_device[0], on_device[1], ends, on_device[2], is_bits.nonzero()[0])

    def restrict(self, logits: Tensor, first: int) -> None:
        """Set the logits of rows from `first` on to -inf for all tokens that were not kept, in place."""
        row, ids, numbers, bits = self._of(logits, first)
        kept = logits[row, ids]
        every = torch.ones(len(logits), dtype=torch.bool)
        every[numbers] = False
        if every.all():  # in place, without a mask of the vocabulary's size
            logits.fill_(-torch.inf)
        else:
            logits.index_fill_(0, every.nonzero().squeeze(1).to(logits.device), -torch.inf)
        logits[row, ids] = kept
        for numbers_block, words in zip(numbers.split(BLOCK), bits.split(BLOCK), strict=True):
            where = numbers_block.to(logits.device)
            logits[where] = logits[where].masked_fill(~self._unpacked(words), -torch.inf)

    def restricted(self, logits: Tensor, first: int) -> Tensor:
        """Return `restrict` as a new tensor, with the gradient of the logits that were kept."""
        row, ids, numbers, bits = self._of(logits, first)
        dropped = torch.ones_like(logits, dtype=torch.bool)
        dropped[row, ids] = False
        for numbers_block, words in zip(numbers.split(BLOCK), bits.split(BLOCK), strict=True):
            dropped[numbers_block.to(logits.device)] = ~self._unpacked(words)
        return logits.masked_fill(dropped, -torch.inf)

    def _of(self, logits: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return row and id of the kept tokens of a chunk of logits, and number and bits of its rows in bits."""
        if logits.shape[1] != self.vocabulary:
            raise ValueError(
                f"the sampler kept tokens of a vocabulary of {self.vocabulary}, but the trainer has {logits.shape[1]} "
                "logits: sampler and trainer must have the same model"
            )
        last = first + len(logits)
        ids = slice(int(self.ends[first]), int(self.ends[last]))
        low, high = np.searchsorted(self.in_bits, [first, last])
        numbers = torch.from_numpy(self.in_bits[low:high] - first)
        return self.row[ids] - first, self.ids[ids], numbers, self.bits[low:high]

    def _unpacked(self, words: Tensor) -> Tensor:
        bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
        return bits.flatten(1)[:, : self.vocabulary].bool()
