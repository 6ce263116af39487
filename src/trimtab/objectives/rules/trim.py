"""trim: hold the entropy in a band, by weights that follow from the measured effect of every token on the entropy.

A token with coefficient c (-d loss / d ln p under the plan) changes the entropy of its own distribution by e = -c Phi
per unit of step size. Surprising tokens have Phi < 0: rewarded ones raise the entropy, punished ones lower it. trim
multiplies the former by a and the latter by 1 / a, and leaves alone what the policy expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.phi import MOMENTS, PhiSource, token_phi
from trimtab.objectives.plan import Reason
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.rules.entropy import checked_state

MOST_DRIVE = 1.0  # the whole of what the update does to the entropy, P + N, in one direction


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
        # Never away from the band: after a jump from one side to the other the integral is still of the old sign.
        wanted = math.copysign(1.0, error) * (self.gain * error + self.integral)
        return math.copysign(min(MOST_DRIVE, max(0.0, wanted)), error)

    def _error(self) -> float:
        """The distance from the band, relative to its end; positive below it. 0 within, and before any rollout."""
        floor, ceiling = self.band
        if self.entropy < floor:
            return 1 - self.entropy / floor
        return _beyond(self.entropy, ceiling) if self.entropy > ceiling else 0.0

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
            left = self.integral + self.integral_gain * _beyond(entropy, end)
            self.integral = left if left * self.integral > 0 else 0.0
        self.integral = min(MOST_DRIVE, max(-MOST_DRIVE, self.integral))  # no wind-up behind a drive at its limit

    def state_dict(self) -> dict[str, float]:
        """Return the state as plain numbers; entropies once there are any."""
        # NaN is no JSON, and checkpoints and records hold this as JSON.
        values = {name: float(getattr(self, name)) for name in _STATE}
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state that `state_dict` returned; a missing or non-finite value raises and changes nothing."""
        for name, value in zip(_STATE, checked_state("trim", state, ("integral", "rollouts"), _STATE), strict=True):
            setattr(self, name, value)


_STATE = tuple(f.name for f in fields(TrimControl))[-5:]


def _beyond(entropy: float, end: float) -> float:
    """Return how far an entropy is from an end of the band, relative to it; at most 1 above it, as one can be below."""
    return max(1 - entropy / end, -1.0) if end > 0 else -1.0


def trim(
    floor: float = 0.3,
    ceiling: float | None = None,
    relative: bool = False,
    fall: float = 1.0,
    fall_steps: int = 1000,
    gain: float = 0.5,
    integral_gain: float = 0.02,
    max_weight: float = 10.0,
    phi: PhiSource | None = None,
) -> TokenRule:
    """Hold the entropy above a floor, and if given below a ceiling, by weights on surprising tokens.

    While the rollout's mean entropy is in the band, nothing changes. Below the floor, rewarded surprising tokens are
    multiplied by a, and punished surprising tokens by 1 / a. The factor is computed for every update, so that the
    predicted change of the entropy is what a PI controller asks for. Above the ceiling it is below 1. Effects are exact
    if the batch has the moments of its distributions. In TRL and verl, which have none, they are estimated from ln p
    and H.
    """
    state = TrimControl(floor, ceiling, relative, fall, fall_steps, gain, integral_gain)

    def apply(builder: PlanBuilder) -> None:
        drive = state.drive
        sensitivity = token_phi(builder.batch, phi)
        effect = -builder.coefficient * sensitivity
        surprising = torch.where(sensitivity < 0, effect, 0.0)
        raising, lowering = surprising.clamp(min=0).sum(), -surprising.clamp(max=0).sum()
        total, rest = effect.abs().sum(), (effect - surprising).sum()
        factor = effect.new_ones(())
        if drive is not None:
            factor = balance(raising, lowering, drive * total - rest, max_weight)
            factor = factor.clamp(min=1.0) if math.copysign(1.0, drive) > 0 else factor.clamp(max=1.0)
        if bool(factor != 1):
            up, down = (Reason.BOOSTED, Reason.DAMPED) if bool(factor > 1) else (Reason.DAMPED, Reason.BOOSTED)
            builder.multiply((surprising > 0).nonzero().squeeze(1), factor, up)
            builder.multiply((surprising < 0).nonzero().squeeze(1), 1 / factor, down)
        builder.metrics["trim/predicted_change"] = rest + factor * raising - lowering / factor
        builder.metrics["trim/leverage"] = (raising + lowering) / total.clamp(min=torch.finfo(effect.dtype).tiny)
        builder.metrics["trim/weight"] = factor
        builder.metrics["trim/saturated"] = (torch.maximum(factor, 1 / factor) >= max_weight).to(effect.dtype)
        known = {"trim/target": state.target, "trim/drive": drive or 0.0, "trim/entropy_change": state.change}
        builder.metrics |= {name: factor.new_full((), value) for name, value in known.items() if math.isfinite(value)}

    needs = {"entropy", *MOMENTS} if phi == "exact" else {"entropy"}
    words = {
        Reason.BOOSTED: "boosted: surprising, and it moves the entropy towards its band",
        Reason.DAMPED: "damped: surprising, and it moves the entropy away from its band",
    }
    formula = "e = -c Phi; where Phi < 0: e > 0 times a, e < 0 times 1 / a, so that sum e = drive x sum |e|, "
    formula += _band_formula(state)
    # After STARE's critical weight as well, which would undo what trim asks for.
    return TokenRule("trim", formula, apply, frozenset(needs), state, words, frozenset(MOMENTS), last=2)


def balance(raising: Tensor, lowering: Tensor, wanted: Tensor, most: float) -> Tensor:
    """Return a with a P - N / a = wanted, at most `most` and at least its inverse; 1 without any P and N."""
    root = (wanted * wanted + 4 * raising * lowering).sqrt()
    # Of the two forms of the root the one that adds: the other loses its digits, and is 0 / 0 without P or N.
    factor = torch.where(wanted > 0, (wanted + root) / (2 * raising), 2 * lowering / (root - wanted))
    return torch.where(raising + lowering > 0, factor.clamp(1 / most, most), 1.0)


def _band_formula(state: TrimControl) -> str:
    of = " of the first rollout's" if state.relative else ""
    text = f"while the rollout's mean entropy is below {state.floor:g}{of}"
    if state.ceiling is not None:
        text += f" or above {state.ceiling:g}{of}"
    if state.fall != 1:
        text += f" (both fall to {state.fall:g} times that within {state.fall_steps} rollouts)"
    return text
