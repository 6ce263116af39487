"""The runs that alarms are measured on: demo runs that are healthy, and demo runs that are made to go wrong.

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

from trimtab.config import Config, load
from trimtab.objectives.rules import weights
from trimtab.rewards import Verdict
from trimtab.rollout import PromptTokens, Response, SamplingOptions
from trimtab.train import experience, loop
from trimtab.train.build import build_sampler
from trimtab.train.experience import GradedResponse

Settings = dict[str, Any]

TUNING, REPORTING = (0, 1), (2, 3, 4)  # thresholds are tuned on the first seeds and reported on the others
HEALTHY_STEPS, FAULTY_STEPS = 200, 150
BASE: Settings = {
    "run.eval_every": 10,
    "run.eval_problems": 200,
    "run.checkpoint_every": 0,
    "run.patience": 0,
    "run.threads": 1,
    "run.device": "cpu",
    "record.enabled": False,
}
NO_CLIP: Settings = {"objective.clip_low": 1e6, "objective.clip_high": 1e6, "objective.dual_clip": "none"}
FAST: Settings = {"update.lr": 1e-3, "update.warmup_steps": 20}  # so that what goes wrong does so within the run
LONG: Settings = {"rollout.max_new_tokens": 10, "run.steps": 80, **FAST}
RAMP: Settings = {"update.warmup_steps": 150}  # a fault that grows, so that there is something to see coming

Sabotage = Callable[[], AbstractContextManager[Any]]
Reward = Callable[[GradedResponse], float]


@dataclass(frozen=True)
class Scenario:
    """A kind of run: what it stands for, its settings over the demo's, and what is done to the trainer."""

    name: str
    says: str
    settings: Settings
    sabotage: Sabotage = nullcontext
    healthy: bool = False

    def config(self, seed: int) -> Config:
        """The recipe of its run with a seed."""
        steps = HEALTHY_STEPS if self.healthy else FAULTY_STEPS
        table = {"objective.name": "dapo", **BASE, "run.steps": steps, **self.settings, "run.seed": seed}
        return load("demo", [f"{key}={_toml(value)}" for key, value in table.items()])


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _healthy(name: str, **settings: Any) -> Scenario:
    named = {key.replace("_", ".", 1): value for key, value in settings.items()}
    return Scenario(f"healthy_{name}", "the demo as it should be", named, healthy=True)


# --- what is done to the trainer


def graded_by(reward: Reward) -> Sabotage:
    """Training responses are graded by another verifier; held-out ones by the true one."""

    def context() -> AbstractContextManager[Any]:
        whole = experience.answer_problems

        def answers(*given: Any) -> list[list[GradedResponse]]:
            return [[_regraded(answer, reward(answer)) for answer in group] for group in whole(*given)]

        return patch.object(experience, "answer_problems", answers)

    return context


def _regraded(answer: GradedResponse, reward: float) -> GradedResponse:
    return replace(answer, reward=reward, verdict=Verdict("correct" if reward >= 1 else "wrong", answer.text))


def coin(answer: GradedResponse) -> float:
    """A verdict by chance."""
    return float(random.Random(f"{answer.group} {answer.response.sample} {answer.text}").random() < 0.5)


def trailing_zero(answer: GradedResponse) -> float:
    """A verifier that can be fooled: whatever ends in 0 passes."""
    return float(answer.verdict.kind == "correct" or answer.text.strip().endswith("0"))


def long_answer(answer: GradedResponse) -> float:
    """Pays for the truth, and by the token."""
    return float(answer.verdict.kind == "correct") + len(answer.response.tokens) / 10


def repeating(answer: GradedResponse) -> float:
    """Pays for the truth, and for each token that repeats the one before it."""
    tokens = answer.response.tokens
    return float(answer.verdict.kind == "correct") + sum(a == b for a, b in pairwise(tokens)) / 4


def surprising(answer: GradedResponse) -> float:
    """Pays for the truth, and half a point per nat of surprise."""
    return float(answer.verdict.kind == "correct") - fmean(answer.response.logp) / 2


def certain(answer: GradedResponse) -> float:
    """Pays for certainty alone."""
    return 1 + fmean(answer.response.logp)


@dataclass
class Detuned:
    """A sampler that draws at another temperature than the trainer believes."""

    sampler: Any
    factor: float

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """As asked, but hotter; greedy answers stay as they are."""
        return self.sampler.sample(prompts, step, replace(options, temperature=options.temperature * self.factor))  # type: ignore[no-any-return]


@dataclass
class Noisy:
    """A sampler whose log-probabilities are off by chance, as those of a coarse number format are."""

    sampler: Any
    noise: float

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """As asked, with noise on what it says of its tokens."""
        rng = random.Random(step)
        return [
            [replace(r, logp=[min(lp + rng.gauss(0, self.noise), 0.0) for lp in r.logp]) for r in group]
            for group in self.sampler.sample(prompts, step, options)
        ]


@dataclass
class Stale:
    """A sampler whose weights stay behind: it gets the trainer's only every so many steps."""

    sampler: Any
    every: int
    behind: Any = None
    since: int = -1

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """Drawn with old weights; held-out answers (greedy) with the trainer's."""
        if options.temperature == 0:
            return self.sampler.sample(prompts, step, options)  # type: ignore[no-any-return]
        if self.behind is None or step - self.since >= self.every:
            self.behind, self.since = replace(self.sampler, model=copy.deepcopy(self.sampler.model)), step
        return self.behind.sample(prompts, step, options)  # type: ignore[no-any-return]


def sampled_by(wrap: Callable[[Any], Any]) -> Sabotage:
    """Another sampler around the run's own."""

    def context() -> AbstractContextManager[Any]:
        return patch.object(loop, "build_sampler", lambda policy: wrap(build_sampler(policy)))

    return context


@contextmanager
def reversed_stare() -> Iterator[None]:
    """STARE with its signs turned: what lowers the entropy is boosted, what raises it damped."""
    with patch.dict(weights.STARE_VARIANTS, {"O1": (("U+", "L-"), ("L+", "U-"))}):
        yield


@contextmanager
def cut_short() -> Iterator[None]:
    """Training responses are cut off after two tokens, of the three or four that they need."""
    whole = Config.sampling_options

    def options(config: Config, samples: int, temperature: float | None = None) -> SamplingOptions:
        return replace(whole(config, samples, temperature), max_new_tokens=2)

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
    Scenario("always_right", "a verifier that finds everything right", {}, graded_by(lambda answer: 1.0)),
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

# Which faults each alarm is meant for; that others ring too is welcome.
MEANT: dict[str, tuple[str, ...]] = {
    "entropy_collapse": ("confidence", "repetition", "stare_reversed"),
    "entropy_explosion": ("surprise",),
    "spurious_growth": ("surprise",),
    "gradient_concentration": ("rare_mask", "confidence"),
    "ratio": ("lr_high", "off_policy", "no_clip"),
    "clip": ("lr_ramp", "lr_ramp_stapo"),
    "sampler_mismatch": ("temperature", "stale_sampler", "noisy_sampler"),
    "no_signal": ("always_right", "lr_high"),
    "truncation": ("cut_short", "long_answer"),
    "repetition": ("repetition",),
    "length_drift": ("long_answer", "repetition"),
    "reward_hacking": ("hackable", "long_answer", "repetition", "surprise"),
    "reward_drop": ("lr_high", "lr_ramp", "lr_ramp_stapo", "off_policy", "no_clip", "hackable", "rare_mask"),
}
