"""The registry of methods and attachments, and the meaning and limits of every option, stated once.

A method is a function whose keyword arguments are its options and whose docstring describes it; the decorators below
read both. An option has one name, one meaning and one range wherever it occurs.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Literal, TypeVar

from trimtab.objectives.objective import Objective
from trimtab.objectives.plan_builder import TokenRule
from trimtab.own_parts import Option, read_options

OPTIONS: dict[str, Option] = {
    "adaptive": Option("change boost and damp by `rate` per rollout: stronger if the entropy is below the target"),
    "advantage": Option("how the rewards of a group become advantages; python:MODULE:NAME is your own function"),
    "aggregation": Option("how the losses of the tokens are averaged over the mini-batch"),
    "boost": Option("STARE's W: the factor for tokens that raise the entropy; critical: measured", 1, 10),
    "cap": Option("upper limit of the importance weight: p_old / p_sampler in tis, p_new / p_old in dppo", 0),
    "ceiling": Option("the entropy above which it is lowered; none means no upper end", 0),
    "clip_high": Option("how far above 1 the ratio may go before it is clipped", 0),
    "clip_low": Option("how far below 1 the ratio may go before it is clipped", 0),
    "clip_scale": Option("sqrt_length divides the clip range of a subsentence of n tokens by sqrt(n)"),
    "coef": Option("strength of the penalty or bonus", 0),
    "corrected": Option("multiply the estimate by p_new / p_old, which corrects for sampling from the old policy"),
    "count": Option(
        "which tokens means divide by: all, or only those of groups with signal (signal); the other groups, whose "
        "advantages are all zero, then have no penalty either"
    ),
    "cov_high": Option("tokens with a covariance at or above this are never chosen"),
    "cov_low": Option("tokens with a covariance at or below this are never chosen"),
    "damp": Option("STARE's M: the factor for tokens that lower the entropy", 0, 1),
    "decline": Option("how far floor and ceiling fall, in nats", 0),
    "divergence": Option("how the change of a token's probability is measured: the difference (tv) or the binary KL"),
    "dual_clip": Option("upper limit of the ratio if the advantage is negative; none means no limit", 1),
    "effect": Option(
        "how a token's effect on the entropy is computed: the paper's approximation, or STARE's Phi (exact)"
    ),
    "ended": Option("whether responses that have ended before a token still count in its baseline"),
    "entropy_cap": Option("upper limit of the bonus, as a share of |A|; up to 1 the bonus keeps the sign of A", 0),
    "estimator": Option("which estimator of the KL divergence to use"),
    "fall": Option("floor and ceiling move linearly to this multiple of themselves", 0, 1),
    "fall_steps": Option("the number of rollouts in which floor and ceiling fall", 1),
    "falloff": Option("how STEER's weight falls with the effect on the entropy"),
    "floor": Option("the entropy (nats, mean over tokens) below which it is raised", 0),
    "gain": Option("how strongly the control reacts to the distance from the target or band", 0, 10),
    "gate": Option(
        "whose entropy is compared with the target: the rollout batch, each response (sample), each token, or none"
    ),
    "gradient": Option(
        "how the entropy bonus enters: as an advantage of the sampled token, or by its own gradient (exact)"
    ),
    "geometric": Option("use the geometric mean of a response's token ratios instead of their product"),
    "high": Option("upper end of the band of p_old / p_sampler", 0),
    "integral_gain": Option("how much each rollout adds to the control, per distance from the target or band", 0, 1),
    "k_neg": Option("power of w in phi if A < 0: how fast the weight falls for small w", 0, 100),
    "k_pos": Option("power of w in phi if A >= 0", 0, 100),
    "lambda_neg": Option("decay rate of phi in w if A < 0: how fast the weight falls for large w", 0, 100),
    "lambda_pos": Option("decay rate of phi in w if A >= 0", 0, 100),
    "length": Option("the constant that the sum over a response is divided by", 1),
    "low": Option("lower end of the band of p_old / p_sampler", 0),
    "mask": Option("which tokens are silenced: the spurious ones, or those of one of the paper's ablations"),
    "max_weight": Option("the largest weight of a token; its inverse is the smallest", 1, 100),
    "mu": Option("how many standard deviations below the mean a token is dropped", 0),
    "p_least": Option("only tokens above this probability have EntroPIC's term", 0, 1),
    "p_threshold": Option("with threshold=probability, tokens below this probability are surprising", 0, 1),
    "phi": Option("exact: from the moments, estimated: from ln p and H only; none: exact if there are moments"),
    "population": Option("which tokens the quantile is taken over: the rare rewarded ones (candidates), or all"),
    "quantile": Option("a rare rewarded token is spurious if its entropy is below this quantile", 0, 1),
    "rate": Option("how much a rollout changes boost and damp (adaptive), or the coefficient of entropy_bonus", 0, 1),
    "relative": Option("floor and ceiling are multiples of the first rollout's entropy"),
    "renormalize": Option("do not count the removed tokens in the mean either"),
    "scope": Option(
        "what quantiles and means are taken over: the mini-batch, or each micro-batch as in other trainers"
    ),
    "seed": Option("seed of the random choice (only for rules that choose at random)"),
    "share": Option("the share of tokens that the rule chooses", 0, 1),
    "shift_high": Option("how far a token's probability may rise, if A > 0, before its gradient is cut", 0),
    "shift_low": Option("how far a token's probability may fall, if A <= 0, before its gradient is cut", 0),
    "token_stats": Option("rules look at log-probs of the old or the current policy; none: the current one if given"),
    "strength_max": Option("the largest size of REPO-R's z", 0, 1),
    "strength_min": Option("the smallest size of REPO-R's z, at which it changes its sign", 1e-12, 1),
    "target": Option("the entropy (nats, mean over tokens) to steer to, or at which reweighting stops", 0),
    "tau_negative": Option("steepness of the sigmoid if A < 0", 1e-6),
    "tau_p": Option("a token is rare if its probability is below this", 0, 1),
    "tau_positive": Option("steepness of the sigmoid if A > 0", 1e-6),
    "threshold": Option("what makes a token surprising: the top `share` by surprisal (quantile), or p_threshold"),
    "upper_only": Option("cap the ratio only from above"),
    "variant": Option("which sets of tokens are boosted and damped"),
    "weight_high": Option("the weight of the token with the least effect on the entropy", 0, 10),
    "weight_low": Option("the weight of the token with the largest effect on the entropy", 0, 10),
    "whiten": Option("divide the advantages by their standard deviation over the rollout batch"),
    "widen_high": Option("largest factor on the clip range", 0),
    "widen_low": Option("smallest factor on the clip range", 0),
}

# The ends of a range, lower one first.
RANGES = (
    ("low", "high"),
    ("cov_low", "cov_high"),
    ("widen_low", "widen_high"),
    ("floor", "ceiling"),
    ("weight_low", "weight_high"),
    ("strength_min", "strength_max"),
)


@dataclass(frozen=True)
class Entry:
    """A method or attachment, and the function that builds it from its options."""

    name: str
    paper: str
    title: str
    notes: str
    build: Callable[..., Any]
    options: Mapping[str, Option]


MethodBuilder = TypeVar("MethodBuilder", bound=Callable[..., Objective])

METHODS: dict[str, Entry] = {}
ATTACHMENTS: dict[str, Entry] = {}


def method(paper: str = "", rule: Callable[..., TokenRule] | None = None) -> Callable[[MethodBuilder], MethodBuilder]:
    """Register a function that builds an `Objective` under its own name.

    A method that passes `**options` on to an attachment names it as `rule`: it has that one's options and defaults too.
    """

    def register(build: MethodBuilder) -> MethodBuilder:
        METHODS[build.__name__] = entry(build, paper, rule)
        return build

    return register


def entry(build: Callable[..., Any], paper: str, rule: Callable[..., Any] | None = None) -> Entry:
    """Read an entry off a function: its name, its docstring, its options with their defaults and types."""
    options: dict[str, Option] = {}
    for source in (build,) if rule is None else (rule, build):
        for key, found in read_options(source.__name__, source, skip=("options",)).items():
            options[key] = replace(OPTIONS[key], type=found.type, default=found.default)
    return Entry(build.__name__, paper, *title_and_notes(build), build, options)


def title_and_notes(build: Callable[..., Any]) -> tuple[str, str]:
    """Return the first line of a docstring, and the rest of it."""
    title, _, notes = inspect.cleandoc(build.__doc__ or "").partition("\n")
    return title, notes.strip()


def check_option(owner: str, key: str, value: Any, option: Option) -> Any:
    """Return `value` as the option's type; raise with the option, the value and what would be right."""
    union = typing.get_origin(option.type) in (typing.Union, UnionType)
    types = typing.get_args(option.type) if union else (option.type,)
    choices = [choice for one in types if typing.get_origin(one) is Literal for choice in typing.get_args(one)]
    where = f"{owner}: option {key}={value!r}"
    if value is None and type(None) in types:
        return None
    if choices:
        # In brackets `none` is read as None, and is a choice of some options.
        value = "none" if value is None and "none" in choices else value
        if value in choices:
            return value
        if float not in types or isinstance(value, str):
            number = " or a number" if float in types else ""
            raise ValueError(f"{where} must be one of {', '.join(map(str, choices))}{number}")
    if bool in types:
        if not isinstance(value, bool):
            raise ValueError(f"{where} must be true or false")
        return value
    if str in types:
        if not isinstance(value, str):
            raise ValueError(f"{where} must be text")
        return value
    return _number(where, option, value, whole=float not in types)


def check_ranges(entry: Entry, options: Mapping[str, Any]) -> None:
    """Raise if the lower end of a range is above the upper one, given or by default."""
    values = {key: option.default for key, option in entry.options.items()} | dict(options)
    for low, high in RANGES:
        if values.get(low) is not None and values.get(high) is not None and values[low] > values[high]:
            where = f"{entry.name}: option {low}={values[low]:g}"
            raise ValueError(f"{where} must be at most {high}, which is {values[high]:g}")


def _number(where: str, option: Option, value: Any, whole: bool) -> float:
    # Python's bool is an int, and clip_low=true would pass as 1.
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ValueError(f"{where} must be a {'whole number' if whole else 'number'}")
    low = -math.inf if option.low is None else option.low
    high = math.inf if option.high is None else option.high
    if not low <= value <= high:  # as for NaN
        if math.isfinite(high):
            raise ValueError(f"{where} must be between {low:g} and {high:g}")
        raise ValueError(f"{where} must be at least {low:g}")
    return value if whole else float(value)
