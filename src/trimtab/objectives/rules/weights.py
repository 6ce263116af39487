"""Token weights: the rules that silence, boost, damp or mask tokens by probability, entropy and advantage."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.reasons import Reason
from trimtab.objectives.rules.controllers import EntropyGate
from trimtab.objectives.selection import quantile, random_pick, top_share

ENTROPY = frozenset({"entropy"})

# Which of STARE's four sets a variant multiplies by W and by M: surprising (L) and unsurprising (U) tokens of
# responses with positive and negative advantage.
STARE_VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "O1": (("L+",), ()),
    "O2": ((), ("U+",)),
    "O3": (("U-",), ()),
    "O4": ((), ("L-",)),
    "C1": (("L+", "U-"), ()),
    "C2": (("L+",), ("L-",)),
    "C3": (("U-",), ("U+",)),
    "C4": ((), ("U+", "L-")),
}


def silence_spurious(
    tau_p: float,
    q: float,
    population: Literal["candidates", "all"],
    mask: Literal["spurious", "rare", "uncertain", "random"],
    seed: int,
) -> TokenRule:
    """STAPO's S2T and its ablations: which rare tokens of rewarded responses leave the update.

    `spurious`: entropy strictly below the quantile; `rare`: all of them; `uncertain`: entropy strictly above it;
    `random`: as many as `spurious` finds, drawn from all rewarded tokens.
    """

    def apply(builder: PlanBuilder) -> None:
        rare = (builder.positive & (builder.logp < _log(tau_p))).nonzero().squeeze(1)
        entropy = builder.entropy[rare]
        threshold = quantile(entropy if population == "candidates" else builder.entropy, q)
        chosen = rare
        if mask == "uncertain":
            chosen = rare[entropy > threshold]
        elif mask != "rare":
            chosen = rare[entropy < threshold]
        if mask == "random":
            rewarded = builder.positive.nonzero().squeeze(1)
            chosen = random_pick(rewarded, len(chosen), seed, builder.batch.old_logp)
        builder.silence(chosen)
        builder.metrics["s2t/entropy_threshold"] = threshold
        builder.metrics["s2t/candidate_share"] = threshold.new_full((), len(rare) / max(builder.batch.tokens, 1))

    whole = "rare rewarded tokens" if population == "candidates" else "all tokens"
    bound = f"the {q:g} quantile of H over {whole}"
    formula = {
        "spurious": f"silenced where A > 0, p < {tau_p:g} and H < {bound}",
        "rare": f"silenced where A > 0 and p < {tau_p:g}, whatever H",
        "uncertain": f"silenced where A > 0, p < {tau_p:g} and H > {bound}",
        "random": f"silenced: as many random tokens with A > 0 as have p < {tau_p:g} and H < {bound}",
    }
    return TokenRule("s2t", formula[mask], apply, ENTROPY)


def steer_entropy(
    gate: EntropyGate,
    variant: str,
    share: float,
    gate_scope: Literal["batch", "sample", "token", "none"],
    threshold: Literal["quantile", "probability"],
    p_threshold: float,
) -> TokenRule:
    """STARE: reweight the tokens that decide the entropy, while it is below the target."""
    boosted, damped = STARE_VARIANTS[variant]

    def members(builder: PlanBuilder, name: str) -> Tensor:
        among = builder.positive if name.endswith("+") else builder.batch.advantage < 0
        if threshold == "probability":
            chosen = (among & (builder.logp < _log(p_threshold))).nonzero().squeeze(1)
        else:
            chosen = top_share(-builder.logp, share, among)
        return chosen if name.startswith("L") else among.index_fill(0, chosen, False).nonzero().squeeze(1)

    def apply(builder: PlanBuilder) -> None:
        builder.metrics["stare/gate_open"] = builder.weight.new_full((), float(gate.is_open or gate_scope != "batch"))
        if gate_scope == "batch" and not gate.is_open:
            return
        within = _gated(builder, gate.target, gate_scope)
        for names, factor, reason in ((boosted, gate.boost, Reason.BOOSTED), (damped, gate.damp, Reason.DAMPED)):
            for name in names:
                tokens = members(builder, name)
                builder.multiply(tokens if within is None else tokens[within[tokens]], factor, reason)

    return TokenRule(
        "stare", _stare_sentence(gate, variant, share, gate_scope, threshold, p_threshold), apply, ENTROPY, gate
    )


def _gated(builder: PlanBuilder, target: float, scope: str) -> Tensor | None:
    """The tokens a finer gate is open for."""
    if scope == "token":
        return builder.entropy < target
    if scope == "sample":
        responses = builder.batch.response_spans
        return responses.spread(responses.mean(builder.entropy) < target)
    return None


def _stare_sentence(
    gate: EntropyGate, variant: str, share: float, scope: str, threshold: str, p_threshold: float
) -> str:
    boosted, damped = STARE_VARIANTS[variant]
    actions = [
        f"{' and '.join(names)} times {factor:g}"
        for names, factor in ((boosted, gate.boost), (damped, gate.damp))
        if names
    ]
    top = f"the top {share:.0%} by surprisal" if threshold == "quantile" else f"p < {p_threshold:g}"
    when = {
        "batch": f"while the rollout's mean entropy is below {gate.target:g}",
        "sample": f"in responses whose mean entropy is below {gate.target:g}",
        "token": f"at tokens whose entropy is below {gate.target:g}",
        "none": "always",
    }[scope]
    adaptive = f"; the factors adapt by {gate.rate:g} per rollout" if gate.rate else ""
    return f"{', '.join(actions)} {when} (L: {top} of an advantage's sign, U: the rest){adaptive}"


def keep_top_entropy(share: float, renormalize: bool) -> TokenRule:
    """20-Entropy: only the tokens with the highest entropy are trained on."""

    def apply(builder: PlanBuilder) -> None:
        kept = top_share(builder.entropy, share)
        rest = torch.ones_like(builder.positive).index_fill_(0, kept, False).nonzero().squeeze(1)
        (builder.silence if renormalize else builder.drop)(rest, Reason.MASKED)

    over = "kept tokens" if renormalize else "all tokens"
    return TokenRule(
        "top_entropy", f"weight 0 unless H is in the top {share:.0%} (denominator: {over})", apply, ENTROPY
    )


def widen_by_entropy(least: float, most: float) -> TokenRule:
    """SSPO: the clip range of a segment grows and shrinks with its entropy relative to the mini-batch's segments."""

    def apply(builder: PlanBuilder) -> None:
        spans = builder.batch.spans
        mean = spans.mean(builder.entropy)
        centre = mean.mean()
        relative = (mean / centre).nan_to_num(1.0).clamp(least, most)  # no entropy anywhere: the range as it is
        factor = spans.spread(relative)
        builder.mark_all(factor > 1, Reason.WIDENED)
        builder.mark_all(factor < 1, Reason.NARROWED)
        builder.clip_low, builder.clip_high = builder.clip_low * factor, factor.mul_(builder.clip_high)
        builder.metrics["sspo/segment_entropy"] = centre

    return TokenRule(
        "entropy_clip",
        f"clip range times clip(segment entropy / mean segment entropy, {least:g}, {most:g})",
        apply,
        ENTROPY | {"segment"},
    )


def entropy_shaped_advantage(coef: float, cap: float) -> TokenRule:
    """Raise the advantage of uncertain tokens, never past a share of its own size."""

    def apply(builder: PlanBuilder) -> None:
        bonus = torch.minimum(coef * builder.entropy, builder.advantage.abs() * cap)
        builder.advantage = builder.advantage + bonus
        builder.mark_all(bonus > 0, Reason.RESHAPED)

    return TokenRule("entropy_advantage", f"A' = A + min({coef:g} H, {cap:g} |A|)", apply, ENTROPY)


def _log(p: float) -> float:
    return math.log(p) if p > 0 else -math.inf
