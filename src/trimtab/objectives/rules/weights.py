"""Token weights: the rules that silence, boost, damp or mask tokens by probability, entropy and advantage."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from trimtab.objectives.plan_builder import Draft, Rule
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
) -> Rule:
    """STAPO's S2T and its ablations: which rare tokens of rewarded responses leave the update.

    `spurious`: entropy strictly below the quantile; `rare`: all of them; `uncertain`: entropy strictly above it;
    `random`: as many as `spurious` finds, drawn from all rewarded tokens.
    """

    def apply(draft: Draft) -> None:
        rare = (draft.positive & (draft.logp < _log(tau_p))).nonzero().squeeze(1)
        entropy = draft.entropy[rare]
        threshold = quantile(entropy if population == "candidates" else draft.entropy, q)
        chosen = rare
        if mask == "uncertain":
            chosen = rare[entropy > threshold]
        elif mask != "rare":
            chosen = rare[entropy < threshold]
        if mask == "random":
            rewarded = draft.positive.nonzero().squeeze(1)
            chosen = random_pick(rewarded, len(chosen), seed, draft.batch.old_logp)
        draft.silence(chosen)
        draft.metrics["s2t/entropy_threshold"] = threshold
        draft.metrics["s2t/candidate_share"] = threshold.new_full((), len(rare) / max(draft.batch.tokens, 1))

    whole = "rare rewarded tokens" if population == "candidates" else "all tokens"
    bound = f"the {q:g} quantile of H over {whole}"
    says = {
        "spurious": f"silenced where A > 0, p < {tau_p:g} and H < {bound}",
        "rare": f"silenced where A > 0 and p < {tau_p:g}, whatever H",
        "uncertain": f"silenced where A > 0, p < {tau_p:g} and H > {bound}",
        "random": f"silenced: as many random tokens with A > 0 as have p < {tau_p:g} and H < {bound}",
    }
    return Rule("s2t", says[mask], apply, ENTROPY)


def steer_entropy(
    gate: EntropyGate,
    variant: str,
    share: float,
    gate_scope: Literal["batch", "sample", "token", "none"],
    threshold: Literal["quantile", "probability"],
    p_threshold: float,
) -> Rule:
    """STARE: reweight the tokens that decide the entropy, while it is below the target."""
    boosted, damped = STARE_VARIANTS[variant]

    def members(draft: Draft, name: str) -> Tensor:
        among = draft.positive if name.endswith("+") else draft.batch.advantage < 0
        if threshold == "probability":
            chosen = (among & (draft.logp < _log(p_threshold))).nonzero().squeeze(1)
        else:
            chosen = top_share(-draft.logp, share, among)
        return chosen if name.startswith("L") else among.index_fill(0, chosen, False).nonzero().squeeze(1)

    def apply(draft: Draft) -> None:
        draft.metrics["stare/gate_open"] = draft.weight.new_full((), float(gate.is_open or gate_scope != "batch"))
        if gate_scope == "batch" and not gate.is_open:
            return
        within = _gated(draft, gate.target, gate_scope)
        for names, factor, reason in ((boosted, gate.boost, Reason.BOOSTED), (damped, gate.damp, Reason.DAMPED)):
            for name in names:
                tokens = members(draft, name)
                draft.multiply(tokens if within is None else tokens[within[tokens]], factor, reason)

    return Rule(
        "stare", _stare_sentence(gate, variant, share, gate_scope, threshold, p_threshold), apply, ENTROPY, gate
    )


def _gated(draft: Draft, target: float, scope: str) -> Tensor | None:
    """The tokens a finer gate is open for."""
    if scope == "token":
        return draft.entropy < target
    if scope == "sample":
        responses = draft.batch.response_runs
        return responses.spread(responses.mean(draft.entropy) < target)
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


def keep_top_entropy(share: float, renormalize: bool) -> Rule:
    """20-Entropy: only the tokens with the highest entropy are trained on."""

    def apply(draft: Draft) -> None:
        kept = top_share(draft.entropy, share)
        rest = torch.ones_like(draft.positive).index_fill_(0, kept, False).nonzero().squeeze(1)
        (draft.silence if renormalize else draft.drop)(rest, Reason.MASKED)

    over = "kept tokens" if renormalize else "all tokens"
    return Rule("top_entropy", f"weight 0 unless H is in the top {share:.0%} (denominator: {over})", apply, ENTROPY)


def widen_by_entropy(least: float, most: float) -> Rule:
    """SSPO: the clip range of a segment grows and shrinks with its entropy relative to the mini-batch's segments."""

    def apply(draft: Draft) -> None:
        runs = draft.batch.runs
        mean = runs.mean(draft.entropy)
        centre = mean.mean()
        relative = (mean / centre).nan_to_num(1.0).clamp(least, most)  # no entropy anywhere: the range as it is
        factor = runs.spread(relative)
        draft.mark_all(factor > 1, Reason.WIDENED)
        draft.mark_all(factor < 1, Reason.NARROWED)
        draft.clip_low, draft.clip_high = draft.clip_low * factor, factor.mul_(draft.clip_high)
        draft.metrics["sspo/segment_entropy"] = centre

    return Rule(
        "entropy_clip",
        f"clip range times clip(segment entropy / mean segment entropy, {least:g}, {most:g})",
        apply,
        ENTROPY | {"segment"},
    )


def entropy_shaped_advantage(coef: float, cap: float) -> Rule:
    """Raise the advantage of uncertain tokens, never past a share of its own size."""

    def apply(draft: Draft) -> None:
        bonus = torch.minimum(coef * draft.entropy, draft.advantage.abs() * cap)
        draft.advantage = draft.advantage + bonus
        draft.mark_all(bonus > 0, Reason.RESHAPED)

    return Rule("entropy_advantage", f"A' = A + min({coef:g} H, {cap:g} |A|)", apply, ENTROPY)


def _log(p: float) -> float:
    return math.log(p) if p > 0 else -math.inf
