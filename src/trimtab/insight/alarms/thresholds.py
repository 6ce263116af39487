"""Every threshold of the alarms in one table, each with its reason.

`benchmarks/alarms.py` measures detection and false alarms on faulty and healthy runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


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
