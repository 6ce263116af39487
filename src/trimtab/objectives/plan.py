"""The plan of one update: every decision about every token, made without gradients, and its split into micro-batches.

A plan is made once over the whole mini-batch of all processes. The loss then needs nothing but the plan and the new
log-probabilities, and the losses of its micro-batches add up to the loss of the mini-batch.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntFlag
from itertools import accumulate, pairwise
from typing import Any

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.token_batch import Spans


# Recorded as int16 per token: new reasons take new bits, and no bit changes its meaning.
class Reason(IntFlag):
    """What rules did to a token, as bits; no bit means that the token was left as it is."""

    KEPT = 0
    NO_SIGNAL = 1
    SILENCED = 2
    BOOSTED = 4
    DAMPED = 8
    MASKED = 16
    DROPPED = 32
    PENALIZED = 64
    CORRECTED = 128
    RESHAPED = 256
    WIDENED = 512
    NARROWED = 1024

    @property
    def metric(self) -> str:
        """The name of the metric with the share of tokens that have this reason."""
        return f"tokens/{str(self.name).lower()}_share"


REASON_WORDS: dict[Reason, str] = {
    Reason.KEPT: "kept unchanged",
    Reason.NO_SIGNAL: "advantage is zero: nothing to learn from it",
    Reason.SILENCED: "silenced: rare, confident and rewarded",
    Reason.BOOSTED: "boosted: it raises the entropy, which is below target",
    Reason.DAMPED: "damped: it lowers the entropy, which is below target",
    Reason.MASKED: "masked: its entropy is not among the highest",
    Reason.DROPPED: "dropped from the update, denominator unchanged",
    Reason.PENALIZED: "held near another policy by a penalty instead of a clip",
    Reason.CORRECTED: "reweighted for the mismatch between sampler and trainer",
    Reason.RESHAPED: "advantage raised by its entropy",
    Reason.WIDENED: "clip range widened: its segment is uncertain",
    Reason.NARROWED: "clip range narrowed: its segment is certain",
}


def reason_words(code: int, words: Mapping[Reason, str] = REASON_WORDS) -> str:
    """Return a reason code in words, `; ` between several; `Objective.reason_words` has those of one objective."""
    flags = Reason(code)
    return "; ".join(words[flag] for flag in Reason if flag in flags) or words[Reason.KEPT]


@dataclass(frozen=True, eq=False)
class Plan:
    """The terms of the loss of every token of this process; a micro-batch of a plan is a `Plan` too.

    Per token: `advantage`; `weight` on the surrogate; `scale`, which includes aggregation and normaliser; `clip_low`
    and `clip_high`, how far the ratio may leave 1; `penalty`, the coefficient of a rule's penalty; `entropy_coef`, that
    of the entropy, whose gradient the loss then needs; `reason`, bits of `Reason`. `metrics` describes the mini-batch
    and is the same on every rank and in every micro-batch.
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
    entropy_coef: Tensor | None = None
    ref_logp: Tensor | None = None
    proxy_logp: Tensor | None = None
    # On the host: slicing by them must not wait for a GPU.
    offsets: Sequence[int] = (0,)
    tokens_in_minibatch: float = 0
    start: int = 0
    metrics: dict[str, Tensor] = field(default_factory=dict)
    reason_words: Mapping[Reason, str] = field(default_factory=lambda: REASON_WORDS)
    # Plans the responses [first, last) by themselves: set under scope="micro" alone.
    replan: Callable[[int, int], Plan] | None = None

    @property
    def segment(self) -> Tensor | None:
        """The number of the span whose ratio or weight each token shares; None where each token has its own."""
        return None if self.spans is None else self.spans.index

    @property
    def entropy_grad(self) -> Tensor | None:
        """The derivative of the loss by every token's entropy; None if the loss has no term of it."""
        return None if self.entropy_coef is None else -self.entropy_coef * self.scale

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self.old_logp)

    @property
    def responses(self) -> int:
        """The number of responses."""
        return len(self.offsets) - 1

    @property
    def slice(self) -> builtins.slice:
        """The position of these tokens in this process's mini-batch."""
        return builtins.slice(self.start, self.start + self.tokens)

    def split(self, sequences: int | Sequence[int]) -> list[Plan]:
        """Split into micro-batches of consecutive responses; `micro_batch.slice` is where its tokens are.

        `sequences` is the number of responses in each micro-batch, or the list of their sizes.
        """
        ends = accumulate(_micro_batch_sizes(sequences, self.responses), initial=0)
        return [(self.replan or self.select)(first, last) for first, last in pairwise(ends)]

    def select(self, first: int, last: int) -> Plan:
        """Return the plan of the responses `first` up to, not including, `last`."""
        span = builtins.slice(self.offsets[first], self.offsets[last])
        return replace(
            self,
            **self._sliced(span),
            spans=None if self.spans is None else self.spans.select(span, first, last),
            start=self.start + span.start,
            offsets=[o - span.start for o in self.offsets[first : last + 1]],
        )

    def cut(self, first: int, last: int) -> Plan:
        """Return the plan of the tokens `first` up to `last`, wherever responses begin; none may share a ratio."""
        if self.spans is not None or self.replan is not None:
            raise ValueError("tokens that share a ratio or are planned by micro-batch cannot be cut apart: use `split`")
        span = builtins.slice(first, last)
        return replace(self, **self._sliced(span), start=self.start + first, offsets=(0, last - first))

    def check(self, new_logp: Tensor, name: str = "new_logp", what: str = "log-probability") -> Tensor:
        """Return `new_logp` in the plan's float type; raise if its shape is not the plan's."""
        # A padded tensor would broadcast against the plan's vectors, and train on a wrong loss in silence.
        if new_logp.shape != self.old_logp.shape:
            raise ValueError(
                f"{name} has shape {tuple(new_logp.shape)}, but the plan holds {self.tokens} tokens: give one "
                f"{what} per response token (`batch.pack(...)` for padded ones, `[micro_batch.slice]` for a "
                "micro-batch)"
            )
        return new_logp.to(self.old_logp.dtype)

    def why(self, index: int) -> str:
        """Explain the treatment of one token in words and numbers."""
        values = (self.advantage, self.weight, self.clip_low, self.clip_high)
        advantage, weight, low, high = (float(value[index]) for value in values)
        words = reason_words(int(self.reason[index]), self.reason_words)
        limits = f"ratio within [{1 - low:.3g}, {1 + high:.3g}]"
        return f"{words} (advantage {advantage:+.3g}, weight {weight:.3g}, {limits})"

    def _sliced(self, span: builtins.slice) -> dict[str, Any]:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value[span] for name, value in values if isinstance(value, torch.Tensor)}


def _micro_batch_sizes(sequences: int | Sequence[int], responses: int) -> list[int]:
    if isinstance(sequences, int):
        if sequences < 1:
            raise ValueError(f"a micro-batch must hold at least 1 response, got {sequences}")
        # Without responses one empty micro-batch, so that callers need no special case.
        return [min(sequences, responses - first) for first in range(0, responses, sequences)] or [0]
    sizes = [int(size) for size in sequences]
    if min(sizes, default=0) < 0 or sum(sizes) != responses:
        raise ValueError(f"micro-batch sizes {sizes} must be non-negative and add up to the {responses} responses")
    return sizes


def merge_metrics(micro_batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the metrics of micro-batches into the mini-batch's: extremes of `_max` and `_min`, sums of the others."""
    merge = {"_max": torch.max, "_min": torch.min}
    merged: dict[str, Tensor] = {}
    # A micro-batch without tokens has no extremes, so the first one need not have all names.
    for name in {name: None for metrics in micro_batches for name in metrics}:
        values = torch.stack([metrics[name] for metrics in micro_batches if name in metrics])
        merged[name] = merge.get(name[-4:], torch.sum)(values)
    return merged
