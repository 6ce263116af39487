"""The section `[task]`: its keys are `name` and the options of the task that it names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import Field, ValidationError, create_model, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from trimtab.data import (
    TASKS,
    TaskArgument,
    check_columns,
    check_paths,
    has_held_out_problems,
    task_arguments,
)
from trimtab.grading import RULES, check_rule, load_rule
from trimtab.own_parts import errors_located, is_own, load_part
from trimtab.text import nearest, shown
from trimtab.trainer.config.section import Section
from trimtab.trainer.config.tools_section import check_environment

GYM = "gym:KIND"  # a name with a part to fill in
# What the config.toml of a run held, whatever its task, when all tasks had one section.
ONE_SECTION = {
    "rule": "boxed", "suffix": "", "family": "addition", "digits": 2, "terms": 3, "form": "bare", "size": 10_000,
    "options": {},
}  # fmt: skip

COMMON_KEYS = ("name", "environment")  # of every task


class TaskConfig(Section):
    """Where prompts and ground-truth answers come from; a task has options of its own."""

    name: str = Field("arithmetic", description="the task, or python:MODULE:NAME for your own")
    environment: str | None = Field(
        None, description="your own class, python:MODULE:NAME, whose methods are tools ([tools.md](tools.md))"
    )

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, value: str | None) -> str | None:
        return value if value is None else check_environment(value)

    @field_validator("rule", check_fields=False)
    @classmethod
    def _check_rule(cls, value: Any) -> Any:
        if not isinstance(value, str):  # a task of the user's own may mean something else by it
            return value
        try:
            check_rule(value)
        except ValueError:
            raise ValueError(f"unknown rule {shown(value)}: {nearest(value, RULES)}") from None
        load_rule(value)
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
    fields |= {key: (each.type, _field(each)) for key, each in task_arguments(name).items()}
    with errors_located(name, part):
        section: type[TaskConfig] = create_model(f"Task {name}", __base__=TaskConfig, **fields)
    return section


def _field(argument: TaskArgument) -> Any:
    option = argument.option
    return Field(argument.default, description=option.meaning, ge=option.low, le=option.high)


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
    if ONE_SECTION.keys() <= value.keys():
        rest = {key for key in ONE_SECTION.keys() - section.model_fields if value[key] == ONE_SECTION[key]}
        value = {key: each for key, each in value.items() if key not in rest}
    return section.model_validate(value)


def task_schema() -> dict[str, Any]:
    """Return the JSON schema of `[task]`: the keys of the task that it names."""
    schema: dict[str, Any] = {"properties": {"name": {"type": "string", "examples": [*TASKS, "python:MODULE:NAME"]}}}
    for name in reversed(list(TASKS)):
        named = {"pattern": "^gym:."} if name == GYM else {"const": name}
        section = task_section(name.replace("KIND", "kind")).model_json_schema()
        schema = {"if": {"properties": {"name": named}}, "then": section, "else": schema}
    return schema


def task_hint(task: str, key: str) -> str:
    """Return what an unknown key of a task could mean: a near one, or an option of another task."""
    own = list(task_section(task).model_fields)
    hint = nearest(key, own)
    if hint.startswith("did you mean"):
        return hint
    owners = [other for other in TASKS if other != task and key in task_arguments(other.replace("KIND", "kind"))]
    elsewhere = f"it is an option of {' and '.join(owners)}; " if owners else ""
    return f"{elsewhere}the task {shown(task)} has {', '.join(own)}"
