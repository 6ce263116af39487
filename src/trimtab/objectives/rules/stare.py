"""STARE: steer the entropy by reweighting the tokens that decide it, behind a gate on the rollout's entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.phi import MOMENTS, token_phi
from trimtab.objectives.plan import Reason
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.rules.entropy import checked_state
from trimtab.objectives.selection import top_share

GateScope = Literal["batch", "sample", "token", "none"]
StareVariant = Literal["O1", "O2", "O3", "O4", "C1", "C2", "C3", "C4"]
Threshold = Literal["quantile", "probability"]
Critical = Literal["critical"]

# The sets that a variant multiplies by `boost` and by `damp`: low-probability, surprising (L) and unsurprising (U)
# tokens of responses with positive (+) and negative (-) advantage.
STARE_VARIANTS: dict[StareVariant, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "O1": (("L+",), ()),
    "O2": ((), ("U+",)),
    "O3": (("U-",), ()),
    "O4": ((), ("L-",)),
    "C1": (("L+", "U-"), ()),
    "C2": (("L+",), ("L-",)),
    "C3": (("U-",), ("U+",)),
    "C4": ((), ("U+", "L-")),
}

CRITICAL_LIMIT = 10.0  # of the critical weight, as of a boost that is a number
# Bounds of the adaptive weights, so that a target out of reach cannot drive them on and on.
BOOST_LIMIT = 1.5
DAMP_LIMIT = 0.5


@dataclass
class EntropyGate:
    """STARE's gate: open while the rollout's token-mean entropy is strictly below the target. It starts open.

    With `rate` > 0 the two weights adapt: each rollout moves `boost` up and `damp` down by `rate` while the entropy is
    below the target, and back while it is above.
    """

    target: float
    boost: float
    damp: float
    rate: float = 0.0
    is_open: bool = True
    entropy: float = math.nan

    def observe(self, entropy: float) -> None:
        """Update the gate with a rollout's token-mean entropy; one that is not finite changes nothing."""
        if not math.isfinite(entropy):  # a rollout without tokens has NaN
            return
        self.entropy = entropy
        self.is_open = entropy < self.target
        if self.rate:
            step = self.rate * ((self.target > entropy) - (self.target < entropy))
            self.boost = min(max(self.boost + step, 1.0), BOOST_LIMIT)
            self.damp = min(max(self.damp - step, DAMP_LIMIT), 1.0)

    def state_dict(self) -> dict[str, float]:
        """Return gate and weights, and `entropy` once one has been observed."""
        state = {"is_open": float(self.is_open), "boost": self.boost, "damp": self.damp}
        # NaN is no JSON, and checkpoints and records hold this as JSON.
        return state | ({"entropy": self.entropy} if math.isfinite(self.entropy) else {})

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state that `state_dict` returned; a missing or non-finite value raises and changes nothing."""
        keys = ("is_open", "boost", "damp", "entropy")
        is_open, self.boost, self.damp, self.entropy = checked_state("an entropy gate", state, keys[:3], keys)
        self.is_open = bool(is_open)


def stare(
    variant: StareVariant = "O1",
    share: float = 0.1,
    boost: float | Critical = 1.1,
    damp: float = 0.9,
    target: float = 0.3,
    gate: GateScope = "batch",
    threshold: Threshold = "quantile",
    p_threshold: float = 0.1,
    adaptive: bool = False,
    rate: float = 0.01,
) -> TokenRule:
    """Reweight the tokens with the largest effect on entropy while it is below a target.

    In your own training loop, call `observe` with every rollout batch: it compares the entropy with the target. The
    authors' code takes the quantile per micro-batch and rank. Here it is taken over the mini-batch of all ranks. For
    models of 14B and more the paper uses boost 1.05 and damp 0.95. boost=critical takes the weight from the paper's
    theory: while the gate is open, every update gets the weight that leaves the entropy unchanged to first order,
    measured on its tokens, between 1 and 10. The shorter the responses, the further that is above 1.1.
    """
    boosted, damped = STARE_VARIANTS[variant]
    if boost == "critical":
        _check_critical(variant, adaptive)
    state = EntropyGate(target, 1.0 if boost == "critical" else boost, damp, rate if adaptive else 0.0)
    log_threshold = None
    if threshold == "probability":
        log_threshold = math.log(p_threshold) if p_threshold > 0 else -math.inf

    def apply(builder: PlanBuilder) -> None:
        # The gate is read when a plan is made, not when the rule is built: `observe` changes it between them.
        builder.metrics["stare/gate_open"] = builder.weight.new_full((), float(state.is_open or gate != "batch"))
        if gate == "batch" and not state.is_open:
            return
        within = _gated(builder, target, gate)

        def members(names: tuple[str, ...]) -> list[Tensor]:
            found = [_members(builder, name, share, log_threshold) for name in names]
            return found if within is None else [tokens[within[tokens]] for tokens in found]

        for tokens in members(damped):
            builder.multiply(tokens, state.damp, Reason.DAMPED)
        chosen = members(boosted)
        factor = critical_boost(builder, torch.cat(chosen)) if boost == "critical" else state.boost
        for tokens in chosen:
            builder.multiply(tokens, factor, Reason.BOOSTED)
        if boost == "critical":
            builder.metrics["stare/weight"] = torch.as_tensor(factor)

    top = f"the top {share:.0%} by surprisal" if log_threshold is None else f"p < {p_threshold:g}"
    by = "the weight that leaves H unchanged" if boost == "critical" else f"{boost:g}"
    factors = [(boosted, by), (damped, f"{damp:g}")]
    formula = ", ".join(f"{' and '.join(names)} times {factor}" for names, factor in factors if names)
    formula += f" {_GATE_FORMULAS[gate].format(target)} (L: {top} of an advantage's sign, U: the rest)"
    if state.rate:
        formula += f"; the factors adapt by {rate:g} per rollout"
    # The critical weight depends on what the other rules leave of the tokens, so it comes after them.
    critical = boost == "critical"
    reads = frozenset(MOMENTS) if critical else frozenset[str]()
    return TokenRule("stare", formula, apply, frozenset({"entropy"}), state, reads=reads, last=int(critical))


def critical_boost(builder: PlanBuilder, tokens: Tensor) -> Tensor:
    """Return the weight on these tokens at which the update leaves the entropy unchanged to first order."""
    effect = -builder.coefficient * token_phi(builder.batch)
    theirs = effect[tokens].sum()
    # Tokens that do not raise the entropy cannot balance the others with any weight.
    factor = torch.where(theirs > 0, 1 - effect.sum() / theirs, 1.0)
    return factor.nan_to_num(1.0).clamp(1.0, CRITICAL_LIMIT)


def _check_critical(variant: StareVariant, adaptive: bool) -> None:
    if adaptive:
        raise ValueError("stare: boost='critical' is measured for every update: set adaptive=false, or boost=1.1")
    if not STARE_VARIANTS[variant][0]:
        raise ValueError(f"stare: variant={variant} boosts no tokens, so boost='critical' does nothing: try O1")


_GATE_FORMULAS: dict[GateScope, str] = {
    "batch": "while the rollout's mean entropy is below {:g}",
    "sample": "in responses whose mean entropy is below {:g}",
    "token": "at tokens whose entropy is below {:g}",
    "none": "always",
}


def _members(builder: PlanBuilder, name: str, share: float, log_threshold: float | None) -> Tensor:
    """Return the tokens of the set `name`: surprising are those below the threshold, without one the top share."""
    among = builder.positive if name.endswith("+") else builder.batch.advantage < 0
    if log_threshold is None:
        chosen = top_share(-builder.logp, share, among)
    else:
        chosen = (among & (builder.logp < log_threshold)).nonzero().squeeze(1)
    return chosen if name.startswith("L") else among.index_fill(0, chosen, False).nonzero().squeeze(1)


def _gated(builder: PlanBuilder, target: float, scope: GateScope) -> Tensor | None:
    """Return a mask of the tokens that a gate per response or token is open for; None for a gate over the batch."""
    if scope == "token":
        return builder.entropy < target
    if scope == "sample":
        responses = builder.batch.response_spans
        return responses.spread(responses.mean(builder.entropy) < target)
    return None
