"""A whole recipe: `Config` holds its sections and checks them against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from trimtab.data import SamplingOptions, agent_of
from trimtab.objectives import ATTACHMENTS, COMMON_OPTIONS, METHODS, OPTIONS, Objective, objective
from trimtab.own_parts import PREFIX, is_own
from trimtab.trainer.config.sections import (
    MAX_RESPONSES,
    AlarmsConfig,
    ModelConfig,
    RecordConfig,
    RolloutConfig,
    RunConfig,
    Section,
    UpdateConfig,
    WarmStartConfig,
)
from trimtab.trainer.config.task_sections import (
    AgentConfig,
    CurriculumConfig,
    RewardConfig,
    TaskConfig,
    ToolsConfig,
    read_task,
    task_schema,
    task_section,
)

if TYPE_CHECKING:
    from trimtab.agents import Limits

DEFAULT_OBJECTIVE = "stapo"


class Config(Section):
    """A whole recipe."""

    objective: dict[str, Any] = Field(
        default_factory=lambda: {"name": DEFAULT_OBJECTIVE}, description="the objective's name and its options"
    )
    task: SerializeAsAny[TaskConfig] = Field(default_factory=task_section("arithmetic"))
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    tools: ToolsConfig = ToolsConfig()
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    update: UpdateConfig = UpdateConfig()
    run: RunConfig = RunConfig()
    record: RecordConfig = RecordConfig()
    alarms: AlarmsConfig = AlarmsConfig()

    @field_validator("task", mode="before")
    @classmethod
    def _task_of_its_name(cls, value: Any) -> Any:
        return read_task(value)

    @field_validator("objective", mode="before")
    @classmethod
    def _objective_as_table(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if not isinstance(value, Mapping):
            return value
        # TOML has no null, and a run's config.toml must build the same objective again.
        return {"name": DEFAULT_OBJECTIVE} | {k: "none" if v is None else v for k, v in value.items()}

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, value: dict[str, Any]) -> dict[str, Any]:
        # Built here only to report unknown methods and options with all other errors of the recipe.
        build_objective(value)
        return value

    @model_validator(mode="after")
    def _check_across_sections(self) -> Config:
        rollout, update = self.rollout, self.update
        if rollout.prompts * rollout.samples > MAX_RESPONSES:
            raise ValueError(
                f"rollout.prompts = {rollout.prompts} times rollout.samples = {rollout.samples} must be at most "
                f"{MAX_RESPONSES:,}: all responses of a step are in memory"
            )
        if rollout.prompts % update.per_step:
            raise ValueError(
                f"update.per_step = {update.per_step} does not divide rollout.prompts = {rollout.prompts}: the "
                f"{rollout.prompts * rollout.samples} responses of a step are split into mini-batches of whole groups"
            )
        end = self.decay_steps
        if end is None and (update.decay_steps is not None or update.min_lr_ratio):
            raise ValueError(
                "update.decay_steps and update.min_lr_ratio say how the learning rate decays, but "
                "update.lr_schedule = 'constant': set it to 'linear' or 'cosine'"
            )
        if end is not None and end <= update.warmup_steps:
            raise ValueError(
                f"update.warmup_steps = {update.warmup_steps} leaves no step for update.lr_schedule = "
                f"{update.lr_schedule!r}, which ends at step {end} (update.decay_steps, or run.steps)"
            )
        # The trainer rescores mini-batches by [update]; another value in [objective] would plan without those scores.
        token_stats = self.objective.get("token_stats", update.token_stats)
        if token_stats != update.token_stats:
            raise ValueError(
                f"objective.token_stats = {token_stats!r}, but update.token_stats = {update.token_stats!r}: "
                "set update.token_stats alone"
            )
        # Found now rather than after the model is loaded.
        if "ref_logp" in self.build_objective().needs and self.model.reference is None:
            raise ValueError(
                f"objective.name = {self.objective['name']!r} has a KL to a reference model: "
                "set model.reference ('start' or a path)"
            )
        self._check_samples()
        self._check_best()
        self._check_agent()
        self._check_tools()
        self._check_old_stats()
        self._check_max_lag()
        self._check_truncation()
        for key in ("gradient_checkpointing", "lora_dropout"):
            if self.update.shared_prompts and (value := getattr(self.model, key)):
                raise ValueError(
                    f"update.shared_prompts = true does not work with model.{key} = {value}: set one of them"
                )
        reward, limit = self.reward, rollout.max_new_tokens
        if reward.correct <= reward.wrong:
            raise ValueError(f"reward.correct = {reward.correct} must be more than reward.wrong = {reward.wrong}")
        if reward.overlong_buffer > limit:
            raise ValueError(
                f"reward.overlong_buffer = {reward.overlong_buffer} must be at most rollout.max_new_tokens = {limit}"
            )
        return self

    def _check_best(self) -> None:
        run = self.run
        wanted = "run.keep_best" if run.keep_best else "run.early_stop" if run.early_stop else ""
        if wanted and not run.eval_every:
            raise ValueError(f"{wanted} is about held-out scores, but run.eval_every = 0: set it to 1 or more")
        if wanted and not self.task.has_held_out_problems:
            raise ValueError(f"{wanted} is about held-out scores, but there are no such problems: set task.eval_path")

    def _check_samples(self) -> None:
        rollout = self.rollout
        if "mixed" in self.gates and rollout.samples < 2:
            asked = "rollout.dynamic_sampling" if rollout.dynamic_sampling else 'curriculum.gates = ["mixed"]'
            raise ValueError(
                f"{asked} needs rollout.samples of 2 or more, not {rollout.samples}: "
                "the rewards of one response cannot differ"
            )
        advantage = self.build_objective().advantage
        if rollout.samples < 2 and not is_own(advantage):
            raise ValueError(
                f"rollout.samples = {rollout.samples} with objective.name = {self.objective['name']!r}: its advantage "
                f"({advantage}) compares the responses to one prompt, so that of a single one is 0 and nothing is "
                "learned; set rollout.samples to 2 or more, or objective.advantage to one of your own that needs no "
                "group (python:MODULE:NAME)"
            )

    def _check_agent(self) -> None:
        agent, brought = self.agent, agent_of(self.task.name, self.task.arguments)
        own = f"agent.run = {agent.run!r}" if agent.run else f"agent.command = {agent.command}" if agent.command else ""
        if brought and own:
            raise ValueError(f"task.name = {self.task.name!r} brings its own agent: leave out {own}")
        if not brought and not own and agent != AgentConfig():
            raise ValueError(
                "[agent] names no agent: set agent.run (a function, python:MODULE:NAME) or agent.command (a program)"
            )
        if self.has_agent and self.has_tools:
            tools, environment = self.tools.use, self.task.environment
            raise ValueError(
                f"{own or f'task.name = {self.task.name!r}'} together with "
                f"{f'tools.use = {tools}' if tools else f'task.environment = {environment!r}'}: an agent calls its "
                "tools itself; leave out one of them"
            )

    def _check_tools(self) -> None:
        environment, turns = self.task.environment, self.rollout.max_turns
        if self.has_tools and turns < 2:
            named = f"tools.use = {self.tools.use}" if self.tools.use else f"task.environment = {environment!r}"
            raise ValueError(
                f"{named}, but rollout.max_turns = {turns}: a call is one message and the answer after it another; set "
                "it to 2 or more"
            )
        if not self.has_tools and turns > 1:
            if self.has_agent:
                raise ValueError(
                    f"rollout.max_turns = {turns}, but an agent decides itself how often it asks: leave it out"
                )
            raise ValueError(
                f"rollout.max_turns = {turns}, but there is nothing to call: set tools.use or task.environment, or "
                "rollout.max_turns = 1"
            )
        if self.reward.void_turns == "exclude" and not self.has_tools:
            raise ValueError(
                "reward.void_turns = 'exclude' is about conversations with tools: set tools.use or task.environment"
            )

    def _check_old_stats(self) -> None:
        """Raise if the sampler's log-probs and entropies are not those of a forward pass over the responses."""
        rollout, precision, temperature = self.rollout, self.model.precision, self.rollout.sampler_temperature
        unsupported = {
            f"rollout.engine = {rollout.engine!r}": rollout.engine != "native",
            f"model.precision = {precision!r}": precision != "fp32",
            f"rollout.precision = {rollout.precision!r}": rollout.precision not in (None, precision),
            f"rollout.sampler_temperature = {temperature}": temperature not in (None, rollout.temperature),
            "conversations with tools": self.has_tools,
            "an agent": self.has_agent,
        }
        found = [name for name, is_so in unsupported.items() if is_so]
        if found and self.update.old_stats == "sampled":
            raise ValueError(
                f"update.old_stats = 'sampled' does not work with {found[0]}: it needs the native sampler with the "
                "trainer's precision, fp32, and temperature, without tools or an agent; use 'scored'"
            )

    def _check_truncation(self) -> None:
        rollout = self.rollout
        if rollout.keeps and rollout.engine == "vllm":
            raise ValueError(
                "rollout.exact_truncation = true needs the tokens that top-p and top-k kept, which rollout.engine = "
                '"vllm" does not return: use "native", or set rollout.top_p = 1 and rollout.top_k = 0; or leave it '
                "false, with a correction such as '+ tis' in objective.name"
            )

    def _check_max_lag(self) -> None:
        """Raise if responses cannot be left unfinished, or their log-probs are not those that ratios need."""
        rollout, temperature = self.rollout, self.rollout.sampler_temperature
        unsupported = {
            f"rollout.engine = {rollout.engine!r}, which does not go on with a response": rollout.engine != "native",
            "conversations with tools": self.has_tools,
            "an agent": self.has_agent,
            "update.old_stats = 'sampled', because the present policy must score what older weights sampled; use "
            "'scored'": self.update.old_stats == "sampled",
            "objective.token_stats = 'old', because the entropies are the present policy's; leave it out": (
                self.objective.get("token_stats") == "old"
            ),
            f"rollout.sampler_temperature = {temperature}": temperature not in (None, rollout.temperature),
            f"rollout.top_p = {rollout.top_p:g} and rollout.top_k = {rollout.top_k}: ratios are of the whole "
            "vocabulary's probabilities; set 1 and 0": rollout.top_p < 1 or rollout.top_k > 0,
        }
        found = [name for name, is_so in unsupported.items() if is_so]
        if rollout.max_lag and found:
            raise ValueError(f"rollout.max_lag = {rollout.max_lag} does not work with {found[0]}, or set it to 0")

    @property
    def lag_note(self) -> str:
        """Return which correction a run with partial rollouts has for what older weights sampled; else nothing."""
        name, read = self.objective["name"], self.build_objective().needs
        if not self.rollout.max_lag or "sampler_logp" in read or "dppo" in str(name).split(" + "):
            return ""
        return (
            f"note: rollout.max_lag = {self.rollout.max_lag} trains on tokens of older weights, and objective.name = "
            f"{name!r} has no correction for it but its clip range: add ' + tis', ' + icepop' or ' + mis', or use "
            "dppo; sampler/effective_sample_share says how far the weights are apart"
        )

    @property
    def frozen_in_bf16(self) -> bool:
        """Whether LoRA's frozen weights are kept in bf16: nothing may compute with them in fp32."""
        model, rollout = self.model, self.rollout
        halved = model.lora_rank > 0 and model.precision == "bf16"
        # A sampler of the user's own may compute without autocast. Sharded layers have weights of one type.
        return halved and rollout.precision != "fp32" and not is_own(rollout.engine) and not model.shard

    @property
    def gates(self) -> list[str]:
        """The names of what a group must pass to be trained on; with any, others are sampled for groups refused."""
        dynamic = ["mixed"] if self.rollout.dynamic_sampling else []
        return list(dict.fromkeys([*dynamic, *self.curriculum.gates]))

    @property
    def has_tools(self) -> bool:
        """Whether responses are conversations with tools."""
        return bool(self.tools.use) or self.task.environment is not None

    @property
    def agent_function(self) -> str | None:
        """The name of the agent's function: the user's own, or one that the task brings."""
        return self.agent.run or agent_of(self.task.name, self.task.arguments)

    @property
    def has_agent(self) -> bool:
        """Whether responses are what an agent asked for."""
        return bool(self.agent.command) or self.agent_function is not None

    @property
    def conversation_limits(self) -> Limits:
        """What one conversation may take."""
        from trimtab.agents import Limits

        tools, rollout = self.tools, self.rollout
        return Limits(rollout.max_turns, rollout.max_observation_tokens, tools.timeout, tools.deadline)

    @property
    def decay_steps(self) -> int | None:
        """The step at which the decay of the learning rate ends; None if it is constant."""
        return None if self.update.lr_schedule == "constant" else self.update.decay_steps or self.run.steps

    def sampling_options(self, samples: int, temperature: float | None = None) -> SamplingOptions:
        """Return the sampling options of this run; a given temperature (evaluation) turns top-p and top-k off."""
        rollout = self.rollout
        sampled_at = rollout.temperature if rollout.sampler_temperature is None else rollout.sampler_temperature
        return SamplingOptions(
            samples=samples,
            max_new_tokens=rollout.max_new_tokens,
            temperature=sampled_at if temperature is None else temperature,
            # Greedy decoding has nothing to filter, and an evaluation must not depend on the training filter.
            top_p=rollout.top_p if temperature is None else 1.0,
            top_k=rollout.top_k if temperature is None else 0,
            seed=self.run.seed,
            batch_size=rollout.batch_size,
        )

    def build_objective(self) -> Objective:
        """Build the objective of this recipe."""
        built = build_objective(self.objective)
        # Without rules nothing looks at tokens, and a forward pass for their statistics would be wasted.
        if self.update.token_stats == "old" or not built.rules:
            return built
        return build_objective({**self.objective, "token_stats": "current"})


def build_objective(options: Mapping[str, Any]) -> Objective:
    """Build an objective from a recipe's table: `name` and its options; the string `none` means no value."""
    given = {key: None if value == "none" else value for key, value in options.items() if key != "name"}
    return objective(str(options["name"]), **given)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of recipes, for editors."""
    table = Config.model_json_schema()
    # Objectives are validated by their builder; the schema only lists names and options for completion.
    names = [*METHODS, *(f"dapo + {name}" for name in ATTACHMENTS), f"{PREFIX}MODULE:NAME"]
    entries = [*METHODS.values(), *ATTACHMENTS.values()]
    known = sorted({*COMMON_OPTIONS, *(key for entry in entries for key in entry.options)} - {*ATTACHMENTS})
    options: dict[str, Any] = {key: {"description": OPTIONS[key].meaning} for key in known}
    options |= {name: {"description": entry.title} for name, entry in ATTACHMENTS.items()}
    properties = {"name": {"type": "string", "examples": names}, **options}
    table["properties"]["objective"] = {
        "type": "object",
        "required": ["name"],
        "properties": properties,
        # The options of a method of the user's own are known to its file alone.
        "if": {"properties": {"name": {"pattern": PREFIX}}},
        "else": {"properties": dict.fromkeys(properties, True), "additionalProperties": False},
    }
    table["properties"]["task"] = task_schema()
    return table
