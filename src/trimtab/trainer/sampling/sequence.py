"""A response in the making: what was sampled for a prompt so far, and the replies between its messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from trimtab.data import KeptTokens, PromptTokens, Reply, Response, SamplingOptions, Turns
from trimtab.trainer.sampling.sampling import rng_keys


@dataclass
class SampledSequence:
    """One response in the making: its index within its group, its random key, its prompt, and its tokens so far.

    `tokens` has the tokens of replies too (`observed` says where), `logp` those of sampled tokens alone.
    """

    sample: int
    key: int
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    observed: list[tuple[int, int]] = field(default_factory=list)
    moments: list[list[float]] = field(default_factory=list)  # of sampled tokens, if the sampler was asked for them
    kept: list[KeptTokens] = field(default_factory=list)  # likewise, a row for each sampled token
    prompt_index: int = 0
    max_new_tokens: int = 2**31 - 1

    def append(self, token: int, logp: float, moments: list[float], kept: KeptTokens | None = None) -> None:
        """Append a sampled token; without `moments` and `kept` if the sampler was not asked for them."""
        self.tokens.append(token)
        self.logp.append(logp)
        if moments:
            self.moments.append(moments)
        if kept is not None:
            self.kept.append(kept)

    def is_over(self, eos_token_ids: Collection[int]) -> bool:
        """Return whether the newest message is over: an end token was sampled, or as many as may be."""
        return self.is_finished(eos_token_ids) or self.num_sampled >= self.max_new_tokens

    def is_finished(self, eos_token_ids: Collection[int]) -> bool:
        """Return whether an end token has ended the newest message."""
        return self.tokens[-1] in eos_token_ids

    @property
    def ids(self) -> list[int]:
        """The prompt and all tokens after it."""
        return [*self.prompt, *self.tokens]

    @property
    def num_sampled(self) -> int:
        """How many tokens were sampled: the position of the next one in the random stream."""
        return len(self.logp)

    @property
    def where(self) -> tuple[int, int]:
        """The indices of its prompt and sample, which name a conversation."""
        return self.prompt_index, self.sample

    def submit(self, turns: Turns) -> None:
        """Submit the newest message."""
        first = self.observed[-1][1] if self.observed else 0
        turns.submit(*self.where, self.tokens[first:])

    def observe(self, reply: Reply, turns: Turns, vocab_size: int) -> bool:
        """Append the tokens of a reply; return whether the conversation goes on.

        It does not where there is no reply, or no token may be sampled after it: it is dropped then.
        """
        if reply.tokens is None or self.num_sampled >= self.max_new_tokens:
            return False
        where = f"the reply to sample {self.sample} of prompt {self.prompt_index}"
        if not reply.tokens:
            raise ValueError(f"{where} has no tokens: None is what ends a conversation")
        # On a GPU an index outside of the embedding is a device-side assert, which ends the process.
        outside = [token for token in (min(reply.tokens), max(reply.tokens)) if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(f"{where} holds token {outside[0]}, but the model's vocabulary is 0 to {vocab_size - 1}")
        before = len(self.tokens)
        self.tokens += reply.tokens
        self.observed.append((before, len(self.tokens)))
        total = len(self.tokens) - self.num_sampled
        if total > turns.max_observed_tokens:
            raise ValueError(
                f"{where}: the replies of this conversation have {total} tokens, and the KV cache has room for "
                f"max_observed_tokens={turns.max_observed_tokens}"
            )
        return True

    def response(self, eos_token_ids: Collection[int]) -> Response:
        """Return the finished response."""
        moments = np.array(self.moments, dtype=np.float32).T if self.moments else None
        finished = self.is_finished(eos_token_ids)
        kept = KeptTokens.concat(self.kept) if self.kept else None
        return Response(self.tokens, self.logp, finished, self.sample, tuple(self.observed), moments, kept=kept)


def new_sequences(prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[SampledSequence]]:
    """Return `options.samples` sequences for each prompt, with their random keys."""
    keys = rng_keys(options.seed, step, [prompt.number for prompt in prompts], options.samples).tolist()
    return [
        [
            SampledSequence(
                sample,
                keys[index * options.samples + sample],
                prompt.ids,
                prompt_index=index,
                max_new_tokens=options.max_new_tokens,
            )
            for sample in range(options.samples)
        ]
        for index, prompt in enumerate(prompts)
    ]


def waiting_for(reply: Reply, where: Collection[tuple[int, int]]) -> tuple[int, int]:
    """Return which conversation a reply is for, or raise where that one waits for none."""
    if (reply.prompt, reply.sample) not in where:
        raise ValueError(f"a reply to sample {reply.sample} of prompt {reply.prompt}, which waits for none")
    return reply.prompt, reply.sample
