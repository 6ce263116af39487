"""Trainers whose samplers return prepared responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.data import Arithmetic, PromptTokens, Response, Sampler, SamplingOptions, Task
from trimtab.trainer.config import Config, parse
from trimtab.trainer.model import Policy, make_optimizer
from trimtab.trainer.train.trainer import Trainer


def small_config(**sections: dict[str, Any]) -> Config:
    """Four prompts with two responses each under STAPO, with changes by section."""
    base: dict[str, dict[str, Any]] = {
        "objective": {"name": "stapo"},
        "rollout": {"prompts": 4, "samples": 2, "max_new_tokens": 5},
    }
    return parse({key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}})


def scripted_trainer(policy: Policy, sampler: Sampler, config: Config, task: Task | None = None) -> Trainer:
    """A trainer with this sampler, by default for additions."""
    return Trainer(
        config=config,
        policy=policy,
        sampler=sampler,
        task=Arithmetic() if task is None else task,
        test_task=None,
        objective=config.build_objective(),
        optimizer=make_optimizer(policy, config.update.lr, config.update.betas, config.update.weight_decay),
    )


@dataclass
class MixedGroups:
    """A sampler of additions: every `mixed_every`th prompt gets right and wrong responses, the others wrong ones."""

    policy: Policy
    mixed_every: int
    sampled: list[int] = field(default_factory=list)

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        groups = []
        for prompt in prompts:
            self.sampled.append(prompt.number)
            a, b = self.policy.tokenizer.decode(list(prompt.ids)).rstrip("=").split("+")
            right = self.policy.encode_solution(str(int(a) + int(b)))
            wrong = self.policy.encode_solution("7" if int(a) + int(b) != 7 else "8")
            mixed = prompt.number % self.mixed_every == 0
            tokens = [right if mixed and sample % 2 else wrong for sample in range(options.samples)]
            groups.append([Response(t, [-1.0] * len(t), True, sample=n) for n, t in enumerate(tokens)])
        return groups


@dataclass
class FixedTexts:
    """A sampler that gives every prompt the same responses, one per text."""

    policy: Policy
    texts: Sequence[str]

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        tokens = [self.policy.encode_solution(text) for text in self.texts]
        return [[Response(t, [-1.0] * len(t), True, sample=n) for n, t in enumerate(tokens)] for _ in prompts]
