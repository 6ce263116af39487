"""The cache of warm starts: one private folder for all runs of a user, bounded in size."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trimtab.private_cache import cache_folder, private_folder

LARGEST_CACHE = 20e9  # bytes, beyond which the warm starts that were not used for longest are removed


@dataclass(frozen=True)
class CachedWarmStart:
    """A warm start in the cache: its folder, its bytes, and when it was last used."""

    path: Path
    size: int
    used: float


def open_cache() -> Path:
    """Return the cache's folder, $TRIMTAB_WARM_START or `warm_start` in the user's cache; make it if it is missing."""
    # Private: whoever could write there would choose the weights of later runs.
    return private_folder(_root())


def _root() -> Path:
    named = os.environ.get("TRIMTAB_WARM_START")
    return Path(named).expanduser() if named else cache_folder() / "warm_start"


def list_warm_starts() -> list[CachedWarmStart]:
    """Return the warm starts in the cache; those that were not used for longest come first."""
    found = []
    for path in _root().glob("*") if _root().is_dir() else ():
        with suppress(OSError):  # another run has just removed it
            if re.fullmatch(r"[0-9a-f]{16}", path.name) and path.is_dir():
                files = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
                found.append(CachedWarmStart(path, sum(files), path.stat().st_mtime))
    return sorted(found, key=lambda each: each.used)


def note_use(entry: Path) -> None:
    """Note that a warm start is in use, and remove others that the cache has no room for."""
    with suppress(OSError):
        os.utime(entry)
    kept = list_warm_starts()
    while sum(each.size for each in kept) > LARGEST_CACHE and kept[0].path != entry:
        shutil.rmtree(kept.pop(0).path, ignore_errors=True)


def remove_warm_starts(most: int | None = None) -> list[CachedWarmStart]:
    """Remove so many warm starts, or all, those first that were not used for longest; return what was removed."""
    found = list_warm_starts()[:most]
    if found:
        open_cache()  # raises if it is not the user's
    for each in found:
        shutil.rmtree(each.path)
    return found


def make_room(folder: Path) -> Path | None:
    """Remove a warm start from the disk of a folder, and return it; None if there is none."""
    with suppress(OSError):
        if _root().stat().st_dev == folder.stat().st_dev:
            return next((each.path for each in remove_warm_starts(1)), None)
    return None
