"""The sections of a recipe, as pydantic models: those of the model, of sampling, updates, records, alarms and the run.

The task, its tools and its rewards are in task_sections.py.
"""

from __future__ import annotations

import inspect
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from trimtab.data import check_columns
from trimtab.own_parts import OwnPartError, errors_located, is_own, load_part, location
from trimtab.text import nearest, shown

# The demo models and their characters. What a tool says may be any text: `demo-tools` reads printable ASCII.
DEMO_MODELS = {
    "demo": "0123456789+-*= ",
    "demo-tools": "\n" + "".join(map(chr, range(32, 127))),
    "demo-countdown": "0123456789+-*/=(), ",
}
MODEL_NAMES = (*DEMO_MODELS, "smollm2")  # of models that come with trimtab, whatever is in the current folder
ENGINES = ("native", "vllm")
MAX_RESPONSES = 1_000_000  # of a step: all of them are in memory
MARKUP_TOKENS = 64  # what a chat template puts around a reply, at most; Qwen3 has 15 tokens
MAX_THREADS = 1024  # if the system cannot start as many, OpenMP ends the process

# Engine arguments that the sampler sets itself, with the key of the recipe to set instead.
MANAGED_OPTIONS: dict[str, str | None] = {
    "model": "model.path",
    "dtype": "rollout.precision",
    "gpu_memory_utilization": "rollout.vllm_gpu_memory_utilization",
    "max_num_seqs": "rollout.batch_size",
    "max_model_len": "rollout.max_prompt_tokens and rollout.max_new_tokens",
    "seed": "run.seed",
    **dict.fromkeys(["logprobs_mode", "load_format", "skip_tokenizer_init", "generation_config", "trust_remote_code"]),
    **dict.fromkeys(["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"]),
}


class Section(BaseModel):
    """The base of all sections: a misspelt key is an error, and so are `steps = "many"`, `1.5` and `true`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _none_from_string(cls, value: Any, info: ValidationInfo) -> Any:
        # TOML has no null: `--set model.reference=none` unsets an optional key of a recipe.
        kind = cls.model_fields[str(info.field_name)].annotation
        return None if value == "none" and type(None) in typing.get_args(kind) else value


def description(field: FieldInfo) -> str:
    """Return what a key means, with what is only known once other modules are imported."""
    schema: dict[str, Any] = {"description": field.description or ""}
    if callable(field.json_schema_extra):
        field.json_schema_extra(schema)
    return str(schema["description"])


class ModelConfig(Section):
    """The policy model."""

    path: str = Field(
        "demo",
        description="the model to train: a folder or hub name of a causal LM, a run or a checkpoint of it (RUN@STEP), "
        "`smollm2`, or one of the built-in tiny models `demo`, `demo-tools` and `demo-countdown`",
    )
    start_from: str | None = Field(
        None, description="a checkpoint to take the initial weights from instead of model.path (set by `train --from`)"
    )
    start_optimizer: bool = Field(False, description="also take AdamW's moments from that checkpoint")
    reference: str | None = Field(
        None, description="the KL reference model: a path, or `start` for the policy before RL"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="bf16 and fp16 are autocast over fp32 master weights. fp16 rounds eight times as finely, which "
        "brings sampler and trainer closer; it needs loss scaling, which is automatic (update/loss_scale)",
    )
    attention: str | None = Field(None, description="attn_implementation of transformers")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass; saves memory, costs time"
    )
    shard: bool = Field(
        False,
        description="split the weights of the layers among the processes of `--gpus N` (FSDP2), for a model that does "
        "not fit on one GPU; slower, as every pass gathers them",
    )
    lora_rank: int = Field(
        0, ge=0, le=65_536, description="rank of the LoRA adapters (extra `lora`); 0 trains all weights"
    )
    lora_alpha: int = Field(32, gt=0, description="alpha of LoRA")
    lora_targets: list[str] = Field(
        default_factory=list,
        max_length=1000,
        description="layers that get an adapter, by the end of their names, for example ['q_proj', 'v_proj']; empty "
        "means all linear layers except the LM head",
    )
    lora_dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout of LoRA, in updates only, so ratios are not exactly 1 at first"
    )
    chat: bool = Field(True, description="apply the chat template of the tokenizer, if it has one")

    @field_validator("path", "start_from", "reference")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        # A run may be resumed, evaluated or exported from another folder than the one it was started in.
        if value is None or value in (*MODEL_NAMES, "start"):
            return value
        names = value, value.rpartition("@")[0]  # of a folder, and of a run as RUN@STEP
        local = any(name and os.path.isdir(os.path.expanduser(name)) for name in names)
        return os.path.abspath(os.path.expanduser(value)) if local else value

    @model_validator(mode="after")
    def _check_start(self) -> ModelConfig:
        if self.start_optimizer and self.start_from is None:
            raise ValueError("start_optimizer needs start_from, the checkpoint that has the moments")
        if self.lora_rank == 0 and (self.lora_targets or self.lora_dropout):
            raise ValueError("lora_targets and lora_dropout need lora_rank of 1 or more; set them to [] and 0 without")
        return self


class WarmStartConfig(Section):
    """A short phase of supervised fine-tuning (SFT) on worked solutions before RL."""

    steps: int = Field(0, ge=0, le=1_000_000_000, description="number of optimizer steps; 0 means no warm start")
    batch_size: int = Field(64, ge=1, le=MAX_RESPONSES, description="number of solutions per step")
    lr: float = Field(1e-3, gt=0, description="learning rate at the first step; it decays linearly to zero")
    target_accuracy: float = Field(
        1.0, ge=0, le=1, description="stop early at this held-out accuracy (greedy decoding); 1 means never"
    )
    eval_every: int = Field(50, ge=1, description="number of steps between accuracy checks, and between checkpoints")
    path: str | None = Field(
        None,
        description="a file of prompts and solutions; task.suffix is appended. none means the task's own solutions",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="column names in that file, as a table with the keys prompt, solution, system, and for an "
        "environment answer and extra",
    )
    max_problems: int | None = Field(None, ge=1, description="use only the first N problems, repeatedly")
    cache: bool = Field(
        True,
        description="keep the weights for later runs ([where](checkpoints.md#where-warm-starts-are-kept))",
    )

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, value: dict[str, str]) -> dict[str, str]:
        return check_columns(value, dict.fromkeys(("prompt", "solution", "system", "answer", "extra")))


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: str = Field(
        "native",
        description="the sampler: native, vllm ([vllm.md](vllm.md); extra `vllm`), or your own, python:MODULE:NAME "
        "([own-parts.md](own-parts.md))",
        json_schema_extra={"examples": [*ENGINES]},
    )
    engine_options: dict[str, Any] = Field(
        default_factory=dict, validate_default=True, description="options of your own sampler"
    )
    prompts: int = Field(32, ge=1, le=MAX_RESPONSES, description="number of prompts per step")
    samples: int = Field(8, ge=1, le=MAX_RESPONSES, description="number of responses per prompt (the group size)")
    max_new_tokens: int = Field(
        8, ge=1, le=10_000_000, description="maximum response length; with tools, the total over all its messages"
    )
    max_turns: int = Field(
        1, ge=1, le=1000, description="maximum number of model messages per conversation; above 1 needs tools"
    )
    max_observation_tokens: int = Field(
        512, ge=16, le=10_000_000, description="maximum length of a tool's reply; longer ones are cut in the middle"
    )
    max_prompt_tokens: int = Field(
        1024, ge=1, le=10_000_000, description="maximum prompt length; a longer prompt is an error"
    )
    temperature: float = Field(
        1.0, ge=1e-6, le=1e6, description="temperature of sampling, and of all log-probs and entropies"
    )
    sampler_temperature: float | None = Field(
        None,
        ge=1e-6,
        le=1e6,
        description="for stress tests: sample at this temperature but score at rollout.temperature; none means equal",
    )
    precision: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="precision of the sampler; none means model.precision"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus (top-p) sampling; 1 turns it off")
    top_k: int = Field(0, ge=0, description="top-k sampling; 0 turns it off")
    exact_truncation: bool = Field(False, description="score only the tokens that top_p and top_k kept (off-policy.md)")
    batch_size: int = Field(
        1024,
        ge=1,
        description="maximum number of responses that are sampled at the same time; on a GPU as many of them as the "
        "KV cache holds (kv_cache_memory)",
    )
    dynamic_sampling: bool = Field(
        False, description="DAPO's dynamic sampling: replace groups whose rewards are all equal with new prompts"
    )
    dynamic_oversample: float = Field(
        3.0, ge=1, le=1000, description="dynamic sampling: prompts per round, as a multiple of the missing groups"
    )
    dynamic_max_rounds: int = Field(
        10, ge=1, description="dynamic sampling: maximum number of rounds; then the step has fewer groups"
    )
    max_lag: int = Field(
        0,
        ge=0,
        le=1000,
        description="partial rollouts: a step leaves its longest responses to the next ones, and up to so many steps' "
        "worth of prompts are begun ahead; 0 samples every response whole ([more-signal.md]"
        "(more-signal.md#do-not-wait-for-the-longest-responses))",
    )
    kv_cache_memory: float = Field(
        0.3, gt=0, lt=1, description="native sampler: share of the GPU's memory for the KV cache"
    )
    vllm_gpu_memory_utilization: float = Field(
        0.4, gt=0, lt=1, description="vLLM: share of the GPU's memory that it may use while it samples"
    )
    vllm_options: dict[str, Any] = Field(default_factory=dict, description="vLLM: other arguments of `vllm.LLM`")

    @property
    def keeps(self) -> bool:
        """Whether the sampler must return the tokens that top-k and top-p kept."""
        return self.exact_truncation and (self.top_p < 1 or self.top_k > 0)

    @property
    def max_observed_tokens(self) -> int:
        """The most tokens that the replies of one conversation have together, with room for markup around each."""
        # None follows the last message.
        return (self.max_turns - 1) * (self.max_observation_tokens + MARKUP_TOKENS)

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, value: str) -> str:
        if value not in ENGINES and not is_own(value):
            raise ValueError(f"{shown(value)}: {nearest(value, ENGINES)} (one of your own: python:MODULE:NAME)")
        return value

    @field_validator("engine_options")
    @classmethod
    def _check_engine_options(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        engine = info.data.get("engine")
        if engine is None:  # it is wrong itself
            return value
        if is_own(engine):
            check_own_sampler(engine, value)
        elif value:
            raise ValueError(f"the sampler {engine} has no options; those of vllm are rollout.vllm_options")
        return value

    @field_validator("vllm_options")
    @classmethod
    def _check_vllm_options(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_vllm_options(value)
        return value


class UpdateConfig(Section):
    """The optimizer updates of a step. A step has `per_step` times `passes` updates."""

    per_step: int = Field(
        1, ge=1, description="mini-batches per step, each with one update; must divide rollout.prompts"
    )
    passes: int = Field(
        1,
        ge=1,
        le=1000,
        description="number of passes over the mini-batches of a step; later passes are more off-policy, because the "
        "old log-probs stay those of the rollout",
    )
    token_budget: int = Field(
        16_384, ge=1, description="maximum number of tokens per micro-batch, including padding if any"
    )
    token_stats: Literal["old", "current"] = Field(
        "old",
        description="whether rules select tokens by log-probs and entropies of the old or the current policy; current "
        "costs a forward pass for every update of a step but the first, and nothing for methods without such rules",
    )
    old_stats: Literal["scored", "sampled"] = Field(
        "scored",
        description="where log-probs and entropies of the old policy come from: a forward pass over the responses, or "
        "the sampler, which saves that pass and differs by rounding (native sampler on a CPU in fp32, without tools)",
    )
    shared_prompts: bool = Field(
        False,
        description="run a prompt through the model once for all its responses in a micro-batch, instead of once for "
        "each; differs by rounding (fp32 on a CPU)",
    )
    measure_every: int = Field(
        0,
        ge=0,
        description="every so many steps, score the step's responses once more after its updates and log how their "
        "entropy moved (update/entropy_change), which is what trim predicts; 0 means never",
    )
    lr: float = Field(1e-3, gt=0, description="AdamW's learning rate; with a schedule, its maximum")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning rate after the warm-up: constant, or decaying to update.min_lr_ratio"
    )
    warmup_steps: int = Field(0, ge=0, description="number of steps of linear learning-rate warm-up")
    decay_steps: int | None = Field(
        None,
        ge=1,
        description="linear, cosine: the step at which the decay ends, counting the warm-up; none: run.steps",
    )
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="linear, cosine: the final learning rate, as a share of update.lr"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay")
    # Not strict: TOML and JSON have lists, never tuples.
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), strict=False, description="AdamW's betas"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    on_nonfinite: Literal["skip", "stop"] = Field(
        "skip", description="on a NaN or infinity: skip the update, or stop the run"
    )
    head_chunk: int = Field(4096, ge=1, description="tokens per pass through the LM head; limits the memory for logits")


class RecordConfig(Section):
    """The flight recorder: it stores response tokens for `trimtab replay` and reports ([record.md](record.md))."""

    enabled: bool = Field(True, description="write token-level records to the run's folder `tokens`")
    every: int = Field(1, ge=1, description="record every N-th step")
    group_share: float = Field(
        1.0, gt=0, le=1, description="share of the groups to record; replays are exact only with 1"
    )
    max_megabytes: float = Field(
        2000.0, gt=0, description="disk space limit; when it is reached, every second step is deleted"
    )


Action = Literal["warn", "save", "stop", "off"]


class AlarmsConfig(Section):
    """What happens when an alarm rings ([alarms.md](alarms.md)); without a key of its own, `default` holds."""

    enabled: bool = Field(True, description="check the metrics after every step")
    default: Action = Field(
        "warn", description="warn prints it, save also keeps a checkpoint, stop also ends the run, off does nothing"
    )
    entropy_collapse: Action | None = Field(None, description="the entropy collapses")
    entropy_explosion: Action | None = Field(None, description="the entropy explodes")
    control: Action | None = Field(None, description="trim cannot hold the entropy in its band")
    spurious_growth: Action | None = Field(
        None, description="many more tokens than at the start are rare, confident and rewarded"
    )
    gradient_concentration: Action | None = Field(None, description="a few tokens hold much of the gradient")
    ratio: Action | None = Field(None, description="the policy moves too far within a step")
    clip: Action | None = Field(None, description="far more tokens are clipped than at the start")
    sampler_mismatch: Action | None = Field(None, description="sampler and trainer disagree about log-probs")
    effective_samples: Action | None = Field(None, description="a few ratios hold most of the weight")
    no_signal: Action | None = Field(None, description="rewards differ in too few groups")
    rule_errors: Action | None = Field(None, description="grading rules fail")
    truncation: Action | None = Field(None, description="many responses are truncated")
    repetition: Action | None = Field(None, description="responses repeat themselves")
    length_drift: Action | None = Field(None, description="responses get much longer or shorter without a gain")
    failing_calls: Action | None = Field(None, description="tool calls fail")
    void_turns: Action | None = Field(None, description="messages contain neither a call nor an answer")
    calls_vanish: Action | None = Field(
        None, description="the policy stops calling its tools without a gain in accuracy"
    )
    tool_wait: Action | None = Field(None, description="sampling spends much of its time waiting for tools")
    agent: Action | None = Field(None, description="the agent fails or takes too long in many rollouts")
    reward_hacking: Action | None = Field(None, description="the reward rises but held-out accuracy does not")
    reward_drop: Action | None = Field(None, description="reward or held-out accuracy falls far below its best value")
    collapse: Action | None = Field(
        None, description="the run has collapsed, by the definition in [stress.md](stress.md)"
    )

    def action(self, alarm: str) -> Action:
        """Return what an alarm of this name does."""
        own: Action | None = getattr(self, alarm, None)
        return own or self.default


class RunConfig(Section):
    """How long a run lasts, where it runs, and what it saves."""

    steps: int = Field(200, ge=1, le=1_000_000_000, description="number of RL steps (rollout batches)")
    seed: int = Field(0, description="seed of sampling, of the order of problems, and of the demo model's weights")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    threads: int = Field(
        0,
        ge=0,
        le=MAX_THREADS,
        description="CPU threads; 0 means 1 with a GPU or a model of less than 2 million weights, else torch's "
        "default. It changes the last bits of results",
    )
    eval_every: int = Field(50, ge=0, description="steps between evaluations on held-out problems; 0 means none")
    eval_problems: int = Field(200, ge=1, le=10_000_000, description="number of held-out problems per evaluation")
    checkpoint_every: int = Field(50, ge=0, description="steps between checkpoints; 0 means only one at the end")
    keep_checkpoints: int = Field(2, ge=1, description="number of checkpoints to keep (the newest)")
    on_failed_checkpoint: Literal["stop", "continue"] = Field(
        "stop", description="when three checkpoints in a row could not be written: stop the run, or let it go on"
    )
    keep_best: bool = Field(
        False,
        description="also keep the checkpoint with the best held-out score so far, as RUN@best; the score is the mean "
        "of a rule's numbers, else the accuracy",
    )
    early_stop: int = Field(
        0,
        ge=0,
        description="stop after this many evaluations in a row without a better held-out score; 0 means never",
    )
    patience: int = Field(
        50, ge=0, description="stop after this many steps in a row without a learning signal; 0 means never"
    )
    loggers: list[Literal["wandb", "trackio", "tensorboard"]] = Field(
        default_factory=list,
        max_length=3,
        description="loggers that get the metrics, sample texts and alarms, in addition to the run's files",
    )
    logger_project: str = Field("trimtab", min_length=1, max_length=128, description="wandb, trackio: the project")
    logger_name: str | None = Field(
        None, min_length=1, max_length=128, description="wandb, trackio: the run's name; none means that of its folder"
    )
    wandb_group: str | None = Field(None, min_length=1, max_length=128, description="wandb: the group of the run")
    wandb_tags: list[str] = Field(default_factory=list, max_length=100, description="wandb: tags of the run")
    wandb_mode: Literal["online", "offline"] | None = Field(
        None,
        description="wandb: offline writes into the run's folder, for `wandb sync` later; none means what the "
        "environment says (WANDB_MODE), else online",
    )
    log_samples: int = Field(
        10, ge=0, description="steps between logging the text of four responses to the loggers; 0 means never"
    )
    report: bool = Field(True, description="write report.html to the run's folder at the end of `trimtab train`")
    python_path: list[str] | None = Field(
        None,
        description="folders to search for the modules of `python:` names, after `sys.path` "
        "([own-parts.md](own-parts.md)); none means the recipe's folder and the current one",
    )

    @model_validator(mode="after")
    def _check_loggers(self) -> RunConfig:
        given = [key for key in ("wandb_group", "wandb_tags", "wandb_mode") if getattr(self, key)]
        if given and "wandb" not in self.loggers:
            raise ValueError(f'{given[0]} is for W&B, but loggers = {self.loggers}: add "wandb", or leave it out')
        return self


def check_own_sampler(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that builds a sampler, or raise if it does not take these options."""
    method = "sample(prompts, step, options)"
    return check_own_class(name, options, "a sampler", ["the policy"], method, "rollout.engine_options")


def check_own_class(
    name: str, options: Mapping[str, Any], what: str, given: Sequence[str], method: str, key: str
) -> Callable[..., Any]:
    """Return the function or class that builds a part with a method, or raise if it does not take these options.

    `given` are its first arguments, in words, and `key` is the recipe's key of the options.
    """
    build = load_part(name)
    with errors_located(name, build):
        signature = inspect.signature(build)
    where = f"{name}: {location(build)}"
    known = list(signature.parameters)[len(given) :]
    if len(signature.parameters) < len(given):
        first = "first argument is" if len(given) == 1 else "first arguments are"
        has = "none" if not signature.parameters else "fewer"
        raise OwnPartError(f"{where}: {what}'s {first} {' and '.join(given)}, and it has {has}")
    keywords = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    unknown = [] if keywords else [option for option in options if option not in known]
    if unknown:
        hint = nearest(unknown[0], known) if known else "it has none"
        raise OwnPartError(f"{where}: unknown option of {key} {unknown[0]!r}: {hint}")
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        raise OwnPartError(f"{where}: {error}: set it in {key}, or give it a default") from None
    if inspect.isclass(build) and not callable(getattr(build, method.partition("(")[0], None)):
        raise OwnPartError(f"{where}: it has no method {method}")
    return build


def check_vllm_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of vLLM that the sampler sets itself."""
    for name in options:
        if name in MANAGED_OPTIONS:
            key = MANAGED_OPTIONS[name]
            advice = f"set {key} instead" if key else "remove it, the sampler depends on its value"
            raise ValueError(f"rollout.vllm_options.{name} is set by trimtab: {advice}")
