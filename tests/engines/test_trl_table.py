"""What TRL calls what: the lines of the table in docs/trl.md, run by TRL's trainer and by ours, to the same weights.

The second pass over each rollout is off-policy, so that clips, caps and ratios have something to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed here: `make test-engines` runs these tests")

import torch
import trl

from helpers.engines import trl_runs
from helpers.engines.trl_worker import known_rollout
from trimtab.engines.trl.options import REPLACED
from trimtab.objectives import TokenBatch
from trimtab.trainer.config import build_objective

# TRL's options, and the objective that says the same.
SAME = {
    "dapo": ({"loss_type": "dapo"}, "dapo(clip_low=0.2, clip_high=0.2, dual_clip=none)"),
    "clip-higher": ({"loss_type": "dapo", "epsilon_high": 0.28}, "dapo(dual_clip=none)"),
    "delta": ({"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.5}, "dapo(dual_clip=1.5)"),
    "grpo": ({"loss_type": "grpo"}, "grpo"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, "dr_grpo(length=4)"),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.28}, "cispo(upper_only=true, clip_high=0.28)"),
    "sapo": ({"loss_type": "sapo"}, "sapo"),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        "gspo",
    ),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        "luspo",
    ),
    "vespo": ({"loss_type": "vespo"}, "vespo"),
    "corrected kl": (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
        "grpo + kl(coef=0.1, corrected=true)",
    ),
    "kl": ({"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}, "grpo + kl(coef=0.1)"),
}
# A large step, so that the second pass is far from the first.
STEPS: dict[str, Any] = {
    "optim": "sgd",
    "learning_rate": 0.3,
    "max_grad_norm": 0.0,
    "max_steps": 2,
    "num_iterations": 2,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model on the disk: TRL loads its reference from there."""
    folder = tmp_path_factory.mktemp("model")
    model = trl_runs.warm_model(60)
    model.save_pretrained(folder)
    return str(folder)


def loaded(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def trls_own(folder: Path, options: dict[str, Any], model: Any) -> Any:
    """TRL's trainer with TRL's loss, on the same rollouts."""
    ours = trl_runs.config(folder, **STEPS)
    settings = {name: getattr(ours, name) for name in trl.GRPOConfig.__dataclass_fields__ if name not in REPLACED}
    given = {**settings, "generation_batch_size": None, **options, "vllm_importance_sampling_correction": False}
    args = trl.GRPOConfig(**{k: v for k, v in given.items() if not k.startswith("_") and _settable(k)})
    return trl_runs.trainer(model, args, kind=trl.GRPOTrainer, rollout_func=known_rollout)


def _settable(name: str) -> bool:
    return trl.GRPOConfig.__dataclass_fields__[name].init


@pytest.mark.parametrize("line", SAME)
def test_the_objective_of_a_line_updates_as_trl_does(line: str, model_folder: str, tmp_path: Path) -> None:
    options, name = SAME[line]
    scaling = "none" if line == "dr_grpo" else "group"
    theirs, mine = loaded(model_folder), loaded(model_folder)
    start = trl_runs.weights(mine)
    trls_own(tmp_path / "theirs", {**options, "scale_rewards": scaling}, theirs).train()
    args = trl_runs.config(tmp_path / "mine", **STEPS, objective=name, advantage="trl", scale_rewards=scaling)
    trainer = trl_runs.trainer(mine, args, rollout_func=known_rollout)
    trainer.train()
    for key, value in trl_runs.weights(theirs).items():
        assert torch.allclose(trl_runs.weights(mine)[key], value, rtol=0, atol=2e-6), key
    assert max(float((value - start[key]).abs().max()) for key, value in trl_runs.weights(mine).items()) > 1e-3
    if line not in ("sapo", "kl", "corrected kl", "dr_grpo", "cispo", "vespo"):
        assert max(trl_runs.logged(trainer, "update/clip_share")) > 0, "nothing was clipped: this proves little"


@pytest.mark.parametrize("advantage", [1.5, -0.5])
@pytest.mark.parametrize("options", [{}, {"k_pos": 0.7, "lambda_pos": 0.2, "k_neg": 1.0, "lambda_neg": 5.0}])
def test_vespo_weights_responses_as_trl_does_however_far_they_have_moved(
    advantage: float, options: dict[str, float]
) -> None:
    moves = torch.tensor([-40.0, -19.0, -3.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 3.0, 19.0, 40.0])
    log_ratio = torch.stack([moves, moves / 2, torch.zeros_like(moves)], 1)
    mask = torch.ones_like(log_ratio)
    mask[::2, 2] = 0
    advantages = torch.full((len(moves), 1), advantage)
    wanted = trl.GRPOTrainer.get_gamma_weights(advantages, log_ratio, mask, None, **options)
    old = torch.full_like(log_ratio, -50.0)
    batch = TokenBatch.from_padded(mask, old_logp=old, advantage=advantages.squeeze(1))
    objective = build_objective({"name": "vespo", **options})
    _, gradient = objective.loss_and_grad(batch.pack(old + log_ratio), objective.plan(batch))
    found = batch.unpack(gradient) * batch.tokens / -advantage
    torch.testing.assert_close(found, wanted * mask, rtol=1e-4, atol=1e-6)
