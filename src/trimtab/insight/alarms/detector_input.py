"""What a detector gets (a run's metrics so far, the thresholds, facts from the recipe) and what it returns.

Statistics are robust: medians, which a single outlier does not move. `benchmarks/alarms.py` measures detection and
false alarms on faulty and healthy runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from statistics import median
from typing import Any

from trimtab.record import CollapseDetector, is_finite_number, start_values

MAD_TO_DEVIATION = 1.4826  # from the median absolute deviation to the standard deviation of a normal distribution
NOISE_WINDOW = 50  # values over which noise is measured
LARGEST_LOG = 700.0  # whose exponential a float holds: a log of another trainer may hold anything
EDGE = 100  # values kept at the start and at the end of a series: more than any window of a detector


@dataclass
class Series:
    """The values of one metric with their steps: the first and the newest; `count` counts all that there were."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    count: int = 0

    def add(self, step: int, value: float) -> None:
        """Add a value, and drop those in the middle once there are many."""
        self.steps.append(step)
        self.values.append(value)
        self.count += 1
        # Detectors compare the start of a run with now. Everything kept would be 1.4 KB of memory for every step.
        if len(self.values) > 4 * EDGE:
            del self.steps[EDGE:-EDGE], self.values[EDGE:-EDGE]


@dataclass
class History:
    """The first and the newest finite values of every metric; `peaks` caches `best`."""

    series: dict[str, Series] = field(default_factory=dict)
    peaks: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)

    def add(self, record: Mapping[str, float]) -> int:
        """Add a record of finite metrics and return its step."""
        step = int(record["step"])
        for name, value in record.items():
            self.series.setdefault(name, Series()).add(step, float(value))
        return step

    def count(self, name: str) -> int:
        """Return how many values a metric has had."""
        return self._of(name).count

    def steps(self, name: str) -> list[int]:
        """Return the steps of `values`."""
        return self._of(name).steps

    def values(self, name: str) -> list[float]:
        """Return the values of a metric, in order; of many, at least the first and the newest `EDGE`."""
        return self._of(name).values

    def last(self, name: str, count: int) -> list[float]:
        """Return the newest `count` values; an empty list if there are fewer."""
        values = self.values(name)
        return values[-count:] if len(values) >= count else []

    def best(self, name: str, recent: int) -> float:
        """Return the largest median over any window of `recent` values; called after every step, it misses none."""
        values = self.values(name)
        count = self.count(name)
        # Only windows that are new since the last call are looked at, and none that spans a gap in the middle.
        done, best = self.peaks.get((name, recent), (0, -math.inf))
        first = recent if count == len(values) else EDGE + recent
        for end in range(max(first, len(values) - (count - done) + 1), len(values) + 1):
            best = max(best, median(values[end - recent : end]))
        self.peaks[name, recent] = count, best
        return best

    def noise(self, name: str) -> float:
        """Return the standard deviation of a metric's step-to-step noise."""
        values = self.values(name)[-NOISE_WINDOW:]
        # From differences of neighbours, so that a slow trend does not count as noise.
        changes = [abs(later - earlier) for earlier, later in pairwise(values)]
        return MAD_TO_DEVIATION * median(changes) / math.sqrt(2) if changes else 0.0

    def _of(self, name: str) -> Series:
        return self.series.get(name) or Series()


def spread(values: list[float]) -> float:
    """Return the median absolute deviation, scaled to a standard deviation."""
    centre = median(values)
    return MAD_TO_DEVIATION * median([abs(value - centre) for value in values])


def slope(values: list[float]) -> float:
    """Return the trend per step: the median slope over pairs half a window apart (a Theil-Sen estimator)."""
    # Pairs half a window apart: as robust as all pairs, in linear time.
    half = len(values) // 2
    return median([(later - earlier) / half for earlier, later in zip(values, values[half:], strict=False)])


def _threshold(value: float, why: str) -> Any:
    # The reason is metadata instead of a comment: docs/alarms.md prints it.
    return field(default=value, metadata={"why": why})


@dataclass(frozen=True)
class Thresholds:
    """When alarms ring. Shares and accuracies are between 0 and 1, entropies and log-probabilities in nats."""

    start_steps: int = _threshold(
        10,
        "first steps, whose median is the start of the run (if the next do not leave the first at once); fewer "
        "are noisy, more delay the alarms",
    )
    recent_steps: int = _threshold(5, 'last steps, whose median is "now"; so one or two odd steps cannot ring an alarm')
    trend_steps: int = _threshold(20, "steps over which a trend is measured; a slope over fewer steps is mostly noise")
    min_spreads: float = _threshold(6.0, "a change must be larger than this many spreads (scaled MAD) of the start")
    forecast_steps: int = _threshold(30, "steps by which the trend of the entropy is extrapolated; enough time to act")
    hold_steps: int = _threshold(3, "steps in a row for which a condition must hold before the alarm rings")
    quiet_steps: int = _threshold(25, "steps without the condition after which the alarm can ring again")

    learned_gain: float = _threshold(
        0.2, "rise of accuracy since the start; above it, lower entropy is a result of learning"
    )

    # Entropy
    collapse_level: float = _threshold(
        0.25, "share of the entropy at the start; healthy runs keep more while they learn"
    )
    collapse_floor: float = _threshold(0.1, "share of the entropy at the start; rings if the trend leads below it")
    collapse_target: float = _threshold(0.5, "share of the objective's target entropy, if it has one")
    explosion_level: float = _threshold(1.5, "times the entropy at the start (or the target, if that is more)")
    explosion_ceiling: float = _threshold(2.0, "times that entropy; rings if the trend leads above it")
    explosion_min_rise: float = _threshold(
        0.1, "nats by which it must also rise, because a run that starts near 0 may move a little"
    )

    # Control of the entropy
    control_below: float = _threshold(
        0.8, "share of the target; an entropy above it counts as held, and one below it for long does not"
    )
    control_steps: int = _threshold(50, "steps for which it must be below; a run that starts there needs time to rise")
    control_leverage: float = _threshold(
        0.02, "leverage: the share of all effects on the entropy that surprising tokens have; below it no weight steers"
    )
    control_mixed: float = _threshold(0.05, "share of groups whose rewards differ; below it, few tokens can be weighed")
    control_r2: float = _threshold(0.01, "R^2 of prediction and outcome over 100 measurements; chance alone gives 0.01")

    # Tokens that weigh too much
    spurious_growth: float = _threshold(3.0, "factor by which the share must grow since the start")
    spurious_min_share: float = _threshold(0.002, "share of tokens; below it, growth is ignored")
    gradient_growth: float = _threshold(
        2.0, "factor by which the gradient share of a few tokens must grow since the start"
    )
    gradient_min_share: float = _threshold(0.2, "share of the gradient; below it, concentration is harmless")

    # How far an update moves the policy, and the sampler from the trainer
    ratio_kl: float = _threshold(0.02, "nats that the policy moves within a step; trust regions aim at 0.01 or less")
    ratio_growth: float = _threshold(5.0, "factor compared with the start of the run")
    ratio_kl_min: float = _threshold(0.01, "nats within a step; below it, growth is ignored")
    ratio_kl_once: float = _threshold(0.5, "nats within a single step, even if only once")
    ratio_max: float = _threshold(20.0, "largest ratio: a token is 20 times more probable than when it was sampled")
    clip_growth: float = _threshold(3.0, "factor compared with the start; methods differ too much for a fixed level")
    clip_min_share: float = _threshold(0.03, "share of tokens; below it, growth is ignored")
    mismatch_level: float = _threshold(0.05, "mean difference of log-probs; bf16 engines are below 0.02")
    mismatch_growth: float = _threshold(5.0, "factor compared with the start")
    mismatch_min: float = _threshold(0.01, "nats; below it, growth is only rounding")
    mismatch_rising_min: float = _threshold(0.003, "nats; below it, a trend is not extrapolated")
    mismatch_rising: float = _threshold(1.5, "factor compared with the start; below it, a trend is not extrapolated")
    samples_level: float = _threshold(0.5, "effective sample size as a share of the tokens; half of them are wasted")
    samples_growth: float = _threshold(5.0, "factor by which what is lost of it must grow since the start")
    samples_min_loss: float = _threshold(0.2, "share that is lost; below it, growth is ignored")
    samples_rising_min: float = _threshold(0.03, "share that is lost; below it, a trend is not extrapolated")
    samples_rising: float = _threshold(1.5, "factor compared with the start; below it, a trend is not extrapolated")

    # Responses
    signal_min_share: float = _threshold(
        0.1, "share of groups whose rewards differ; below it, 90 % of the sampling is wasted"
    )
    signal_fall: float = _threshold(0.5, "share compared with the start, if accuracy has not risen")
    signal_right: float = _threshold(0.5, "accuracy; above it, such groups are few because the problems are solved")
    truncated_level: float = _threshold(0.5, "share of truncated responses; above it, most never reach their answer")
    truncated_growth: float = _threshold(0.1, "smallest change of that share since the start that counts")
    repetition_growth: float = _threshold(0.15, "rise of the share of repeated 4-grams since the start")
    length_factor: float = _threshold(1.5, "factor by which responses are longer or shorter than at the start")
    length_gain: float = _threshold(0.05, "rise of held-out accuracy since the start that justifies another length")

    # Conversations with tools
    failing_level: float = _threshold(0.5, "share of calls that fail")
    failing_growth: float = _threshold(0.15, "smallest change of that share since the start that counts")
    void_level: float = _threshold(0.5, "share of conversations with a void turn")
    void_growth: float = _threshold(0.1, "smallest change of that share since the start that counts")
    vanish_level: float = _threshold(0.25, "share compared with the start, of conversations with a successful call")
    vanish_min_start: float = _threshold(0.1, "share at the start; below it, the policy has not learned to call yet")
    tool_wait_share: float = _threshold(
        0.5, "share of the sampling time; above it, the sampler waits longer than it samples"
    )

    # Agents
    agent_failed_share: float = _threshold(
        0.05, "share of rollouts in which the agent failed or took too long; a few may be a network's fault"
    )

    # Rewards
    crashed_share: float = _threshold(
        0.01, "share of responses on which rules failed; fewer can be a few bad rows in a dataset"
    )
    hacking_rise: float = _threshold(0.1, "rise of sampled accuracy since the start")
    hacking_follow: float = _threshold(0.3, "share of that rise that held-out accuracy must show too")
    jump_rise: float = _threshold(0.15, "rise of accuracy within `trend_steps`")
    jump_length: float = _threshold(0.25, "relative change of length within the same steps")
    jump_entropy: float = _threshold(0.4, "relative fall of the entropy within the same steps")
    drop_share: float = _threshold(0.7, "share of its best value; below it, reward or held-out accuracy has dropped")
    drop_noise: float = _threshold(
        2.5, "times the noise between successive values, because accuracy on few problems is noisy"
    )
    drop_min: float = _threshold(0.08, "smallest fall in accuracy that counts")


def threshold_reasons() -> dict[str, tuple[float, str]]:
    """Return every threshold's value and reason by name."""
    values = Thresholds()
    return {each.name: (float(getattr(values, each.name)), each.metadata["why"]) for each in fields(Thresholds)}


# Metrics of what the policy samples. Those of an update are small while the learning rate rises, which is no start to
# hold to, and groups that differ become many at once in a run that begins to learn.
SAMPLED = ("policy", "reward", "response")


@dataclass(frozen=True)
class Finding:
    """What a detector found: a message, the numbers behind it by metric, and advice if it depends on the cause."""

    message: str
    evidence: dict[str, Any]
    suggestion: str = ""


@dataclass(frozen=True)
class Shift:
    """A metric's median now and at the start of the run, whether noise can explain the change, and the evidence."""

    now: float
    start: float
    significant: bool
    evidence: dict[str, Any]


@dataclass(frozen=True)
class DetectorInput:
    """A run so far: its metrics, the thresholds, facts from its recipe, and whether it has collapsed.

    `entropy_target` is the target of the objective's entropy controller; `rewards` are those of a wrong and a right
    answer.
    """

    history: History = field(default_factory=History)
    limits: Thresholds = field(default_factory=Thresholds)
    entropy_target: float | None = None
    rewards: tuple[float, float] = (0.0, 1.0)
    collapse: CollapseDetector = field(default_factory=CollapseDetector)

    def add(self, record: Mapping[str, float]) -> int:
        """Add a record of metrics and return its step."""
        # Logs of other trainers hold text and nulls, and a single NaN would make every median after it NaN.
        numbers = {k: v for k, v in record.items() if is_finite_number(v)}
        self.collapse.add(numbers)
        return self.history.add(numbers)

    def shift(self, metric: str) -> Shift | None:
        """Compare a metric now with the start of the run; None until there are enough values for both."""
        began = self.start(metric)
        recent = self.limits.recent_steps
        steps = self.history.steps(metric)
        values = self.history.values(metric)
        if not began or len(values) < len(began) + recent:
            return None
        now, start, noise = median(values[-recent:]), median(began), spread(began)
        evidence = {"now": now, "steps": [steps[-recent], steps[-1]], "start": start}
        evidence |= {"start_steps": [steps[0], steps[len(began) - 1]], "start_spread": noise}
        return Shift(now, start, abs(now - start) > self.limits.min_spreads * noise, {metric: evidence})

    def start(self, metric: str) -> list[float]:
        """Return the values of a metric at the start of the run; an empty list until there are enough."""
        values = self.history.values(metric)
        count = self.limits.start_steps
        area = metric.partition("/")[0]
        if area in SAMPLED:
            return start_values(values, count, may_rise=area != "reward")
        return values[:count] if len(values) >= count else []

    def now(self, metric: str) -> float | None:
        """Return the median of a metric over the recent steps; None until there are enough."""
        # A median, which two odd steps out of five do not move.
        values = self.history.last(metric, self.limits.recent_steps)
        return median(values) if values else None

    def level(self, metric: str, **more: float) -> dict[str, Any]:
        """Return the evidence for a metric's level over the recent steps."""
        steps = self.history.steps(metric)[-self.limits.recent_steps :]
        return {metric: {"now": self.now(metric), "steps": [steps[0], steps[-1]], **more}}

    def target(self) -> float | None:
        """Return the target of the entropy: as it is logged, since one may move, else that of the recipe."""
        logged = self.now("trim/target")
        return self.entropy_target if logged is None else logged

    def held_out(self) -> tuple[float, float] | None:
        """Return held-out accuracy at the start and now (mean of the last two evaluations); None before the second.

        If the rule gives numbers, it is their mean.
        """
        # The middle of the last two: one evaluation on a few dozen problems is noisy.
        values = self.history.values(self.held_out_metric)
        return (values[0], median(values[-2:])) if len(values) > 1 else None

    def held_out_rise(self, steps: int) -> float:
        """Return how far the newest evaluation is above the last one before these steps; 0 if there is none in them."""
        at, values = self.history.steps(self.held_out_metric), self.history.values(self.held_out_metric)
        first = self.history.steps("step")[-1] - steps
        before = [value for step, value in zip(at, values, strict=True) if step <= first]
        return values[-1] - before[-1] if before and values else 0.0

    def scaled(self, reward: float) -> float:
        """Scale a mean reward to 0 where all answers are wrong and 1 where all are right."""
        # The thresholds are those of accuracies, and a recipe may reward with -1 and 1.
        wrong, right = self.rewards
        return (reward - wrong) / (right - wrong)

    def gain(self) -> float:
        """Return the rise of accuracy since the start: held-out if measured, else by the verifier."""
        # Held-out accuracy first: the training reward is what a hacked verifier raises.
        held_out = self.held_out()
        right = self.shift(self.accuracy)
        if held_out is not None:
            return held_out[1] - held_out[0]
        return 0.0 if right is None else right.now - right.start

    def has_learned(self) -> bool:
        """Return whether accuracy is so far above its start that a policy which is more certain is not a surprise."""
        return self.gain() >= self.limits.learned_gain

    @property
    def accuracy(self) -> str:
        """Return the name of the training accuracy metric; `reward/score` if the rule gives numbers."""
        logged = (name for name in ("reward/score", "reward/accuracy") if self.history.values(name))
        return next(logged, "reward/mean")

    @property
    def held_out_metric(self) -> str:
        """Return the name of the held-out accuracy metric; `eval/score` if the rule gives numbers."""
        return "eval/score" if self.history.values("eval/score") else "eval/accuracy"

    @property
    def held_out_word(self) -> str:
        """Return what that metric is called in a message."""
        return self.held_out_metric.partition("/")[2]


Detector = Callable[[DetectorInput], Finding | None]


def percent(share: float) -> str:
    """Write a share as a percentage."""
    return f"{100 * share:.3g} %"
