"""verl with vLLM on one GPU under trimtab: a few steps of `main_ppo` on Ray with FSDP2, killed once and resumed.

The model has random weights in the shape of SmolLM2-135M. All responses have their full length, so the tokens of a step
are those of `step.py --only fixed`. Steps are timed by verl itself (`timing_s`). Of the start `stages` has the seconds,
and a part that does not get as far as it should leaves the end of verl's log.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from made_models import save_made_model
from result_file import about, save
from verl_run import TAIL, logged, run

# What processes import a minute or two into a run. Imported first: a missing package is known at once, and their
# bytecode is cached.
IMPORTS = (
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "vllm.v1.worker.gpu_worker",
)
PROMPT_TOKENS = 128
REWARD = """
import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return zlib.crc32(solution_str.encode()) % 7 / 7
"""


def write_inputs(folder: Path, device: torch.device, problems: int) -> None:
    """Write the model, the problems and the reward of a run."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    save_made_model("135M", folder / "model", device)
    rows = [
        {
            "prompt": [{"role": "user", "content": " ".join(f"w{number * 31 + word}" for word in range(60))}],
            "data_source": "made",
            "reward_model": {"ground_truth": "", "style": "rule"},
            "extra_info": {"index": number},
        }
        for number in range(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "made.parquet")
    (folder / "reward.py").write_text(REWARD)


def model_settings(folder: Path) -> list[str]:
    """Return verl's settings of a small model without flash-attn: nothing packed, nothing recomputed, FSDP2."""
    return [
        "data.dataloader_num_workers=0",
        "data.return_raw_chat=True",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
    ]


def overrides(
    folder: Path, steps: int, prompts: int, samples: int, tokens: int, trimtab: bool, eager: bool
) -> list[str]:
    """Return verl's settings, as in scripts/verl where they apply to one GPU without flash-attn."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    micro_batch = min(64, prompts * samples)  # verl wants batches that it divides
    return [
        *(["trainer.v1.trainer_mode=trimtab", "+trimtab.objective=stapo"] if trimtab else []),
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        f"data.train_files={folder}/made.parquet",
        f"data.val_files={folder}/made.parquet",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={tokens}",
        *model_settings(folder),
        f"{actor}.ppo_mini_batch_size={prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu={micro_batch}",
        f"{actor}.use_kl_loss=False",
        f"{actor}.entropy_coeff=0",
        f"{actor}.optim.lr=1e-6",
        # Compiling takes longer than the few steps: vLLM compiles and captures graphs at every start, without a cache.
        f"{actor}.use_torch_compile={not eager}",
        f"{actor}.fsdp_config.use_torch_compile={not eager}",
        f"{rollout}.enforce_eager={eager}",
        f"{rollout}.name=vllm",
        f"{rollout}.n={samples}",
        f"{rollout}.ignore_eos=True",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization=0.3",
        f"{rollout}.max_num_seqs={prompts * samples}",
        f"{rollout}.max_num_batched_tokens=32768",
        f"{rollout}.max_model_len={PROMPT_TOKENS + tokens}",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={micro_batch}",
        f"{rollout}.agent.num_workers=1",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=99",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={folder}/checkpoints",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]


def environment(metrics: Path) -> dict[str, str]:
    """Return the environment of all processes of a run, which logs to `metrics`; trimtab need not be installed."""
    return {
        **os.environ,
        "VERL_USE_EXTERNAL_MODULES": "trimtab.engines.verl.plugin",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "VLLM_LOGGING_LEVEL": "INFO",  # verl's default hides what vLLM does while it starts
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles, for top-k and top-p, which are off here
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONWARNINGS": "ignore",
    }


def start_imports(folder: Path, modules: Sequence[str] = IMPORTS) -> subprocess.Popen[str]:
    """Start to import what a run will need, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import {', '.join(modules)}"], cwd=folder, env=environment(folder / "none.jsonl"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip


def imported(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Wait for these imports, and return how they ended."""
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        said += f"\ncut after {seconds} s"
    return {} if process.returncode == 0 else {"error": said[-TAIL:]}


def wait_for_memory(seconds: float = 40) -> None:
    """Wait until processes that were killed have given the GPU back."""
    deadline = time.monotonic() + seconds
    while torch.cuda.is_available() and time.monotonic() < deadline:
        free, total = torch.cuda.mem_get_info()
        if free > 0.9 * total:
            return
        time.sleep(1)  # until the next look at the memory


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, kill, resume, and write; return 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--limit", type=float, default=300, help="seconds of each of the two runs")
    parser.add_argument("--plain", action="store_true", help="verl's own trainer, without trimtab")
    parser.add_argument("--eager", action="store_true", help="neither vLLM nor verl compiles: starts a minute sooner")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more settings of verl")
    args = parser.parse_args(arguments)
    if args.steps < 2:
        parser.error("--steps must be 2 or more: the last one is done by the resumed run")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = about("verl with vLLM on one GPU", device, "verl", "vllm", "ray")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        measure(result, Path(name), device, args)
    print(json.dumps(result, indent=1)[-9000:])
    failed = [part for part in ("imports", "killed", "resumed") if "error" in result.get(part, {})]
    for part in failed:  # not as JSON, so that lines are lines
        print(f"\n{part}: {result[part]['error']}")
    return int(bool(failed))


def measure(result: dict[str, Any], folder: Path, device: torch.device, args: argparse.Namespace) -> None:
    """Write the inputs, run until a step has its checkpoint, kill, and resume; stop at the first part that fails."""
    start = time.monotonic()
    imports = start_imports(folder)
    write_inputs(folder, device, 4 * args.prompts)
    result["imports"] = imported(imports, args.limit) | {"seconds": round(time.monotonic() - start, 1)}
    save(result, args.out)
    if "error" in result["imports"]:
        return
    for part, kill in (("killed", args.steps - 1), ("resumed", None)):
        metrics = folder / f"{part}.jsonl"  # one for each: verl's logger empties its file at the start
        steps = args.steps if kill is None else 99
        settings = overrides(folder, steps, args.prompts, args.samples, args.tokens, not args.plain, args.eager)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings, *args.set]
        result[part] = run(command, folder, environment(metrics), metrics, kill, args.limit)
        result[part]["steps"] = [
            {key: value for key, value in step.items() if key.startswith(("timing_s/", "training/", "trimtab"))}
            for step in logged(metrics)
        ]
        save(result, args.out)
        if "error" in result[part]:
            return
        if kill is not None:
            wait_for_memory()


if __name__ == "__main__":
    sys.exit(main())
