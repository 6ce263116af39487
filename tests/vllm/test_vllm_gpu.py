"""vLLM on a GPU: log-probs in bf16, new weights, LoRA, memory that sleep gives back, ten steps, resume."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.vllm import vllm_models as small
from trimtab.config import RolloutConfig
from trimtab.policy import Policy, load_policy
from trimtab.rollout import vllm as module
from trimtab.rollout.vllm import VllmSampler
from trimtab.train.build import build_sampler

pytest.importorskip("vllm", reason="vLLM is not installed", exc_type=ImportError)
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # vLLM warns about its own code

GIB = 1 << 30
KV_CACHE = 2 * GIB
ROUNDING = 0.25  # nats: the largest difference of a token's log-prob in bf16; stale weights differ by several


def rollout(**changes: object) -> RolloutConfig:
    """Return a rollout config whose engine starts quickly."""
    return small.rollout(vllm_options={"kv_cache_memory_bytes": KV_CACHE, "enforce_eager": True}, **changes)


def free_bytes() -> int:
    """Return the GPU's free memory, with torch's cache given back."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(str(small.save_model(tmp_path_factory.mktemp("gpu"))), device="cuda", precision="bf16")


@pytest.fixture(scope="module")
def sampler(policy: Policy) -> Iterator[VllmSampler]:
    made = build_sampler(policy, rollout())
    assert isinstance(made, VllmSampler) and made._sleeps
    yield made
    made._wake_up()  # memory that sleeps cannot be freed
    module._running.pop().llm_engine.engine_core.shutdown()


def test_log_probs_are_the_trainers_to_rounding_and_new_weights_take_effect(
    policy: Policy, sampler: VllmSampler
) -> None:
    prompts = small.prompts(policy, [*small.PROMPTS, small.LONG])
    before = sampler.sample(prompts, 0, small.OPTIONS)
    assert small.mismatch(policy, prompts, before) < ROUNDING
    move(policy)
    assert small.mismatch(policy, prompts, before) > 4 * ROUNDING
    assert small.mismatch(policy, prompts, sampler.sample(prompts, 0, small.OPTIONS)) < ROUNDING


def test_sleep_gives_the_kv_cache_back(policy: Policy, sampler: VllmSampler) -> None:
    asleep = free_bytes()
    sampler._wake_up()
    awake = free_bytes()
    sampler._sleep()
    assert asleep - awake >= 0.9 * KV_CACHE
    assert free_bytes() >= asleep - GIB // 8


def test_the_same_seed_gives_the_same_samples(policy: Policy, sampler: VllmSampler) -> None:
    first = sampler.sample(small.prompts(policy), 3, small.OPTIONS)
    assert sampler.sample(small.prompts(policy), 3, small.OPTIONS) == first


def test_ten_steps_and_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = train(["--out", str(tmp_path / "whole")], settings(tmp_path) | {"run.steps": "10"}, tmp_path / "whole")
    assert len(whole) == 10 and all(record["sampler/mismatch_mean"] < ROUNDING / 4 for record in whole)
    train(["--out", str(tmp_path / "parts")], settings(tmp_path) | {"run.steps": "5"}, tmp_path / "parts")
    parts = train(["--resume", str(tmp_path / "parts")], {"run.steps": "10"}, tmp_path / "parts")
    for name in ("tokens/count", "reward/mean", "sampler/mismatch_mean", "update/grad_norm"):
        assert [record[name] for record in parts[5:]] == pytest.approx([record[name] for record in whole[5:]], rel=0.02)


def test_lora_is_sampled_with_merged_weights(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    changes = {"model.lora_rank": "4", "update.lr": "0.03", "run.steps": "5"}  # stale weights would soon show
    steps = train(["--out", str(tmp_path / "run")], settings(tmp_path) | changes, tmp_path / "run")
    assert len(steps) == 5 and all(record["sampler/mismatch_mean"] < ROUNDING / 4 for record in steps)


def settings(folder: Path) -> dict[str, str]:
    """Return the settings of a short run from a model that is saved in the folder."""
    return {
        "model.path": str(small.save_model(folder / "start")),
        "model.precision": "bf16",
        "run.device": "cuda",
        "rollout.engine": "vllm",
        "rollout.vllm_options": f"{{kv_cache_memory_bytes = {KV_CACHE}, enforce_eager = true}}",
        "rollout.batch_size": "64",
        "rollout.prompts": "8",
        "rollout.samples": "4",
        "rollout.max_new_tokens": "6",
        "reward.overlong_buffer": "6",
        "update.lr": "3e-4",
        "warm_start.steps": "0",
        "run.checkpoint_every": "5",
        "run.eval_every": "0",
        "run.report": "false",
    }


def train(words: list[str], changes: dict[str, str], folder: Path) -> list[dict[str, float]]:
    """Run `trimtab train` in a process of its own, and return the metrics of every step after the start.

    Sleep mode allows one engine in a process.
    """
    given = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-P", "-m", "trimtab", "train", *words, "--quiet", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["step"] > 0]


@torch.no_grad()
def move(policy: Policy) -> None:
    """Add noise to all weights."""
    noise = torch.Generator(device="cuda").manual_seed(0)
    for weight in policy.model.parameters():
        weight.add_(torch.randn(weight.shape, generator=noise, device="cuda") * 0.2)
