"""The pydantic models of a recipe's sections."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from trimtab.config.section import Section
from trimtab.own_parts import is_own
from trimtab.policy import DEMO_MODELS
from trimtab.rollout import check_own_sampler, check_vllm_options
from trimtab.tasks import check_columns
from trimtab.text import nearest, shown

ENGINES = ("native", "vllm")
MAX_RESPONSES = 1_000_000  # of a step: all of them are in memory
MARKUP_TOKENS = 64  # what a chat template puts around a reply, at most; Qwen3 has 15 tokens
MAX_THREADS = 1024  # where the system cannot start as many, OpenMP ends the process


class ModelConfig(Section):
    """The policy model."""

    path: str = Field(
        "demo",
        description="a folder or hub name of a causal LM, a run or its checkpoint (RUN@STEP), `demo`, `demo-tools`, "
        "`smollm2`",
    )
    start_from: str | None = Field(
        None, description="a checkpoint whose weights replace those of model.path at the start (`train --from`)"
    )
    start_optimizer: bool = Field(False, description="take AdamW's moments from that checkpoint too")
    reference: str | None = Field(None, description="the KL reference model: a path, or `start`: the policy before RL")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast over fp32 master weights")
    attention: str | None = Field(None, description="transformers' attn_implementation")
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, more time")
    lora_rank: int = Field(0, ge=0, le=65_536, description="0: full fine-tuning; else LoRA of this rank (extra `lora`)")
    lora_alpha: int = Field(32, gt=0, description="LoRA's alpha")
    lora_targets: list[str] = Field(
        default_factory=list,
        max_length=1000,
        description="layers with an adapter by the ends of their names, as ['q_proj', 'v_proj']; empty: all linear "
        "layers but the head",
    )
    lora_dropout: float = Field(
        0.0, ge=0, lt=1, description="LoRA's dropout in updates; scoring and sampling have none, so ratios start off 1"
    )
    chat: bool = Field(True, description="apply the tokenizer's chat template if it has one")

    @field_validator("path", "start_from", "reference")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        # A run may be resumed, evaluated or exported from another folder than the one it was started in.
        if value is None or value in (*DEMO_MODELS, "smollm2", "start"):
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
    """A short supervised phase (SFT) on worked solutions before RL."""

    steps: int = Field(0, ge=0, le=1_000_000_000, description="optimizer steps; 0: no warm start")
    batch_size: int = Field(64, ge=1, le=MAX_RESPONSES, description="solutions per step")
    lr: float = Field(1e-3, gt=0, description="learning rate of the first step; decays linearly to zero")
    target_accuracy: float = Field(1.0, ge=0, le=1, description="stop early at this greedy held-out accuracy; 1: never")
    eval_every: int = Field(50, ge=1, description="steps between checks of that accuracy, and between checkpoints")
    path: str | None = Field(
        None, description="a file of prompts and solutions (task.suffix is appended); none: the task's own solutions"
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="names of that file's columns: a table of prompt, solution, system"
    )
    max_problems: int | None = Field(None, ge=1, description="use only the first so many problems, over and over")
    cache: bool = Field(True, description="cache the warm-started weights next to the run's folder, for later runs")

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, value: dict[str, str]) -> dict[str, str]:
        return check_columns(value, dict.fromkeys(("prompt", "solution", "system")))


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: str = Field(
        "native",
        description="the sampler: native, vllm ([vllm.md](vllm.md); extra `vllm`), or one of your own, "
        "python:MODULE:NAME ([own-parts.md](own-parts.md))",
        json_schema_extra={"examples": [*ENGINES]},
    )
    engine_options: dict[str, Any] = Field(
        default_factory=dict, validate_default=True, description="a sampler of your own: its options"
    )
    prompts: int = Field(32, ge=1, le=MAX_RESPONSES, description="prompts per step")
    samples: int = Field(8, ge=1, le=MAX_RESPONSES, description="responses per prompt: the size of a group")
    max_new_tokens: int = Field(
        8, ge=1, le=10_000_000, description="maximum length of a response; with tools, of all its messages together"
    )
    max_turns: int = Field(
        1, ge=1, le=1000, description="messages of the policy per conversation, with tools.use or task.environment"
    )
    max_observation_tokens: int = Field(
        512, ge=16, le=10_000_000, description="tokens of one reply of a tool; longer ones are cut in the middle"
    )
    max_prompt_tokens: int = Field(1024, ge=1, le=10_000_000, description="longer prompts are an error")
    temperature: float = Field(
        1.0, ge=1e-6, le=1e6, description="of sampling, and of every log-probability and entropy"
    )
    sampler_temperature: float | None = Field(
        None,
        ge=1e-6,
        le=1e6,
        description="a stress: sample at this temperature, and score at rollout.temperature; none: sample at that too",
    )
    precision: Literal["fp32", "bf16"] | None = Field(None, description="of the sampler; none: that of model.precision")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1: off")
    top_k: int = Field(0, ge=0, description="top-k sampling; 0: off")
    batch_size: int = Field(1024, ge=1, description="responses sampled concurrently")
    dynamic_sampling: bool = Field(
        False, description="DAPO's dynamic sampling: replace groups whose rewards are all equal by further prompts"
    )
    dynamic_oversample: float = Field(
        3.0, ge=1, le=1000, description="dynamic sampling: prompts per round, as a multiple of the groups still missing"
    )
    dynamic_max_rounds: int = Field(10, ge=1, description="dynamic sampling: rounds until a step takes fewer groups")
    kv_cache_memory: float = Field(0.3, gt=0, lt=1, description="native on a GPU: share of its memory for the KV cache")
    vllm_gpu_memory_utilization: float = Field(
        0.4, gt=0, lt=1, description="vllm: the share of the GPU's memory it may take while it samples"
    )
    vllm_options: dict[str, Any] = Field(default_factory=dict, description="vllm: other arguments of `vllm.LLM`")

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
    """The optimizer updates of a step."""

    per_step: int = Field(1, ge=1, description="mini-batches per step, an update each; must divide rollout.prompts")
    passes: int = Field(
        1,
        ge=1,
        le=1000,
        description="passes over the mini-batches of a step, in the same order; the old log-probabilities stay those "
        "of the rollout, so later passes are further off-policy",
    )
    token_budget: int = Field(16_384, ge=1, description="tokens per micro-batch, including padding if any")
    token_stats: Literal["old", "current"] = Field(
        "old", description="which policy's log-probabilities and entropies select tokens: the old or the current one's"
    )
    lr: float = Field(1e-3, gt=0, description="AdamW's learning rate, the highest where a schedule changes it")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="the learning rate after the warm-up: constant, or decaying to update.min_lr_ratio"
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear learning-rate warm-up")
    decay_steps: int | None = Field(
        None, ge=1, description="linear, cosine: the step at which the decay ends, warm-up included; none: run.steps"
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="linear, cosine: the share of update.lr at that step")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay")
    # Not strict: TOML and JSON have lists, never tuples.
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), strict=False, description="AdamW's betas"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    on_nonfinite: Literal["skip", "stop"] = Field("skip", description="on a NaN or infinity: skip the update, or stop")
    head_chunk: int = Field(4096, ge=1, description="tokens per pass through the LM head: bounds the memory of logits")


class RecordConfig(Section):
    """The flight recorder: response tokens with every decision about them, for `trimtab replay` and reports."""

    enabled: bool = Field(True, description="write token-level records to the run's `tokens` folder")
    every: int = Field(1, ge=1, description="record every so many steps")
    group_share: float = Field(1.0, gt=0, le=1, description="share of a step's groups; below 1 no replay is exact")
    max_megabytes: float = Field(2000.0, gt=0, description="on the disk, kept by deleting every second recorded step")


Action = Literal["warn", "save", "stop", "off"]


class AlarmsConfig(Section):
    """What an alarm does ([alarms.md](alarms.md)); a key named after an alarm overrides `default` for it."""

    enabled: bool = Field(True, description="check the metrics of every step")
    default: Action = Field(
        "warn", description="warn: print it; save: also keep a checkpoint; stop: also end the run; off: nothing"
    )
    entropy_collapse: Action | None = Field(None, description="the entropy collapses")
    entropy_explosion: Action | None = Field(None, description="the entropy explodes")
    spurious_growth: Action | None = Field(None, description="more tokens are rare, confident and rewarded")
    gradient_concentration: Action | None = Field(None, description="few tokens hold much of the gradient")
    ratio: Action | None = Field(None, description="the policy moves too far within a step")
    clip: Action | None = Field(None, description="far more tokens are clipped than at the start")
    sampler_mismatch: Action | None = Field(None, description="sampler and trainer disagree about log-probabilities")
    no_signal: Action | None = Field(None, description="too few groups have different rewards")
    rule_errors: Action | None = Field(None, description="rules fail on responses")
    truncation: Action | None = Field(None, description="responses are truncated")
    repetition: Action | None = Field(None, description="responses repeat themselves")
    length_drift: Action | None = Field(None, description="responses get much longer or shorter without a gain")
    failing_calls: Action | None = Field(None, description="calls of tools fail")
    void_turns: Action | None = Field(None, description="messages have neither a call nor an answer")
    calls_vanish: Action | None = Field(None, description="the policy stops calling its tools, for little gain")
    tool_wait: Action | None = Field(None, description="sampling waits for tools much of the time")
    reward_hacking: Action | None = Field(None, description="the reward rises but held-out accuracy does not")
    reward_drop: Action | None = Field(None, description="reward or held-out accuracy falls from its best")
    collapse: Action | None = Field(None, description="the run has collapsed, as `trimtab stress` counts it")

    def action(self, alarm: str) -> Action:
        """Return what an alarm of this name does."""
        own: Action | None = getattr(self, alarm, None)
        return own or self.default


class RunConfig(Section):
    """How long a run lasts, where it runs, and what it saves."""

    steps: int = Field(200, ge=1, le=1_000_000_000, description="RL steps (rollout batches)")
    seed: int = Field(0, description="of sampling, the order of problems, and the demo model's weights")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    threads: int = Field(
        0,
        ge=0,
        le=MAX_THREADS,
        description="CPU threads; 0: torch's default, or one beside a GPU. Last bits of results depend on it",
    )
    eval_every: int = Field(50, ge=0, description="steps between evaluations on held-out problems; 0: none")
    eval_problems: int = Field(200, ge=1, le=10_000_000, description="held-out problems per evaluation")
    checkpoint_every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(2, ge=1, description="keep the newest so many checkpoints")
    patience: int = Field(50, ge=0, description="stop after so many steps in a row without learning signal; 0: never")
    loggers: list[Literal["wandb", "trackio", "tensorboard"]] = Field(
        default_factory=list,
        max_length=3,
        description="where metrics, sample texts and alarms go besides the run's files",
    )
    log_samples: int = Field(
        10, ge=0, description="loggers get the texts of four responses every so many steps; 0: none"
    )
    report: bool = Field(True, description="`trimtab train` ends by writing report.html to the run's folder")
    python_path: list[str] | None = Field(
        None,
        description="folders in which the modules of `python:` names are looked for after `sys.path` "
        "([own-parts.md](own-parts.md)); none: the recipe's and the current one",
    )
