"""Parts of the user's own: whatever a recipe names can be `python:MODULE:NAME`.

The module is looked for on `sys.path`, then beside the recipe, then in the current folder: an installed module comes
first. `register` gives a name to what has no module, in a notebook. Whatever goes wrong in a user's file is a
`ValueError` that names the file and the line.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import os
import re
import sys
import sysconfig
import threading
import traceback
import typing
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from trimtab.text import nearest, shorten, shown

PREFIX = "python:"
PATTERN = r"python:(?:[\w.]+:)?\w+"  # the second form is that of a registered part

MAX_TRACEBACK = 8_000  # characters, of the end of one

_Part = TypeVar("_Part")
_registered: dict[str, Any] = {}
_folders: list[str] = []  # of recipes, the newest first
_loaded: set[str] = set()
_lock = threading.RLock()  # sys.path is changed while a module is imported


@dataclass(frozen=True)
class Option:
    """An option of a method, attachment or task: what it means, and the range, type and default of its value.

    Meaning and range are written at the argument, as `digits: Annotated[int, Option("digits of each number", 1, 9)]`.
    """

    meaning: str = ""
    low: float | None = None
    high: float | None = None
    type: Any = Any
    default: Any = None


class OwnPartError(ValueError):
    """A part of the user's own cannot be used; the message names its file and line where they are known."""


def is_own(name: object) -> bool:
    """Return whether a name is that of a part of the user's own."""
    return isinstance(name, str) and name.startswith(PREFIX)


def register(part: _Part, name: str | None = None) -> _Part:
    """Register a function or class for this process; recipes then name it `python:NAME`. Also a decorator.

    For notebooks: what is in a file needs no registration, and other processes (a comparison's runs, the workers that
    grade) know files only.
    """
    label = str(name or getattr(part, "__name__", ""))
    if not callable(part) or not re.fullmatch(r"[^\W\d]\w*", label):
        raise OwnPartError(f"register takes a function or class that has a name, not {shown(part)}")
    _registered[label] = part
    return part


def look_beside(folder: Path | str) -> None:
    """Look for modules in this folder too: the one that a recipe lies in."""
    path = os.path.abspath(folder)
    _folders[:] = [path, *(other for other in _folders if other != path)]


def module_folders() -> list[str]:
    """Return the folders that are searched after `sys.path`: those of recipes, then the current one."""
    try:
        return list(dict.fromkeys([*_folders, os.getcwd()]))
    except FileNotFoundError:  # it has been deleted
        return list(_folders)


def was_loaded(name: str) -> bool:
    """Return whether this process has loaded the part, or another of its module: recipe or command line named it."""
    return name in _loaded or name.rpartition(":")[0] in {other.rpartition(":")[0] for other in _loaded} - {"python"}


def own_names(value: object) -> list[str]:
    """Return the names of parts of the user's own anywhere in a value: a name, or a table of a recipe."""
    names, left = [], [value]
    while left:  # no recursion: a recipe that was not checked yet may be nested a thousand deep
        item = left.pop()
        if isinstance(item, dict):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            left += item
        elif isinstance(item, str):
            names += re.findall(PATTERN, item)
    return names


def load_part(name: str) -> Callable[..., Any]:
    """Return the function or class that a name stands for."""
    if not re.fullmatch(PATTERN, name):
        raise OwnPartError(f"{shown(name)} is no name of a part: write python:MODULE:NAME, as python:mine:gentle")
    module_name, _, attribute = name.removeprefix(PREFIX).rpartition(":")
    if not module_name:
        if attribute not in _registered:
            known = f"; registered are {', '.join(_registered)}" if _registered else ""
            raise OwnPartError(f"{name}: nothing of this name is registered here: write python:MODULE:NAME{known}")
        part = _registered[attribute]
    else:
        module = import_module(name, module_name)
        file = shown_file(getattr(module, "__file__", None) or module_name)
        if not hasattr(module, attribute):
            own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
            hint = f": {nearest(attribute, own)}" if own else ""
            raise OwnPartError(shorten(f"{name}: {file} has no {attribute}{hint}", 1_000))
        part = getattr(module, attribute)
        if not callable(part):
            raise OwnPartError(f"{name}: {attribute} of {file} is {shown(part)}, and no function or class")
    _loaded.add(name)
    loaded: Callable[..., Any] = part
    return loaded


def read_options(name: str, build: Callable[..., Any], skip: Collection[str] = ()) -> dict[str, Option]:
    """Return the options of a function or class, which are its arguments, in their order."""
    function = build.func if isinstance(build, partial) else build
    with errors_located(name, build):
        parameters = inspect.signature(build).parameters
        # A class has the annotations of its arguments in `__init__`.
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    options = {}
    for key, parameter in parameters.items():
        if key in skip:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise option_error(name, build, key, "is no option: name every option, with a default")
        default = parameter.default
        if default is parameter.empty:
            advice = "arguments are options, and a recipe may leave them out"
            raise option_error(name, build, key, f"needs a default: {advice}")
        annotation = hints.get(key, Any if default is None else type(default))
        options[key] = replace(_annotated_option(annotation), default=default)
    return options


def _annotated_option(annotation: Any) -> Option:
    """Return what `Annotated[int, Option(...)]` or `Annotated[int, "what it means"]` says."""
    if typing.get_origin(annotation) is not Annotated:
        return Option(type=annotation)
    kind, *notes = typing.get_args(annotation)
    option = next((note for note in notes if isinstance(note, Option)), None)
    text = next((note for note in notes if isinstance(note, str)), "")
    return replace(option or Option(text), type=kind)


def option_error(name: str, build: Callable[..., Any], key: str, problem: str) -> OwnPartError:
    """Return the error about an argument that cannot be an option."""
    return OwnPartError(f"{name}: {location(build)}: its argument {key!r} {problem}")


def require_module(name: str, what: str) -> None:
    """Raise if a part can be in no module that another process finds; nothing is imported."""
    if not re.fullmatch(PATTERN, name):
        raise OwnPartError(f"{shown(name)} is no name of a part: write python:MODULE:NAME, as python:mine:gentle")
    module_name = name.removeprefix(PREFIX).rpartition(":")[0]
    if not module_name:
        raise OwnPartError(
            f"{name}: {what} runs in a process of its own, which knows files only: put it in a file MODULE.py and "
            "write python:MODULE:NAME"
        )
    top, folders = module_name.partition(".")[0], module_folders()
    if top not in sys.modules and importlib.machinery.PathFinder.find_spec(top, [*sys.path, *folders]) is None:
        raise _not_found(name, module_name, folders)


def _not_found(name: str, module_name: str, folders: list[str]) -> OwnPartError:
    places = ", ".join([*(shown_file(folder) for folder in folders), "sys.path (PYTHONPATH adds to it)"])
    return OwnPartError(f"{name}: there is no module {module_name} in {places}")


def import_module(name: str, module_name: str) -> Any:
    """Import the module of a part that has this name."""
    with _lock:
        folders = [folder for folder in module_folders() if folder not in sys.path]
        # Only while it is imported: a library that tries an optional import later must not find a file of these.
        sys.path += folders
        importlib.invalidate_caches()  # the file may be a second old
        try:
            with errors_located(name):
                module = _import_or_say_where(name, module_name, folders)
        finally:
            for folder in folders:
                sys.path.remove(folder)
    _refuse_namesake(name, module_name, module, folders)
    return module


def _import_or_say_where(name: str, module_name: str, folders: list[str]) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # one that the user's module imports
        raise _not_found(name, module_name, folders) from None


def _refuse_namesake(name: str, module_name: str, module: Any, folders: list[str]) -> None:
    """Refuse a module that was imported from another recipe's folder, if this one's has a file of that name too."""
    file = getattr(module, "__file__", None) or ""
    if not any(Path(file).is_relative_to(folder) for folder in folders):
        return
    stem = module_name.replace(".", os.sep)
    for folder in folders:
        for found in (Path(folder, f"{stem}.py"), Path(folder, stem, "__init__.py")):
            if found.is_file():
                if not found.samefile(file):
                    raise OwnPartError(f"{name}: {file} is loaded, and {found} has the same name: rename one of them")
                return


@contextmanager
def errors_located(name: str, part: object = None) -> Iterator[None]:
    """Around code of the user's own: turn whatever it raises into an error that names its file and line."""
    try:
        yield
    except (KeyboardInterrupt, OwnPartError):
        raise
    except BaseException as error:  # also SystemExit: a script without `if __name__ == "__main__"`
        raise _located(name, error, part) from error


def _located(name: str, error: BaseException, part: object = None) -> OwnPartError:
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{shown_file(error.filename)}:{error.lineno}"
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        place = f"{shown_file(frames[-1].filename)}:{frames[-1].lineno}" if frames else location(part)
    reason = error.msg if isinstance(error, SyntaxError) else str(error)
    return OwnPartError(shorten(f"{name}: {place}: {type(error).__name__}: {reason}".replace(": : ", ": "), 1_000))


def own_traceback(error: BaseException) -> str:
    """Return the traceback of an error in a part of the user's own, without trimtab's calls of it."""
    ours, trace = os.path.dirname(os.path.abspath(__file__)) + os.sep, error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))[-MAX_TRACEBACK:].rstrip()


def location(part: object) -> str:
    """Return `file:line` of a function or class; empty if it has none."""
    try:
        found = inspect.unwrap(part) if callable(part) else part
        file = inspect.getsourcefile(found)  # type: ignore[arg-type]
        line = found.__code__.co_firstlineno if inspect.isfunction(found) else inspect.getsourcelines(found)[1]  # type: ignore[arg-type]
    except (TypeError, OSError, ValueError):
        return ""
    return f"{shown_file(file or '')}:{line}"


def _is_users(filename: str) -> bool:
    """Return whether a file is neither trimtab's nor Python's nor an installed package's."""
    if filename.startswith(("<frozen", "<string")):  # the second is where annotations are evaluated
        return False
    ours = [os.path.dirname(os.path.abspath(__file__)), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    return "site-packages" not in filename and not any(filename.startswith(folder + os.sep) for folder in ours)


def shown_file(file: str) -> str:
    """Return a path, relative if it lies below the current folder."""
    try:
        return os.path.relpath(file) if Path(file).is_relative_to(os.getcwd()) else file
    except (FileNotFoundError, ValueError):
        return file
