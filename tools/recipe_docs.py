"""Generate docs/recipes.md from the models of the configuration and from the recipes themselves."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trimtab.config.loading import load, packaged_recipes
from trimtab.config.recipe import Config
from trimtab.config.task_section import TaskConfig, task_section
from trimtab.tasks import TASKS

_INTRO = """\
# Recipes

Made from the code by `make docs`. A recipe is a TOML file; `trimtab train NAME` takes one of those below by its name,
`trimtab train my.toml` your own. Keys that a recipe does not set have their defaults. Each recipe starts with a
comment: what it trains, from which paper, on what hardware, what the paper does not specify, and how to run baselines.

Any key can be set on the command line with `--set`:

```
trimtab train demo --set update.lr=1e-4 --set run.seed=3
trimtab train demo --set objective.name=grpo
trimtab train demo --set "objective.name=sspo + s2t" --set objective.tau_p=0.001
```

A value is parsed as TOML (`3`, `1e-6`, `true`, `[0.9, 0.95]`); anything else is a string. `none` unsets an optional
key. Setting `objective.name` to another method drops the options of the recipe's method; with the same method and
other attachments they stay."""

_OBJECTIVE = """\
## `[objective]`

`name`, a method with its attachments, and their options: see [methods.md](methods.md). An attachment may also be a
key: `kl = 0.001`, `s2t = true`, `stare = { variant = "C2" }`."""

_TASK = """\
## `[task]`

Where prompts and ground-truth answers come from. `name` is one of those below, each with options of its own, or
`python:MODULE:NAME`: a task of yours, whose options are the arguments of its function ([own-parts.md](own-parts.md)).
Setting `task.name` to another task drops the options of the recipe's task. Every task may have an `environment`:
`python:MODULE:NAME`, a class of yours whose methods are tools ([tools.md](tools.md)); needs `rollout.max_turns` of 2 or
more."""


def recipes_page() -> str:
    """Return the content of docs/recipes.md."""
    parts = [_INTRO, *_recipe_table(), _OBJECTIVE]
    for name, field in Config.model_fields.items():
        section = field.annotation
        if section is TaskConfig:
            parts += [_TASK, *map(_task_part, TASKS)]
        elif isinstance(section, type) and issubclass(section, BaseModel):
            parts.append("\n".join([f"## `[{name}]`", "", section.__doc__ or "", "", *_key_table(section)]))
            parts += _tables_by_name(name, section)
    return "\n\n".join(parts) + "\n"


def _task_part(name: str) -> str:
    section = task_section(name.replace("KIND", "kind"))
    keys = [line for line in _key_table(section) if not line.startswith(("| `name`", "| `environment`"))]
    return "\n".join([f'### `name = "{name}"`', "", _first_line(TASKS[name]), "", *keys])


def _first_line(function: Any) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _tables_by_name(name: str, section: type[BaseModel]) -> list[str]:
    """Return the tables of keys of the sections that a user names, as `[reward.terms.NAME]`."""
    parts = []
    for key, field in section.model_fields.items():
        inner = (*typing.get_args(field.annotation), None)[1] if typing.get_origin(field.annotation) is dict else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            parts.append("\n".join([f"### `[{name}.{key}.NAME]`", "", inner.__doc__ or "", "", *_key_table(inner)]))
    return parts


def recipe_title(path: Path) -> str:
    """Return the first line of a recipe's comment, which says what it trains."""
    line = path.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def _recipe_table() -> list[str]:
    lines = ["| recipe | | prompts x responses | updates | tokens |", "|---|---|---|---|---|"]
    for name, path in packaged_recipes().items():
        config = load(name)
        rollout = config.rollout
        lines.append(
            f"| `{name}` | {recipe_title(path)} | {rollout.prompts} x {rollout.samples} | {config.update.per_step} "
            f"| {rollout.max_new_tokens} |"
        )
    return ["\n".join(lines)]


def _key_table(section: type[BaseModel]) -> list[str]:
    rows = [
        f"| `{key}` | {_values(field.annotation, field.metadata)} | {_default(field)} | {field.description or ''} |"
        for key, field in section.model_fields.items()
    ]
    return ["| key | values | default | meaning |", "|---|---|---|---|", *rows]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ([], {}, ""):
        return "none" if value is None else "empty"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{list(value)}`" if isinstance(value, tuple) else "`{}`".format(str(value).replace("\n", "\\n"))


def _values(kind: Any, metadata: list[Any]) -> str:
    """Describe the values of a key by its type and limits."""
    arguments = [argument for argument in typing.get_args(kind) if argument is not type(None)]
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if typing.get_origin(kind) is list:
        return f"list of {_values(arguments[0], [])}"
    if typing.get_origin(kind) is tuple:
        return f"[{', '.join(_values(*_bare(argument)) for argument in arguments)}]"
    if typing.get_origin(kind) is dict:
        return "table"
    if arguments:  # a union; None was removed above
        return " or ".join(_values(argument, metadata) for argument in arguments)
    names = {bool: "true, false", int: "whole number", float: "number", str: "text"}
    return names[kind] + ",".join(filter(None, map(_limit, metadata)))


def _bare(kind: Any) -> tuple[Any, list[Any]]:
    base, field = typing.get_args(kind)
    return base, field.metadata


def _limit(limit: Any) -> str:
    signs = {annotated_types.Ge: ("≥", "ge"), annotated_types.Gt: (">", "gt")}
    signs |= {annotated_types.Le: ("≤", "le"), annotated_types.Lt: ("<", "lt")}
    sign, name = signs.get(type(limit), ("", ""))
    return f" {sign} {getattr(limit, name):,.10g}" if sign else ""
