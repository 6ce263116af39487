"""Warm start: a short supervised phase on worked solutions, before RL.

It is cached by everything that shapes it, so runs that differ only in their objective share it, and it keeps its own
checkpoints, so a killed one goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch

from trimtab import failpoints
from trimtab.config import Config
from trimtab.policy import Policy, Transcript, log_probs, make_optimizer, split_by_token_budget
from trimtab.tasks import Task, derive_seed, read_rows
from trimtab.train import checkpoints

Progress = Callable[[int, int, float], None]
Evaluate = Callable[[], dict[str, float]]


def warm_start(
    policy: Policy,
    task: Task,
    config: Config,
    cache: Path,
    progress: Progress,
    evaluate: Evaluate,
    warn: Callable[[str], None],
) -> None:
    """Bring the policy to where RL starts; from the cache where it was there before."""
    warm = config.warm_start
    if not warm.steps:
        return
    folder = cache / cache_key(config)
    optimizer = make_optimizer(policy, warm.lr, config.update.betas, 0.0)
    done = 0

    def go_on_from(saved: checkpoints.Checkpoint) -> None:
        nonlocal done
        with checkpoints.fitting(saved):
            load_parameters(policy, saved.tensors["model"])
            checkpoints.load_optimizer(optimizer, saved.tensors["optimizer"])
            done = warm.steps if saved.state["good_enough"] else saved.step

    if warm.cache:
        checkpoints.newest(folder, go_on_from, warn)
    examples = _examples(policy, task, config)
    for step in range(done, warm.steps):
        loss = _supervised_step(policy, optimizer, _draw(examples, step, config), config, step)
        progress(step + 1, warm.steps, loss)
        failpoints.failpoint("warm_start.step")
        if (step + 1) % warm.eval_every and step + 1 < warm.steps:
            continue
        good_enough = warm.target_accuracy < 1 and evaluate().get("eval/accuracy", 0.0) >= warm.target_accuracy
        if warm.cache:
            tensors = {"model": parameters(policy), "optimizer": checkpoints.optimizer_tensors(optimizer)}
            try:
                checkpoints.save(folder, step + 1, tensors, {"good_enough": good_enough}, keep=1)
            except checkpoints.CheckpointError as error:
                warn(f"warning: {error}")  # the cache saves time, no more
        if good_enough:
            break


def cache_key(config: Config) -> str:
    """A name for everything that shapes a warm start."""
    shaping = {
        "model": config.model.model_dump(exclude={"reference"}),
        "task": config.task.model_dump(),
        "warm": config.warm_start.model_dump(exclude={"cache"}),
        "seed": config.run.seed,
        "threads": torch.get_num_threads(),
        "device": config.run.device,
        "torch": torch.__version__,
        "update": config.update.model_dump(include={"token_budget", "head_chunk", "betas", "max_grad_norm"}),
        "evaluation": [config.run.eval_problems, config.rollout.max_new_tokens]
        if config.warm_start.target_accuracy < 1
        else [],
        "files": [_stamp(path) for path in (config.model.path, config.task.path, config.warm_start.path) if path],
    }
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]


def _stamp(path: str) -> list[tuple[str, int, int]]:
    """What tells that a local file or folder has changed; nothing for a name on the hub."""
    where = Path(path).expanduser()
    files = sorted(where.iterdir()) if where.is_dir() else [where]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


def parameters(policy: Policy) -> dict[str, torch.Tensor]:
    """The trained weights by name."""
    return {name: p.detach() for name, p in policy.model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_parameters(policy: Policy, tensors: dict[str, torch.Tensor]) -> None:
    """Put saved weights back, all of them or none."""
    mine = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    wrong = [
        n
        for n in mine.keys() | tensors.keys()
        if n not in mine or n not in tensors or mine[n].shape != tensors[n].shape
    ]
    if wrong:
        raise checkpoints.CheckpointError(
            f"the checkpoint is of another model: {wrong[0]} does not fit (and {len(wrong) - 1} more)"
        )
    for name, p in mine.items():
        p.copy_(tensors[name])


def _examples(policy: Policy, task: Task, config: Config) -> Callable[[int], Transcript]:
    """Worked solutions by number, endless."""
    warm = config.warm_start
    if warm.path is not None:
        pairs = [(where, row.get("prompt"), row.get("solution")) for where, row in read_rows(warm.path)]
        for where, prompt, solution in pairs:
            if not isinstance(prompt, str) or not isinstance(solution, str) or not prompt:
                raise ValueError(f"{where}: a warm-start row needs `prompt` and `solution`, both text, and some prompt")
        return lambda n: _transcript(
            policy, ({"role": "user", "content": str(pairs[n % len(pairs)][1])},), str(pairs[n % len(pairs)][2])
        )
    if task[0].solution is None:
        raise ValueError(
            f"task {task.name} has no worked solutions: set warm_start.path to a jsonl, or warm_start.steps = 0"
        )
    count = min(warm.max_problems or len(task), len(task))

    def example(number: int) -> Transcript:
        problem = task[number % count]
        return _transcript(policy, problem.prompt, str(problem.solution))

    return example


def _transcript(policy: Policy, prompt: object, solution: str) -> Transcript:
    return Transcript(policy.encode(prompt), policy.encode_solution(solution))  # type: ignore[arg-type]


def _draw(examples: Callable[[int], Transcript], step: int, config: Config) -> list[Transcript]:
    rng = random.Random(derive_seed("warm", config.run.seed, step))
    chosen = [examples(rng.randrange(1 << 30)) for _ in range(config.warm_start.batch_size)]
    return sorted(chosen, key=len)


def _supervised_step(
    policy: Policy, optimizer: torch.optim.Optimizer, batch: list[Transcript], config: Config, step: int
) -> float:
    """One step of token-mean cross-entropy on solutions; the learning rate falls linearly to nothing."""
    policy.model.train()
    for group in optimizer.param_groups:
        group["lr"] = config.warm_start.lr * (1 - step / config.warm_start.steps)
    optimizer.zero_grad(set_to_none=True)
    tokens = sum(len(t.response) for t in batch)
    total = torch.zeros((), device=policy.device)
    for part in split_by_token_budget(batch, config.update.token_budget, policy.packed):
        loss = -log_probs(policy, part, 1.0, config.update.head_chunk).sum() / tokens
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.update.max_grad_norm)
    if not bool(torch.isfinite(norm)):
        raise ValueError(f"the warm start's gradient is not finite at step {step}: lower warm_start.lr")
    optimizer.step()
    return float(total)
