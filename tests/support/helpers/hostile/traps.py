"""Code whose only effect is a file: each trap has a name, and running it creates a file of that name in one folder."""

from __future__ import annotations

import io
import json
import marshal
import os
import pickle
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Traps:
    """The folder in which traps leave their files."""

    folder: Path

    def marker(self, name: str) -> str:
        """Return the file that a trap creates."""
        self.folder.mkdir(exist_ok=True)
        return str(self.folder / plain(name))

    def sprung(self) -> list[str]:
        """Return the names of the traps that have run."""
        return sorted(os.listdir(self.folder)) if self.folder.exists() else []

    def reset(self) -> list[str]:
        """Return the names of the traps that have run, and forget them."""
        names = self.sprung()
        for name in names:
            (self.folder / name).unlink()
        return names

    def expression(self, name: str) -> str:
        """Return a Python expression without imports."""
        return f"open({self.marker(name)!r}, 'w')"

    def shell(self, name: str) -> str:
        """Return a shell command."""
        return f"touch {self.marker(name)}"

    def python(self, name: str) -> str:
        """Return a module's source that marks its import, and has what others might look for in it."""
        made = "ConfigClass ModelClass TokenizerClass ProcessorClass Dataset grade generate main load system run app"
        members = "".join(f"{member} = _Any\n" for member in made.split())
        anything = "class _Any:\n    def __init__(self, *a, **k): pass\n    def __call__(self, *a, **k): return True\n"
        return f"{self.expression(name)}.close()\n{anything}{members}"

    def bytecode(self, name: str) -> bytes:
        """Return a module as a sourceless .pyc file."""
        return MAGIC_NUMBER + bytes(12) + marshal.dumps(compile(self.python(name), name, "exec"))

    def thing(self, name: str, how: str = "open") -> Any:
        """Return an object that runs when it is unpickled."""
        calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "open": (open, (self.marker(name), "w")),
            "system": (os.system, (self.shell(name),)),
            "exec": (exec, (self.expression(name),)),
            "eval": (eval, (self.expression(name),)),
            "import": (__import__("runpy").run_path, (self.script(name),)),
        }
        return _Reduced(*calls[how])

    def script(self, name: str) -> str:
        """Write a script beside the folder and return its path."""
        path = self.folder.parent / "scripts" / f"{plain(name)}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.python(name))
        return str(path)

    def pickled(self, name: str, how: str = "open") -> bytes:
        """Return a pickle."""
        return pickle.dumps(self.thing(name, how))

    def torch_file(self, name: str, form: str = "zip", how: str = "open") -> bytes:
        """Return a pickle in one of torch's formats: zip, legacy, or the tar of old."""
        import torch

        out = io.BytesIO()
        if form == "tar":
            with tarfile.open(fileobj=out, mode="w") as tar:
                for member in ("sys_info", "pickle", "storages", "tensors"):
                    data = self.pickled(name, how)
                    info = tarfile.TarInfo(member)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        else:
            weights = {"model.norm.weight": torch.ones(4), "x": self.thing(name, how)}
            torch.save(weights, out, _use_new_zipfile_serialization=form == "zip")
        return out.getvalue()

    def numpy_file(self, name: str) -> bytes:
        """Return a .npy file of one pickled object."""
        import numpy as np

        out = io.BytesIO()
        np.save(out, np.array([self.thing(name)], dtype=object), allow_pickle=True)
        return out.getvalue()


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


def plain(name: str) -> str:
    """Return a name as a file's name that needs no quotes anywhere."""
    return re.sub(r"[^\w.]+", "-", name)


class _Reduced:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, its folder included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))


def change_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    write_json(path, {**(json.loads(path.read_text()) if path.exists() else {}), **changes})
