"""Random streams without state: a number per (run, step, prompt, sample, position), the same on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.splitmix64 import GOLDEN, logical_shift, mix


def stream_keys(seed: int, step: int, prompts: Sequence[int], samples: int) -> Tensor:
    """One key per sample, prompt by prompt."""
    prompt = torch.tensor(list(prompts), dtype=torch.int64).repeat_interleave(samples)
    sample = torch.arange(samples).repeat(len(prompts))
    key = torch.full_like(prompt, seed)
    for part in (torch.full_like(prompt, step), prompt, sample):
        key = mix(key + (part + 1) * GOLDEN)
    return key


def uniform(keys: Tensor, position: int | Tensor) -> Tensor:
    """A float64 in [0, 1) for every key, at one position or at one for each."""
    steps = position + 1 if isinstance(position, Tensor) else torch.full_like(keys, position + 1)
    return logical_shift(mix(keys + steps * GOLDEN), 11).to(torch.float64) * 2.0**-53
