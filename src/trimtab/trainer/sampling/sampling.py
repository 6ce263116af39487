"""Sample next tokens from logits: temperature, top-k, top-p, then inverse transform sampling.

Random numbers are counter-based (splitmix64), one per (seed, step, prompt, sample, position). They have no state, so
a sample's depend neither on the batch it is in nor on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.data import KeptTokens, SamplingOptions
from trimtab.objectives import moments, splitmix64


def rng_keys(seed: int, step: int, prompts: Sequence[int], samples: int) -> Tensor:
    """Return one int64 key per sample, all samples of the first prompt first."""
    prompt = torch.tensor(list(prompts), dtype=torch.int64).repeat_interleave(samples)
    sample = torch.arange(samples).repeat(len(prompts))
    key = torch.full_like(prompt, seed)
    for counter in (torch.full_like(prompt, step), prompt, sample):
        key = splitmix64.mix(key + (counter + 1) * splitmix64.GOLDEN)
    return key


def uniform(keys: Tensor, position: int | Tensor) -> Tensor:
    """Return a float64 in [0, 1) for every key, at one position or at one for each."""
    steps = position + 1 if isinstance(position, Tensor) else torch.full_like(keys, position + 1)
    # The upper 53 bits: as many as a float64 holds exactly.
    return splitmix64.logical_shift(splitmix64.mix(keys + steps * splitmix64.GOLDEN), 11).to(torch.float64) * 2.0**-53


def sample_tokens(
    logits: Tensor, keys: Tensor, position: int | Tensor, options: SamplingOptions
) -> tuple[Tensor, Tensor]:
    """Sample one token per row; return the tokens and their log-probabilities under the filtered distribution.

    `logits` is (rows, vocabulary), `keys` the rows' random keys, `position` the index of the token in its response.
    """
    if options.temperature == 0:
        logp = logits.float().log_softmax(-1)
        best = logp.max(-1)
        return best.indices, best.values
    return draw_tokens(filter_top_k_top_p(logits.float() / options.temperature, options), keys, position)


def draw_tokens(filtered: Tensor, keys: Tensor, position: int | Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row of logits after temperature and filter; return the tokens and their log-probabilities."""
    logp = filtered.log_softmax(-1)
    # In fp64: over a large vocabulary an fp32 cumulative sum would be off by more than rare tokens' probabilities.
    cdf = logp.exp().to(torch.float64).cumsum(-1)
    # Scaled by the last entry, which rounding may leave below 1: otherwise the search could run past the end.
    target = uniform(keys, position)[:, None] * cdf[:, -1:]
    token = torch.searchsorted(cdf, target, right=True).clamp(max=filtered.shape[-1] - 1)
    return token.squeeze(1), logp.gather(1, token).squeeze(1)


@dataclass(frozen=True)
class Extras:
    """What a sampler is asked for besides tokens and log-probabilities, unless it is greedy.

    `moments`: those of every token. `kept`: the tokens that top-k and top-p kept, where these leave out any; the
    moments are then those of what was kept.
    """

    moments: bool = False
    kept: bool = False


def sample_with_extras(
    logits: Tensor, keys: Tensor, position: int | Tensor, options: SamplingOptions, extras: Extras
) -> tuple[tuple[Tensor, ...], KeptTokens | None]:
    """Return what `sample_tokens` does, with the four moments if asked for; and what was kept if asked for."""
    if not (extras.kept and options.truncates):
        token, logp = sample_tokens(logits, keys, position, options)
        wanted = extras.moments and options.temperature > 0
        return (token, logp, *(moments(logits.float() / options.temperature, token) if wanted else ())), None
    filtered = filter_top_k_top_p(logits.float() / options.temperature, options)
    token, logp = draw_tokens(filtered, keys, position)
    mask = filtered > -torch.inf
    mask.scatter_(1, token[:, None], True)  # rounding may have drawn a token of probability 0
    kept = KeptTokens.from_mask(mask.cpu().numpy())
    return (token, logp, *(moments(filtered, token) if extras.moments else ())), kept


def filter_top_k_top_p(logits: Tensor, options: SamplingOptions) -> Tensor:
    """Set logits outside of top-k, then of top-p, to -inf; tokens with equal logits are kept or dropped together."""
    if options.top_k and options.top_k < logits.shape[-1]:
        kth = logits.topk(options.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if options.top_p < 1:
        ordered = logits.sort(dim=-1, descending=True).values
        p = ordered.softmax(-1)
        # `cumsum - p` is the mass before a token: the token that crosses top_p is kept.
        kept = (p.cumsum(-1) - p < options.top_p).sum(-1, keepdim=True).clamp(min=1)
        logits = logits.masked_fill(logits < ordered.gather(1, kept - 1), -torch.inf)
    return logits
