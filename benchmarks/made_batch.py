"""A small micro-batch of random tokens: its responses, and what an objective needs to know of them."""

from __future__ import annotations

import torch

import trimtab as tt
from trimtab.trainer.model import Transcript

RESPONSES, LENGTH = 16, 8


def made_transcripts() -> list[Transcript]:
    """Return random transcripts of equal length."""
    ids = torch.randint(2, 17, (RESPONSES, LENGTH + 1), generator=torch.Generator().manual_seed(0)).tolist()
    return [Transcript(row[:1], row[1:]) for row in ids]


def made_batch() -> tt.TokenBatch:
    """Return random tokens for them."""
    sequence = torch.arange(RESPONSES).repeat_interleave(LENGTH)
    random = torch.rand(2, len(sequence), generator=torch.Generator().manual_seed(1))
    return tt.TokenBatch(
        old_logp=-8 * random[0],
        entropy=random[1],
        advantage=torch.linspace(-1, 1, RESPONSES)[sequence],
        sequence=sequence,
        segment=torch.arange(len(sequence)) // 3,
    )
