"""Configuration: TOML recipes checked by pydantic. A wrong key or value is named, with what would be right.

Every section is one model below; `extra="forbid"` makes a misspelt key an error, which names its nearest. Types are
strict: `steps = "many"`, `steps = 1.5` and `steps = true` are errors alike.
"""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from trimtab.config.errors import readable
from trimtab.objectives import ATTACHMENTS, COMMON, METHODS, OPTIONS, Objective, objective
from trimtab.rewards import RULES, Kind, check_rule
from trimtab.rollout import SamplingOptions, check_vllm_options
from trimtab.text import nearest

PACKAGED = Path(__file__).parent.parent / "recipes"
RewardWord = Literal["wrong", "leave_out"]
TASKS = ("arithmetic", "gsm8k", "file", "gym:KIND")


class Section(BaseModel):
    """A table of a recipe: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _none_is_a_word(cls, value: Any, info: ValidationInfo) -> Any:
        """TOML has no null: `--set model.reference=none` takes back what a recipe sets."""
        kind = cls.model_fields[str(info.field_name)].annotation
        return None if value == "none" and type(None) in typing.get_args(kind) else value


class TaskConfig(Section):
    """Where prompts and answers come from."""

    name: str = Field("arithmetic", description="arithmetic, gsm8k, file, or gym:KIND (reasoning-gym)")
    path: str | None = Field(
        None, description="file and gsm8k: a jsonl or parquet file, or a data set's name on the hub"
    )
    eval_path: str | None = Field(None, description="file and gsm8k: the held-out problems; none: no evaluation")
    rule: str = Field("boxed", description=f"file: how answers are graded: {', '.join(RULES)}")
    suffix: str = Field("", description="file: text added to the last message of each prompt")
    family: Literal["addition", "subtraction", "multiplication", "chain", "words"] = Field(
        "addition", description="arithmetic: the kind of problem"
    )
    digits: int = Field(2, ge=1, le=9, description="arithmetic: digits of each number")
    terms: int = Field(3, ge=2, le=9, description="arithmetic: length of chains and stories")
    form: Literal["bare", "instruct"] = Field(
        "bare", description="arithmetic: bare is `12+34=`, instruct asks in words and wants a box"
    )
    size: int = Field(10_000, ge=1, description="generated tasks: how many problems an epoch has")
    options: dict[str, Any] = Field(default_factory=dict, description="reasoning-gym: options of the generator")

    @field_validator("name")
    @classmethod
    def _task_is_known(cls, value: str) -> str:
        if value in TASKS[:-1] or (value.startswith("gym:") and len(value) > len("gym:")):
            return value
        raise ValueError(f"unknown task {value!r}: {nearest(value, TASKS)}")

    @field_validator("rule")
    @classmethod
    def _rule_is_known(cls, value: str) -> str:
        try:
            check_rule(value)
        except ValueError:
            raise ValueError(f"unknown rule {value!r}: {nearest(value, RULES)}") from None
        return value


class ModelConfig(Section):
    """The policy."""

    path: str = Field("demo", description="a folder or hub name of a causal LM, `demo`, or `smollm2`")
    reference: str | None = Field(None, description="a second model for a KL penalty; `start`: the policy as it starts")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast over fp32 master weights")
    attention: str | None = Field(None, description="transformers' attn_implementation")
    gradient_checkpointing: bool = Field(False, description="less memory for more time")
    lora_rank: int = Field(0, ge=0, description="0: full fine-tuning; else LoRA of this rank (extra `lora`)")
    lora_alpha: int = Field(32, gt=0, description="LoRA's scale")
    chat: bool = Field(True, description="use the tokenizer's chat template where it has one")


class WarmStartConfig(Section):
    """A short supervised phase on worked solutions before RL."""

    steps: int = Field(0, ge=0, description="0: none")
    batch: int = Field(64, ge=1, description="solutions per step")
    lr: float = Field(1e-3, gt=0, description="learning rate at the first step; it falls linearly to nothing")
    until: float = Field(1.0, ge=0, le=1, description="stop early once greedy held-out accuracy is at least this")
    check_every: int = Field(50, ge=1, description="steps between looks at that accuracy, and between checkpoints")
    path: str | None = Field(None, description="a jsonl of {prompt, solution}; none: the task's own worked solutions")
    problems: int | None = Field(None, ge=1, description="use only the first so many problems, each several times")
    cache: bool = Field(True, description="keep the warm-started weights under the run's parent and reuse them")


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: Literal["native", "vllm"] = Field("native", description="the sampler ([vllm.md](vllm.md); extra `vllm`)")
    prompts: int = Field(32, ge=1, description="prompts per step")
    samples: int = Field(8, ge=1, description="responses per prompt: the group")
    max_new_tokens: int = Field(8, ge=1, description="a response is cut off here")
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are an error")
    temperature: float = Field(1.0, gt=0, description="of sampling, and of every log-probability and entropy")
    top_p: float = Field(1.0, gt=0, le=1, description="1: no limit")
    top_k: int = Field(0, ge=0, description="0: no limit")
    batch: int = Field(1024, ge=1, description="responses sampled at once")
    dynamic: bool = Field(False, description="dynamic sampling: drop groups without reward spread and draw others")
    dynamic_oversample: float = Field(3.0, ge=1, description="prompts drawn per round, as a multiple of those missing")
    dynamic_rounds: int = Field(10, ge=1, description="rounds before a step makes do with fewer groups")
    cache_memory: float = Field(
        0.3, gt=0, lt=1, description="native on a GPU: the share of its memory that the cache of responses may take"
    )
    vllm_memory: float = Field(0.4, gt=0, lt=1, description="vllm: its share of the device's memory while it samples")
    vllm_options: dict[str, Any] = Field(default_factory=dict, description="vllm: other arguments of `vllm.LLM`")

    @field_validator("vllm_options")
    @classmethod
    def _options_are_free(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_vllm_options(value)
        return value


class RewardConfig(Section):
    """From verdicts to rewards."""

    correct: float = Field(1.0, description="reward of a right answer")
    wrong: float = Field(0.0, description="reward of a wrong answer")
    no_answer: float | RewardWord = Field("wrong", description="of a response without an answer; a number, or a word")
    ambiguous: float | RewardWord = Field("wrong", description="of several answers where one is asked")
    too_costly: float | RewardWord = Field("wrong", description="of an answer that takes too long to understand")
    crashed: float | RewardWord = Field("leave_out", description="where the grader failed; left out of training")
    overlong_buffer: int = Field(0, ge=0, description="DAPO's soft penalty over the last so many tokens; 0: none")
    overlong_factor: float = Field(1.0, ge=0, description="the penalty of a response that is cut off")

    @field_validator("no_answer", "ambiguous", "too_costly", "crashed", mode="before")
    @classmethod
    def _number_or_word(cls, value: Any) -> Any:
        if value in typing.get_args(RewardWord) or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise ValueError(f"{value!r} must be a number, 'wrong' (what a wrong answer gets) or 'leave_out'")

    def of(self, kind: Kind) -> float | None:
        """The reward of a verdict of this kind; None where such a response is left out of training."""
        reward = getattr(self, kind)
        return self.wrong if reward == "wrong" else None if reward == "leave_out" else float(reward)


class UpdateConfig(Section):
    """The optimizer step."""

    per_step: int = Field(1, ge=1, description="updates (mini-batches) per step; it divides rollout.prompts")
    token_budget: int = Field(16_384, ge=1, description="tokens of one forward pass (a part), padding included if any")
    token_stats: Literal["old", "current"] = Field("old", description="judge tokens by the old or the current policy")
    lr: float = Field(1e-3, gt=0, description="AdamW's learning rate, constant after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises linearly")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), strict=False, description="AdamW's betas"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    not_finite: Literal["skip", "stop"] = Field("skip", description="what to do with an update that is not finite")
    head_chunk: int = Field(4096, ge=1, description="tokens whose logits exist at one time")


class RecordConfig(Section):
    """The flight recorder: response tokens with all that was decided about them, for `trimtab replay` and reports."""

    enabled: bool = Field(True, description="write token-level records under the run's `tokens` folder")
    every: int = Field(1, ge=1, description="record every so many steps")
    share: float = Field(1.0, gt=0, le=1, description="of a step, the share of groups; below 1 no replay is exact")
    max_megabytes: float = Field(
        2000.0, gt=0, description="size budget; kept by dropping every second recorded step, again and again"
    )


Action = Literal["warn", "save", "stop", "off"]


class AlarmsConfig(Section):
    """What is done when an alarm rings ([alarms.md](alarms.md)); a key with an alarm's name is for that one alone."""

    enabled: bool = Field(True, description="watch the metrics of every step")
    default: Action = Field(
        "warn", description="warn: say it; save: keep a checkpoint too; stop: end the run too; off: nothing"
    )
    entropy_collapse: Action | None = Field(None, description="the entropy falls away")
    entropy_explosion: Action | None = Field(None, description="the entropy runs up")
    spurious_growth: Action | None = Field(None, description="more tokens are rare, confident and rewarded")
    gradient_concentration: Action | None = Field(None, description="few tokens hold much of the gradient")
    ratio: Action | None = Field(None, description="the policy moves too far within a step")
    clip: Action | None = Field(None, description="the clip cuts far more tokens than at the start")
    sampler_mismatch: Action | None = Field(None, description="sampler and trainer disagree about probabilities")
    no_signal: Action | None = Field(None, description="too few groups have any spread in reward")
    truncation: Action | None = Field(None, description="responses are cut off")
    repetition: Action | None = Field(None, description="responses repeat themselves")
    length_drift: Action | None = Field(None, description="responses get much longer or shorter for no gain")
    reward_hacking: Action | None = Field(None, description="the reward rises and held-out accuracy does not")
    reward_drop: Action | None = Field(None, description="reward or held-out accuracy falls from its best")

    def action(self, alarm: str) -> Action:
        """What is done when an alarm rings."""
        own: Action | None = getattr(self, alarm, None)
        return own or self.default


class RunConfig(Section):
    """The run: how long, where, and what is kept."""

    steps: int = Field(200, ge=1, description="rollout batches")
    seed: int = Field(0, description="of sampling, of the order of problems, and of the demo model")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads; 0: as torch chooses, or one beside a GPU. Results depend on it in the last bit",
    )
    eval_every: int = Field(50, ge=0, description="steps between evaluations on held-out problems; 0: none")
    eval_problems: int = Field(200, ge=1, description="held-out problems per evaluation")
    checkpoint_every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(2, ge=1, description="older checkpoints are removed")
    patience: int = Field(50, ge=0, description="stop after so many steps in a row without learning signal; 0: never")
    sinks: list[Literal["wandb", "trackio", "tensorboard"]] = Field(
        default_factory=list, description="where else metrics go"
    )
    report: bool = Field(True, description="`trimtab train` ends with report.html in the run's folder")


class Config(Section):
    """A recipe."""

    objective: dict[str, Any] = Field(
        default_factory=lambda: {"name": "stapo"}, description="the objective's name and its options"
    )
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    update: UpdateConfig = UpdateConfig()
    run: RunConfig = RunConfig()
    record: RecordConfig = RecordConfig()
    alarms: AlarmsConfig = AlarmsConfig()

    @field_validator("objective", mode="before")
    @classmethod
    def _name_alone_will_do(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        # TOML has no null, and a run's config.toml must give the same objective again.
        return {k: "none" if v is None else v for k, v in value.items()} if isinstance(value, Mapping) else value

    @field_validator("objective")
    @classmethod
    def _objective_can_be_built(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "name" not in value:
            raise ValueError("the objective needs a name, for example name = 'stapo'")
        build_objective(value)
        return value

    @model_validator(mode="after")
    def _parts_fit(self) -> Config:
        rollout, update = self.rollout, self.update
        if rollout.prompts % update.per_step:
            raise ValueError(
                f"update.per_step = {update.per_step} does not divide rollout.prompts = {rollout.prompts}: "
                f"the {rollout.prompts * rollout.samples} responses of a step are shared out in whole groups"
            )
        token_stats = self.objective.get("token_stats", update.token_stats)
        if token_stats != update.token_stats:
            raise ValueError(
                f"objective.token_stats = {token_stats!r}, but update.token_stats = {update.token_stats!r}: "
                "set update.token_stats alone"
            )
        if "ref_logp" in self.build_objective().needs and self.model.reference is None:
            raise ValueError(
                f"objective.name = {self.objective['name']!r} has a KL to a reference model: "
                "set model.reference ('start' or a path)"
            )
        if rollout.dynamic and rollout.samples < 2:
            raise ValueError(
                f"rollout.dynamic needs rollout.samples of 2 or more, not {rollout.samples}: one response has no spread"
            )
        return self

    @model_validator(mode="after")
    def _rewards_teach(self) -> Config:
        reward, limit = self.reward, self.rollout.max_new_tokens
        if reward.correct <= reward.wrong:
            raise ValueError(f"reward.correct = {reward.correct} must be more than reward.wrong = {reward.wrong}")
        if reward.overlong_buffer > limit:
            raise ValueError(
                f"reward.overlong_buffer = {reward.overlong_buffer} must be at most rollout.max_new_tokens = {limit}"
            )
        return self

    def sampling_options(self, samples: int, temperature: float | None = None) -> SamplingOptions:
        """How this run samples; evaluation gives its own temperature, and then samples without top-p and top-k."""
        rollout = self.rollout
        return SamplingOptions(
            samples=samples,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=rollout.top_p if temperature is None else 1.0,
            top_k=rollout.top_k if temperature is None else 0,
            seed=self.run.seed,
            batch=rollout.batch,
        )

    def build_objective(self) -> Objective:
        """The objective this recipe names."""
        options = dict(self.objective)
        if self.update.token_stats == "current":
            options.setdefault("token_stats", "current")
        return build_objective(options)


def build_objective(options: Mapping[str, Any]) -> Objective:
    """An objective from its table in a recipe: `name`, and its options, of which `none` is the word for no value."""
    given = {key: None if value == "none" else value for key, value in options.items() if key != "name"}
    return objective(str(options["name"]), **given)


def load(recipe: str | Path | None, settings: Sequence[str] = ()) -> Config:
    """A recipe by name or path, with `key=value` settings over it.

    A later setting of a key wins; the objective's name goes first, so that its options may stand on either side of it.
    """
    table: dict[str, Any] = {} if recipe is None else _read(find_recipe(recipe))
    read = [(setting, *_key_and_value(setting)) for setting in settings]
    for setting, keys, value in sorted(read, key=lambda item: item[1] not in (["objective"], ["objective", "name"])):
        _apply(table, setting, keys, value)
    return parse(table)


def parse(table: Mapping[str, Any]) -> Config:
    """A checked configuration from a table, or one error with a line per fault."""
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise ValueError("\n".join(readable(fault, Config) for fault in error.errors())) from None


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with trimtab, by name."""
    return {file.name.removesuffix(".toml"): file for file in sorted(PACKAGED.glob("*.toml"))}


def find_recipe(recipe: str | Path) -> Path:
    """The file of a recipe: a path, or the name of one that comes with trimtab."""
    path = Path(recipe)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ValueError(f"recipe {str(recipe)!r}: there is no such file")
        return path
    known = packaged_recipes()
    if str(recipe) not in known:
        hint = nearest(str(recipe), known)
        raise ValueError(f"unknown recipe {str(recipe)!r}: {hint} (a file of your own ends in .toml)")
    return known[str(recipe)]


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def _key_and_value(setting: str) -> tuple[list[str], Any]:
    key, equals, text = setting.partition("=")
    keys = [part.strip() for part in key.split(".")]
    if not equals or not all(keys):
        raise ValueError(f"--set {setting!r}: write section.key=value, for example update.lr=1e-6")
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        read = {}
    return keys, read["value"] if list(read) == ["value"] else text.strip()  # a bare word is a string


def _apply(table: dict[str, Any], setting: str, keys: list[str], value: Any) -> None:
    if keys == ["objective", "name"] and _base(table.get("objective")) != _base(value):
        keys = ["objective"]  # the options of another method mean nothing to this one
    for part in keys[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {setting!r}: {part!r} is a value, not a section: it has no keys")
    if keys == ["objective"] and not isinstance(value, dict):
        value = {"name": value}
    table[keys[-1]] = value


def _base(named: Any) -> str:
    """The method of an objective's name or table, without what attaches to it."""
    name = named.get("name", "") if isinstance(named, Mapping) else named
    return re.split(r"[+(]", str(name))[0].strip()


def schema() -> dict[str, Any]:
    """The JSON schema of recipes, for editors."""
    table = Config.model_json_schema()
    names = [*METHODS, *(f"dapo + {name}" for name in ATTACHMENTS)]
    entries = [*METHODS.values(), *ATTACHMENTS.values()]
    known = sorted({*COMMON, *(key for entry in entries for key in entry.options)} - {*ATTACHMENTS})
    options: dict[str, Any] = {key: {"description": OPTIONS[key].meaning} for key in known}
    options |= {name: {"description": entry.title} for name, entry in ATTACHMENTS.items()}
    table["properties"]["objective"] = {
        "type": "object",
        "required": ["name"],
        "additionalProperties": False,
        "properties": {"name": {"type": "string", "examples": names}, **options},
    }
    return table
