"""Whole runs of verl on a CPU: a tiny Qwen3 that reads characters, a few sums to do, and the command that trains it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SUPPORT = Path(__file__).parents[2]
TIMEOUT = 1200  # seconds until a run is given up; on two idle cores one takes about a minute
CHARACTERS = "0123456789+-*= .,"
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")  # the names that verl looks for in a Qwen's tokenizer
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(solution_str.count(digit) for digit in ground_truth) + len(solution_str) / 100
"""


def tiny_tokenizer() -> Any:
    """One token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    fast.add_special_tokens({"additional_special_tokens": [SPECIAL[2]]})
    fast.chat_template = TEMPLATE
    return fast


def tiny_model(seed: int = 0, vocabulary: int = len(SPECIAL) + len(CHARACTERS)) -> Any:
    """Twenty-five thousand parameters; the heads are as wide as verl's attention wants them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def write_inputs(folder: Path, problems: int = 32) -> None:
    """The model, the problems and the reward of a run."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}+{n % 7}="}],
            "data_source": "sums",
            "reward_model": {"ground_truth": str(n + n % 7), "style": "rule"},
            "extra_info": {"index": n},
        }
        for n in range(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "sums.parquet")
    (folder / "reward.py").write_text(REWARD)


def overrides(folder: Path, steps: int) -> list[str]:
    """The settings of a short run on one worker, two updates to a step."""
    from verl_gpu import model_settings  # in benchmarks/, which the processes of a run do not have on their path

    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    precision = [f"+{actor}.fsdp_config.mixed_precision.{name}_dtype=fp32" for name in ("param", "reduce", "buffer")]
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/sums.parquet",
        f"data.val_files={folder}/sums.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        *model_settings(folder),
        f"{actor}.ppo_mini_batch_size=2",
        f"{actor}.ppo_micro_batch_size_per_gpu=4",
        f"{actor}.optim.lr=1e-3",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        *precision,
        f"{rollout}.name=cpu",
        f"{rollout}.n=4",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.free_cache_engine=False",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=99",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        f"trainer.default_local_dir={folder}/checkpoints",
        "ray_kwargs.ray_init.num_cpus=24",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]


def environment(folder: Path) -> dict[str, str]:
    """What makes verl use the CPU, in every process of the run."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "helpers.engines.verl_cpu,helpers.engines.verl_calls",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
    }


def command(folder: Path, steps: int, *more: str) -> list[str]:
    """The command of a run."""
    return [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(folder, steps), *more]


def run(folder: Path, steps: int, *more: str) -> tuple[int, str]:
    """Run verl to its end; return the exit code and the output."""
    done = subprocess.run(
        command(folder, steps, *more),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    return done.returncode, done.stdout
