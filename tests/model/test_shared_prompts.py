"""`update.shared_prompts`: a prompt goes through the model once for all its responses, equal up to rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.train.short_runs import recipe
from trimtab.trainer.model import Policy, Transcript, load_policy, log_probs, score, with_shared_prompts
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.trainer import RunProgress, build_trainer

# Prompts of three lengths, each with several responses, not in order; one has a tool's reply in the middle.
TRANSCRIPTS = [
    Transcript([2, 3, 4], [5, 6, 7, 1]),
    Transcript([9, 8], [1]),
    Transcript([2, 3, 4], [7, 1]),
    Transcript([5], [6, 7, 8, 9, 10], observed=((1, 3),)),
    Transcript([9, 8], [4, 4, 1]),
]
ALONE = [Transcript([2, 3], [1]), Transcript([2, 3], [4])]  # responses of one token


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=0)


@pytest.mark.parametrize("transcripts", [TRANSCRIPTS, ALONE, TRANSCRIPTS[:1]])
def test_log_probs_and_gradients_are_those_of_whole_rows(policy: Policy, transcripts: list[Transcript]) -> None:
    found = []
    for each in (policy, with_shared_prompts(policy)):
        logp = log_probs(each, transcripts, 0.7, 1000)
        grads = torch.autograd.grad((logp * torch.arange(1, len(logp) + 1)).sum(), list(policy.model.parameters()))
        found.append((logp.detach(), torch.cat([grad.flatten() for grad in grads])))
    (whole, whole_grad), (shared, shared_grad) = found
    assert len(whole) == sum(t.num_sampled for t in transcripts)
    assert torch.allclose(whole, shared, atol=1e-5)
    assert float((whole_grad - shared_grad).norm() / whole_grad.norm()) < 1e-5


def test_scores_are_those_of_whole_rows_in_any_micro_batches(policy: Policy) -> None:
    whole = score(policy, TRANSCRIPTS, 1.0, 1000, 1000)
    shared = score(with_shared_prompts(policy), TRANSCRIPTS, 1.0, 14, 3)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, shared, strict=True))


def test_steps_are_those_of_whole_rows_up_to_rounding() -> None:
    weights = []
    for value in ("false", "true"):
        trainer, progress = build_trainer(recipe({"update.shared_prompts": value, "update.lr": "1e-3"})), RunProgress()
        for _ in range(2):
            assert train_step(trainer, progress).metrics["groups/mixed_share"] > 0
        weights.append([p.detach() for p in trainer.policy.model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("setting", [{"model.gradient_checkpointing": "true"}, {"model.lora_dropout": "0.1"}])
def test_what_would_change_more_than_rounding_is_refused(setting: dict[str, str]) -> None:
    ((key, _),) = setting.items()
    with pytest.raises(ValueError, match=f"update.shared_prompts = true does not work with {key}"):
        recipe({"update.shared_prompts": "true", "model.lora_rank": "2", **setting})


def test_a_model_that_does_not_support_it_is_refused(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="it is for fp32 on a CPU"):
        with_shared_prompts(replace(policy, precision="bf16"))
    monkeypatch.setattr(policy.causal_lm.config, "sliding_window", 4)
    monkeypatch.setattr(policy.causal_lm.config, "use_sliding_window", True)
    with pytest.raises(ValueError, match="sliding window"):
        with_shared_prompts(policy)
