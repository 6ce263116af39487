"""The sections about what is asked and what it pays: `[task]`, `[curriculum]`, `[tools]`, `[agent]` and `[reward]`.

Graders, tools and workers are imported by the checks that need them.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, create_model, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from trimtab.data import TASKS, check_columns, check_paths, has_held_out_problems, task_options
from trimtab.own_parts import Option, OwnPartError, errors_located, is_own, load_part, location, require_module
from trimtab.text import nearest, shown
from trimtab.trainer.config.sections import Section, check_own_class

if TYPE_CHECKING:
    from trimtab.grading import VerdictKind

COMMON_KEYS = ("name", "environment")  # of every task
RewardKeyword = Literal["wrong", "exclude"]
TASK_TERM = "task"  # the name of the reward by the task's own rule, beside those of the terms
PROBLEMS = ("uniform", "pools")  # ways to choose the next problems
POOL_KEYS = ("max_hard", "min_easy", "min_solved")  # together with the shares, the keys of `pools`
POOLS = ("unseen", "hard", "normal", "easy", "solved")
GATES = ("mixed", "mean_reward")
GATE_KEYS = ("mean_above", "mean_below")  # of the gate `mean_reward`


class TaskConfig(Section):
    """Where prompts and ground-truth answers come from; a task has options of its own."""

    name: str = Field("arithmetic", description="the task, or python:MODULE:NAME for your own")
    environment: str | None = Field(
        None, description="your own class, python:MODULE:NAME, whose methods are tools ([tools.md](tools.md))"
    )

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, value: str | None) -> str | None:
        if value is not None:
            from trimtab.agents import ToolCatalog

            ToolCatalog(environment=value)
        return value

    @field_validator("rule", check_fields=False)
    @classmethod
    def _check_rule(cls, value: Any) -> Any:
        if isinstance(value, str):  # a task of the user's own may mean something else by it
            _load_rule(value)
        return value

    @field_validator("path", "eval_path", check_fields=False)
    @classmethod
    def _check_paths(cls, value: Any) -> Any:
        if cls.model_fields["name"].default == "file" and value is not None:
            check_paths(value)
        return value

    @field_validator("columns", check_fields=False)
    @classmethod
    def _check_columns(cls, value: Any) -> Any:
        return check_columns(value) if cls.model_fields["name"].default == "file" else value

    @property
    def arguments(self) -> dict[str, Any]:
        """The options with which the task is built."""
        return {key: getattr(self, key) for key in type(self).model_fields if key not in COMMON_KEYS}

    @property
    def has_held_out_problems(self) -> bool:
        """Whether there are problems for evaluation."""
        return has_held_out_problems(self.name, self.arguments)


def task_section(name: str) -> type[TaskConfig]:
    """Return the section of a task: a model with a field for each of its options."""
    # The second argument is the user's function itself: a notebook may define it again under the same name.
    return _task_section(name, load_part(name) if is_own(name) else None)


@lru_cache(maxsize=64)
def _task_section(name: str, part: object) -> type[TaskConfig]:
    label = TaskConfig.model_fields["name"]
    fields: dict[str, Any] = {"name": (str, Field(name, description=label.description))}
    fields |= {key: (each.type, _field(each)) for key, each in task_options(name).items()}
    with errors_located(name, part):
        section: type[TaskConfig] = create_model(f"Task {name}", __base__=TaskConfig, **fields)
    return section


def _field(option: Option) -> Any:
    return Field(option.default, description=option.meaning, ge=option.low, le=option.high)


def read_task(value: Any) -> Any:
    """Return the section of a recipe's table `[task]`, by the task that it names."""
    if not isinstance(value, Mapping):
        return value
    name = value.get("name", TaskConfig.model_fields["name"].default)
    if not isinstance(name, str):
        return value
    try:
        section = task_section(name)
    except ValueError as error:
        problem = PydanticCustomError("value_error", "{error}", {"error": error})
        details = InitErrorDetails(type=problem, loc=("name",), input=name)
        raise ValidationError.from_exception_data("task", [details]) from None
    return section.model_validate(value)


def task_schema() -> dict[str, Any]:
    """Return the JSON schema of `[task]`: the keys of the task that it names."""
    schema: dict[str, Any] = {"properties": {"name": {"type": "string", "examples": [*TASKS, "python:MODULE:NAME"]}}}
    for name in reversed(list(TASKS)):
        family, _, member = name.partition(":")  # a name with a member to fill in, as gym:KIND
        named = {"pattern": f"^{family}:."} if member else {"const": name}
        section = task_section(name.lower()).model_json_schema()
        schema = {"if": {"properties": {"name": named}}, "then": section, "else": schema}
    return schema


def task_hint(task: str, key: str) -> str:
    """Return what an unknown key of a task could mean: a near one, or an option of another task."""
    own = list(task_section(task).model_fields)
    hint = nearest(key, own)
    if hint.startswith("did you mean"):
        return hint
    owners = [other for other in TASKS if other != task and key in task_options(other.lower())]
    elsewhere = f"it is an option of {' and '.join(owners)}; " if owners else ""
    return f"{elsewhere}the task {shown(task)} has {', '.join(own)}"


class CurriculumConfig(Section):
    """Which problems come next, and which groups are trained on ([more-signal.md](more-signal.md)).

    Mean rewards of groups are compared on a scale on which 0 is `reward.wrong` and 1 is `reward.correct`.
    """

    problems: str = Field(
        "uniform",
        description="uniform: all problems, shuffled anew every epoch; pools: by the mean reward of a problem's latest "
        "group; or your own, python:MODULE:NAME",
        json_schema_extra={"examples": [*PROBLEMS]},
    )
    problems_options: dict[str, Any] = Field(
        default_factory=dict, validate_default=True, description="options of your own choice of problems"
    )
    max_hard: float = Field(0.0, description="pools: up to this mean reward a problem is hard")
    min_easy: float = Field(0.75, description="pools: from this mean reward on a problem is easy; below, normal")
    min_solved: float = Field(1.0, description="pools: from this mean reward on a problem is solved")
    unseen_share: float = Field(0.3, gt=0, le=1e6, description="pools: share of prompts that were not sampled yet")
    hard_share: float = Field(0.1, ge=0, le=1e6, description="pools: share of hard problems")
    normal_share: float = Field(0.45, ge=0, le=1e6, description="pools: share of normal problems")
    easy_share: float = Field(0.1, ge=0, le=1e6, description="pools: share of easy problems")
    solved_share: float = Field(
        0.05, ge=0, le=1e6, description="pools: share of solved problems, which come back to see what is forgotten"
    )
    gates: list[str] = Field(
        default_factory=list,
        max_length=16,
        description="what a group must pass to be trained on; others are sampled in place of those refused, by "
        "rollout.dynamic_oversample and rollout.dynamic_max_rounds. mixed: its rewards differ; mean_reward: its mean "
        "reward is in a range; or your own, python:MODULE:NAME",
    )
    mean_above: float = Field(0.0, description="mean_reward: admit groups whose mean reward is above this")
    mean_below: float = Field(1.0, description="mean_reward: admit groups whose mean reward is below this")

    @field_validator("problems")
    @classmethod
    def _check_problems(cls, value: str) -> str:
        if value not in PROBLEMS and not is_own(value):
            raise ValueError(f"{shown(value)}: {nearest(value, PROBLEMS)} (one of your own: python:MODULE:NAME)")
        return value

    @field_validator("problems_options")
    @classmethod
    def _check_options(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        problems = info.data.get("problems")
        if problems is not None and is_own(problems):
            check_own_curriculum(problems, value)
        elif problems is not None and value:
            raise ValueError(f"they are for problems of your own; those of {problems} are keys of this section")
        return value

    @field_validator("gates")
    @classmethod
    def _check_gates(cls, value: list[str]) -> list[str]:
        if len({*value}) < len(value):
            raise ValueError(f"{shown(value)} names a gate twice")
        for name in value:
            if is_own(name):
                check_own_gate(name)
            elif name not in GATES:
                raise ValueError(f"{shown(name)}: {nearest(name, GATES)} (one of your own: python:MODULE:NAME)")
        return value

    @model_validator(mode="after")
    def _check_ranges(self) -> CurriculumConfig:
        if not self.max_hard < self.min_easy <= self.min_solved:
            raise ValueError(
                f"max_hard = {self.max_hard}, min_easy = {self.min_easy}, min_solved = {self.min_solved}: max_hard "
                "must be below min_easy, and min_easy not above min_solved"
            )
        if not self.mean_above < self.mean_below:
            raise ValueError(f"mean_above = {self.mean_above} must be below mean_below = {self.mean_below}")
        unused = [] if self.problems == "pools" else [*POOL_KEYS, *(f"{name}_share" for name in POOLS)]
        unused += [] if "mean_reward" in self.gates else GATE_KEYS
        for key in unused:
            if getattr(self, key) != type(self).model_fields[key].default:
                needed = 'gates = ["mean_reward"]' if key in GATE_KEYS else 'problems = "pools"'
                raise ValueError(f"{key} = {getattr(self, key)} is about {needed}: set that too, or leave it out")
        return self


def check_own_curriculum(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that builds a curriculum, or raise if it does not take these options."""
    given = ["the task", "the seed"]
    return check_own_class(name, options, "a curriculum", given, "choose(numbers)", "curriculum.problems_options")


def check_own_gate(name: str) -> Callable[..., Any]:
    """Return a gate of the user's own, or raise if it does not take a problem and its rewards."""
    gate = load_part(name)
    with errors_located(name, gate):
        signature = inspect.signature(gate)
    try:
        signature.bind("problem", "rewards")
    except TypeError as error:
        raise OwnPartError(f"{name}: {location(gate)}: a gate takes a problem and its rewards: {error}") from None
    return gate


class ToolsConfig(Section):
    """Tools that the policy may call during a response ([tools.md](tools.md))."""

    use: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="names of the tools: python, python_session, calculator, or your own function, python:MODULE:NAME; "
        "needs rollout.max_turns of 2 or more",
    )
    format: Literal["auto", "hermes", "llama", "fenced", "plain"] = Field(
        "auto", description="how the model writes a call; auto follows its chat template"
    )
    timeout: float = Field(10.0, gt=0, le=86_400, description="seconds for one call; then its process is killed")
    deadline: float = Field(120.0, gt=0, le=86_400, description="seconds for all calls of a conversation together")
    workers: int = Field(
        4, ge=1, le=1024, description="number of calls that run at the same time, each in its own process"
    )
    memory_mb: int = Field(2048, ge=64, le=1_000_000, description="memory limit of one call, in megabytes")
    sandbox_level: str = Field(
        "full", description="python, python_session: the lowest level of isolation to accept ([sandbox.md](sandbox.md))"
    )

    @field_validator("use")
    @classmethod
    def _check_use(cls, value: list[str]) -> list[str]:
        if len({*value}) < len(value):
            raise ValueError(f"{shown(value)} names a tool twice")
        from trimtab.agents import BUILT_IN, ToolCatalog

        if {*value} - BUILT_IN.keys():  # of built-in tools there is nothing to find, and schemas import transformers
            ToolCatalog(value)
        return value

    @field_validator("sandbox_level")
    @classmethod
    def _check_level(cls, value: str) -> str:
        from trimtab.workers import LEVELS

        if value not in LEVELS:
            raise ValueError(f"{shown(value)}: {nearest(value, LEVELS)}")
        return value


class AgentConfig(Section):
    """Your own agent: a function or a program that asks the policy over an OpenAI endpoint ([agents.md](agents.md)).

    A rollout is one run of it for one problem. `rollout.max_new_tokens` is what all requests of a rollout may sample
    together, and the messages of a request may have `rollout.max_prompt_tokens` more than what is left of that. A
    rollout in which the agent raises an error, or asks nothing, is not trained on.
    """

    run: str | None = Field(None, description="the agent as a function, python:MODULE:NAME; sync or async")
    command: list[str] = Field(
        default_factory=list,
        max_length=1000,
        description="the agent as a program and its arguments, started once for each rollout in the current folder",
    )
    concurrency: int = Field(64, ge=1, le=4096, description="number of agents that run at the same time")
    timeout: float = Field(300.0, gt=0, le=86_400, description="seconds for one rollout; then the agent is killed")
    on_timeout: Literal["exclude", "wrong"] = Field(
        "exclude",
        description="what to do with a rollout that took longer: exclude it from training, or give it the reward of a "
        "wrong answer",
    )

    @field_validator("run")
    @classmethod
    def _check_run(cls, value: str | None) -> str | None:
        if value is not None:
            if not is_own(value):
                raise ValueError(f"{shown(value)}: an agent is a function of your own, python:MODULE:NAME")
            # Not imported: it may bring a whole framework, which only the agents' processes need.
            require_module(value, "an agent")
        return value

    @field_validator("command")
    @classmethod
    def _check_command(cls, value: list[str]) -> list[str]:
        if value and not value[0]:
            raise ValueError(f"{shown(value)} names no program")
        if any("\0" in word for word in value):
            raise ValueError(f"{shown(value)} has a null character")
        return value

    @model_validator(mode="after")
    def _check_one(self) -> AgentConfig:
        if self.run is not None and self.command:
            raise ValueError(f"run = {shown(self.run)} and command = {shown(self.command)}: set one of them")
        return self


def _load_rule(rule: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise if there is no rule of this name, or not one with these options; options are those of a reward's term."""
    from trimtab.grading import RESPONSE_RULES, RULES, check_rule, load_rule

    if options is None or rule not in RESPONSE_RULES:
        try:
            check_rule(rule)
        except ValueError:
            known = RULES if options is None else (*RESPONSE_RULES, *RULES)
            raise ValueError(f"unknown rule {shown(rule)}: {nearest(rule, known)}") from None
    load_rule(rule, options)


def _name_rules(schema: dict[str, Any]) -> None:
    """Add the names of the rules to what is said about `rule`."""
    from trimtab.grading import RESPONSE_RULES, RULES

    schema["description"] += f": {', '.join((*RESPONSE_RULES, *RULES))}"


class RewardTerm(Section):
    """An additional reward: `weight` times the value of its rule, added to the reward of the task's rule."""

    rule: str = Field(description="how it is computed", json_schema_extra=_name_rules)
    weight: float = Field(1.0, ge=-1e6, le=1e6, description="its weight in the sum of all rewards; 0 only logs it")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the rule")
    crashed: float | Literal["exclude"] = Field(
        "exclude", description="if the rule fails: use this number instead, or exclude the response from training"
    )

    @field_validator("crashed", mode="before")
    @classmethod
    def _check_crashed(cls, value: Any) -> Any:
        if value == "exclude" or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise ValueError(f"{shown(value)} must be a number or 'exclude'")

    @model_validator(mode="after")
    def _check_rule(self) -> RewardTerm:
        _load_rule(self.rule, self.options)
        return self


class RewardConfig(Section):
    """What each kind of verdict pays: a number, `wrong` (as a wrong answer) or `exclude` (do not train on it)."""

    correct: float = Field(1.0, description="the answer is right")
    wrong: float = Field(0.0, description="the answer is wrong")
    no_answer: float | RewardKeyword = Field("wrong", description="the response contains no answer")
    ambiguous: float | RewardKeyword = Field(
        "wrong", description="the response gives several answers although one is asked for"
    )
    too_costly: float | RewardKeyword = Field("wrong", description="checking the answer takes too long")
    # Excluded by default: a failure of the grader tells nothing about the response.
    crashed: float | RewardKeyword = Field("exclude", description="the grader failed")
    void_turns: Literal["keep", "exclude"] = Field(
        "keep",
        description="what to do with a conversation that has a message without a call or an answer: keep it, or "
        "exclude it from training as SimpleTIR does",
    )
    weight: float = Field(
        1.0,
        ge=0,
        le=1e6,
        description="weight of the task's rule in the sum of all rewards; 0 means that only reward.terms pay",
    )
    terms: dict[str, RewardTerm] = Field(
        default_factory=dict, description="additional rewards by name, each a table with the keys below"
    )
    overlong_buffer: int = Field(
        0, ge=0, description="DAPO's soft overlong penalty, which grows over this many last tokens; 0 turns it off"
    )
    overlong_factor: float = Field(1.0, ge=0, description="overlong penalty of a response with the maximum length")
    # At most one half: beyond it wrong answers would be rewarded more often than right ones.
    noise: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="for stress tests: the probability that a training reward is flipped between `correct` and "
        "`wrong`, seeded by run.seed; other verdicts and evaluations do not change",
    )

    @field_validator("no_answer", "ambiguous", "too_costly", "crashed", mode="before")
    @classmethod
    def _check_number_or_keyword(cls, value: Any) -> Any:
        # Checked here because pydantic would report a wrong value once per member of the union.
        if value in typing.get_args(RewardKeyword) or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise ValueError(f"{shown(value)} must be a number, 'wrong' (the reward of a wrong answer) or 'exclude'")

    @field_validator("terms")
    @classmethod
    def _check_names(cls, value: dict[str, RewardTerm]) -> dict[str, RewardTerm]:
        for name in value:
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or name == TASK_TERM:
                raise ValueError(
                    f"{shown(name)} is no name of a reward: use small letters, digits and _, and not {TASK_TERM!r}, "
                    "which is the reward by the task's own rule"
                )
        return value

    @model_validator(mode="after")
    def _check_rewards(self) -> RewardConfig:
        if not self.weight and not any(term.weight for term in self.terms.values()):
            raise ValueError("weight = 0 and no term of reward.terms has a weight: nothing would be rewarded")
        return self

    def of(self, kind: VerdictKind) -> float | None:
        """Return the reward of a verdict's kind, or None if such responses are excluded from training."""
        reward = getattr(self, kind)
        return self.wrong if reward == "wrong" else None if reward == "exclude" else float(reward)
