"""Reason codes: why a token has its weight and clip range, as bits per token and in words."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag


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
