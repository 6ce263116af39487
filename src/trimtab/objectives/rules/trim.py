"""trim: hold the entropy in a band, by weights that the measured effect of every token on the entropy decides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from trimtab.objectives.phi import MOMENTS, estimated_phi, token_phi
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.reasons import Reason

Law = Literal["balance", "raise", "critical", "least"]
PhiSource = Literal["exact", "estimated"]

DRIVE_LIMIT = 1.0  # of what all tokens together could do to the entropy


@dataclass
class TrimControl:
    """The controller of trim: a PI controller on the distance of the rollout's entropy from its band.

    `first` is the entropy of the first rollout, `entropy` that of the last, `change` how far it moved between the last
    two, `rollouts` their number.
    """

    floor: float
    ceiling: float | None = None
    relative: bool = False
    fall: float = 1.0
    fall_steps: int = 1000
    gain: float = 0.5
    integral_gain: float = 0.02
    integral: float = 0.0
    rollouts: float = 0.0
    first: float = math.nan
    entropy: float = math.nan
    change: float = math.nan

    @property
    def band(self) -> tuple[float, float]:
        """Floor and ceiling at this rollout."""
        done = min(1.0, max(0.0, self.rollouts - 1) / self.fall_steps)
        factor = 1 + (self.fall - 1) * done
        if self.relative:
            factor *= self.first if math.isfinite(self.first) else 0.0
        return self.floor * factor, math.inf if self.ceiling is None else self.ceiling * factor

    @property
    def target(self) -> float:
        """The end of the band that the entropy is compared with: the floor."""
        return self.band[0]

    @property
    def drive(self) -> float | None:
        """The change to ask for, as a share of what all tokens could do; None while the entropy is in its band."""
        error = self._error()
        if error == 0:
            return None
        return min(DRIVE_LIMIT, max(-DRIVE_LIMIT, self.gain * error + self.integral))

    def _error(self) -> float:
        """The distance from the band, relative to its end; positive below it. 0 within, and before any rollout."""
        floor, ceiling = self.band
        if self.entropy < floor:
            return 1 - self.entropy / floor
        return max(1 - self.entropy / ceiling, -1.0) if self.entropy > ceiling else 0.0

    def observe(self, entropy: float) -> None:
        """Update the controller with a rollout's token-mean entropy; one that is not finite changes nothing."""
        if not math.isfinite(entropy):  # a rollout without tokens has NaN
            return
        self.rollouts += 1
        self.first = entropy if math.isnan(self.first) else self.first
        self.change = entropy - self.entropy
        self.entropy = entropy
        error = self._error()
        if error:
            self.integral += self.integral_gain * error
        elif self.integral:
            # Within the band the integral runs down with the distance from the end that it pushes away from.
            end = self.band[0] if self.integral > 0 else self.band[1]
            left = self.integral + self.integral_gain * max(1 - entropy / end, -1.0)
            self.integral = left if left * self.integral > 0 else 0.0
        self.integral = min(DRIVE_LIMIT, max(-DRIVE_LIMIT, self.integral))  # no wind-up behind a drive at its limit

    def state_dict(self) -> dict[str, float]:
        """Return the state as plain numbers; entropies once there are any."""
        # NaN is no JSON, and checkpoints and records hold this as JSON.
        values = {name: float(getattr(self, name)) for name in _STATE}
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state that `state_dict` returned; a missing or non-finite value raises and changes nothing."""
        if not {"integral", "rollouts"} <= set(state) <= set(_STATE):
            raise ValueError(f"the state of trim has the keys {sorted(_STATE)}, got {sorted(state)}")
        if not all(math.isfinite(float(value)) for value in state.values()):
            raise ValueError(f"the state of trim must be finite numbers, got {dict(state)}")
        for name in _STATE:
            setattr(self, name, float(state.get(name, math.nan)))


_STATE = tuple(f.name for f in fields(TrimControl))[-5:]


def trim(
    floor: float = 0.3,
    ceiling: float | None = None,
    law: Law = "balance",
    relative: bool = False,
    fall: float = 1.0,
    fall_steps: int = 1000,
    gain: float = 0.5,
    integral_gain: float = 0.02,
    max_weight: float = 5.0,
    phi: PhiSource | None = None,
) -> TokenRule:
    """Hold the entropy between a floor and, if given, a ceiling."""
    state = TrimControl(floor, ceiling, relative, fall, fall_steps, gain, integral_gain)

    def apply(builder: PlanBuilder) -> None:
        drive = state.drive
        effect = -builder.coefficient * (token_phi(builder.batch) if phi != 'estimated' else estimated_phi(builder.logp, builder.entropy))
        metrics = {"trim/target": state.target, "trim/drive": drive or 0.0}
        if math.isfinite(state.change):
            metrics["trim/entropy_change"] = state.change
        builder.metrics |= {name: builder.weight.new_full((), value) for name, value in metrics.items()}
        raising, lowering = effect.clamp(min=0).sum(), -effect.clamp(max=0).sum()
        weight, factor = effect.new_ones(()), effect.new_ones(())
        if drive is not None:
            weight, factor = _weights(law, effect, builder.advantage, drive, max_weight)
            builder.multiply((weight > 1).nonzero().squeeze(1), weight[weight > 1], Reason.BOOSTED)
            builder.multiply((weight < 1).nonzero().squeeze(1), weight[weight < 1], Reason.DAMPED)
        both = (raising + lowering).clamp(min=torch.finfo(effect.dtype).tiny)
        builder.metrics["trim/predicted_change"] = (effect * weight).sum()
        builder.metrics["trim/leverage"] = torch.minimum(raising, lowering) / both
        builder.metrics["trim/weight"] = factor
        builder.metrics["trim/saturated"] = ((factor >= max_weight) | (factor <= 1 / max_weight)).to(effect.dtype)

    needs = frozenset({"entropy"}) | (frozenset(MOMENTS) if phi == "exact" else frozenset())
    return TokenRule("trim", law, apply, needs, state, reads=frozenset(MOMENTS), last=True)


def _weights(law: Law, effect: Tensor, advantage: Tensor, drive: float, limit: float) -> tuple[Tensor, Tensor]:
    up = math.copysign(1.0, drive)
    effect = effect * up  # below: a positive effect is wanted
    positive, negative = effect > 0, effect < 0
    P, N = effect[positive].sum(), -effect[negative].sum()
    wanted = abs(drive) * (P + N)
    one = effect.new_ones(())
    if law == "balance":
        factor = (wanted + (wanted * wanted + 4 * P * N).sqrt()) / (2 * P)
        factor = factor.nan_to_num(1.0, posinf=1.0).clamp(1.0, limit)
        return torch.where(positive, factor, torch.where(negative, 1 / factor, one)), factor
    if law == "raise":
        factor = ((N + wanted) / P).nan_to_num(1.0, posinf=1.0).clamp(1.0, limit)
        return torch.where(positive, factor, one), factor
    if law == "critical":
        chosen = positive & (advantage > 0)
        gam = effect[chosen].sum()
        factor = (1 + (wanted - (P - N)) / gam).nan_to_num(1.0, posinf=1.0).clamp(1.0, limit)
        return torch.where(chosen, factor, one), factor
    # least
    unit = effect / effect.abs().mean().clamp(min=torch.finfo(effect.dtype).tiny)
    low, high = 0.0, 1e3
    for _ in range(40):
        mid = (low + high) / 2
        w = (1 + mid * unit).clamp(1 / limit, limit)
        if bool((w * effect).sum() < wanted):
            low = mid
        else:
            high = mid
    w = (1 + high * unit).clamp(1 / limit, limit)
    if bool(effect.sum() >= wanted):
        return torch.ones_like(effect), one
    return w, w.max()
