"""GDPO in a run: each of several rewards is normalised by itself, and the overlong penalty too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from helpers.train.scripted import FixedTexts, scripted_trainer
from trimtab.data import FixedTask, Problem
from trimtab.data.problems import user
from trimtab.objectives.advantages import compute_advantages
from trimtab.trainer.config import parse
from trimtab.trainer.model import load_policy
from trimtab.trainer.train.rollouts import collect_rollouts
from trimtab.trainer.train.scoring import Experience, score_rollouts
from trimtab.trainer.train.trainer import RunProgress

EQUALS = {"rule": "format", "options": {"texts": ["="]}, "weight": -0.25}
TEXTS = ["46", "=46", "45", "=4500"]


def experience(objective: str, texts: Sequence[str] = TEXTS, **reward: object) -> Experience:
    policy = load_policy("demo", device="cpu", seed=0)
    made = parse({
        "objective": {"name": objective},
        "rollout": {"prompts": 1, "samples": 4, "max_new_tokens": 6},
        "reward": reward,
    })  # fmt: skip
    task = FixedTask("sums", (Problem(user("12+34="), "46", "number", "sums"),))
    trainer = scripted_trainer(policy, FixedTexts(policy, texts), made, task)
    return score_rollouts(trainer, collect_rollouts(trainer, RunProgress()))


def per_response(found: Experience) -> list[float]:
    batch = found.batch
    return [float(batch.advantage[start]) for start in batch.offsets[:-1]]


def test_gdpo_gets_the_rewards_and_their_weights() -> None:
    found = experience("gdpo", terms={"equals": EQUALS})
    columns = torch.tensor([[each.terms["task"], each.terms["equals"]] for each in found.rollouts.responses])
    assert sorted(columns.tolist()) == [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    expected = compute_advantages("decoupled_whitened", columns, [0] * 4, weights=[1.0, -0.25])
    assert per_response(found) == pytest.approx(expected.tolist())


def test_the_overlong_penalty_is_a_reward_of_its_own() -> None:
    found = experience("gdpo(whiten=false)", terms={"equals": EQUALS}, overlong_buffer=3, overlong_factor=0.5)
    responses = found.rollouts.responses
    columns = torch.tensor([[
        each.terms["task"], each.terms["equals"], min(0.0, -(each.response.num_sampled - 3) / 3) * 0.5
    ] for each in responses])  # fmt: skip
    assert columns[:, 2].min() < 0
    expected = compute_advantages("decoupled", columns, [0] * 4, weights=[1.0, -0.25, 1.0])
    assert per_response(found) == pytest.approx(expected.tolist(), abs=1e-3)


def test_with_one_reward_gdpo_has_grpos_advantages() -> None:
    assert per_response(experience("gdpo(whiten=false)")) == per_response(experience("grpo"))
