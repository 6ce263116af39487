"""Rules that judge a token by its first-order effect on the entropy: Clip_B, Clip_V and STEER."""

from __future__ import annotations

from typing import Literal

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.phi import MOMENTS, PhiSource, own_phi, token_phi
from trimtab.objectives.plan import Reason
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.ratios import log_ratio

Effect = Literal["paper", "exact"]
Falloff = Literal["linear", "exponential"]

_DROPPED = {Reason.DROPPED: "dropped: punished, and surprising beyond what its distribution makes likely"}


def clip_b(mu: float = 2.5) -> TokenRule:
    """Drop the punished tokens that would lower the entropy most, compared with the other tokens of the mini-batch.

    With S = p (ln p + H), these are the tokens whose S is more than mu standard deviations below the mean.
    """

    def apply(builder: PlanBuilder) -> None:
        own = own_phi(builder.logp, builder.entropy)
        _drop_lowest(builder, own - own.mean(), mu)

    formula = f"dropped where A < 0 and S - mean S < -{mu:g} std S, S = p (ln p + H), over the mini-batch"
    return TokenRule("clip_b", formula, apply, frozenset({"entropy"}), reason_words=_DROPPED)


def clip_v(mu: float = 2.5, phi: PhiSource | None = None) -> TokenRule:
    """Drop the punished tokens that would lower the entropy most, compared with what could have been sampled.

    The centre of S = p (ln p + H) is its expectation over the token's own distribution, so the difference is STARE's
    Phi. It is exact if the batch has the moments of its distributions. Without them it is estimated from ln p and H.
    """

    def apply(builder: PlanBuilder) -> None:
        _drop_lowest(builder, token_phi(builder.batch, phi), mu)

    needs, formula = _needs(phi), f"dropped where A < 0 and Phi < -{mu:g} std Phi over the mini-batch"
    return TokenRule("clip_v", formula, apply, needs, reason_words=_DROPPED, reads=frozenset(MOMENTS))


def _needs(phi: PhiSource | None) -> frozenset[str]:
    return frozenset({"entropy", *MOMENTS} if phi == "exact" else {"entropy"})


def _drop_lowest(builder: PlanBuilder, centred: Tensor, mu: float) -> None:
    # NaN for fewer than two tokens, which compares false.
    deviation = centred.std() if len(centred) > 1 else centred.new_full((), torch.nan)
    builder.drop(((builder.batch.advantage < 0) & (centred < -mu * deviation)).nonzero().squeeze(1))


def steer(
    weight_low: float = 0.8,
    weight_high: float = 1.2,
    falloff: Falloff = "linear",
    effect: Effect = "paper",
) -> TokenRule:
    """Weight tokens by how little they change the entropy: the smallest change gets the largest weight.

    effect=paper is the paper's approximation of the change, effect=exact takes STARE's Phi from the moments of the
    distributions. Smallest and largest are those of the mini-batch. falloff=exponential is our reading of the paper's
    other form: from 1 for no change down to weight_low for the largest, and weight_high has no effect.
    """

    def apply(builder: PlanBuilder) -> None:
        change = _change(builder, effect)
        if not len(change):
            return
        least, most = torch.aminmax(change)
        if falloff == "linear":
            share = (change - least) / (most - least)
            # Where all changes are equal none is small or large: 0 / 0.
            factor = (weight_high + (weight_low - weight_high) * share).nan_to_num(1.0)
        else:
            factor = weight_low ** (change / most).nan_to_num(0.0)
        builder.weight = builder.weight * factor
        builder.mark_all(factor > 1, Reason.BOOSTED)
        builder.mark_all(factor < 1, Reason.DAMPED)

    measure = "r (1 - p) (ln p + H)" if effect == "paper" else "r Phi"
    limits = f"weight from {weight_high:g} at the least |O| of the mini-batch, linearly to {weight_low:g} at the most"
    if falloff == "exponential":
        limits = f"weight {weight_low:g} ^ (|O| / the most |O| of the mini-batch)"
    words = {
        Reason.BOOSTED: "boosted: it changes the entropy little",
        Reason.DAMPED: "damped: it changes the entropy much",
    }
    needs = _needs("exact" if effect == "exact" else None)
    return TokenRule("steer", f"{limits}; O = A {measure}, r = p / p_old", apply, needs, reason_words=words)


def _change(builder: PlanBuilder, effect: Effect) -> Tensor:
    """Return |O| of every token, its effect on the entropy."""
    batch = builder.batch
    ratio = log_ratio(builder.logp, batch.old_logp).exp()
    if effect == "exact":
        return (batch.advantage * ratio * token_phi(batch, "exact")).abs()
    return (batch.advantage * ratio * (1 - builder.logp.exp()) * (builder.logp + builder.entropy)).abs()
