"""The plan of one update: everything decided about every token before any gradient, and its split into parts.

A plan is made once over the whole mini-batch of all processes. The loss then needs nothing but the plan and the new
log-probabilities, and the losses of its parts add up to the loss of the mini-batch.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from trimtab.objectives.reasons import reason_words
from trimtab.objectives.spans import Spans


@dataclass(frozen=True, eq=False)
class Plan:
    """Per token of this process: what its term in the loss is made of.

    `advantage`; `weight` on the surrogate; `scale`, in which aggregation and normaliser are folded; `clip_low` and
    `clip_high`, how far the ratio may leave 1; `segment`, the number of the segment whose ratio it shares (None: it has
    its own); `penalty`, the coefficient of a rule's penalty; `reason`, bits of `Reason`. `metrics` describes the
    mini-batch and is the same on every rank and in every part.
    """

    old_logp: Tensor
    advantage: Tensor
    weight: Tensor
    scale: Tensor
    clip_low: Tensor
    clip_high: Tensor
    reason: Tensor
    spans: Spans | None = None
    penalty: Tensor | None = None
    ref_logp: Tensor | None = None
    proxy_logp: Tensor | None = None
    offsets: Sequence[int] = (0,)
    tokens_in_minibatch: float = 0
    start: int = 0
    metrics: dict[str, Tensor] = field(default_factory=dict)
    replan: Callable[[int, int], Plan] | None = None

    @property
    def segment(self) -> Tensor | None:
        """Which tokens share one ratio, numbered from 0; None where each token has its own."""
        return None if self.spans is None else self.spans.index

    @property
    def tokens(self) -> int:
        """How many tokens this plan or part holds."""
        return len(self.old_logp)

    @property
    def responses(self) -> int:
        """How many responses this plan or part holds."""
        return len(self.offsets) - 1

    @property
    def slice(self) -> builtins.slice:
        """Which tokens of this process's mini-batch the plan or part holds."""
        return builtins.slice(self.start, self.start + self.tokens)

    def split(self, sequences: int | Sequence[int]) -> list[Plan]:
        """Parts of consecutive responses; `part.slice` says which tokens of the mini-batch a part holds.

        `sequences` is how many responses a part has, or the size of each part in turn.
        """
        sizes = _part_sizes(sequences, self.responses)
        parts, first = [], 0
        for size in sizes:
            part = self.replan(first, first + size) if self.replan else self._part(first, first + size)
            parts.append(part)
            first += size
        return parts

    def cut(self, first: int, last: int) -> Plan:
        """The tokens `first` up to `last` alone, wherever responses begin: only where no token shares its ratio."""
        if self.spans is not None or self.replan is not None:
            raise ValueError("tokens that share a ratio or are planned by part cannot be cut apart: use `split`")
        span = builtins.slice(first, last)
        return replace(self, **self._cut(span), start=self.start + first, offsets=(0, last - first))

    def check(self, new_logp: Tensor) -> Tensor:
        """`new_logp` in the plan's float type, or an error that says what it should be."""
        if new_logp.shape != self.old_logp.shape:
            raise ValueError(
                f"new_logp has shape {tuple(new_logp.shape)}, but the plan holds {self.tokens} tokens: give one "
                "log-probability per response token (`batch.pack(...)` for padded ones, `[part.slice]` for a part)"
            )
        return new_logp.to(self.old_logp.dtype)

    def why(self, index: int) -> str:
        """One token's treatment in words and numbers."""
        low, high = float(self.clip_low[index]), float(self.clip_high[index])
        return (
            f"{reason_words(int(self.reason[index]))} (advantage {float(self.advantage[index]):+.3g}, "
            f"weight {float(self.weight[index]):.3g}, ratio within [{1 - low:.3g}, {1 + high:.3g}])"
        )

    def _cut(self, span: builtins.slice) -> dict[str, Any]:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value[span] for name, value in values if isinstance(value, Tensor)}

    def _part(self, first: int, last: int) -> Plan:
        span = builtins.slice(self.offsets[first], self.offsets[last])
        return replace(
            self,
            **self._cut(span),
            spans=None if self.spans is None else self.spans.part(span, first, last),
            start=self.start + span.start,
            offsets=[o - span.start for o in self.offsets[first : last + 1]],
        )


def _part_sizes(sequences: int | Sequence[int], responses: int) -> list[int]:
    if isinstance(sequences, int):
        if sequences < 1:
            raise ValueError(f"a part must hold at least 1 response, got {sequences}")
        return [min(sequences, responses - first) for first in range(0, responses, sequences)] or [0]
    sizes = [int(size) for size in sequences]
    if min(sizes, default=0) < 0 or sum(sizes) != responses:
        raise ValueError(f"the part sizes {sizes} must be non-negative and add up to the plan's {responses} responses")
    return sizes


def merge_metrics(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of the mini-batch from those of its parts: `_max` and `_min` are just that, the others add up."""
    merged: dict[str, Tensor] = {}
    for name in {name: None for part in parts for name in part}:
        values = torch.stack([part[name] for part in parts if name in part])
        if name.endswith("_max"):
            merged[name] = values.max()
        else:
            merged[name] = values.min() if name.endswith("_min") else values.sum()
    return merged
