"""The tokens that top-k and top-p keep at every position of a response, in little memory.

The sampler draws from the distribution over these tokens alone, so training needs them to know its log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

WORD = 32  # bits


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Which of `vocabulary` tokens top-k and top-p kept at each position, one row for each sampled token.

    A row holds the ids of its tokens (`words[ends[row]:ends[row + 1]]`). One that would be longer than a bit for each
    token of the vocabulary holds these bits instead: with 152 thousand tokens, 4 bytes per kept token, 19 KB at most.
    """

    vocabulary: int
    words: np.ndarray  # int32, of all rows end to end
    ends: np.ndarray  # (rows + 1,) int64, from 0 on

    @classmethod
    def from_mask(cls, mask: np.ndarray) -> KeptTokens:
        """Return the rows of a mask (rows, vocabulary) of what was kept."""
        import numpy as np  # here and below: what only parses a recipe imports this module too

        vocabulary = mask.shape[1]
        width = words_of_bits(vocabulary)
        counts = mask.sum(1)
        in_bits = counts >= width
        sizes = np.where(in_bits, width, counts)
        words = np.empty(int(sizes.sum()), np.int32)
        from_bits = np.repeat(in_bits, sizes)
        words[~from_bits] = mask[~in_bits].nonzero()[1]
        padded = np.zeros((int(in_bits.sum()), width * WORD), bool)
        padded[:, :vocabulary] = mask[in_bits]
        words[from_bits] = np.packbits(padded, axis=1, bitorder="little").view("<i4").ravel()
        return cls(vocabulary, words, _ends(sizes))

    @classmethod
    def concat(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """Return the rows of several, end to end; ValueError if their vocabularies differ."""
        import numpy as np

        sizes = sorted({part.vocabulary for part in parts})
        if len(sizes) != 1:
            raise ValueError(f"kept tokens of vocabularies of {sizes} tokens: they must be of one model")
        words = np.concatenate([part.words for part in parts])
        return cls(sizes[0], words, _ends(np.concatenate([part.sizes for part in parts])))

    @property
    def sizes(self) -> np.ndarray:
        """How many words each row has."""
        import numpy as np

        return np.diff(self.ends)

    @property
    def in_bits(self) -> np.ndarray:
        """A mask of the rows that hold a bit for each token of the vocabulary, and no ids."""
        mask: np.ndarray = self.sizes == words_of_bits(self.vocabulary)
        return mask

    @cached_property
    def counts(self) -> np.ndarray:
        """How many tokens were kept in each row."""
        import numpy as np

        counts = self.sizes.copy()
        bits = self.words[np.repeat(self.in_bits, self.sizes)].reshape(-1, words_of_bits(self.vocabulary))
        counts[self.in_bits] = np.unpackbits(bits.view(np.uint8), axis=1).sum(1)
        return counts

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ends) - 1

    def __getitem__(self, rows: slice) -> KeptTokens:
        """Return some consecutive rows."""
        first, last, step = rows.indices(len(self))
        assert step == 1
        ends = self.ends[first : max(first, last) + 1]
        return KeptTokens(self.vocabulary, self.words[ends[0] : ends[-1]], ends - ends[0])

    def take(self, rows: np.ndarray) -> KeptTokens:
        """Return the rows of these numbers, in this order."""
        import numpy as np

        sizes = self.sizes[rows]
        ends = _ends(sizes)
        where = np.arange(ends[-1]) + np.repeat(self.ends[:-1][rows] - ends[:-1], sizes)
        return KeptTokens(self.vocabulary, self.words[where], ends)

    def contains(self, tokens: np.ndarray) -> np.ndarray:
        """Return for each row whether it has the token of the same number."""
        import numpy as np

        in_bits, row = self.in_bits, np.repeat(np.arange(len(self)), self.sizes)
        found = np.zeros(len(self), bool)
        found[row[~in_bits[row] & (self.words == tokens[row])]] = True
        words = self.words[(self.ends[:-1] + tokens // WORD)[in_bits]]
        found[in_bits] = words >> (tokens[in_bits] % WORD).astype(np.int32) & 1 == 1
        return found

    def mask(self) -> np.ndarray:
        """Return a mask (rows, vocabulary) of what was kept."""
        import numpy as np

        mask = np.zeros((len(self), self.vocabulary), bool)
        in_bits, sizes = self.in_bits, self.sizes
        from_bits = np.repeat(in_bits, sizes)
        mask[np.repeat(np.arange(len(self)), sizes)[~from_bits], self.words[~from_bits]] = True
        bits = self.words[from_bits].reshape(-1, words_of_bits(self.vocabulary)).astype("<i4", copy=False)
        mask[in_bits] = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, : self.vocabulary]
        return mask


def words_of_bits(vocabulary: int) -> int:
    """Return how many words a bit for each token of a vocabulary takes."""
    return -(-vocabulary // WORD)


def _ends(sizes: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.concatenate([np.zeros(1, np.int64), sizes.cumsum(dtype=np.int64)])
