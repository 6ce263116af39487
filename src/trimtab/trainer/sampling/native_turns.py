"""Conversations of the native sampler: several batches take turns, one token each.

A conversation whose message has ended leaves its batch. With its reply it comes back by prefilling its own tokens, in a
new batch with others that are ready. It comes back after a fixed number of decoding rounds, not whenever the reply is
there: which sequences share a batch is then independent of the time that tools take, and runs repeat bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from trimtab.data import PromptTokens, Reply, SamplingOptions, Turns
from trimtab.trainer.sampling.sampling import sample_tokens
from trimtab.trainer.sampling.sequence import SampledSequence, new_sequences, waiting_for

# Drop rows that have ended only when fewer than this share is left: dropping copies the whole KV cache.
COMPACT_BELOW = 0.75
# Returning conversations start a batch once they are this share of those that are running: a forward pass for a single
# row takes nearly as long as one for many.
JOIN_SHARE = 0.25
# Rounds between a message and the return with its reply, at which the sampler waits for replies that have not come; at
# once where nothing else is running. Tens of milliseconds for small models on a CPU, about what a tool takes.
REPLY_ROUNDS = 16


@dataclass
class _Batch:
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

    def compact(self, token: Tensor) -> Tensor:
        """Drop rows without a sequence once they are many; return the tokens of the rows that remain."""
        if self.size >= COMPACT_BELOW * len(self.rows):
            return token
        kept = [row for row, sequence in enumerate(self.rows) if sequence is not None]
        keep = torch.tensor(kept, device=token.device)
        self.cache.batch_select_indices(keep)
        self.rows, self.keys, self.mask = [self.rows[row] for row in kept], self.keys[keep], self.mask[keep]
        return token[keep]


@dataclass
class NativeConversations:
    """Decodes conversations with a model's own forward; `turns` is the other side."""

    model: Any
    eos_token_ids: frozenset[int]
    pad_token_id: int
    options: SamplingOptions
    turns: Turns
    vocab_size: int
    _waiting: dict[tuple[int, int], tuple[SampledSequence, int]] = field(default_factory=dict)  # until which round
    _come: dict[tuple[int, int], Reply] = field(default_factory=dict)  # replies before their round

    def run(self, prompts: Sequence[PromptTokens], step: int) -> list[list[SampledSequence]]:
        """Return the finished sequences of each prompt."""
        groups = new_sequences(prompts, step, self.options)
        ready = deque(sequence for group in groups for sequence in group)
        batches: list[_Batch] = []
        for number in count():
            ready += self._returning(number, idle=not ready and not batches)
            if not (ready or batches or self._waiting):
                break
            running = sum(batch.size for batch in batches)
            joining = min(len(ready), self.options.batch_size - running)
            if joining > JOIN_SHARE * running:
                batches.append(self._prefill([ready.popleft() for _ in range(joining)]))
            for batch in batches:
                for sequence in self._decode(batch):
                    self._waiting[sequence.where] = sequence, number + REPLY_ROUNDS
                    sequence.submit(self.turns)
            batches = [batch for batch in batches if batch.size]
        return groups

    def _returning(self, number: int, idle: bool) -> list[SampledSequence]:
        """Return the conversations that go on in this round; in an idle one those whose round is next."""
        if idle and self._waiting:
            number = min(until for _, until in self._waiting.values())
        due = [where for where, (_, until) in self._waiting.items() if until <= number]
        while not self._come.keys() >= set(due):
            for reply in self.turns.replies(block=True):
                self._come[waiting_for(reply, self._waiting.keys() - self._come.keys())] = reply
        returned = [(self._waiting.pop(where)[0], self._come.pop(where)) for where in due]
        limits = self.turns, self.options.max_new_tokens, self.vocab_size
        return [sequence for sequence, reply in returned if sequence.observe(reply, *limits)]

    def _prefill(self, sequences: list[SampledSequence]) -> _Batch:
        """Start a batch; what several sequences have in full, as the samples of a prompt do, is prefilled once."""
        device = next(self.model.parameters()).device
        distinct: dict[tuple[int, ...], int] = {}
        row = torch.tensor([distinct.setdefault(tuple(each.ids), len(distinct)) for each in sequences], device=device)
        width = max(map(len, distinct))
        ids = torch.tensor([[self.pad_token_id] * (width - len(each)) + list(each) for each in distinct], device=device)
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in distinct], device=device)
        keys = torch.tensor([sequence.key for sequence in sequences], device=device)
        batch = _Batch(list(sequences), keys, mask, torch.empty(0), None)
        self._forward(batch, ids, (mask.cumsum(1) - 1).clamp(min=0))
        if len(distinct) < len(sequences):
            batch.cache.batch_select_indices(row)
            batch.mask, batch.logits = batch.mask[row], batch.logits[row]
        return batch

    def _decode(self, batch: _Batch) -> list[SampledSequence]:
        """Sample a token for every row, and run it; return the sequences whose message it ended."""
        ended = []
        position = torch.tensor([row.num_sampled if row else 0 for row in batch.rows], device=batch.keys.device)
        token, logp = sample_tokens(batch.logits, batch.keys, position, self.options)
        for row, (each, its_logp) in enumerate(zip(token.tolist(), logp.tolist(), strict=True)):
            sequence = batch.rows[row]
            if sequence is None:
                continue
            sequence.tokens.append(each)
            sequence.logp.append(its_logp)
            is_end = each in self.eos_token_ids
            ended += [sequence] if is_end else []
            if is_end or sequence.num_sampled == self.options.max_new_tokens:
                batch.rows[row] = None
        if batch.size:
            token = batch.compact(token)
            batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(token), 1)], dim=1)
            self._forward(batch, token[:, None], batch.mask.sum(1, keepdim=True) - 1)
        return ended

    def _forward(self, batch: _Batch, ids: Tensor, position: Tensor) -> None:
        """Run tokens of every row, add their keys and values to the cache, and set the next token's logits."""
        inputs = {"input_ids": ids, "attention_mask": batch.mask, "position_ids": position}
        out = self.model(**inputs, past_key_values=batch.cache, use_cache=True, logits_to_keep=1)
        batch.cache, batch.logits = out.past_key_values, out.logits[:, -1]
