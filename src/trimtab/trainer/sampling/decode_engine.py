"""Decode sequences in batches with a transformers model's own forward; sequences join and leave between tokens.

What joins is prefilled as one batch. A sequence that is over leaves its row empty, and rows are dropped once many are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trimtab.data import SamplingOptions
from trimtab.trainer.sampling.sampling import Extras, sample_with_extras
from trimtab.trainer.sampling.sequence import SampledSequence

# Drop finished rows only when fewer than this share is unfinished: dropping copies the whole KV cache.
COMPACT_BELOW = 0.75


@dataclass
class DecodeBatch:
    """Sequences that are decoded together, one row of the cache each; None where a sequence has left."""

    rows: list[SampledSequence | None]
    keys: Tensor
    mask: Tensor  # attention mask, one column per token in the cache
    logits: Tensor  # of the next token
    cache: Any

    @property
    def size(self) -> int:
        """How many sequences are still decoded."""
        return sum(row is not None for row in self.rows)

    @property
    def can_merge(self) -> bool:
        """Whether the cache has nothing but a key and a value for every column of the mask."""
        from transformers.cache_utils import DynamicLayer  # here: importing transformers takes a second

        # A sliding window drops columns by itself, and the state of linear attention has none.
        return all(type(layer) is DynamicLayer for layer in self.cache.layers)

    def compact(self, token: Tensor) -> Tensor:
        """Drop rows without a sequence once they are many; return the tokens of the rows that remain."""
        if self.size >= COMPACT_BELOW * len(self.rows):
            return token
        keep = self._drop_empty_rows()
        return token[keep]

    def merge(self, other: DecodeBatch) -> None:
        """Take over the rows of another batch; drop columns that no row uses, and pad the narrower batch on the left.

        It copies the cache once, which transformers does for every token as well.
        """
        if self.size < len(self.rows):
            self.logits = self.logits[self._drop_empty_rows()]
        first = int(self.mask.argmax(1).min())  # the column of the longest row's first token
        mask = self.mask[:, first:]
        width = max(mask.shape[1], other.mask.shape[1])
        for layer, others in zip(self.cache.layers, other.cache.layers, strict=True):
            for name in ("keys", "values"):
                pair = getattr(layer, name)[:, :, first:], getattr(others, name)
                padded = [pad(each, (0, 0, width - each.shape[2], 0)) for each in pair]
                setattr(layer, name, torch.cat(padded))
        self.mask = torch.cat([pad(each, (width - each.shape[1], 0)) for each in (mask, other.mask)])
        self.keys, self.logits = torch.cat([self.keys, other.keys]), torch.cat([self.logits, other.logits])
        self.rows += other.rows

    def _drop_empty_rows(self) -> Tensor:
        """Drop rows without a sequence from all but the logits; return the indices of those that remain."""
        kept = [row for row, sequence in enumerate(self.rows) if sequence is not None]
        keep = torch.tensor(kept, device=self.keys.device)
        self.cache.batch_select_indices(keep)
        self.rows, self.keys, self.mask = [self.rows[row] for row in kept], self.keys[keep], self.mask[keep]
        return keep


@dataclass
class DecodeEngine:
    """Decodes what joins it until it is over; with `merges` in one batch, where the model's cache allows it.

    `extras` are what sequences have besides their tokens and log-probabilities.
    """

    model: Any
    eos_token_ids: frozenset[int]
    pad_token_id: int
    options: SamplingOptions
    merges: bool = False
    extras: Extras = field(default_factory=Extras)
    batches: list[DecodeBatch] = field(default_factory=list)

    @property
    def running(self) -> int:
        """How many sequences are decoded."""
        return sum(batch.size for batch in self.batches)

    def join(self, sequences: Sequence[SampledSequence]) -> None:
        """Prefill sequences as one batch; what several have in full, as the samples of a prompt do, is run once."""
        device = next(self.model.parameters()).device
        distinct: dict[tuple[int, ...], int] = {}
        row = torch.tensor([distinct.setdefault(tuple(each.ids), len(distinct)) for each in sequences], device=device)
        width = max(map(len, distinct))
        ids = torch.tensor([[self.pad_token_id] * (width - len(each)) + list(each) for each in distinct], device=device)
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in distinct], device=device)
        keys = torch.tensor([sequence.key for sequence in sequences], device=device)
        batch = DecodeBatch(list(sequences), keys, mask, torch.empty(0), None)
        self._forward(batch, ids, (mask.cumsum(1) - 1).clamp(min=0))
        if len(distinct) < len(sequences):
            batch.cache.batch_select_indices(row)
            batch.mask, batch.logits = batch.mask[row], batch.logits[row]
        if self.merges and self.batches and batch.can_merge:
            self.batches[-1].merge(batch)
        else:
            self.batches.append(batch)

    def step(self) -> Iterator[SampledSequence]:
        """Sample a token for every sequence, and run it; yield the sequences that are over then.

        They are yielded before the forward pass, so that others can go on with them while it runs.
        """
        for batch in self.batches:
            token = self._sample(batch)
            # Again after some were yielded: what is done with one may end others.
            while over := [row for row, each in enumerate(batch.rows) if each and each.is_over(self.eos_token_ids)]:
                for row in over:
                    sequence, batch.rows[row] = batch.rows[row], None
                    assert sequence is not None
                    yield sequence
            if batch.size:
                token = batch.compact(token)
                batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(token), 1)], dim=1)
                self._forward(batch, token[:, None], batch.mask.sum(1, keepdim=True) - 1)
        self.batches = [batch for batch in self.batches if batch.size]

    def _sample(self, batch: DecodeBatch) -> Tensor:
        """Sample a token for every row, and append it to the row's sequence."""
        position = torch.tensor([row.num_sampled if row else 0 for row in batch.rows], device=batch.keys.device)
        columns, kept = sample_with_extras(batch.logits, batch.keys, position, self.options, self.extras)
        token, logp, *found = columns
        moments: list[list[float]] = torch.stack(found, 1).tolist() if found else [[]] * len(batch.rows)
        tokens, logps = token.tolist(), logp.tolist()
        for row, sequence in enumerate(batch.rows):
            if sequence is not None:
                sets = None if kept is None else kept[row : row + 1]
                sequence.append(tokens[row], logps[row], moments[row], sets)
        return token

    def _forward(self, batch: DecodeBatch, ids: Tensor, position: Tensor) -> None:
        """Run tokens of every row, add their keys and values to the cache, and set the next token's logits."""
        inputs = {"input_ids": ids, "attention_mask": batch.mask, "position_ids": position}
        out = self.model(**inputs, past_key_values=batch.cache, use_cache=True, logits_to_keep=1)
        batch.cache, batch.logits = out.past_key_values, out.logits[:, -1]
