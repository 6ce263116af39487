"""A counter-based random generator (splitmix64): one number per (seed, step, prompt, sample, position).

Without state, so a sample's random numbers depend neither on the batch it is in nor on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.objectives import splitmix64


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
