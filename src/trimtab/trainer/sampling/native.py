"""The native sampler: samples from any transformers causal LM with its own forward, on CPU and GPU.

A prompt is prefilled once, and its KV cache is repeated for its samples. Every sample has random numbers of its own, so
what else is in the batch changes a sample through rounding alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.data import KeptTokens, PromptTokens, Reply, Requests, Response, SamplingOptions, Turns, check_prompts
from trimtab.trainer.parallel import gathered_layers
from trimtab.trainer.sampling.decode_engine import COMPACT_BELOW, DecodeEngine
from trimtab.trainer.sampling.request_queue import RequestQueue, ServedSequence
from trimtab.trainer.sampling.sampling import Extras, rng_keys, sample_with_extras
from trimtab.trainer.sampling.sequence import SampledSequence, new_sequences, waiting_for


@dataclass
class NativeSampler:
    """Samples from `model`, whose weights may change between calls. `autocast` enters the precision context.

    `with_moments`: sampled responses have their moments, unless they are greedy. `with_kept`: they have the tokens that
    top-k and top-p kept, where these leave out any, and the moments are those of what was kept.
    """

    model: Any
    eos_token_ids: frozenset[int]
    pad_token_id: int
    autocast: Callable[[], AbstractContextManager[Any]]
    with_moments: bool = False
    with_kept: bool = False

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, turns: Turns | None = None
    ) -> list[list[Response]]:
        """Return `options.samples` responses for each prompt, in order."""
        vocab_size = self.model.get_input_embeddings().num_embeddings
        check_prompts(prompts, vocab_size)
        with self._evaluating():
            return self._sample(prompts, step, options, turns, vocab_size)

    @torch.no_grad()
    def serve(self, requests: Requests, options: SamplingOptions) -> None:
        """Answer requests until there are no more; the processes of a sharded policy call it together."""
        vocab_size = self.model.get_input_embeddings().num_embeddings
        with self._evaluating(), self.autocast():
            engine = self._engine(options, self._extras, merges=True)
            _serve(engine, RequestQueue(requests, self.eos_token_ids, vocab_size))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Switch the model to evaluation in the block, with all of its layers on this process."""
        was_training = self.model.training
        self.model.eval()
        try:
            with gathered_layers(self.model):
                yield
        finally:
            self.model.train(was_training)

    @property
    def _extras(self) -> Extras:
        return Extras(self.with_moments, self.with_kept)

    def _engine(self, options: SamplingOptions, extras: Extras, merges: bool = False) -> DecodeEngine:
        return DecodeEngine(self.model, self.eos_token_ids, self.pad_token_id, options, merges, extras)

    def _sample(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, turns: Turns | None, vocab_size: int
    ) -> list[list[Response]]:
        if turns is not None and prompts:
            with self.autocast():
                sequences = NativeConversations(
                    self._engine(options, Extras(kept=self.with_kept)), turns, vocab_size
                ).run(prompts, step)
            return [[sequence.response(self.eos_token_ids) for sequence in group] for group in sequences]
        prompts_per_batch = max(1, options.batch_size // options.samples)
        groups: list[list[Response]] = []
        for first in range(0, len(prompts), prompts_per_batch):
            groups += self._sample_batch(prompts[first : first + prompts_per_batch], step, options)
        return groups

    def _sample_batch(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions
    ) -> list[list[Response]]:
        device = next(self.model.parameters()).device
        batch = _DecodeBatch.from_prompts(prompts, step, options, self.pad_token_id, device)
        eos_token_ids = torch.tensor(sorted(self.eos_token_ids), device=device)
        with self.autocast():
            logits = self._forward(batch, batch.prompt_ids, (batch.mask.cumsum(1) - 1).clamp(min=0))
            logits = batch.repeat(options.samples, logits)
            for position in range(options.max_new_tokens):
                columns, kept = sample_with_extras(logits, batch.keys, position, options, self._extras)
                token = columns[0]
                batch.append(torch.isin(token, eos_token_ids), columns, kept)
                if position + 1 == options.max_new_tokens or batch.finished.all():
                    break
                token = batch.compact(token)
                batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(token), 1)], dim=1)
                logits = self._forward(batch, token[:, None], batch.mask.sum(1, keepdim=True) - 1)
        return batch.responses(len(prompts), options.samples)

    def _forward(self, batch: _DecodeBatch, ids: Tensor, position: Tensor) -> Tensor:
        """Run tokens of every row, add their keys and values to the cache, and return the next-token logits."""
        inputs = {"input_ids": ids, "attention_mask": batch.mask, "position_ids": position}
        out = self.model(**inputs, past_key_values=batch.cache, use_cache=True, logits_to_keep=1)
        batch.cache = out.past_key_values
        return out.logits[:, -1]  # type: ignore[no-any-return]


@dataclass
class _DecodeBatch:
    """The unfinished rows of a batch, and the tokens sampled so far for all of its responses."""

    prompt_ids: Tensor  # (prompts, longest prompt), padded on the left
    mask: Tensor  # attention mask, one column per token in the cache
    keys: Tensor
    response: Tensor  # the index of each row's response
    finished: Tensor
    cache: Any = None
    sampled: list[tuple[Tensor, ...]] = field(default_factory=list)
    kept: list[KeptTokens] = field(default_factory=list)

    @classmethod
    def from_prompts(
        cls, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, pad: int, device: torch.device
    ) -> _DecodeBatch:
        width = max(len(prompt.ids) for prompt in prompts)
        ids = [[pad] * (width - len(prompt.ids)) + list(prompt.ids) for prompt in prompts]
        mask = [[0] * (width - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts]
        keys = rng_keys(options.seed, step, [prompt.number for prompt in prompts], options.samples).to(device)
        response = torch.arange(len(keys), device=device)
        finished = torch.zeros(len(keys), dtype=torch.bool, device=device)
        return cls(torch.tensor(ids, device=device), torch.tensor(mask, device=device), keys, response, finished)

    def repeat(self, samples: int, logits: Tensor) -> Tensor:
        """Repeat cache and mask of the prompts for their samples; return the logits repeated as well."""
        self.cache.batch_repeat_interleave(samples)
        self.mask = self.mask.repeat_interleave(samples, 0)
        return logits.repeat_interleave(samples, 0)

    def append(self, is_end: Tensor, columns: tuple[Tensor, ...], kept: KeptTokens | None) -> None:
        """Keep tokens, log-probabilities and extras of unfinished rows, and mark rows that sampled an end token."""
        self.sampled.append((~self.finished, self.response, *columns))
        if kept is not None:
            self.kept.append(kept)
        self.finished = self.finished | is_end

    def compact(self, token: Tensor) -> Tensor:
        """Drop finished rows once they are many; return the tokens of the rows that remain."""
        unfinished = ~self.finished
        if int(unfinished.sum()) >= COMPACT_BELOW * len(unfinished):
            return token
        keep = unfinished.nonzero().squeeze(1)
        self.cache.batch_select_indices(keep)
        self.mask, self.keys = self.mask[keep], self.keys[keep]
        self.response, self.finished = self.response[keep], self.finished[keep]
        return token[keep]

    def responses(self, prompts: int, samples: int) -> list[list[Response]]:
        """Return the responses by prompt and sample."""
        # Moved to the host here, not token by token: the copy would make every decoding step wait for the device.
        kept, *columns = (torch.cat(column) for column in zip(*self.sampled, strict=True))
        row, token, logp, *moments = (column[kept] for column in columns)
        order = row.argsort(stable=True)  # by response, and within it by position
        tokens, logps = token[order].cpu().numpy(), logp[order].cpu().numpy()
        found = torch.stack(moments)[:, order].cpu().numpy() if moments else None
        sets = None
        if self.kept:
            sets = KeptTokens.concat(self.kept).take(np.flatnonzero(kept.cpu().numpy())[order.cpu().numpy()])
        ends = row.bincount(minlength=prompts * samples).cumsum(0).tolist()
        unfinished = set(self.response[~self.finished].tolist())
        responses = [
            Response(
                tokens[start:end],
                logps[start:end],
                number not in unfinished,
                sample=number % samples,
                moments=None if found is None else found[:, start:end],
                kept=None if sets is None else sets[start:end],
            )
            for number, (start, end) in enumerate(pairwise([0, *ends]))
        ]
        return [responses[first : first + samples] for first in range(0, len(responses), samples)]


# A conversation whose message has ended leaves its batch. With its reply it comes back by prefilling its tokens, in a
# new batch with others that are ready. It comes back after a fixed number of decoding rounds, not whenever the reply is
# there: which sequences share a batch is then independent of the time that tools take, and runs repeat bit for bit.

# Returning conversations start a batch once they are this share of those that are running: a forward pass for a single
# row takes nearly as long as one for many.
JOIN_SHARE = 0.25
# Rounds between a message and the return with its reply, at which the sampler waits for replies that have not come; at
# once where nothing else is running. Tens of milliseconds for small models on a CPU, about what a tool takes.
REPLY_ROUNDS = 16


@dataclass
class NativeConversations:
    """Decodes conversations; `turns` is the other side."""

    engine: DecodeEngine
    turns: Turns
    vocab_size: int
    _waiting: dict[tuple[int, int], tuple[SampledSequence, int]] = field(default_factory=dict)  # until which round
    _come: dict[tuple[int, int], Reply] = field(default_factory=dict)  # replies before their round

    def run(self, prompts: Sequence[PromptTokens], step: int) -> list[list[SampledSequence]]:
        """Return the finished sequences of each prompt."""
        options = self.engine.options
        groups = new_sequences(prompts, step, options)
        ready = deque(sequence for group in groups for sequence in group)
        for number in count():
            ready += self._returning(number, idle=not ready and not self.engine.batches)
            if not (ready or self.engine.batches or self._waiting):
                break
            running = self.engine.running
            joining = min(len(ready), options.batch_size - running)
            if joining > JOIN_SHARE * running:
                self.engine.join([ready.popleft() for _ in range(joining)])
            for sequence in self.engine.step():
                if sequence.is_finished(self.engine.eos_token_ids):
                    self._waiting[sequence.where] = sequence, number + REPLY_ROUNDS
                    sequence.submit(self.turns)
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
        return [sequence for sequence, reply in returned if sequence.observe(reply, self.turns, self.vocab_size)]


# Requests join what is running once they are `JOIN_SHARE` of it, or after so many rounds: a prefill delays all others
# by about a round.
JOIN_ROUNDS = 4
MAX_PREFILL_TOKENS = 32_768  # of the requests that join in one round, padding included


def _serve(engine: DecodeEngine, queue: RequestQueue) -> None:
    """Answer requests until there are no more."""
    ready: deque[ServedSequence] = deque()
    waited = 0
    while True:
        ready += queue.take(block=not (ready or engine.batches))
        ready = deque(sequence for sequence in ready if not sequence.is_waived)
        if not (ready or engine.batches):
            if queue.closed:
                return
            continue
        running = engine.running
        joining = min(_prefill_together(ready), engine.options.batch_size - running)
        waited = waited + 1 if joining else 0
        if joining > JOIN_SHARE * running or waited > JOIN_ROUNDS:
            engine.join([ready.popleft() for _ in range(joining)])
            waited = 0
        for sequence in engine.step():
            queue.answer(sequence)


def _prefill_together(ready: Sequence[ServedSequence]) -> int:
    """Return how many of the first requests, but one at least, fit into a prefill."""
    longest = 0
    for number, sequence in enumerate(ready):
        longest = max(longest, len(sequence.prompt) + len(sequence.tokens))
        if number and (number + 1) * longest > MAX_PREFILL_TOKENS:
            return number
    return len(ready)
