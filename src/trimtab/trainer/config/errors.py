"""Turn pydantic's errors in a recipe into messages that name the key, the value and what is allowed."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from trimtab.text import nearest, shorten, shown
from trimtab.trainer.config.sections import description
from trimtab.trainer.config.task_sections import task_hint, task_section

MAX_LINE = 1_000  # characters; a value may be a text of any length
MAX_LINES = 20  # of an error: a list of a million wrong entries has a million


# What other trainers call our keys.
OTHER_WORDS = {
    "learning_rate": "lr",
    "num_generations": "samples",
    "max_completion_length": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "num_train_steps": "steps",
    "max_steps": "steps",
    "num_epochs": "passes",
    "ppo_epochs": "passes",
    "train_batch_size": "prompts",
    "model_name_or_path": "path",
    "dtype": "precision",
}


def _number(limit: float) -> str:
    return f"{limit:,.10g}"


_TYPE_NAME = re.compile(r"str|int|float|bool|(?:list|dict)\[.*\]")  # as pydantic writes the types of a union
_EXPECTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "bool": lambda _: "true or false",
    "int": lambda _: "a whole number",
    "float": lambda _: "a number",
    "finite_number": lambda _: "a finite number",
    "string": lambda _: "text, in quotes",
    "list": lambda _: "a list, in brackets",
    "tuple": lambda _: "two numbers, for example [0.9, 0.999]",
    "dict": lambda _: "a table, for example {key = 1}",
    "greater_than_equal": lambda context: f"at least {_number(context['ge'])}",
    "greater_than": lambda context: f"more than {_number(context['gt'])}",
    "less_than_equal": lambda context: f"at most {_number(context['le'])}",
    "less_than": lambda context: f"less than {_number(context['lt'])}",
    "literal_error": lambda context: f"one of {context['expected']}",
}


def describe_errors(errors: Sequence[Any], root: type[BaseModel], task: str) -> str:
    """Return one line for each of pydantic's errors in a recipe of this task, or for the first of very many."""
    errors = _of_unions(errors)
    described = [shorten(describe_error(error, root, task), MAX_LINE) for error in errors[:MAX_LINES]]
    # A mistake in a file of the user's own is found by each of its parts that the recipe names, and is said once.
    lines = list({re.sub(r"^\S+ python:\S+ ", "", line): line for line in reversed(described)}.values())[::-1]
    return "\n".join([*lines, f"and {len(errors) - MAX_LINES} more"] if len(errors) > MAX_LINES else lines)


def _of_unions(errors: Sequence[Any]) -> list[Any]:
    """Return the errors with one for each option of `[task]` that may have several types, and has none of them.

    Pydantic has one for each type, with the type's name in the location.
    """
    types: dict[Any, dict[str, list[Any]]] = {}
    for error in errors:
        if len(error["loc"]) > 2 and error["loc"][0] == "task" and _TYPE_NAME.fullmatch(str(error["loc"][2])):
            types.setdefault(error["loc"][:2], {}).setdefault(error["loc"][2], []).append(error)
    merged = [error for error in errors if len(types.get(error["loc"][:2], ())) < 2]
    for location, found in types.items():
        if len(found) < 2:  # not a type but a key of that name
            continue
        inside = [error for each in found.values() for error in each if len(error["loc"]) > 3]
        if inside:  # the value has this type, and something in it is wrong
            merged += [{**error, "loc": (*location, *error["loc"][3:])} for error in inside]
        else:
            expected = [_expected(each[0]) or each[0]["msg"] for each in found.values()]
            merged.append(
                {**next(iter(found.values()))[0], "loc": location, "type": "union", "msg": " or ".join(expected)}
            )
    return merged


def describe_error(error: Any, root: type[BaseModel], task: str) -> str:
    """Return one line for one of pydantic's errors in a recipe whose sections are the fields of `root`."""
    location, kind, value = error["loc"], error["type"], error["input"]
    key = "".join(f"[{name}]" if isinstance(name, int) else f".{name:.100}" for name in location).lstrip(".")
    if kind == "extra_forbidden":
        return _unknown_key(location, root, task)
    if kind == "value_error":
        message = str(error["ctx"]["error"])
        return f"{key}: {message}" if key else message
    if kind == "model_type":
        fields = _fields_at(location, root, task)
        return f"{key} = {shown(value)}: {key} is a section, a table with the keys {', '.join(fields)}"
    if kind == "missing" and "betas" not in location:
        return f"{key} is missing: {description(_section_at(location[:-1], root).model_fields[str(location[-1])])}"
    if kind in ("missing", "too_long") and "betas" in location:  # the one list of fixed length
        key, kind = key.partition("[")[0], "tuple"
    expected = error["msg"] if kind == "union" else _expected({**error, "type": kind})
    wanted = f"must be {expected}" if expected else error["msg"]
    if kind == "list_type" and isinstance(value, str):
        wanted = f"must be a list, for example [{shown(value)}]"
    return f"{key} = {shown(value)}: {wanted}{_suggestion(error)}"


def _expected(error: Any) -> str:
    """Return what a value must be, in words; nothing if there are none for this kind of error."""
    # Pydantic's kinds are `int_type`, `int_parsing`, `int_from_float`, ...: the first word tells the type.
    expected = _EXPECTED.get(error["type"]) or _EXPECTED.get(error["type"].partition("_")[0])
    return expected(error.get("ctx", {})) if expected else ""


def _suggestion(error: Any) -> str:
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    # Pydantic gives the choices as text only: "'fp32' or 'bf16'".
    choices = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
    near = difflib.get_close_matches(error["input"].lower(), choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _fields(root: type[BaseModel], section: str, task: str) -> Sequence[str]:
    """Return the keys of a section; those of `[task]` depend on the task."""
    if section == "task":
        return [*task_section(task).model_fields]
    return [*getattr(root.model_fields[section].annotation, "model_fields", ())]


def _unknown_key(location: tuple[str | int, ...], root: type[BaseModel], task: str) -> str:
    name = str(location[-1])[:100]
    if len(location) == 1:
        sections = {key: _fields(root, key, task) for key in root.model_fields}
        owners = [section for section, keys in sections.items() if name in keys]
        if owners:  # the key was written without its section
            return f"unknown section {name}: it is a key of {' and '.join(f'[{owner}]' for owner in owners)}"
        return f"unknown section {name}: {nearest(name, root.model_fields)}"
    fields, known = _fields_at(location[:-1], root, task), OTHER_WORDS.get(name, "")
    hint = f"did you mean {known}?" if known in fields else nearest(name, fields)
    if location[0] == "task":
        hint = task_hint(task, name)
    return f"unknown key {'.'.join(map(str, (*location[:-1], name)))}: {hint}"


def _fields_at(location: tuple[str | int, ...], root: type[BaseModel], task: str) -> Sequence[str]:
    """Return the keys of a section at a place in a recipe."""
    return _fields(root, "task", task) if location == ("task",) else [*_section_at(location, root).model_fields]


def _section_at(location: tuple[str | int, ...], root: type[BaseModel]) -> Any:
    """Return the model of a section at a place in a recipe."""
    section: Any = root
    for name in location:
        if typing.get_origin(section) is dict:  # a table of sections by names of the user's own
            section = typing.get_args(section)[1]
        else:
            section = section.model_fields[str(name)].annotation
    return section
