"""The options that are the same in TRL and verl: name, meaning, default and range of each are declared here once.

Those that a recipe has too take theirs from its sections `[record]`, `[tools]` and `[agent]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from trimtab.agents import ToolSet
from trimtab.engines.conversations import tool_set
from trimtab.objectives import Objective
from trimtab.own_parts import is_own
from trimtab.text import nearest, shown
from trimtab.trainer.config import AgentConfig, RecordConfig, Section, ToolsConfig


def _same_as(section: type[Section], key: str) -> Any:
    return section.model_fields[key]


class EngineOptions(Section):
    """What a run in another trainer can set of trimtab; `objective` is the table that builds the objective."""

    objective: dict[str, Any] = Field(
        default_factory=dict, description="a name such as 'stapo' or 'sspo + s2t', or a table with a name and options"
    )
    advantage: str = Field(
        "method",
        description="method: the advantages that the objective is defined with; trl, verl: those that the engine "
        "computes",
    )
    record: str | None = Field(None, description="folder to record the tokens of every step in")
    record_every: int = _same_as(RecordConfig, "every")
    record_group_share: float = _same_as(RecordConfig, "group_share")
    record_max_megabytes: float = _same_as(RecordConfig, "max_megabytes")
    tools: tuple[str, ...] = Field(
        (), description="python, python_session, calculator, or functions of your own, python:MODULE:NAME"
    )
    environment: str | None = Field(
        None, description="a class of your own, python:MODULE:NAME, whose public methods are tools too"
    )
    tool_timeout: float = _same_as(ToolsConfig, "timeout")
    tool_workers: int = _same_as(ToolsConfig, "workers")
    tool_characters: int = Field(4000, ge=100, description="longest reply of a tool; a longer one is cut in the middle")
    agent: str | None = Field(None, description="your own agent as a function, python:MODULE:NAME")
    agent_command: tuple[str, ...] = Field((), description="your own agent as a program, and its arguments")
    agent_concurrency: int = _same_as(AgentConfig, "concurrency")
    agent_timeout: float = _same_as(AgentConfig, "timeout")
    agent_on_timeout: Literal["exclude", "wrong"] = _same_as(AgentConfig, "on_timeout")
    agent_branches: Literal["all", "longest"] = Field(
        "all",
        description="of a rollout with several branches train all, which TRL cannot, or only the one with the most "
        "sampled tokens",
    )
    # Set by an adapter: where the process that started the run looks for modules of the user's own.
    tool_folders: tuple[str, ...] = ()

    @field_validator("tools", "tool_folders", "agent_command", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("agent")
    @classmethod
    def _check_agent(cls, value: str | None) -> str | None:
        if value is not None and not is_own(value):
            raise ValueError(f"{shown(value)}: an agent is a function of your own, python:MODULE:NAME")
        return value

    @model_validator(mode="after")
    def _check_one(self) -> EngineOptions:
        if self.agent is not None and self.agent_command:
            raise ValueError("agent and agent_command are both set: set one of them")
        if self.has_agent and self.has_tools:
            raise ValueError("an agent brings its own tools: leave out tools and environment")
        return self

    @property
    def has_agent(self) -> bool:
        """Return whether an agent is set."""
        return self.agent is not None or bool(self.agent_command)

    @property
    def has_tools(self) -> bool:
        """Return whether any tools are set."""
        return bool(self.tools or self.environment)

    @property
    def tool_set(self) -> ToolSet:
        """Return the tools in this process; the first access starts them, and raises what is wrong with them."""
        return tool_set(self.tools, self.environment, self.tool_workers, self.tool_folders)


def read_options(engine: str, given: Mapping[str, Any], prefix: str = "") -> EngineOptions:
    """Check the options of a run in an engine; errors write `prefix` before a name."""
    try:
        options = EngineOptions(**given)
    except ValidationError as error:
        raise ValueError("\n".join(_described(each, prefix) for each in error.errors())) from None
    if options.advantage not in ("method", engine):
        raise ValueError(
            f"{prefix}advantage={options.advantage!r} must be 'method' (those that the objective is defined with) or "
            f"{engine!r} (those that {engine} computes)"
        )
    return options


def _described(error: Any, prefix: str) -> str:
    if not error["loc"]:  # of several options together
        return f"{prefix}{error['msg'].removeprefix('Value error, ')}"
    key = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"unknown option {prefix}{key}: {nearest(key, EngineOptions.model_fields)}"
    wanted = error["msg"].replace("Input should be", "must be")
    return f"{prefix}{key}={error['input']!r:.80} {wanted}: {EngineOptions.model_fields[key].description}"


def objective_table(option: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the option `objective` as the table that builds it: `name`, and the options of the objective."""
    if isinstance(option, str) and option:
        return {"name": option}
    if isinstance(option, Mapping) and isinstance(option.get("name"), str):
        return dict(option)
    raise ValueError(
        f"objective={option!r:.200} names no objective: set a name ('stapo', 'sspo + s2t') or a table with a name and "
        "its options ({'name': 'stapo', 'tau_p': 0.001}); `trimtab methods` lists them"
    )


def missing_fields(objective: Objective, engine: str) -> list[str]:
    """Return a sentence about each field that an objective reads and an engine does not compute, such as moments."""
    missing = objective.needs - {"entropy", "sampler_logp", "ref_logp", "segment", "current_logp"}
    return [f"{objective.name} reads {field}, which {engine} does not compute" for field in sorted(missing)]
