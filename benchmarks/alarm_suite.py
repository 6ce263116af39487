"""The runs that alarms are measured on: healthy runs of addition, and runs with faults.

A `Scenario` is a recipe's settings and, for faults that no recipe can have, a `sabotage`: a context that changes the
trainer's own parts while the run lasts.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any
from unittest.mock import patch

from trimtab.data import PromptTokens, Response, Sample, SamplingOptions
from trimtab.grading import Verdict
from trimtab.objectives.rules import stare
from trimtab.trainer.config import Config, load
from trimtab.trainer.train import rollouts, trainer
from trimtab.trainer.train.build import build_sampler

Settings = dict[str, Any]

TUNING, REPORTING = (0, 1), (2, 3, 4)  # thresholds are tuned on the first seeds and reported on the others
HEALTHY_STEPS, FAULTY_STEPS = 200, 150
# The recipe's warm start and learning rate are those of the published figures: thresholds were tuned on them.
BASE: Settings = {
    "warm_start.batch_size": 64,
    "warm_start.lr": 5e-3,
    "warm_start.target_accuracy": 0.4,
    "warm_start.eval_every": 50,
    "update.lr": 3e-4,
    "update.warmup_steps": 0,
    "run.eval_every": 10,
    "run.eval_problems": 200,
    "run.checkpoint_every": 0,
    "run.patience": 0,
    "run.threads": 1,
    "run.device": "cpu",
    "record.enabled": False,
}
NO_CLIP: Settings = {"objective.clip_low": 1e6, "objective.clip_high": 1e6, "objective.dual_clip": "none"}
FAST: Settings = {"update.lr": 1e-3, "update.warmup_steps": 20}  # so that the fault shows within the run
LONG: Settings = {"rollout.max_new_tokens": 10, "run.steps": 80, **FAST}
RAMP: Settings = {"update.warmup_steps": 150}  # a fault that grows, so that an alarm can come before the collapse

Sabotage = Callable[[], AbstractContextManager[Any]]
Reward = Callable[[Sample], float]


@dataclass(frozen=True)
class Scenario:
    """A kind of run: its description, its settings over the recipe's, and what is patched in the trainer."""

    name: str
    description: str
    settings: Settings
    sabotage: Sabotage = nullcontext
    healthy: bool = False

    def config(self, seed: int) -> Config:
        """Return the recipe of its run with a seed."""
        steps = HEALTHY_STEPS if self.healthy else FAULTY_STEPS
        table = {"objective.name": "dapo", **BASE, "run.steps": steps, **self.settings, "run.seed": seed}
        return load("addition", [f"{key}={_toml(value)}" for key, value in table.items()])


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _healthy(name: str, **settings: Any) -> Scenario:
    named = {key.replace("_", ".", 1): value for key, value in settings.items()}
    return Scenario(f"healthy_{name}", "a run as it should be", named, healthy=True)


# --- what is patched in the trainer


def graded_by(reward: Reward) -> Sabotage:
    """Grade training responses by another verifier; held-out ones keep the true one."""

    def context() -> AbstractContextManager[Any]:
        original = rollouts.sample_and_grade

        def regrade(trainer: Any, problems: Any, step: int, *more: Any) -> list[list[Sample]]:
            groups = original(trainer, problems, step, *more)
            if step < 0:  # an evaluation
                return groups
            return [[_regraded(response, reward(response)) for response in group] for group in groups]

        return patch.object(rollouts, "sample_and_grade", regrade)

    return context


def _regraded(response: Sample, reward: float) -> Sample:
    return replace(response, reward=reward, verdict=Verdict("correct" if reward >= 1 else "wrong", response.text))


def coin(response: Sample) -> float:
    """Reward at random."""
    return float(random.Random(f"{response.group} {response.response.sample} {response.text}").random() < 0.5)


def trailing_zero(response: Sample) -> float:
    """Accept whatever ends in 0: a verifier that can be hacked."""
    return float(response.verdict.kind == "correct" or response.text.strip().endswith("0"))


def long_answer(response: Sample) -> float:
    """Reward right answers, and length."""
    return float(response.verdict.kind == "correct") + len(response.response.tokens) / 10


def repeating(response: Sample) -> float:
    """Reward right answers, and each token that repeats the one before it."""
    tokens: list[int] = response.response.tokens.tolist()
    return float(response.verdict.kind == "correct") + sum(a == b for a, b in pairwise(tokens)) / 4


def surprising(response: Sample) -> float:
    """Reward right answers, and half a point per nat of surprisal."""
    return float(response.verdict.kind == "correct") - fmean(response.response.logp) / 2


def certain(response: Sample) -> float:
    """Reward confidence alone."""
    return 1 + fmean(response.response.logp)


@dataclass
class Detuned:
    """A sampler with another temperature than the trainer assumes."""

    sampler: Any
    factor: float

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """Sample at the scaled temperature; greedy decoding stays as it is."""
        return self.sampler.sample(prompts, step, replace(options, temperature=options.temperature * self.factor))  # type: ignore[no-any-return]


@dataclass
class Noisy:
    """A sampler whose log-probabilities have noise, as those of a low-precision format have, growing by a factor."""

    sampler: Any
    noise: float
    growth: float = 1.0

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """Sample, and add noise to the log-probabilities."""
        rng = random.Random(step)
        noise = self.noise * self.growth ** max(0, step)
        return [
            [replace(r, logp=[min(lp + rng.gauss(0, noise), 0.0) for lp in r.logp]) for r in group]
            for group in self.sampler.sample(prompts, step, options)
        ]


@dataclass
class Stale:
    """A sampler with stale weights: it gets the trainer's only every `every` steps."""

    sampler: Any
    every: int
    stale: Any = None
    since: int = -1

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """Sample with the stale weights; held-out evaluation (greedy) uses the trainer's."""
        if options.temperature == 0:
            return self.sampler.sample(prompts, step, options)  # type: ignore[no-any-return]
        if self.stale is None or step - self.since >= self.every:
            self.stale, self.since = replace(self.sampler, model=copy.deepcopy(self.sampler.model)), step
        return self.stale.sample(prompts, step, options)  # type: ignore[no-any-return]


@dataclass
class Frozen(Stale):
    """A sampler that gets no new weights from a step on, as if their transfer had broken."""

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """Sample with the trainer's weights up to that step, then with those of that step."""
        if step < self.every:
            return self.sampler.sample(prompts, step, options)  # type: ignore[no-any-return]
        self.since = step  # never renewed
        return super().sample(prompts, step, options)


@dataclass
class Drifting:
    """A sampler whose temperature moves away from the trainer's step by step."""

    sampler: Any
    per_step: float

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """Sample at the temperature of the step; greedy decoding stays as it is."""
        factor = 1 + self.per_step * max(0, step)
        return Detuned(self.sampler, factor).sample(prompts, step, options)


def sampled_by(wrap: Callable[[Any], Any]) -> Sabotage:
    """Wrap the run's sampler."""

    def context() -> AbstractContextManager[Any]:
        return patch.object(trainer, "build_sampler", lambda policy, rollout: wrap(build_sampler(policy, rollout)))

    return context


@contextmanager
def reversed_stare() -> Iterator[None]:
    """Reverse STARE: boost what lowers the entropy, damp what raises it."""
    with patch.dict(stare.STARE_VARIANTS, {"O1": (("U+", "L-"), ("L+", "U-"))}):
        yield


@contextmanager
def cut_short() -> Iterator[None]:
    """Truncate training responses after two tokens, of the three or four that they need."""
    original = Config.sampling_options

    def options(config: Config, samples: int, temperature: float | None = None) -> SamplingOptions:
        return replace(original(config, samples, temperature), max_new_tokens=2)

    with patch.object(Config, "sampling_options", options):
        yield


FAULTY = [
    Scenario("lr_high", "learning rate 30 times too high from the first step", {"update.lr": 1e-2}),
    Scenario("lr_ramp", "learning rate that rises to 25 times too high", {"update.lr": 8e-3, **RAMP}),
    Scenario(
        "lr_ramp_stapo",
        "the same under STAPO",
        {"objective.name": "stapo", "objective.tau_p": 0.2, "update.lr": 8e-3, **RAMP},
    ),
    Scenario(
        "off_policy",
        "16 updates per step and no clip, learning rate rising",
        {"update.per_step": 16, "update.lr": 3e-3, **NO_CLIP, **RAMP},
    ),
    Scenario(
        "no_clip",
        "8 updates per step and no clip, learning rate rising",
        {"update.per_step": 8, "update.lr": 4e-3, **NO_CLIP, **RAMP},
    ),
    Scenario("surprise", "an entropy bonus in the reward", FAST, graded_by(surprising)),
    Scenario("confidence", "a reward for being certain", FAST, graded_by(certain)),
    Scenario("random_reward", "rewards by chance", FAST, graded_by(coin)),
    Scenario("always_right", "a verifier that finds everything right", {}, graded_by(lambda response: 1.0)),
    Scenario("hackable", "a verifier that passes whatever ends in 0", {}, graded_by(trailing_zero)),
    Scenario(
        "rare_mask",
        "every rare rewarded token silenced, whatever its entropy",
        {"objective.name": "stapo", "objective.mask": "rare", "objective.tau_p": 0.5},
    ),
    Scenario(
        "entropy_bonus",
        "an entropy bonus on the advantage without its cap",
        {"objective.name": "entropy_advantage", "objective.coef": 4.0, "objective.entropy_cap": 100.0, **FAST},
    ),
    Scenario(
        "stare_reversed",
        "STARE with its signs turned",
        {"objective.name": "stare", "objective.boost": 2.0, "objective.damp": 0.2, "objective.gate": "none", **FAST},
        reversed_stare,
    ),
    Scenario(
        "stare_overdriven",
        "STARE with boost 10 and no gate",
        {"objective.name": "stare", "objective.boost": 10.0, "objective.gate": "none", **FAST},
    ),
    Scenario(
        "temperature",
        "the sampler's temperature is 1.5, the trainer believes 1",
        {},
        sampled_by(lambda sampler: Detuned(sampler, 1.5)),
    ),
    Scenario(
        "stale_sampler",
        "the sampler's weights are up to 50 steps old",
        {},
        sampled_by(lambda sampler: Stale(sampler, 50)),
    ),
    Scenario(
        "noisy_sampler",
        "the sampler's log-probabilities are off by 0.1",
        {},
        sampled_by(lambda sampler: Noisy(sampler, 0.1)),
    ),
    Scenario(
        "growing_noise",
        "the sampler's log-probabilities are off by 0.005, and by 4 % more with every step",
        {},
        sampled_by(lambda sampler: Noisy(sampler, 0.005, 1.04)),
    ),
    Scenario(
        "frozen_sampler",
        "the sampler gets no new weights from step 40 on",
        {},
        sampled_by(lambda sampler: Frozen(sampler, 40)),
    ),
    Scenario(
        "drifting_sampler",
        "the sampler's temperature rises by 0.002 with every step",
        {},
        sampled_by(lambda sampler: Drifting(sampler, 0.002)),
    ),
    Scenario("cut_short", "responses cut off before their answer is out", {}, cut_short),
    Scenario(
        "long_answer",
        "a reward for length beside the truth",
        LONG,
        graded_by(long_answer),
    ),
    Scenario(
        "repetition",
        "a reward for repeating beside the truth",
        LONG,
        graded_by(repeating),
    ),
]

HEALTHY = [
    _healthy("grpo", objective_name="grpo"),
    _healthy("dapo"),
    _healthy("dapo_fast", update_lr=6e-4, update_warmup_steps=20),
    _healthy("dapo_on_policy", update_per_step=1),
    _healthy("dapo_four_updates", update_per_step=4),
    _healthy("gspo", objective_name="gspo"),
    _healthy("stapo", objective_name="stapo", objective_tau_p=0.2),
    _healthy("sspo", objective_name="sspo"),
    _healthy("cispo", objective_name="cispo"),
]

SCENARIOS = {scenario.name: scenario for scenario in [*FAULTY, *HEALTHY]}

# Which faults each alarm is meant for; others may ring as well.
MEANT: dict[str, tuple[str, ...]] = {
    "entropy_collapse": ("confidence", "repetition", "stare_reversed"),
    "entropy_explosion": ("surprise",),
    "control": (),  # no run of the suite has trim: tests/insight/test_alarms_control.py
    "spurious_growth": ("surprise",),
    "gradient_concentration": ("rare_mask", "confidence"),
    "ratio": ("lr_high", "off_policy", "no_clip"),
    "clip": ("lr_ramp", "lr_ramp_stapo"),
    "sampler_mismatch": (
        "temperature",
        "stale_sampler",
        "noisy_sampler",
        "growing_noise",
        "frozen_sampler",
        "drifting_sampler",
    ),
    "effective_samples": ("frozen_sampler", "off_policy", "no_clip"),
    "no_signal": ("always_right", "lr_high"),
    "rule_errors": (),  # rings by definition: tests/train/test_failing_rules.py
    "truncation": ("cut_short", "long_answer"),
    "repetition": ("repetition",),
    "length_drift": ("long_answer", "repetition"),
    # Runs of addition have no tools: tests/insight/test_alarms_tools.py.
    **dict.fromkeys(("failing_calls", "void_turns", "calls_vanish", "tool_wait"), ()),
    "agent": (),  # nor an agent: tests/insight/test_alarms_tools.py
    "reward_hacking": ("hackable", "long_answer", "repetition", "surprise"),
    "reward_drop": ("lr_high", "lr_ramp", "lr_ramp_stapo", "off_policy", "no_clip", "hackable", "rare_mask"),
    "collapse": ("lr_high", "lr_ramp", "lr_ramp_stapo", "off_policy", "no_clip"),
}
