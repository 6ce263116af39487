"""STAPO's S2T (silencing spurious tokens) and the ablations of its mask."""

from __future__ import annotations

import math
from typing import Literal

from trimtab.objectives import selection
from trimtab.objectives.lazy_torch import Tensor
from trimtab.objectives.plan import Reason
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.token_batch import TokenBatch

Population = Literal["candidates", "all"]
Mask = Literal["spurious", "rare", "uncertain", "random"]

# The words of `Reason.SILENCED` under the ablations; its own words are those of "spurious".
_MASK_WORDS: dict[Mask, str] = {
    "rare": "silenced: rare and rewarded, whatever its entropy",
    "uncertain": "silenced: rare, uncertain and rewarded",
    "random": "silenced: picked at random from the rewarded tokens",
}


# A token is spurious if its surprisal is this many nats above the entropy, the surprisal's expectation: it is 20 times
# less probable than what this distribution usually gives. Unlike a threshold on p, that fits any vocabulary.
SPURIOUS_NATS = 3.0


def spurious(batch: TokenBatch) -> Tensor:
    """Return a mask (tokens,) of the rare, confident and rewarded tokens, for metrics and alarms of any objective.

    S2T selects them as its paper does, by `tau_p` and a quantile of the mini-batch's entropies. These are options of a
    run, and what is counted here must be comparable between runs.
    """
    assert batch.entropy is not None
    return (batch.advantage > 0) & (-batch.old_logp - batch.entropy > SPURIOUS_NATS)


def s2t(
    tau_p: float = 0.002,
    quantile: float = 0.75,
    population: Population = "candidates",
    mask: Mask = "spurious",
    seed: int = 0,
) -> TokenRule:
    """Silence spurious tokens (rare, confident, rewarded): give them weight 0 and average over the rest.

    The quantile is taken over the rare tokens of rewarded responses, as in version 4 of the paper. Earlier versions
    silence "the bottom 80 %" and do not say of which tokens. Use population=all and quantile=0.8 for them. The paper's
    ablations are mask=rare (rare and rewarded, any entropy), mask=uncertain (rare, rewarded, high entropy) and
    mask=random (the same number of random rewarded tokens).
    """
    log_tau = math.log(tau_p) if tau_p > 0 else -math.inf  # tau_p = 0 is allowed: no token is rare

    def apply(builder: PlanBuilder) -> None:
        rare = (builder.positive & (builder.logp < log_tau)).nonzero().squeeze(1)
        entropy = builder.entropy[rare]
        # NaN where there are no tokens: both comparisons below are then false, and nothing is silenced.
        judged = entropy if population == "candidates" else builder.entropy
        threshold = selection.quantile(judged, quantile)
        chosen = rare
        if mask == "uncertain":
            chosen = rare[entropy > threshold]
        elif mask != "rare":
            chosen = rare[entropy < threshold]
        if mask == "random":
            rewarded = builder.positive.nonzero().squeeze(1)
            chosen = selection.random_pick(rewarded, len(chosen), seed, builder.batch.old_logp)
        builder.silence(chosen)
        if len(judged):
            builder.metrics["s2t/entropy_threshold"] = threshold
        builder.metrics["s2t/candidate_share"] = threshold.new_full((), len(rare) / max(builder.batch.tokens, 1))

    tokens = "rare rewarded tokens" if population == "candidates" else "all tokens"
    bound = f"the {quantile:g} quantile of H over {tokens}"
    formula = {
        "spurious": f"silenced where A > 0, p < {tau_p:g} and H < {bound}",
        "rare": f"silenced where A > 0 and p < {tau_p:g}, whatever H",
        "uncertain": f"silenced where A > 0, p < {tau_p:g} and H > {bound}",
        "random": f"silenced: as many random tokens with A > 0 as have p < {tau_p:g} and H < {bound}",
    }
    words = {Reason.SILENCED: _MASK_WORDS[mask]} if mask in _MASK_WORDS else {}
    return TokenRule("s2t", formula[mask], apply, frozenset({"entropy"}), reason_words=words)
