"""Advantages: from the rewards of groups of responses to one value per response.

A group is the responses to one prompt; `group` holds an integer per response, in any order. A group of one response has
baseline 0 (and deviation 1). Of responses that are branches of a rollout, the rollouts are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.token_batch import NotFiniteError, number_rollouts
from trimtab.own_parts import OwnPartError, errors_located, is_own, load_part, location
from trimtab.text import nearest, shown

Values = Tensor | Sequence[float]
Groups = Tensor | Sequence[int]
AdvantageName = Literal[
    "group_normalized", "group_centered", "leave_one_out", "mean_normalized", "decoupled", "decoupled_whitened"
]


def group_normalized(reward: Values, group: Groups, eps: float = 1e-6) -> Tensor:
    """GRPO: `(R - mean) / (std + eps)` in the group, std unbiased. Equal rewards give exactly 0."""
    stats = _Groups(reward, group)
    variance = stats.total(stats.centered**2) / (stats.size - 1).clamp(min=1)
    deviation = torch.where(stats.size == 1, torch.ones_like(variance), variance.sqrt())
    return (stats.centered / (deviation + eps)).to(stats.dtype)


def group_centered(reward: Values, group: Groups) -> Tensor:
    """Dr.GRPO: `R - mean` in the group."""
    stats = _Groups(reward, group)
    return stats.centered.to(stats.dtype)


def leave_one_out(reward: Values, group: Groups) -> Tensor:
    """RLOO: `R` minus the mean of the group's other responses."""
    stats = _Groups(reward, group)
    # R - (S - R) / (n - 1) = (R - S / n) n / (n - 1)
    return (stats.centered * stats.size / (stats.size - 1).clamp(min=1)).to(stats.dtype)


def mean_normalized(reward: Values, group: Groups) -> Tensor:
    """MaxRL: `(R - mean) / mean` in the group, for rewards of at least 0. A group without any reward gives 0."""
    stats = _Groups(reward, group)
    # A mean near 0 or below would turn advantages round, or make them huge.
    negative = ((stats.reward < 0) & (stats.centered != 0) & (stats.size > 1)).nonzero().flatten().tolist()
    if negative:
        where = f"the reward of response {negative[0]} is {float(stats.reward[negative[0]]):g}"
        raise ValueError(f"mean_normalized (maxrl) divides by the mean reward of a group, but {where}: pay 0 or more")
    divisor = torch.where((stats.size == 1) | (stats.mean == 0), torch.ones_like(stats.mean), stats.mean)
    return (stats.centered / divisor).to(stats.dtype)


ADVANTAGES: dict[str, Callable[[Values, Groups], Tensor]] = {
    function.__name__: function for function in (group_normalized, group_centered, leave_one_out, mean_normalized)
}


# GDPO's, of several rewards per response, and whether they are divided by their deviation over all responses.
DECOUPLED = {"decoupled": False, "decoupled_whitened": True}


def decoupled(
    reward: Values, group: Groups, rollout: Groups | None, weights: Values | None, whiten: bool, eps: float = 1e-6
) -> Tensor:
    """GDPO: the weighted sum of rewards, (responses, rewards), each `group_normalized` by itself.

    One reward per response is a single one. `whiten` divides by the deviation over the rollouts of all groups.
    """
    columns = torch.as_tensor(reward).detach()
    columns = columns.unsqueeze(1) if columns.ndim == 1 else columns
    each = [compute_advantages("group_normalized", column, group, rollout) for column in columns.unbind(1)]
    factors = [1.0] * len(each) if weights is None else torch.as_tensor(weights).tolist()
    if len(factors) != len(each):
        raise ValueError(f"there are {len(each)} rewards per response, but {len(factors)} weights: give one each")
    wide = [values.to(torch.float64) * factor for values, factor in zip(each, factors, strict=True)]
    total = torch.stack(wide).sum(0)
    first = slice(None) if rollout is None else number_rollouts(torch.as_tensor(rollout))[1]
    if whiten and len(total[first]) > 1:
        # The advantages of a group add up to 0, and so does the batch: the mean needs no subtracting, and the zeros of
        # groups without signal stay zeros.
        total = total / (total[first].std() + eps)
    return total.to(each[0].dtype)


def compute_advantages(
    name: str, reward: Values, group: Groups, rollout: Groups | None = None, weights: Values | None = None
) -> Tensor:
    """Return the advantages of a name: one of `AdvantageName`, or `python:MODULE:NAME`; one value per response.

    Those of `DECOUPLED` take several rewards per response, and `weights`, one per reward.

    With `rollout`, ids of which some responses share one, the function gets one reward per rollout, the mean of its
    branches, and a branch has the advantage of its rollout. A branch with another reward than that mean has the
    advantage that its rollout would have with this reward, while all others keep theirs.
    """
    if name in DECOUPLED:
        return decoupled(reward, group, rollout, weights, DECOUPLED[name])
    if rollout is None:
        return _of_responses(name, reward, group)
    rewards, groups = _checked(reward, group)
    ids = torch.as_tensor(rollout, device=rewards.device)
    if ids.shape != rewards.shape:
        raise ValueError(f"rollout has shape {tuple(ids.shape)}, but there are {len(rewards)} responses: give one each")
    number, first = number_rollouts(ids, groups)
    means = _means(rewards, number, len(first))
    found = _of_responses(name, means, groups[first])
    advantages = found[number]
    apart = (rewards != means[number]).nonzero().squeeze(1)
    # One call for each, and not copies of its group in one: a function of the user's may look at all groups together.
    variants: dict[tuple[int, float], Tensor] = {}
    for response, which, value in zip(apart.tolist(), number[apart].tolist(), rewards[apart].tolist(), strict=True):
        if (which, value) not in variants:
            changed = means.index_fill(0, number[response], value)
            variants[which, value] = _of_responses(name, changed, groups[first])[which]
        advantages[response] = variants[which, value]
    return advantages


def _means(rewards: Tensor, number: Tensor, count: int) -> Tensor:
    """Return the mean reward of each rollout; exactly their reward if its branches have the same."""
    wide = rewards.to(torch.float64)
    none = wide.new_zeros(count)
    mean = none.index_add(0, number, wide) / none.index_add(0, number, torch.ones_like(wide))
    low, high = (none.scatter_reduce(0, number, wide, each, include_self=False) for each in ("amin", "amax"))
    return torch.where(low == high, low, mean).to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def _of_responses(name: str, reward: Values, group: Groups) -> Tensor:
    if not is_own(name):
        if name not in ADVANTAGES:
            raise ValueError(
                f"unknown advantage {shown(name)}: {nearest(str(name), get_args(AdvantageName))} "
                "(or python:MODULE:NAME)"
            )
        return ADVANTAGES[name](reward, group)
    function, rewards = load_part(name), torch.as_tensor(reward).detach()
    with errors_located(name, function):
        values = function(rewards, torch.as_tensor(group, device=rewards.device))
    if not isinstance(values, torch.Tensor) or values.shape != rewards.shape:
        made = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else shown(values)
        wanted = f"a tensor with a value for each of the {len(rewards)} responses"
        raise OwnPartError(f"{name}: {location(function)}: it returned {made}, and not {wanted}")
    if not bool(torch.isfinite(values).all()):
        raise OwnPartError(f"{name}: {location(function)}: an advantage is NaN or infinite for rewards {shown(reward)}")
    return values.detach().to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def _checked(reward: Values, group: Groups) -> tuple[Tensor, Tensor]:
    values = torch.as_tensor(reward).detach()
    ids = torch.as_tensor(group, device=values.device)
    if values.ndim != 1 or ids.shape != values.shape:
        shapes = f"{tuple(values.shape)} and {tuple(ids.shape)}"
        raise ValueError(f"reward and group take one value per response each, got shapes {shapes}")
    if not bool(torch.isfinite(values).all()):
        bad: list[int] = (~torch.isfinite(values)).nonzero().squeeze(1).tolist()
        first = f"reward {float(values[bad[0]])} of response {bad[0]}"
        raise NotFiniteError(f"{first} is not a number to learn from: leave it out", "reward", bad)
    return values, ids


class _Groups:
    """Per response, in float64: its reward, the size and mean of its group, and its reward minus this mean."""

    def __init__(self, reward: Values, group: Groups) -> None:
        values, ids = _checked(reward, group)
        self.dtype = values.dtype if values.is_floating_point() else torch.float32
        self.index = torch.unique(ids, return_inverse=True)[1]
        wide = values.to(torch.float64)  # a group's mean of large rewards keeps its last digits
        self.reward = wide
        self.size = self.total(torch.ones_like(wide))
        none = torch.zeros_like(wide)
        self.mean = torch.where(self.size == 1, none, self.total(wide) / self.size)
        # A mean of equal numbers can be off in the last bit; divided by a deviation of 0 + eps that would be large.
        low = none.scatter_reduce(0, self.index, wide, "amin", include_self=False)[self.index]
        high = none.scatter_reduce(0, self.index, wide, "amax", include_self=False)[self.index]
        self.centered = torch.where((low == high) & (self.size > 1), none, wide - self.mean)

    def total(self, values: Tensor) -> Tensor:
        """Return, for every response, the sum over its group."""
        return torch.zeros_like(values).index_add_(0, self.index, values)[self.index]
