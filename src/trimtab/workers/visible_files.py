"""The files that a program sees: the interpreter, the C library, the packages it may import, and nothing else."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field

DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")  # not zero: mapped, it is memory nobody counts
_LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")


@dataclass
class VisibleFiles:
    """Files and folders by their real paths, and the symbolic links that lead to them.

    `hidden` are folders of other packages within them, `search_path` is the programs' `sys.path`.
    """

    paths: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    search_path: list[str] = field(default_factory=list)

    def add(self, path: str) -> None:
        """Add a file or folder, and the links on the way to it."""
        at, rest = "/", [part for part in path.split("/") if part]
        for _ in range(200):
            if not rest:
                break
            step = os.path.normpath(os.path.join(at, rest.pop(0)))
            if not os.path.islink(step):
                at = step
                continue
            self.links[step] = os.readlink(step)
            target = self.links[step]
            at = "/" if target.startswith("/") else os.path.dirname(step)
            rest = [part for part in target.split("/") if part] + rest
        if os.path.exists(at) and not is_below(at, self.paths):
            self.paths.append(at)


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Return whether a path is one of the folders or in one."""
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def find_visible_files(packages: Iterable[str]) -> VisibleFiles:
    """Return what a program needs that may import the standard library and the packages."""
    found = VisibleFiles()
    base, standard_library = os.path.realpath(sys.base_prefix), sysconfig.get_path("stdlib")
    # An interpreter outside /usr has its own folder `lib`, with libpython and, under conda, all C libraries.
    found.add(standard_library if base == "/usr" else os.path.join(base, "lib"))
    for folder in sorted(set(map(os.path.dirname, _loaded_libraries()))):
        if folder != "/usr/lib":  # too much lies there; the loader's cache does not need it
            found.add(folder)
    found.add("/etc/ld.so.cache")
    found.add(next((path for path in _LOADERS if os.path.exists(path)), sys.executable))
    found.add(sys.executable)
    if sys.prefix != sys.base_prefix:
        found.add(os.path.join(sys.prefix, "pyvenv.cfg"))
    site_folders = {sysconfig.get_path("purelib"), os.path.join(standard_library, "site-packages")}
    real = [os.path.realpath(path) for path in sorted(site_folders) if os.path.isdir(path)]
    found.hidden = [path for path in real if is_below(path, found.paths)]
    packages = tuple(packages)
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package_paths = _package_paths(packages)
    own = {os.path.dirname(path) for path in package_paths}
    for path in package_paths:
        found.add(path)
        if is_below(own_path := os.path.realpath(path), found.hidden):
            found.paths.append(own_path)  # within a folder that is hidden otherwise
    found.search_path = [path for path in sys.path if path in own or is_below(os.path.realpath(path), found.paths)]
    return found


def _package_paths(packages: Iterable[str]) -> list[str]:
    """Return the files and folders of packages and of what they require."""
    paths, waiting, seen = [], list(packages), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            spec = importlib.util.find_spec(name.replace("-", "_"))
            required = importlib.metadata.requires(name) or []
        except (ImportError, ValueError):
            continue
        if spec is None or spec.origin is None:
            continue
        path = spec.origin if not spec.submodule_search_locations else spec.submodule_search_locations[0]
        paths.append(path)
        # Wheels keep the C libraries they bring in a folder beside the package.
        if os.path.isdir(libraries := os.path.join(os.path.dirname(path), f"{name}.libs")):
            paths.append(libraries)
        plain = [line for line in required if "extra ==" not in line]
        waiting += [match[0] for line in plain if (match := re.match(r"[\w.-]+", line))]
    return paths


def _loaded_libraries() -> list[str]:
    """Return the shared libraries that this process has loaded."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if ".so" in line}
    return [path for path in paths if path.startswith("/")]
