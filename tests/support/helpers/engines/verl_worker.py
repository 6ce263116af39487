"""verl's training worker by itself, without Ray: one update under several losses, and trimtab's own beside it.

Run as a script by torchrun, with a folder that has the model; rank 0 writes the gradients and weights of every update
there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.engines.verl_runs import TIMEOUT

ROWS = 16
SEED = 50
TABLES: dict[str, dict[str, Any]] = {
    "stapo": {"name": "stapo", "tau_p": 0.04},
    "stare": {"name": "stare", "target": 9.0},
    "sspo": {"name": "sspo"},
    "grpo": {"name": "grpo"},
    "kl_cov": {"name": "kl_cov", "share": 0.05},
    "trim": {"name": "dapo + trim", "floor": 9.0, "gain": 2.0},
}
LR, BETAS, DECAY = 1e-3, (0.9, 0.999), 0.01


def launch(folder: Path, ranks: int, environment: dict[str, str]) -> None:
    """Run the script on several ranks, and wait for all of them."""
    # torchrun chooses the port itself: one that a test looks for beforehand may be taken when the workers want it.
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *torchrun, __file__, str(folder)]
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def batch_of(model: Any) -> Any:
    """A batch that this model could have sampled a little earlier: its log-probabilities, moved, and its entropy."""
    from helpers.engines.verl_batches import random_batch
    from trimtab.trainer.model.score import score

    data = random_batch(SEED, ROWS)
    moments = score(native_policy(model), transcripts(data), temperature=1.0, token_budget=4096, head_chunk=512)
    draw = torch.Generator().manual_seed(SEED)
    moved = moments.logp + 0.3 * torch.randn(len(moments.logp), generator=draw)
    written = data["response_mask"].values().bool()
    for name, value in (("old_log_probs", moved.clamp(max=-1e-4)), ("entropy", moments.entropy)):
        flat = data[name].values().clone()  # of replies of tools it keeps what nothing may read
        flat[written] = value
        data[name] = torch.nested.nested_tensor_from_jagged(flat, data[name].offsets())
    return data


def transcripts(data: Any) -> list[Any]:
    from trimtab.trainer.model.score import Transcript

    found = []
    rows = zip(data["prompts"].unbind(), data["responses"].unbind(), data["response_mask"].unbind(), strict=True)
    for prompt, response, mask in rows:
        replies = (mask == 0).nonzero().squeeze(1).tolist()
        found.append(Transcript(prompt.tolist(), response.tolist(), tuple((n, n + 1) for n in replies)))
    return found


def native_policy(model: Any) -> Any:
    from helpers.engines.verl_batches import TOKENIZER
    from trimtab.trainer.model import Policy

    return Policy(model, TOKENIZER, torch.device("cpu"))


def native_update(table: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients and weights after one update by trimtab's own trainer."""
    from helpers.engines.verl_batches import core_batch
    from helpers.engines.verl_runs import tiny_model
    from trimtab.trainer.config import build_objective
    from trimtab.trainer.model.update import UpdateOptions, make_optimizer, update

    model, objective = tiny_model(), build_objective(table)
    data = batch_of(tiny_model())
    tokens = core_batch(objective, data, range(ROWS))
    objective.observe(tokens)
    policy = native_policy(model)
    optimizer = make_optimizer(policy, LR, BETAS, DECAY)
    options = UpdateOptions(token_budget=4096, head_chunk=512, temperature=1.0, max_grad_norm=1e9)
    result = update(policy, optimizer, objective, objective.plan(tokens), transcripts(data), options)
    assert result.taken
    return numbers(model, optimizer)


def numbers(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Gradients (a tenth of them: Adam's first moment after one step) and weights, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        for kind, value in (("gradient", optimizer.state[parameter]["exp_avg"]), ("weight", parameter.detach())):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{kind} {name}"] = whole.clone().contiguous()
    return found


def build_worker(folder: Path) -> Any:
    """verl's worker around the tiny model: FSDP2, float32, gloo."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineConfig(
        strategy="fsdp2", mixed_precision=precision, use_torch_compile=False, use_dynamic_bsz=False
    )
    model = HFModelConfig(
        path=str(folder / "model"),
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    optimizer = FSDPOptimizerConfig(lr=LR, betas=BETAS, weight_decay=DECAY, clip_grad=1e9, total_training_steps=100)
    return TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )


def verl_update(worker: Any, data: Any, loss: Callable[..., Any], micro: int) -> dict[str, Tensor]:
    """Gradients and weights after one update by verl's worker, from the first weights."""
    from verl.utils import tensordict_utils as tu

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share = ROWS // ranks
    mine = tu.index_select_tensor_dict(data, torch.arange(rank * share, (rank + 1) * share))
    # A size below 1 asks for verl's dynamic batches: as many rows as fit, in another order.
    sizes = {"micro_batch_size_per_gpu": micro} if micro > 0 else {"max_token_len_per_gpu": 64}
    tu.assign_non_tensor(
        mine,
        mini_batch_size=ROWS,
        global_batch_size=ROWS,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
        calculate_entropy=False,
        use_dynamic_bsz=micro < 1,
        **sizes,
    )
    worker.reset()
    worker.set_loss_fn(loss)
    output = worker.train_mini_batch(mine)
    found = numbers(worker.engine.module, worker.engine.optimizer)
    said = tu.get(output, "metrics") if output is not None else {}
    for name, value in said.items():
        if name.startswith("trimtab/"):
            found[f"metric {name}"] = torch.tensor([float(value[0])], dtype=torch.float64)
    return found


def updates(folder: Path, ranks: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every update of this number of ranks, by name."""
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    from helpers.engines.verl_batches import with_plan
    from helpers.engines.verl_runs import tiny_model
    from trimtab.engines.verl.planning import PlannedLoss
    from trimtab.trainer.config import build_objective

    worker = build_worker(folder)
    data = batch_of(tiny_model())
    for name, table in TABLES.items():
        planned = with_plan(build_objective(table), data.copy(), ROWS, ranks)
        for micro in (8, 2, 0) if ranks == 1 else (4,):
            yield f"{name}-{ranks}-{micro}", verl_update(worker, planned, PlannedLoss(table), micro)
    if ranks == 1:
        yield from ((f"{name}-native", native_update(table)) for name, table in TABLES.items())
        mode = PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.05, ppo_kl_coef=1.0)
        actor = FSDPActorConfig(
            strategy="fsdp2", policy_loss=mode, ppo_micro_batch_size_per_gpu=8, rollout_n=1, use_kl_loss=False
        )
        for micro in (8, 2):
            yield f"verl-{micro}", verl_update(worker, data.copy(), partial(ppo_loss, config=actor), micro)


def main(folder: Path) -> None:
    """One rank's share of all updates."""
    import helpers.engines.verl_quiet  # noqa: F401  # isort: skip
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    for name, found in updates(folder, int(os.environ["WORLD_SIZE"])):
        if os.environ["RANK"] == "0":
            save_file(found, folder / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
