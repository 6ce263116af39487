"""STARE: steer the entropy by reweighting the tokens that decide it."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.reasons import Reason
from trimtab.objectives.rules.controllers import EntropyGate
from trimtab.objectives.selection import top_share

GateScope = Literal["batch", "sample", "token", "none"]
Threshold = Literal["quantile", "probability"]

# The sets that a variant multiplies by `boost` and by `damp`: low-probability, surprising (L) and unsurprising (U)
# tokens of responses with positive (+) and negative (-) advantage.
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


def steer_entropy(
    gate: EntropyGate,
    variant: str,
    share: float,
    gate_scope: GateScope,
    threshold: Threshold,
    p_threshold: float,
) -> TokenRule:
    """Reweight the tokens that decide the entropy, while it is below the gate's target."""
    boosted, damped = STARE_VARIANTS[variant]

    def members(builder: PlanBuilder, name: str) -> Tensor:
        among = builder.positive if name.endswith("+") else builder.batch.advantage < 0
        if threshold == "probability":
            log_threshold = math.log(p_threshold) if p_threshold > 0 else -math.inf
            chosen = (among & (builder.logp < log_threshold)).nonzero().squeeze(1)
        else:
            chosen = top_share(-builder.logp, share, among)
        return chosen if name.startswith("L") else among.index_fill(0, chosen, False).nonzero().squeeze(1)

    def apply(builder: PlanBuilder) -> None:
        # The gate is read when a plan is made, not when the rule is built: `observe` changes it between them.
        builder.metrics["stare/gate_open"] = builder.weight.new_full((), float(gate.is_open or gate_scope != "batch"))
        if gate_scope == "batch" and not gate.is_open:
            return
        within = _gated(builder, gate.target, gate_scope)
        for names, factor, reason in ((boosted, gate.boost, Reason.BOOSTED), (damped, gate.damp, Reason.DAMPED)):
            for name in names:
                tokens = members(builder, name)
                builder.multiply(tokens if within is None else tokens[within[tokens]], factor, reason)

    top = f"the top {share:.0%} by surprisal" if threshold == "quantile" else f"p < {p_threshold:g}"
    formula = (
        f"{_actions(gate, variant)} {_gate_formula(gate, gate_scope)} (L: {top} of an advantage's sign, U: the rest)"
    )
    if gate.rate:
        formula += f"; the factors adapt by {gate.rate:g} per rollout"
    return TokenRule("stare", formula, apply, frozenset({"entropy"}), gate)


def _gated(builder: PlanBuilder, target: float, scope: str) -> Tensor | None:
    """Return a mask of the tokens that a gate per response or token is open for; None for a gate over the batch."""
    if scope == "token":
        return builder.entropy < target
    if scope == "sample":
        responses = builder.batch.response_spans
        return responses.spread(responses.mean(builder.entropy) < target)
    return None


def _actions(gate: EntropyGate, variant: str) -> str:
    factors = zip(STARE_VARIANTS[variant], (gate.boost, gate.damp), strict=True)
    return ", ".join(f"{' and '.join(names)} times {factor:g}" for names, factor in factors if names)


def _gate_formula(gate: EntropyGate, scope: GateScope) -> str:
    return {
        "batch": f"while the rollout's mean entropy is below {gate.target:g}",
        "sample": f"in responses whose mean entropy is below {gate.target:g}",
        "token": f"at tokens whose entropy is below {gate.target:g}",
        "none": "always",
    }[scope]
