"""Load recipes: find the TOML file, apply `--set` settings, and check the result."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trimtab.config.errors import describe_error
from trimtab.config.sections import Config
from trimtab.text import nearest

PACKAGED = Path(__file__).parent.parent / "recipes"


def load(recipe: str | Path | None, settings: Sequence[str] = ()) -> Config:
    """Load a recipe by name or path and apply `key=value` settings; the last setting of a key wins."""
    table: dict[str, Any] = {} if recipe is None else _read(find_recipe(recipe))
    parsed = [(setting, *_parse_setting(setting)) for setting in settings]
    # The objective's name is applied first: a new name drops the options of the recipe's method, and must not drop
    # those that other settings give, whether they come before or after it.
    for setting, keys, value in sorted(parsed, key=lambda item: item[1] not in (["objective"], ["objective", "name"])):
        _apply(table, setting, keys, value)
    return parse(table)


def parse(table: Mapping[str, Any]) -> Config:
    """Check a table and return its configuration; the error has one line per problem."""
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise ValueError("\n".join(describe_error(problem, Config) for problem in error.errors())) from None


def packaged_recipes() -> dict[str, Path]:
    """Return the recipes that come with trimtab, by name."""
    return {file.name.removesuffix(".toml"): file for file in sorted(PACKAGED.glob("*.toml"))}


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe, given its path or the name of one that comes with trimtab."""
    path = Path(recipe)
    # The suffix decides, so that a folder named `demo` in the working directory does not hide the recipe.
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


def _parse_setting(setting: str) -> tuple[list[str], Any]:
    key, equals, text = setting.partition("=")
    keys = [name.strip() for name in key.split(".")]
    if not equals or not all(keys):
        raise ValueError(f"--set {setting!r}: write section.key=value, for example update.lr=1e-6")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    # Whatever is not one TOML value is a string without quotes; a line break could smuggle in a second key.
    return keys, parsed["value"] if list(parsed) == ["value"] else text.strip()


def _apply(table: dict[str, Any], setting: str, keys: list[str], value: Any) -> None:
    if keys == ["objective", "name"] and _method(table.get("objective")) != _method(value):
        keys = ["objective"]  # replace the whole table: another method does not have these options
    for name in keys[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {setting!r}: {name!r} is a value, not a section: it has no keys")
    if keys == ["objective"] and not isinstance(value, dict):
        value = {"name": value}
    table[keys[-1]] = value


def _method(objective: Any) -> str:
    """Return the method of an objective's name or table, without its attachments."""
    name = objective.get("name", "") if isinstance(objective, Mapping) else objective
    return re.split(r"[+(]", str(name))[0].strip()
