"""The native sampler: any transformers causal LM, on CPU and GPU, with nothing to install.

A prompt is prefilled once and its cache shared out to its samples. Every sample draws from a random stream of its own,
one number per token by inversion, so what else is in the batch changes a sample through rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trimtab.rollout.rng import stream_keys
from trimtab.rollout.sampling import draw
from trimtab.rollout.types import PromptTokens, Response, SamplingOptions, check_prompts

COMPACT_BELOW = 0.75  # finished rows leave the batch once fewer than this share of it is still going


@dataclass
class NativeSampler:
    """Samples from `model`, whose weights may change between calls. `autocast` opens the precision context."""

    model: Any
    end_tokens: frozenset[int]
    pad_token: int
    autocast: Callable[[], AbstractContextManager[Any]]

    @torch.no_grad()
    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """For every prompt, `options.samples` responses."""
        check_prompts(prompts, self.model.get_input_embeddings().num_embeddings)
        was_training = self.model.training
        self.model.eval()
        at_once = max(1, options.batch // options.samples)
        drawn: list[list[Response]] = []
        for first in range(0, len(prompts), at_once):
            drawn += self._sample_prompts(prompts[first : first + at_once], step, options)
        self.model.train(was_training)
        return drawn

    def _sample_prompts(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions
    ) -> list[list[Response]]:
        device = next(self.model.parameters()).device
        batch = _Batch.start(prompts, step, options, self.pad_token, device)
        ends = torch.tensor(sorted(self.end_tokens), device=device)
        with self.autocast():
            logits = self._prefill(batch, options.samples)
            for position in range(options.max_new_tokens):
                token, logp = draw(logits, batch.keys, position, options)
                batch.take(token, logp, torch.isin(token, ends))
                if position + 1 == options.max_new_tokens or batch.all_ended():
                    break
                token = batch.compact(token)
                logits = self._decode(batch, token)
        return batch.responses(len(prompts), options.samples)

    def _prefill(self, batch: _Batch, samples: int) -> Tensor:
        out = self.model(
            input_ids=batch.prompt_ids,
            attention_mask=batch.mask,
            position_ids=(batch.mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        batch.cache = out.past_key_values
        batch.cache.batch_repeat_interleave(samples)
        batch.mask = batch.mask.repeat_interleave(samples, 0)
        return out.logits[:, -1].repeat_interleave(samples, 0)  # type: ignore[no-any-return]

    def _decode(self, batch: _Batch, token: Tensor) -> Tensor:
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(token), 1)], dim=1)
        out = self.model(
            input_ids=token[:, None],
            attention_mask=batch.mask,
            position_ids=batch.mask.sum(1, keepdim=True) - 1,
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]  # type: ignore[no-any-return]


@dataclass
class _Batch:
    """The rows under way, and what has been drawn for every row so far."""

    prompt_ids: Tensor
    mask: Tensor
    keys: Tensor
    rows: Tensor  # which response each row is
    ended: Tensor
    cache: Any = None
    drawn: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def start(
        cls, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, pad: int, device: torch.device
    ) -> _Batch:
        width = max(len(prompt.ids) for prompt in prompts)
        ids = [[pad] * (width - len(prompt.ids)) + list(prompt.ids) for prompt in prompts]
        mask = [[0] * (width - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts]
        count = len(prompts) * options.samples
        keys = stream_keys(options.seed, step, [prompt.number for prompt in prompts], options.samples).to(device)
        return cls(
            prompt_ids=torch.tensor(ids, device=device),
            mask=torch.tensor(mask, device=device),
            keys=keys,
            rows=torch.arange(count, device=device),
            ended=torch.zeros(count, dtype=torch.bool, device=device),
        )

    def take(self, token: Tensor, logp: Tensor, ends: Tensor) -> None:
        """Note what was drawn for the rows that were still going."""
        going = ~self.ended
        self.drawn.append((self.rows, token, logp, going))
        self.ended = self.ended | ends

    def all_ended(self) -> bool:
        return bool(self.ended.all())

    def compact(self, token: Tensor) -> Tensor:
        """Let finished rows leave once they are many; the tokens of the rows that stay."""
        going = ~self.ended
        if int(going.sum()) >= COMPACT_BELOW * len(going):
            return token
        keep = going.nonzero().squeeze(1)
        self.cache.batch_select_indices(keep)
        self.mask, self.keys = self.mask[keep], self.keys[keep]
        self.rows, self.ended = self.rows[keep], self.ended[keep]
        return token[keep]

    def responses(self, prompts: int, samples: int) -> list[list[Response]]:
        """What was drawn, by prompt and sample."""
        tokens: list[list[int]] = [[] for _ in range(prompts * samples)]
        logps: list[list[float]] = [[] for _ in range(prompts * samples)]
        for rows, token, logp, going in self.drawn:
            for row, t, lp in zip(rows[going].tolist(), token[going].tolist(), logp[going].tolist(), strict=True):
                tokens[row].append(t)
                logps[row].append(lp)
        unfinished = set(self.rows[~self.ended].tolist())
        made = [
            Response(tokens[row], logps[row], row not in unfinished, prompt=row // samples, sample=row % samples)
            for row in range(prompts * samples)
        ]
        return [made[first : first + samples] for first in range(0, len(made), samples)]
