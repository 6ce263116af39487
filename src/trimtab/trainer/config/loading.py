"""Load recipes: find the TOML file, apply `--set` settings, check the result, and word pydantic's errors for people."""

from __future__ import annotations

import copy
import difflib
import math
import os
import re
import shlex
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trimtab.data import agent_of, is_hub_data
from trimtab.files import read_bounded
from trimtab.own_parts import look_beside, own_names, was_loaded
from trimtab.text import nearest, shorten, shown
from trimtab.trainer.config.recipe import Config
from trimtab.trainer.config.sections import MODEL_NAMES, description
from trimtab.trainer.config.task_sections import TaskConfig, task_hint, task_section

PACKAGED = Path(__file__).parents[2] / "recipes"
LARGEST_RECIPE = 1 << 16  # bytes; ours have some thousand
MOST_DOTS = 1_000  # on a line: tomllib takes half a minute for a key of 30,000 dots
DEEPEST_TABLE = 20  # tables and lists inside each other
LARGEST_INTEGER = 10**18 - 1
LARGEST_FLOAT = 1e30  # beyond it, products overflow in float32
FILE_KEYS = (("task", "path"), ("task", "eval_path"), ("warm_start", "path"))
MODEL_KEYS = (("model", "path"), ("model", "reference"), ("model", "start_from"))
FILE_TASKS = ("file", "gsm8k")  # what `path` means to a task of the user's own is not known here
NAMES = (*MODEL_NAMES, "start", "none")  # of models, and no paths


def load(recipe: str | Path | Mapping[str, Any] | None, settings: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """Load a recipe by name or path, or from a table, and apply settings; the last setting of a key wins.

    Settings are `"section.key=value"` texts, as on the command line, or a mapping of `"section.key"` to values. Paths
    in a recipe are relative to its file, those of a table or a setting to the current folder.
    """
    path = None if recipe is None or isinstance(recipe, Mapping) else find_recipe(recipe)
    given = dict(recipe) if isinstance(recipe, Mapping) else {}
    _check_plain(given, "")  # a table that is too deep cannot be copied
    table = copy.deepcopy(given) if path is None else _read(path)
    task = _task_name(_with_settings(copy.deepcopy(given) if path is None else _read(path), settings))
    if given:
        locate_paths(table, Path.cwd(), task)
    elif path is not None and path.parent != PACKAGED:
        locate_paths(table, path.resolve().parent, task)
    table = _with_settings(table, settings, task)
    if own_names(table):
        _look_for_modules(table, path)
    return parse(table)


def load_stored(path: Path) -> Config:
    """Load the configuration of a run, which may come from anyone: no code that it names is run."""
    return parse_stored(_read(path))


def own_code(path: Path) -> list[str]:
    """Return the names of code that the problems of a stored configuration need: of its task, rules and tools."""
    table = _read(path)
    return own_names([table.get("task"), table.get("tools")])


def stored_agent(path: Path) -> str:
    """Return the agent of a stored configuration, a name or a command; "" if it has none. Nothing of it is run."""
    table = _read(path)
    agent, task = _section(table, "agent"), _section(table, "task")
    if agent.get("command"):
        return shlex.join(map(str, agent["command"]))
    brought = agent_of(str(task["name"]), task) if "name" in task else None
    return str(agent.get("run") or brought or "")


def parse_stored(table: Mapping[str, Any]) -> Config:
    """Check the table of a run, which may come from anyone, without what names code that was not loaded yet."""

    def is_foreign(value: object) -> bool:
        return any(not was_loaded(name) for name in own_names(value))

    kept = {}
    for section, value in table.items():
        if not is_foreign(value):
            kept[section] = value
        elif isinstance(value, dict):
            foreign = [key for key, each in value.items() if is_foreign(each)]
            dropped = {*foreign, *(f"{key}_options" for key in foreign)}
            # What is left would be about another one: options of an objective or a task, limits of an agent or gate.
            if section in ("objective", "agent", "curriculum") or (section == "task" and "name" in foreign):
                continue
            kept[section] = {key: each for key, each in value.items() if key not in dropped}
    return parse(_without_idle_turns(kept))


def _without_idle_turns(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table without keys that need tools, if its tools were dropped."""
    called = _section(table, "tools").get("use") or _section(table, "task").get("environment")
    if called:
        return table
    idle = {"rollout": "max_turns", "reward": "void_turns"}
    without = {
        section: {key: each for key, each in _section(table, section).items() if key != name}
        for section, name in idle.items()
        if isinstance(table.get(section), dict)
    }
    return table | without


def _section(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = table.get(name)
    return section if isinstance(section, dict) else {}


def _look_for_modules(table: dict[str, Any], path: Path | None) -> None:
    """Look for modules of the user's own beside the recipe, and note where, for the run may be resumed elsewhere."""
    beside = [] if path is None or path.parent == PACKAGED else [str(path.resolve().parent)]
    run = table.setdefault("run", {})
    if isinstance(run, dict):  # anything else is an error of the recipe, and reported as one
        folders = run.setdefault("python_path", list(dict.fromkeys([*beside, os.getcwd()])))
        for folder in reversed(folders if isinstance(folders, list) else []):
            look_beside(str(folder))


def _with_settings(
    table: dict[str, Any], settings: Sequence[str] | Mapping[str, Any], task: str | None = None
) -> dict[str, Any]:
    """Return the table with `key=value` settings; for a recipe of this task their paths become absolute."""
    if isinstance(settings, Mapping):
        named = [(f"{key}={value!r}", str(key), value) for key, value in settings.items()]
        parsed = [(setting, _key_names(key, setting), value) for setting, key, value in named]
    else:
        parsed = [(setting, *_parse_setting(setting)) for setting in settings]
    # Names are applied first: a new one drops the options of the recipe's method or task, and must not drop those that
    # other settings give, whether they come before or after it.
    first = (["objective"], ["objective", "name"], ["task"], ["task", "name"])
    for setting, keys, value in sorted(parsed, key=lambda item: item[1] not in first):
        _apply(table, setting, keys, value if task is None else _from_here(keys, value, task))
    return table


def _from_here(keys: list[str], value: Any, task: str) -> Any:
    """Return the value of a setting with its paths, which are relative to the current folder, made absolute."""
    nested = {keys[0]: {keys[-1]: value} if len(keys) == 2 else value}
    with suppress(FileNotFoundError):  # the folder has been deleted: nothing can be relative to it
        locate_paths(nested, Path.cwd(), task)
    return nested[keys[0]][keys[1]] if len(keys) == 2 else nested[keys[0]] if len(keys) == 1 else value


def parse(table: Mapping[str, Any]) -> Config:
    """Check a table and return its configuration; the error has one line per problem."""
    _check_plain(table, "")
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise ValueError(describe_errors(error.errors(), Config, _task_name(table))) from None


def packaged_recipes() -> dict[str, Path]:
    """Return the recipes that come with trimtab, by name."""
    return dict(sorted((file.stem, file) for file in PACKAGED.glob("*.toml")))


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe, given its path or the name of one that comes with trimtab."""
    path = Path(recipe)
    # The suffix decides, so that a folder named `demo` in the working directory does not hide the recipe.
    if path.suffix == ".toml":
        if not path.is_file():
            raise ValueError(f"recipe {shown(str(recipe), 300)}: there is no such file")
        return path
    known = packaged_recipes()
    if str(recipe) not in known:
        hint = nearest(str(recipe), known)
        raise ValueError(f"unknown recipe {shown(str(recipe))}: {hint} (a file of your own ends in .toml)")
    return known[str(recipe)]


def _read(path: Path) -> dict[str, Any]:
    try:
        data = read_bounded(path, LARGEST_RECIPE)
    except ValueError as error:
        raise ValueError(f"{path} is not a recipe: {error}") from None
    try:
        return parse_toml(data.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raise ValueError for anything that is wrong with it."""
    if len(text) > LARGEST_RECIPE:
        raise ValueError(f"it has {len(text)} characters, and {LARGEST_RECIPE} at most may be")
    if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"lists or tables are nested more than {DEEPEST_TABLE} deep") from None


def _check_plain(value: Any, key: str, levels: int = DEEPEST_TABLE) -> None:
    """Refuse what TOML can hold but torch, parquet or a later TOML file cannot, at any depth of a table."""
    problem = ""
    if not levels:
        problem = f"lists or tables are nested more than {DEEPEST_TABLE} deep"
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        problem = f"{shown(value)} must be a whole number of at most 18 digits"
    elif isinstance(value, float) and math.isfinite(value) and abs(value) > LARGEST_FLOAT:
        problem = f"{value} must be a number between {-LARGEST_FLOAT:g} and {LARGEST_FLOAT:g}"
    elif isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        problem = f"{shown(value)} must be UTF-8"  # the bytes of a command line may be anything
    if problem:
        raise ValueError(f"{shorten(key)}: {problem}")
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in pairs:
        _check_plain(each, f"{key}.{name}" if key else str(name), levels - 1)


def _parse_setting(setting: str) -> tuple[list[str], Any]:
    key, equals, text = setting.partition("=")
    keys = _key_names(key if equals else "", setting)
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        parsed = {}
    # Whatever is not one TOML value is a string without quotes; a line break could smuggle in a second key.
    return keys, parsed["value"] if list(parsed) == ["value"] else text.strip()


def _key_names(key: str, setting: str) -> list[str]:
    """Return the names in the `section.key` of a setting."""
    keys = [name.strip() for name in key.split(".")]
    if not all(keys) or len(keys) > DEEPEST_TABLE:
        raise ValueError(f"--set {shown(setting)}: write section.key=value, for example update.lr=1e-6")
    return keys


def _apply(table: dict[str, Any], setting: str, keys: list[str], value: Any) -> None:
    if keys == ["objective", "name"] and _method(table.get("objective")) != _method(value):
        keys = ["objective"]  # replace the whole table: another method does not have these options
    if keys == ["task", "name"] and _task_name(table) != value:
        keys, value = ["task"], {"name": value}
    for name in keys[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {shown(setting)}: {shown(name)} is a value, not a section: it has no keys")
    if keys == ["objective"] and not isinstance(value, dict):
        value = {"name": value}
    table[keys[-1]] = value


def _task_name(table: Mapping[str, Any]) -> str:
    """Return the task that a recipe names; the default if there is no task of that name."""
    task = table.get("task")
    name = task.get("name") if isinstance(task, Mapping) else None
    default: str = TaskConfig.model_fields["name"].default
    try:
        return name if isinstance(name, str) and task_section(name) else default
    except ValueError:
        return default


def _method(objective: Any) -> str:
    """Return the method of an objective's name or table, without its attachments."""
    name = objective.get("name", "") if isinstance(objective, Mapping) else objective
    return re.split(r"[+(]", str(name))[0].strip()


def locate_paths(table: dict[str, Any], folder: Path, task: str) -> None:
    """Make the paths in a recipe's table absolute, taking them as relative to a folder; `task` is the recipe's task."""
    for section, key in (*FILE_KEYS, *MODEL_KEYS):
        values = table.get(section)
        if isinstance(values, dict) and key in values and (section != "task" or task in FILE_TASKS):
            locate = locate_model if section == "model" else locate_file
            values[key] = _each(values[key], partial(locate, folder=folder, key=f"{section}.{key}"))


def locate_file(value: str, folder: Path, key: str) -> str:
    """Return the absolute path of a file of rows; the name of a data set on the hub stays as it is."""
    return _locate(value, folder, key, os.path.isfile, is_hub_data)


def locate_model(value: str, folder: Path, key: str) -> str:
    """Return the absolute path of a model, a run, or RUN@STEP; a name stays as it is."""

    def is_there(path: str) -> bool:
        return os.path.isdir(path) or os.path.isdir(path.rpartition("@")[0])

    return value if value in NAMES else _locate(value, folder, key, is_there, is_hub_model)


def is_hub_model(path: str) -> bool:
    """Return whether a name that is not a folder may be that of a model on the hub: `name` or `owner/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", path) is not None


def _locate(
    value: str, folder: Path, key: str, is_there: Callable[[str], bool], is_hub_name: Callable[[str], bool]
) -> str:
    given = os.path.expanduser(value)
    path, here = os.path.normpath(os.path.join(folder, given)), os.path.abspath(given)  # an absolute one stays
    if not value.strip() or (is_hub_name(value) and not is_there(path) and not is_there(here)):
        return value
    if is_there(here) and not is_there(path):
        raise ValueError(
            f"{key} = {shown(value, 300)}: a recipe's paths are relative to its folder, and there is no {path}; there "
            f"is {here}: write that, or --set {key}={value}, which is relative to the current folder"
        )
    # What is missing from the current folder is an error as it was written.
    return path if is_there(path) or path != here else value


def _each(value: Any, change: Callable[[str], str]) -> Any:
    """Change a path, or each of a list or of a table of weights; anything else is an error of the recipe's later."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [change(each) if isinstance(each, str) else each for each in value]
    return {change(path): weight for path, weight in value.items()} if isinstance(value, dict) else value


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
    # Pydantic gives the choices as text only: "'old' or 'current'".
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
