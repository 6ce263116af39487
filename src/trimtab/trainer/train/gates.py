"""Gates: what a group must pass to be trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from trimtab.data import Sample, by_rollout
from trimtab.own_parts import OwnPartError, errors_located, is_own, location
from trimtab.text import shown
from trimtab.trainer.config import Config, RewardConfig, check_own_gate

Gate = Callable[[Sequence[Sample]], bool]

ROUNDING = 1e-9  # of a mean: that of eight rewards of 0.7 may be above 0.7


def has_reward_spread(group: Sequence[Sample]) -> bool:
    """Return whether the rewards of a group differ; if they do not, all its advantages are zero."""
    return len({response.reward for response in group if not response.excluded}) > 1


def mean_reward(group: Sequence[Sample]) -> float | None:
    """Return the mean reward over a group's rollouts, without what is excluded; None if all of it is."""
    rollouts = by_rollout([response for response in group if not response.excluded])
    return fmean(fmean(branch.reward for branch in branches) for branches in rollouts) if rollouts else None


def relative_reward(reward: float, rewards: RewardConfig) -> float:
    """Return a reward on the scale on which 0 is a wrong answer's and 1 a right one's."""
    return (reward - rewards.wrong) / (rewards.correct - rewards.wrong)


def build_gates(config: Config) -> dict[str, Gate]:
    """Return the gates of a recipe, by the names under which refused groups are counted."""
    gates: dict[str, Gate] = {}
    for name in config.gates:
        if is_own(name):
            gates[name.rpartition(":")[2]] = _own_gate(name)
        else:
            gates[name] = has_reward_spread if name == "mixed" else _mean_reward_gate(config)
    return gates


def refused_by(group: Sequence[Sample], gates: dict[str, Gate]) -> str:
    """Return the name of the first gate that refuses a group; empty if all admit it."""
    return next((name for name, admits in gates.items() if not admits(group)), "")


def _mean_reward_gate(config: Config) -> Gate:
    low, high = config.curriculum.mean_above, config.curriculum.mean_below

    def admits(group: Sequence[Sample]) -> bool:
        mean = mean_reward(group)
        return mean is not None and low + ROUNDING < relative_reward(mean, config.reward) < high - ROUNDING

    return admits


def _own_gate(name: str) -> Gate:
    gate = check_own_gate(name)

    def admits(group: Sequence[Sample]) -> bool:
        with errors_located(name, gate):
            verdict = gate(group[0].problem, [response.reward for response in group if not response.excluded])
        if not isinstance(verdict, bool):
            raise OwnPartError(f"{name}: {location(gate)}: it returned {shown(verdict)}: a gate returns True or False")
        return verdict

    return admits
