"""Rules that a rollout's entropy steers: REPO-R, EntroPIC and Entrocraft."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.plan import Plan, Reason
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.ratios import log_ratio
from trimtab.objectives.rules.entropy import ENTROPY, checked_state
from trimtab.objectives.rules.penalties import Penalty


@dataclass
class SignedStrength:
    """REPO-R's strength z: doubled or halved after every rollout, so that it moves towards what the entropy needs.

    Above 0 it raises the entropy, below 0 it lowers it. It changes its sign at the smallest size.
    """

    target: float
    smallest: float
    largest: float
    value: float = math.nan

    def __post_init__(self) -> None:
        self.value = self.smallest

    def observe(self, entropy: float) -> None:
        """Update the strength with a rollout's token-mean entropy; one that is not finite changes nothing."""
        wanted = (entropy < self.target) - (entropy > self.target)  # 0 for NaN
        if not wanted or not math.isfinite(entropy):
            return
        if self.value * wanted > 0:
            self.value = wanted * min(2 * abs(self.value), self.largest)
        else:
            half = self.value / 2
            self.value = half if abs(half) >= self.smallest else wanted * self.smallest

    def state_dict(self) -> dict[str, float]:
        """Return the state as plain numbers."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state that `state_dict` returned; anything else raises and changes nothing."""
        (self.value,) = checked_state("repo_r", state, ("value",), ("value",))


def repo_r(target: float = 0.3, strength_min: float = 1e-4, strength_max: float = 0.05) -> TokenRule:
    """Weight rewarded tokens by 1 - z ln p and punished ones by 1 + z ln p, and steer z by the entropy.

    z doubles while the entropy stays on one side of the target, halves once it is on the other, and changes its sign at
    strength_min. It starts at strength_min. A weight below 0, which would turn the advantage round, is 0.
    """
    state = SignedStrength(target, strength_min, strength_max)

    def apply(builder: PlanBuilder) -> None:
        sign = builder.batch.advantage.sign()
        factor = (1 - state.value * sign * builder.logp).clamp(min=0)
        builder.weight = builder.weight * factor
        builder.mark_all(factor > 1, Reason.BOOSTED)
        builder.mark_all(factor < 1, Reason.DAMPED)
        builder.metrics["repo_r/strength"] = factor.new_full((), state.value)

    formula = "weight 1 - z ln p where A > 0, 1 + z ln p where A < 0, at least 0; z is doubled or halved per rollout "
    formula += f"towards an entropy of {target:g}, {strength_min:g} <= |z| <= {strength_max:g}"
    words = {
        Reason.BOOSTED: "boosted: rare, and it moves the entropy towards its target",
        Reason.DAMPED: "damped: rare, and it moves the entropy away from its target",
    }
    return TokenRule("repo_r", formula, apply, ENTROPY, state, reason_words=words)


@dataclass
class EntropyPI:
    """EntroPIC's coefficient: a PI controller on how far the rollout's entropy is above its target; 0 before any."""

    target: float
    gain: float
    integral_gain: float
    integral: float = 0.0
    error: float = 0.0

    @property
    def alpha(self) -> float:
        """The coefficient of this update, between -1 and 1."""
        return min(1.0, max(-1.0, self.gain * self.error + self.integral_gain * self.integral))

    def observe(self, entropy: float) -> None:
        """Update the controller with a rollout's token-mean entropy; one that is not finite changes nothing."""
        if math.isfinite(entropy):
            self.error = entropy - self.target
            self.integral += self.error

    def state_dict(self) -> dict[str, float]:
        """Return the state as plain numbers."""
        return {"integral": self.integral, "error": self.error}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state that `state_dict` returned; anything else raises and changes nothing."""
        keys = ("integral", "error")
        self.integral, self.error = checked_state("entropic", state, keys, keys)


def push_probable(target: float, gain: float, integral_gain: float, p_least: float) -> TokenRule:
    """Select the probable tokens for the term of `probable_push`, and steer its coefficient (EntroPIC)."""
    state = EntropyPI(target, gain, integral_gain)
    log_least = math.log(p_least) if p_least > 0 else -math.inf

    def apply(builder: PlanBuilder) -> None:
        counted = torch.ones_like(builder.positive)
        if builder.uncounted is not None:
            counted.index_fill_(0, builder.uncounted, False)
        chosen = (counted & (builder.logp > log_least) & (state.alpha != 0)).nonzero().squeeze(1)
        # The scale of a token divides by all counted tokens, the term's mean by the chosen ones alone.
        builder.penalize(chosen, state.alpha * int(counted.sum()) / max(len(chosen), 1))
        builder.metrics["entropic/alpha"] = builder.weight.new_full((), state.alpha)

    formula = f"+ alpha x mean of -r |A| over tokens with p > {p_least:g}; alpha = {gain:g} (H - {target:g}) + "
    formula += f"{integral_gain:g} x its sum over rollouts, within [-1, 1]"
    words = {Reason.PENALIZED: "probable: it has a term that moves the entropy towards its target"}
    # After the rules that silence tokens, which no longer count.
    return TokenRule("entropic", formula, apply, ENTROPY, state, reason_words=words, last=1)


def _probable_push(new_logp: Tensor, plan: Plan) -> Tensor:
    """Push the tokens that the plan penalises in the direction of its coefficient: `-r |A|` (EntroPIC)."""
    assert plan.penalty is not None
    return -plan.penalty * log_ratio(new_logp, plan.old_logp).exp() * plan.advantage.abs()


# Without a formula: that of the rule which selects its tokens states both.
probable_push = Penalty("entropic", "", _probable_push)


@dataclass
class FallingBand:
    """Entrocraft's band: floor and ceiling move down by `decline` within `fall_steps` rollouts, linearly."""

    floor: float
    ceiling: float
    decline: float
    fall_steps: int
    rollouts: float = 0.0
    entropy: float = math.nan

    @property
    def band(self) -> tuple[float, float]:
        """Floor and ceiling at this rollout."""
        moved = self.decline * min(1.0, max(0.0, self.rollouts - 1) / self.fall_steps)
        return self.floor - moved, self.ceiling - moved

    @property
    def target(self) -> float:
        """The end of the band that the entropy is compared with: the floor."""
        return self.band[0]

    @property
    def side(self) -> int:
        """Where the last rollout's entropy is: 1 above the band, -1 below it, 0 within, and before any rollout."""
        low, high = self.band
        return (self.entropy > high) - (self.entropy < low)

    def observe(self, entropy: float) -> None:
        """Update the band with a rollout's token-mean entropy; one that is not finite changes nothing."""
        if math.isfinite(entropy):
            self.rollouts += 1
            self.entropy = entropy

    def state_dict(self) -> dict[str, float]:
        """Return the state as plain numbers, and `entropy` once one has been observed."""
        # NaN is no JSON, and checkpoints and records hold this as JSON.
        state = {"rollouts": self.rollouts}
        return state | ({"entropy": self.entropy} if math.isfinite(self.entropy) else {})

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state that `state_dict` returned; a missing or non-finite value raises and changes nothing."""
        self.rollouts, self.entropy = checked_state("entrocraft", state, ("rollouts",), ("rollouts", "entropy"))


def entrocraft(
    floor: float = 0.6,
    ceiling: float = 0.7,
    decline: float = 0.5,
    fall_steps: int = 1000,
    renormalize: bool = True,
) -> TokenRule:
    """Reject the rewarded responses while the entropy is below a band, and the punished ones while it is above.

    The band falls linearly, because with a constant one training became unstable late. Set fall_steps to the length of
    the run. Rejected responses do not count in the mean, unless renormalize=false.
    """
    state = FallingBand(floor, ceiling, decline, fall_steps)

    def apply(builder: PlanBuilder) -> None:
        rejected = (builder.batch.advantage * state.side < 0).nonzero().squeeze(1)
        (builder.silence if renormalize else builder.drop)(rejected, Reason.DROPPED)
        builder.metrics["entrocraft/side"] = builder.weight.new_full((), float(state.side))
        builder.metrics["entrocraft/floor"] = builder.weight.new_full((), state.band[0])

    formula = f"rejected where A > 0 while the rollout's entropy is below {floor:g}, where A < 0 while it is above "
    formula += f"{ceiling:g}; both ends fall by {decline:g} within {fall_steps:g} rollouts"
    words = {Reason.DROPPED: "rejected: its response moves the entropy away from its band"}
    return TokenRule("entrocraft", formula, apply, ENTROPY, state, reason_words=words)
