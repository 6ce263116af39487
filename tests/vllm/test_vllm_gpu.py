"""vLLM on a GPU: log-probs in bf16, new weights, LoRA, memory that sleep gives back, ten steps, resume.

A process with vLLM takes about a minute to start, so all start at once. Only one of them sleeps at a time: vLLM asserts
that the GPU has more free memory after it fell asleep, and others could have taken it meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from helpers.vllm import vllm_models as small
from trimtab.trainer.config import RolloutConfig
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.sampling.vllm import VllmSampler
from trimtab.trainer.train.build import build_sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # vLLM warns about its own code
    # Not imported here: the processes below start half a minute earlier.
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

GIB = 1 << 30
KV_CACHE = 8 * GIB  # of the engine that sleeps: more than the others take within a moment
ROUNDING = 0.25  # nats: the largest difference of a token's log-prob in bf16; stale weights differ by several
LIMIT = 300  # seconds of a process

# `python -m trimtab`, which has vLLM imported when its standard input is closed.
TRIMTAB = """
import runpy, sys
from trimtab.trainer.sampling.vllm import import_vllm
import_vllm()
sys.stdin.read()
runpy.run_module("trimtab", run_name="__main__", alter_sys=True)
"""


@dataclass
class Run:
    """`trimtab train` in a process of its own: sleep mode allows one engine in a process."""

    folder: Path
    log: Path
    process: subprocess.Popen[bytes]

    def steps(self) -> list[dict[str, float]]:
        """Let the run begin if it waits, and return the metrics of every step after the start."""
        try:
            self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.stop()
        assert self.process.returncode == 0, self.log.read_text()[-5000:]
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [record for record in records if record["step"] > 0]

    def stop(self) -> None:
        """End the process; its memory is free afterwards."""
        with self.process:
            self.process.kill()


@pytest.fixture(scope="module", autouse=True)
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """The runs; the resumed one has yet to begin."""
    root = tmp_path_factory.mktemp("runs")
    awake = settings(root) | {"rollout.vllm_options": options(GIB // 4, sleeps=False)}
    lora = {"model.lora_rank": "4", "update.lr": "0.03", "run.steps": "5"}  # stale weights would soon show
    resume = {"run.steps": "10", "rollout.vllm_options": options(KV_CACHE, sleeps=True)}
    begun = {
        "whole": start(root / "whole", "--out", awake | {"run.steps": "10"}),
        "parts": start(root / "parts", "--out", awake | {"run.steps": "5"}),
        "resumed": start(root / "parts", "--resume", resume, waits=True),
    }
    if find_spec("peft"):
        begun["LoRA"] = start(root / "LoRA", "--out", awake | lora)
    yield begun
    for run in begun.values():
        run.stop()


def start(folder: Path, word: str, changes: dict[str, str], waits: bool = False) -> Run:
    """Start a process for a run in a folder."""
    given = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    recipe = ["addition"] if word == "--out" else []
    command = [sys.executable, "-P", "-c", TRIMTAB, "train", *recipe, word, str(folder), "--quiet", *given]
    log = folder.with_suffix(f".{word.strip('-')}.log")
    with log.open("wb") as output:
        stdin = subprocess.PIPE if waits else subprocess.DEVNULL
        return Run(folder, log, subprocess.Popen(command, stdin=stdin, stdout=output, stderr=subprocess.STDOUT))


def options(kv_cache: int, sleeps: bool) -> str:
    """Return vLLM's options of a run, whose engine starts quickly; memory that is set is not profiled."""
    return f"{{kv_cache_memory_bytes = {kv_cache}, enforce_eager = true, enable_sleep_mode = {str(sleeps).lower()}}}"


def settings(folder: Path) -> dict[str, str]:
    """Return the settings of a short run from a model that is saved in the folder."""
    return {
        "model.path": str(small.save_model(folder / "start")),
        "model.precision": "bf16",
        "run.device": "cuda",
        "rollout.engine": "vllm",
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
def sampler(policy: Policy) -> VllmSampler:
    """A sampler in this process; its engine is never shut down, as in a run: vLLM hung in it, or took very long."""
    made = build_sampler(policy, rollout())
    assert isinstance(made, VllmSampler) and made._sleeps
    return made


def test_log_probs_are_the_trainers_to_rounding_and_new_weights_take_effect(
    policy: Policy, sampler: VllmSampler
) -> None:
    prompts = small.prompts(policy, [*small.PROMPTS, small.LONG])
    before = sampler.sample(prompts, 0, small.OPTIONS)
    assert small.mismatch(policy, prompts, before) < ROUNDING
    move(policy)
    assert small.mismatch(policy, prompts, before) > 4 * ROUNDING
    assert small.mismatch(policy, prompts, sampler.sample(prompts, 0, small.OPTIONS)) < ROUNDING


def test_the_same_seed_gives_the_same_samples(policy: Policy, sampler: VllmSampler) -> None:
    first = sampler.sample(small.prompts(policy), 3, small.OPTIONS)
    assert sampler.sample(small.prompts(policy), 3, small.OPTIONS) == first


def test_ten_steps_and_a_resumed_run_equals_an_uninterrupted_one(runs: dict[str, Run]) -> None:
    whole = runs["whole"].steps()
    assert len(whole) == 10 and all(record["sampler/mismatch_mean"] < ROUNDING / 4 for record in whole)
    assert len(runs["parts"].steps()) == 5
    parts = runs["resumed"].steps()  # its engine sleeps between rollouts
    for name in ("tokens/count", "reward/mean", "sampler/mismatch_mean", "update/grad_norm"):
        assert [record[name] for record in parts[5:]] == pytest.approx([record[name] for record in whole[5:]], rel=0.02)


def test_lora_is_sampled_with_merged_weights(runs: dict[str, Run]) -> None:
    pytest.importorskip("peft")
    steps = runs["LoRA"].steps()
    assert len(steps) == 5 and all(record["sampler/mismatch_mean"] < ROUNDING / 4 for record in steps)


def test_sleep_gives_the_kv_cache_back(policy: Policy, sampler: VllmSampler, runs: dict[str, Run]) -> None:
    for run in runs.values():
        run.stop()  # the GPU's memory is compared
    asleep = free_bytes()
    sampler._wake_up()
    awake = free_bytes()
    sampler._sleep()
    assert asleep - awake >= 0.9 * KV_CACHE
    assert free_bytes() >= asleep - GIB // 8


@torch.no_grad()
def move(policy: Policy) -> None:
    """Add noise to all weights."""
    noise = torch.Generator(device="cuda").manual_seed(0)
    for weight in policy.model.parameters():
        weight.add_(torch.randn(weight.shape, generator=noise, device="cuda") * 0.2)
