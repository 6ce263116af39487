"""The user's cache: folders that nobody else can open, and checksums of large files, which take long to compute."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from trimtab.files import write_atomically

LARGE_FILE = 1 << 24  # bytes from which a checksum is kept: below, it takes less than 20 ms
MOST_DIGESTS = 1_000
# A file may change again within the same tick of its time: the checksum of one that was just written is not kept.
SETTLED_SECONDS = 2.0


def cache_folder() -> Path:
    """Return $TRIMTAB_CACHE or ~/.cache/trimtab."""
    return Path(os.environ.get("TRIMTAB_CACHE") or "~/.cache/trimtab").expanduser()


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can open; one that others could have written to is an error."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()  # not `stat`: a link may lead anywhere
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{path} is a link, not a folder: remove it")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user: choose another place")
    if found.st_mode & 0o077:
        raise PermissionError(f"{path} is open to other users: check what is in it, then chmod 700 {path}")
    return path


def folder_digest(folder: Path) -> str:
    """Return a hash of the names and contents of a folder's files, without hidden ones and folders inside it."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    return short_digest([[file.name, content_digest(file)] for file in files])


def short_digest(value: object) -> str:
    """Return a short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file; that of a large file is kept until its size, times or inode change."""
    found = path.stat()
    if found.st_size < LARGE_FILE:
        return _sha256(path)
    # The time of the last change of the inode as well: `cp -p` and `touch` can set the other one.
    stamp = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
    name, kept = str(path.resolve()), _kept_digests()
    known = kept.get(name)
    if isinstance(known, list) and known[:-1] == stamp and isinstance(known[-1], str):
        return known[-1]
    digest = _sha256(path)
    if time.time() - max(found.st_mtime, found.st_ctime) > SETTLED_SECONDS:
        _keep_digest(name, [*stamp, digest])
    return digest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests_file() -> Path:
    return private_folder(cache_folder() / "digests") / "digests.json"


def _kept_digests() -> dict[str, object]:
    try:
        kept = json.loads(_digests_file().read_bytes())
    except (OSError, ValueError, RecursionError):  # then it is computed
        return {}
    return kept if isinstance(kept, dict) else {}


def _keep_digest(name: str, entry: list[object]) -> None:
    kept = {**{each: value for each, value in _kept_digests().items() if each != name}, name: entry}
    with suppress(OSError):
        write_atomically(_digests_file(), json.dumps(dict(list(kept.items())[-MOST_DIGESTS:])))
