"""Warm start: a short supervised phase (SFT) on worked solutions before RL.

Its weights are cached under a hash of everything they depend on, so runs that differ only in their objective share one
warm start. The cache, one private folder for all runs of a user, is bounded in size. It holds checkpoints, so a warm
start that was killed or stopped is resumed; one that has ended is kept without the optimizer's state.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trimtab import failpoints
from trimtab.data import Problem, Repeats, Task, derive_seed, find_repeats, source_paths, worked_solutions
from trimtab.files import cache_folder, private_folder
from trimtab.own_parts import is_own, load_part, location
from trimtab.process import SignalInterrupt, deferred_stop
from trimtab.trainer.config import Config, model_digest
from trimtab.trainer.model import (
    LongPromptError,
    LossScale,
    Policy,
    Transcript,
    clip_gradients,
    idle_pass,
    least_passes,
    log_probs,
    make_optimizer,
    response_shares,
    share_sizes,
    split_by_token_budget,
    start_gradients,
)
from trimtab.trainer.train import checkpoints
from trimtab.trainer.train.build import build_tasks, check_demo_characters, path_digest
from trimtab.trainer.train.conversations import ToolUse
from trimtab.trainer.train.prompts import encode_problems
from trimtab.trainer.train.reporting import Reporter, announce_stop
from trimtab.trainer.train.rollouts import evaluate
from trimtab.trainer.train.trainer import Trainer

LARGEST_CACHE = 20e9  # bytes, beyond which the warm starts that were not used for longest are removed


def warm_start(trainer: Trainer, cache: Path | None, reporter: Reporter) -> None:
    """Train the policy on worked solutions, or load the weights of the same warm start from the cache, if there is one.

    All processes of a run call it together; only rank 0 reads and writes the cache's folder and heeds signals.
    """
    policy, config, warm, world = trainer.policy, trainer.config, trainer.config.warm_start, trainer.world
    if not warm.steps:
        return
    folder = None if cache is None else cache / cache_key(config, world.size)
    # A separate optimizer: RL starts with fresh AdamW moments, whether the weights come from the cache or not.
    optimizer = make_optimizer(policy, warm.lr, config.update.betas, 0.0, world)
    loss_scale = None if trainer.loss_scale is None else LossScale()
    first = 0

    def restore(saved: checkpoints.Checkpoint) -> None:
        nonlocal first
        with checkpoints.errors_as_mismatch(saved):
            first = _restore(saved, policy, optimizer, loss_scale) or warm.steps

    if folder is not None:
        found = checkpoints.load_newest(folder, restore, reporter.message) if world.leads else None
        if found is not None:
            reporter.message(f"warm start: goes on from step {found.step}, kept in {folder}")
            note_use(folder)
        path = world.gather(found.path if found else None)[0]
        if path is not None and not world.leads:
            restore(checkpoints.read(path))
    examples = _examples(trainer)
    warned = False
    with deferred_stop(announce_stop(reporter)) as stop:
        for step in range(first, warm.steps):
            trainer.seed_dropout("warm dropout", step)
            loss = _supervised_step(trainer, optimizer, _sample_batch(examples, step, config), step, loss_scale)
            reporter.warm(step + 1, warm.steps, loss)
            failpoints.failpoint("warm_start.step")
            due = (step + 1) % warm.eval_every == 0 or step + 1 == warm.steps
            stopping = any(world.gather(bool(stop)))
            if not due and not stopping:
                continue
            tested = due and warm.target_accuracy < 1
            reached = tested and evaluate(trainer).get("eval/accuracy", 0.0) >= warm.target_accuracy
            if folder is not None:
                ended = reached or step + 1 == warm.steps
                tensors = checkpoints.training_tensors(policy, None if ended else optimizer, world)
                failed = _keep(folder, step + 1, tensors, reached, loss_scale) if world.leads else ""
                if failed and not warned:  # without the cache the run only takes longer
                    reporter.message(f"warning: {failed}")
                if ended and world.leads and not failed:
                    reporter.message(f"warm start: kept in {folder}, for runs that begin with the same one")
                warned = warned or bool(failed)
            if stopping:
                raise SignalInterrupt(max(world.gather(stop.number)))
            if reached:
                break


def _restore(
    saved: checkpoints.Checkpoint, policy: Policy, optimizer: checkpoints.AnyOptimizer, loss_scale: LossScale | None
) -> int:
    """Load a kept warm start; return the step that it goes on from, or 0 if it has ended."""
    # One that has ended needs no optimizer any more: RL has its own.
    if "optimizer" not in saved.tensors:
        checkpoints.load_parameters(policy.model, saved.tensors["model"])
        return 0
    checkpoints.load_training_tensors(policy, optimizer, saved)
    if loss_scale is not None:
        loss_scale.load_state_dict(saved.state["loss_scale"])
    return saved.step


def _keep(
    folder: Path, step: int, tensors: checkpoints.TensorGroups, reached: bool, loss_scale: LossScale | None
) -> str:
    """Save a warm start in the cache; return what went wrong, if anything."""
    state: dict[str, Any] = {"target_reached": reached}
    if loss_scale is not None:
        state["loss_scale"] = loss_scale.state_dict()
    try:
        checkpoints.save(folder, step, tensors, state, keep=1)
    except checkpoints.CheckpointError as error:
        return str(error)
    note_use(folder)
    return ""


def cache_key(config: Config, processes: int = 1) -> str:
    """Return a hash of everything that the weights after a warm start depend on."""
    evaluated = config.warm_start.target_accuracy < 1
    inputs = {
        "model": config.model.model_dump(exclude={"reference"} | (set() if config.model.shard else {"shard"})),
        "task": config.task.model_dump(),
        "warm": config.warm_start.model_dump(exclude={"cache"}),
        "seed": config.run.seed,
        # The next three change the last bits of the weights, and runs that share a cache must be reproducible.
        "threads": torch.get_num_threads(),
        "device": config.run.device,
        "torch": torch.__version__,
        "update": config.update.model_dump(include={"token_budget", "head_chunk", "betas", "max_grad_norm"}),
        "evaluation": [config.run.eval_problems, config.rollout.max_new_tokens] if evaluated else [],
        "tools": [config.tools.model_dump(), config.rollout.max_turns, config.rollout.max_observation_tokens],
        "files": _digests(config),
    }
    if processes > 1:
        inputs["processes"] = processes
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _digests(config: Config) -> list[str]:
    """Return hashes of the files that the weights after a warm start depend on."""
    weights = [path for path in (config.model.path, config.model.start_from) if path is not None]
    files: list[Any] = [*source_paths(config.task.arguments.get("path")), config.warm_start.path]
    task = config.task
    for name in (task.name, task.arguments.get("rule"), task.environment, *config.tools.use):
        if isinstance(name, str) and is_own(name):
            files.append(location(load_part(name)).rpartition(":")[0])
    return [*map(model_digest, weights), *(path_digest(path) for path in files if isinstance(path, str) and path)]


def check_problems(config: Config, warms_up: bool = True) -> tuple[Task, Task | None]:
    """Build the problems of a run, and check their rules, texts and worked solutions: all that needs no model."""
    problems = build_tasks(config)
    check_demo_characters(config, problems[0])
    if config.warm_start.steps and warms_up:
        worked_problems(config, problems[0])
    return problems


def repeated_problems(config: Config, task: Task, test_task: Task | None) -> Repeats:
    """Return which problems occur more than once in a run's training, and which held-out ones are trained on."""
    worked = _worked_file(config) if config.warm_start.steps else ()
    count = 0 if test_task is None else min(len(test_task), config.run.eval_problems)
    held_out = [test_task[number] for number in range(count)] if test_task is not None else []
    # The prompts of an environment may all be equal: what it asks is in the other columns.
    return find_repeats(task, worked, held_out, whole=config.task.environment is not None)


def worked_problems(config: Config, task: Task) -> Task | Sequence[Problem]:
    """Return the problems with worked solutions: those of the warm start's file, or the task's own."""
    if config.warm_start.path is not None:
        return _worked_file(config)
    if task[0].solution is None:
        advice = "set warm_start.path to a file with solutions, task.columns.solution, or warm_start.steps = 0"
        raise ValueError(f"task {task.name} has no worked solutions: {advice}")
    return task


def _worked_file(config: Config) -> Sequence[Problem]:
    """Return the problems of the warm start's file; none without one."""
    path, suffix = config.warm_start.path, str(config.task.arguments.get("suffix", ""))
    return () if path is None else worked_solutions(path, suffix, config.warm_start.columns)


def _examples(trainer: Trainer) -> Callable[[Sequence[int]], list[Transcript]]:
    """Return a function from any numbers to worked solutions; numbers beyond the last one start over."""
    policy, config = trainer.policy, trainer.config
    problems = worked_problems(config, trainer.task)
    limit = config.warm_start.max_problems if config.warm_start.path is None else None
    count = min(limit or len(problems), len(problems))

    def examples(numbers: Sequence[int]) -> list[Transcript]:
        chosen = [problems[number % count] for number in numbers]
        try:
            prompts = encode_problems(policy, chosen, trainer.tool_use)
        except LongPromptError as error:
            raise ValueError(f"{_named(chosen[error.number])}: {error}") from None
        transcripts = []
        for problem, prompt in zip(chosen, prompts, strict=True):
            try:
                transcripts.append(worked_transcript(policy, problem, prompt, trainer.tool_use))
            except LongPromptError as error:
                raise ValueError(f"{_named(problem)}: {error}") from None
        return transcripts

    return examples


def _named(problem: Problem) -> str:
    return f"a worked solution of {problem.location or problem.source} is too long for the model, remove it"


def _sample_batch(examples: Callable[[Sequence[int]], list[Transcript]], step: int, config: Config) -> list[Transcript]:
    # Seeded by the step, so that a resumed warm start needs no state of a random number generator.
    rng = random.Random(derive_seed("warm", config.run.seed, step))
    batch = examples([rng.randrange(1 << 30) for _ in range(config.warm_start.batch_size)])
    return sorted(batch, key=len)  # neighbours share a micro-batch: similar lengths leave little padding


def _supervised_step(
    trainer: Trainer,
    optimizer: checkpoints.AnyOptimizer,
    batch: list[Transcript],
    step: int,
    loss_scale: LossScale | None = None,
) -> float:
    """Take one optimizer step on the token-mean cross-entropy of solutions, and return the loss."""
    while True:
        scale = 1.0 if loss_scale is None else loss_scale.value
        loss, finite = _supervised_gradients(trainer, optimizer, batch, step, scale)
        if finite or loss_scale is None or not loss_scale.lower():
            break
    if not finite:
        raise ValueError(f"the warm start's gradient is not finite at step {step}: lower warm_start.lr")
    if loss_scale is not None:
        loss_scale.keep()
    optimizer.step()
    return loss


def _supervised_gradients(
    trainer: Trainer, optimizer: checkpoints.AnyOptimizer, batch: list[Transcript], step: int, scale: float
) -> tuple[float, bool]:
    """Compute the clipped gradients of a supervised step; return its loss, and whether they are finite."""
    # Every solution has another prompt: there is nothing to share.
    policy, config, world = replace(trainer.policy, shared_prompts=False), trainer.config, trainer.world
    policy.model.train()
    for group in optimizer.param_groups:
        group["lr"] = config.warm_start.lr * (1 - step / config.warm_start.steps)
    start_gradients(optimizer)
    tokens = sum(t.num_sampled for t in batch)
    total = torch.zeros((), device=policy.device)
    shares = response_shares(policy, batch, world)
    sizes = share_sizes(policy, batch, shares, config.update.token_budget)
    own = batch[shares[world.rank]]
    for micro_batch in split_by_token_budget(own, config.update.token_budget, policy.packed):
        # Divided by the tokens of the whole batch: the gradients of micro-batches then add up to the token mean.
        loss = -log_probs(policy, micro_batch, 1.0, config.update.head_chunk).sum() / tokens
        (loss if scale == 1 else loss * scale).backward()
        total += loss.detach()
    for _ in range(least_passes(policy, sizes) - len(sizes[world.rank])):
        idle_pass(policy)
    norm = clip_gradients(policy, optimizer, config.update.max_grad_norm, scale)
    return float(world.sum(total)), bool(torch.isfinite(norm))


@dataclass(frozen=True)
class CachedWarmStart:
    """A warm start in the cache: its folder, its bytes, and when it was last used."""

    path: Path
    size: int
    used: float


def open_cache() -> Path:
    """Return the cache's folder, $TRIMTAB_WARM_START or `warm_start` in the user's cache; make it if it is missing."""
    # Private: a user who could write there would choose the weights of later runs.
    return private_folder(_root())


def _root() -> Path:
    named = os.environ.get("TRIMTAB_WARM_START")
    return Path(named).expanduser() if named else cache_folder() / "warm_start"


def list_warm_starts() -> list[CachedWarmStart]:
    """Return the warm starts in the cache; those that were not used for longest come first."""
    found = []
    for path in _root().glob("*") if _root().is_dir() else ():
        with suppress(OSError):  # another run has just removed it
            if re.fullmatch(r"[0-9a-f]{16}", path.name) and path.is_dir():
                files = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
                found.append(CachedWarmStart(path, sum(files), path.stat().st_mtime))
    return sorted(found, key=lambda each: each.used)


def note_use(entry: Path) -> None:
    """Note that a warm start is in use, and remove others that the cache has no room for."""
    with suppress(OSError):
        os.utime(entry)
    kept = list_warm_starts()
    while sum(each.size for each in kept) > LARGEST_CACHE and kept[0].path != entry:
        shutil.rmtree(kept.pop(0).path, ignore_errors=True)


def remove_warm_starts(most: int | None = None) -> list[CachedWarmStart]:
    """Remove so many warm starts, or all, those first that were not used for longest; return what was removed."""
    found = list_warm_starts()[:most]
    if found:
        open_cache()  # raises if it is not the user's
    for each in found:
        shutil.rmtree(each.path)
    return found


def make_room(folder: Path) -> Path | None:
    """Remove a warm start from the disk of a folder, and return it; None if there is none."""
    with suppress(OSError):
        if _root().stat().st_dev == folder.stat().st_dev:
            return next((each.path for each in remove_warm_starts(1)), None)
    return None


def worked_transcript(policy: Policy, problem: Problem, prompt: Sequence[int], tool_use: ToolUse | None) -> Transcript:
    """Return the transcript of a problem's worked solution: a text, or messages of assistant and tool in turn."""
    solution = problem.solution
    if not isinstance(solution, tuple | list):
        return Transcript(prompt, policy.encode_solution(str(solution)))
    roles = [message.get("role") for message in solution]
    if not roles or roles[-1] != "assistant" or roles[0] != "assistant" or {*roles} - {"assistant", "tool"}:
        raise ValueError(
            f"{named(problem)} has messages of {', '.join(map(str, roles)) or 'nobody'}: it starts and ends with the "
            "assistant, and tools reply in between"
        )
    if "tool" in roles and tool_use is None:
        raise ValueError(f"{named(problem)} calls a tool: set tools.use and rollout.max_turns, or warm_start.steps = 0")
    tokens: list[int] = []
    observed: list[tuple[int, int]] = []
    replies: list[tuple[str, str]] = []
    written: list[int] = []  # the message before the replies
    for message in solution:
        if message["role"] == "tool":
            replies.append((message.get("name", ""), message["content"]))
            continue
        if replies and tool_use is not None:
            reply = tool_use.template.render(written, replies, tool_use.limits.max_observation_tokens).tokens
            observed.append((len(tokens), len(tokens) + len(reply)))
            tokens += reply
            replies = []
        written = policy.encode_solution(message["content"])
        tokens += written
    return Transcript(prompt, tokens, tuple(observed))


def named(problem: Problem) -> str:
    """Return where a worked solution comes from, for an error."""
    return f"the worked solution of {problem.location or problem.source}"
