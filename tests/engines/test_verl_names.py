"""What verl calls what: its own losses and ours on the same tokens, as the table in docs/verl.md says."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from helpers.engines.verl_batches import as_minibatch, new_log_probs, random_batch, with_plan
from trimtab.engines.verl.planning import PlannedLoss
from trimtab.objectives import TokenBatch
from trimtab.trainer.config import build_objective

DOC = Path(__file__).parents[2] / "docs" / "verl.md"
SEED = 50  # no row of this batch is padding
PAIRS: list[tuple[dict[str, Any], str]] = [
    ({}, "dapo(clip_low=0.2, clip_high=0.2, dual_clip=3.0)"),
    ({"clip_ratio_high": 0.28, "clip_ratio_c": 10.0}, "dapo"),
    ({"clip_ratio_high": 0.28, "clip_ratio_c": 10.0}, "justrl"),
    ({"loss_agg_mode": "seq-mean-token-mean"}, "grpo(dual_clip=3.0)"),
    ({"loss_agg_mode": "seq-mean-token-sum"}, "dapo(clip_high=0.2, dual_clip=3.0, aggregation=seq-mean-token-sum)"),
    ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 100}, "dr_grpo(length=100.0, dual_clip=3.0)"),
    (
        {"loss_mode": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
        "gspo",
    ),
    ({"loss_mode": "cispo", "clip_ratio_high": 0.28}, "cispo"),
    ({"loss_mode": "dppo_tv", "clip_ratio_c": 20.0}, "dppo"),
    (
        {"loss_mode": "dppo_kl", "clip_ratio_low": 0.02, "clip_ratio_high": 0.03},
        "dppo(divergence=kl, shift_low=0.02, shift_high=0.03, cap=3.0)",
    ),
    ({"loss_mode": "sapo", "loss_agg_mode": "seq-mean-token-mean"}, "sapo"),
    ({"loss_mode": "gpg"}, "reinforce"),
    ({"loss_mode": "geo_mean", "clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, "gmpo"),
    ({"use_kl_loss": True, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0}, "dapo + kl(coef=0.001)"),
]


def gradient(loss: Any, part: TensorDict) -> torch.Tensor:
    flat = new_log_probs(part, SEED)
    output = torch.nested.nested_tensor_from_jagged(flat, part["input_ids"].offsets())
    value, _ = loss(model_output={"log_probs": output}, data=part)
    (found,) = torch.autograd.grad(value, flat)
    return found


def theirs(settings: dict[str, Any], data: TensorDict) -> torch.Tensor:
    """The gradient of verl's loss on a mini-batch in one piece."""
    rest = {key: value for key, value in settings.items() if key != "loss_mode"}
    mode = PolicyLossConfig(loss_mode=settings.get("loss_mode", "vanilla"))
    config = FSDPActorConfig(
        strategy="fsdp2", policy_loss=mode, ppo_micro_batch_size_per_gpu=8, rollout_n=1, kl_loss_coef=0.001, **rest
    )
    part = as_minibatch(data, range(len(data)))
    tu.assign_non_tensor(part, global_batch_size=len(data))
    return gradient(lambda **given: ppo_loss(config, **given), part)


def ours(name: str, data: TensorDict) -> torch.Tensor:
    table = {"name": name}
    part = as_minibatch(with_plan(build_objective(table), data.copy(), len(data)), range(len(data)))
    return gradient(PlannedLoss(table), part)


@pytest.mark.parametrize(("settings", "name"), PAIRS)
def test_a_loss_of_verl_equals_our_method_for_it(settings: dict[str, Any], name: str) -> None:
    data = random_batch(SEED, tools=False)
    wanted, found = theirs(settings, data), ours(name, data)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("mode", "divergence"), [("dppo_tv", "tv"), ("dppo_kl", "kl")])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_dppo_weights_and_masks_every_token_as_verl_does(mode: str, divergence: str, advantage: float) -> None:
    p = torch.tensor([1e-9, 1e-3, 0.05, 0.3, 0.5, 0.69, 0.71, 0.9, 0.999, 1 - 1e-7, 1.0])
    old, new = (grid.reshape(1, -1).log() for grid in torch.meshgrid(p, p, indexing="ij"))
    mask, advantages = torch.ones_like(old), torch.full_like(old, advantage)
    config = FSDPActorConfig(
        strategy="fsdp2", policy_loss=PolicyLossConfig(loss_mode=mode), ppo_micro_batch_size_per_gpu=8, rollout_n=1
    )
    leaf = new.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(mode)(old, leaf, advantages, mask, "token-mean", config)
    (wanted,) = torch.autograd.grad(loss, leaf)
    objective = build_objective({"name": "dppo", "divergence": divergence, "cap": 3.0})
    batch = TokenBatch.from_padded(mask, old_logp=old, advantage=advantages)
    ours, found = objective.loss_and_grad(batch.pack(new), objective.plan(batch))
    torch.testing.assert_close(found, wanted[0])
    # verl counts tokens without advantage too, where nothing is cut.
    cut = metrics["actor/pg_clipfrac"] if advantage else 0.0
    assert ours.metrics["update/clip_share"].item() == pytest.approx(cut)
    assert 0 < metrics["actor/pg_clipfrac"] < 0.5


def test_the_table_in_the_docs_is_the_one_that_was_tested() -> None:
    rows = [line for line in DOC.read_text().splitlines() if line.endswith("| = |")]
    assert len(rows) == len(PAIRS) - 1  # dapo and justrl share a row
    for settings, name in PAIRS:
        mine = [row for row in rows if f"`{name}`" in row]
        assert len(mine) == 1, name
        told = mine[0].split("|")[1]
        assert settings.get("loss_mode", "") in told
        for key in ("loss_agg_mode", "loss_scale_factor"):
            assert key not in settings or str(settings[key]) in told, name


def test_every_option_that_is_refused_is_in_the_docs() -> None:
    text = DOC.read_text()
    told = set(re.findall(r"`(?:\w+\.)*(\w+)(?:=|`)", text)) | set(re.findall(r"(\w+)=", text))
    assert {"clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "loss_scale_factor", "entropy_coeff"} <= told
    assert {"use_kl_loss", "rollout_is", "rollout_rs"} <= told
