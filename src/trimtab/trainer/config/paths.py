"""Paths of files and models in recipes: those of a recipe's file are relative to it, others to the current folder.

They are made absolute when a recipe is loaded, so that a run can be resumed and its model used from any folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.data import is_hub_data
from trimtab.text import shown
from trimtab.trainer.model import DEMO_MODELS, is_hub_model

FILE_KEYS = (("task", "path"), ("task", "eval_path"), ("warm_start", "path"))
MODEL_KEYS = (("model", "path"), ("model", "reference"), ("model", "start_from"))
FILE_TASKS = ("file", "gsm8k")  # what `path` means to a task of the user's own is not known here
NAMES = (*DEMO_MODELS, "smollm2", "start", "none")  # of models, and no paths


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
