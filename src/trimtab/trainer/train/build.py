"""Build task, policy, reference model and sampler from a recipe, and hash what they were made of.

The hashes, of the rows of the data and the contents of the models, are kept in `inputs.json` in the run's folder, so
that a run does not go on with other ones unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trimtab import data
from trimtab.data import FixedTask, Problem, Sampler, Task
from trimtab.files import content_digest, folder_digest, read_bounded
from trimtab.grading import load_rule
from trimtab.own_parts import is_own
from trimtab.trainer.config import LONGEST_CHAIN, Config, RolloutConfig, find_run_model, model_digest
from trimtab.trainer.model import DEMO_MODELS, DTYPES, Policy, add_lora, demo_model, is_hub_model, load_policy
from trimtab.trainer.parallel import World
from trimtab.trainer.sampling import NativeSampler, PagedSampler, VllmSampler, VllmSettings, build_own_sampler
from trimtab.trainer.sampling.paged import unsupported_reason
from trimtab.trainer.train.checkpoints import load_weights

INPUTS = "inputs.json"  # in a run's folder: the hashes
LARGEST_INPUTS = 1 << 16  # bytes of that file; ours has a few hundred
HELD_OUT = "held-out data"
Tasks = tuple[Task, Task | None]


def build_task(config: Config, split: Literal["train", "test"]) -> Task | None:
    """Build the task with the training or the held-out problems; None if a file task has no held-out ones."""
    return data.build_task(config.task.name, config.task.arguments, split, config.run.eval_problems)


def build_tasks(config: Config) -> tuple[Task, Task | None]:
    """Build the training and the held-out problems, and check the rules that grade them."""
    task, test_task = build_task(config, "train"), build_task(config, "test")
    assert task is not None  # only held-out problems may be missing
    for each in (task, test_task):
        if each is not None:
            check_rules(each)
    return task, test_task


def check_rules(task: Task) -> None:
    """Raise for a rule that does not exist or cannot be loaded: of every problem in memory, else of the first."""
    problems = task.problems if isinstance(task, FixedTask) else [task[0]]
    for rule in dict.fromkeys(problem.rule for problem in problems):
        load_rule(rule)


def check_demo_characters(config: Config, task: Task) -> None:
    """Raise if a demo model, the default, meets prompts with characters that it does not know."""
    known = DEMO_MODELS.get(config.model.path)
    # A few problems: what is wrong is the model, not a row.
    for number in range(min(len(task), 20) if known else 0):
        problem = task[number]
        for character in "".join(message["content"] for message in problem.prompt):
            if character not in (known or ""):
                raise ValueError(
                    f"{problem.location or problem.source}: the prompt has {character!r}, which model.path = "
                    f"{config.model.path!r} does not know: this is a toy model for {known!r} alone. Set model.path to "
                    "a model of yours: a folder, or a name on the Hugging Face hub"
                )


def build_policy(config: Config, path: str | None = None, world: World | None = None) -> Policy:
    """Load the policy or, given a path, a reference model in the same precision; `world` shares sharded weights."""
    model = config.model
    trained = path is None
    return open_policy(
        model.path if path is None else path,
        device=config.run.device,
        precision=model.precision,
        attention=model.attention,
        # A reference model is only evaluated: it needs neither checkpointed activations nor adapters.
        gradient_checkpointing=model.gradient_checkpointing and trained,
        lora_rank=model.lora_rank if trained else 0,
        lora_alpha=model.lora_alpha,
        lora_targets=model.lora_targets,
        lora_dropout=model.lora_dropout,
        frozen_in_bf16=config.frozen_in_bf16 and trained,
        chat=model.chat,
        seed=config.run.seed,
        shard=world if model.shard else None,
    )


def open_policy(
    path: str, *, chat: bool = True, prepare: Callable[[Any], Any] = lambda model: model, chain: int = 0, **options: Any
) -> Policy:
    """Load a policy as `load_policy` does, or the model of a run: its finished one, or a checkpoint's, merged."""
    found = find_run_model(path)
    if found is None:
        return load_policy(path, chat=chat, prepare=prepare, **options)
    if chain > LONGEST_CHAIN:
        raise ValueError(f"model.path={path!r}: more than {LONGEST_CHAIN} runs in a row start from each other")
    config = found.config()
    options["attention"] = options.get("attention") or config.model.attention
    if found.checkpoint is None:
        return load_policy(str(found.folder.resolve()), chat=chat and config.model.chat, prepare=prepare, **options)
    base, checkpoint = config.model.path, found.checkpoint
    check_base(found.run, config)

    def restore(model: Any) -> Any:
        # The demo's weights depend on the seed of the run that had them.
        model = demo_model(config.run.seed, base) if base in DEMO_MODELS else model
        return prepare(restore_weights(model, config, checkpoint))

    return open_policy(base, chat=chat and config.model.chat, prepare=restore, chain=chain + 1, **options)


def hub_note(path: str, key: str = "model.path") -> str:
    """Return that a model is looked up on the hub; nothing for a folder, a run or a built-in model."""
    here = path in (*DEMO_MODELS, "smollm2") or os.path.isdir(path) or find_run_model(path) is not None
    if here or not is_hub_model(path):
        return ""
    return f"{key} = {path!r} is no folder here: it is looked up on the Hugging Face hub"


def restore_weights(model: Any, config: Config, checkpoint: Path) -> Any:
    """Return a model with the weights of a checkpoint of a run with this configuration; adapters are merged."""
    lora = config.model
    if lora.lora_rank:
        model = add_lora(model, lora.lora_rank, lora.lora_alpha, config.run.seed, lora.lora_targets)
    load_weights(model, checkpoint)
    # Adapters have frozen the rest, which a run may go on to train.
    return model.merge_and_unload().requires_grad_(True) if lora.lora_rank else model


def read_inputs(run: Path) -> dict[str, str]:
    """Return the hashes of a run's data and models; nothing if none were stored."""
    path = run / INPUTS
    if not path.exists():
        return {}
    try:
        table = json.loads(read_bounded(path, LARGEST_INPUTS))
        return {str(name): str(digest) for name, digest in table.items()}
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{path} is damaged: remove it to go on without a check of data and models") from None


def check_base(run: Path, config: Config) -> None:
    """Raise if the model below the adapters of a LoRA run has changed since it was trained."""
    before = read_inputs(run).get("model")
    now = model_digest(config.model.path) if config.model.lora_rank and before else ""
    if now and now != before:
        raise ValueError(
            f"the adapters of {run} belong to {config.model.path} as it was: its contents are others now. Put the "
            "model back as it was"
        )


def build_reference(config: Config, world: World | None = None) -> Policy | None:
    """Load the reference model of a KL penalty; that of `start` gets its weights after the warm start."""
    reference = config.model.reference
    # `start` loads the policy's own model again: its weights are overwritten after the warm start or on resume.
    return None if reference is None else build_policy(config, None if reference == "start" else reference, world)


def build_sampler(policy: Policy, rollout: RolloutConfig | None = None) -> Sampler:
    """Build the sampler of a policy; without a configuration the native one."""
    rollout = rollout or RolloutConfig()
    if rollout.precision is not None:
        policy = replace(policy, precision=rollout.precision)
    dtype = DTYPES[policy.precision]
    if is_own(rollout.engine):
        vocabulary = policy.causal_lm.get_input_embeddings().num_embeddings
        return build_own_sampler(rollout.engine, policy, rollout.engine_options, vocabulary)
    if rollout.engine == "vllm":
        # vLLM reserves memory for this context, and refuses one longer than the model's position embeddings.
        wanted = rollout.max_prompt_tokens + rollout.max_new_tokens + rollout.max_observed_tokens
        settings = VllmSettings(
            dtype=dtype,
            max_model_len=min(wanted, getattr(policy.causal_lm.config, "max_position_embeddings", None) or wanted),
            max_num_seqs=rollout.batch_size,
            gpu_memory_utilization=rollout.vllm_gpu_memory_utilization,
            options=rollout.vllm_options,
        )
        return VllmSampler(policy.model, policy.eos_token_ids, policy.autocast, settings)
    if _can_page(policy) and not rollout.keeps:
        return PagedSampler(policy.model, policy.eos_token_ids, dtype, rollout.kv_cache_memory)
    native = policy.model, policy.eos_token_ids, policy.pad_token_id, policy.autocast
    return NativeSampler(*native, with_kept=rollout.keeps)


def _can_page(policy: Policy) -> bool:
    return policy.device.type == "cuda" and unsupported_reason(policy.model) is None


def truncation_note(policy: Policy, rollout: RolloutConfig) -> str:
    """Return what to know about a run with top-p or top-k; nothing without."""
    if rollout.top_p == 1 and not rollout.top_k:
        return ""
    named = f"rollout.top_p = {rollout.top_p:g}" if rollout.top_p < 1 else f"rollout.top_k = {rollout.top_k}"
    if rollout.exact_truncation:
        slower = _can_page(policy) and rollout.engine == "native"
        return (
            "rollout.exact_truncation = true samples with the model's own forward, which is slower than the paged "
            "sampler: that one does not return the tokens that top-p and top-k kept"
            if slower
            else ""
        )
    known = rollout.engine == "vllm"
    advice = "attach a correction such as '+ tis', or turn it off" if known else "set rollout.exact_truncation = true"
    return (
        f"{named}: responses are sampled from the tokens that it keeps, but scored over the whole vocabulary, so that "
        f"ratios are biased: {advice}"
    )


def run_inputs(config: Config, tasks: Tasks) -> dict[str, str]:
    """Return the hashes of a run's inputs by name; what the recipe generates, or the hub has, is left out."""
    model, warm = config.model, config.warm_start
    found = {
        "data": _rows_digest(tasks[0]),
        HELD_OUT: _rows_digest(tasks[1]),
        "model": model_digest(model.path),
        "reference model": model_digest(model.reference) if model.reference not in (None, "start") else "",
        "solutions of the warm start": path_digest(warm.path) if warm.steps else "",
    }
    return {name: digest for name, digest in found.items() if digest}


@dataclass
class InputReader:
    """Finds the inputs of several recipes, and reads data that they have in common once."""

    seen: dict[str, Tasks] = field(default_factory=dict)

    def inputs(self, config: Config) -> dict[str, str]:
        """Return the hashes of a recipe's inputs."""
        key = json.dumps([config.task.model_dump(mode="json"), config.run.eval_problems], sort_keys=True)
        if key not in self.seen:
            self.seen = {key: build_tasks(config)}  # only the last: data may be large
        return run_inputs(config, self.seen[key])


def path_digest(path: str | None) -> str:
    """Return a hash of the contents of a file or folder; empty if it is not on this machine."""
    if path is None or not (file := Path(path).expanduser()).exists():
        return ""
    return folder_digest(file) if file.is_dir() else content_digest(file)


def _rows_digest(task: Task | None) -> str:
    if not isinstance(task, FixedTask):
        return ""
    # Of the rows, not of the file: the same rows in another place or format are the same data.
    digest = hashlib.sha256()
    for problem in task.problems:
        digest.update(json.dumps(_row(problem), sort_keys=True, default=repr).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _row(problem: Problem) -> list[Any]:
    return [
        list(map(dict, problem.prompt)),
        problem.answer,
        problem.rule,
        problem.source,
        problem.solution,
        dict(problem.extra),
    ]


def input_changes(before: Mapping[str, str], now: Mapping[str, str], config: Config) -> list[str]:
    """Return a line for every input that has other contents than before."""
    places = {
        "data": config.task.arguments.get("path"),
        HELD_OUT: config.task.arguments.get("eval_path"),
        "model": config.model.path,
        "reference model": config.model.reference,
        "solutions of the warm start": config.warm_start.path,
    }
    changed = [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    return [f"{name}{f' ({places[name]})' if places.get(name) else ''}: the contents are others" for name in changed]
