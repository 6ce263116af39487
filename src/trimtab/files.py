"""File operations that every package shares: atomic writes, JSON lines, locked folders, the user's cache, checksums.

A file or folder that is being written has a name that starts with `.writing-` and ends with the number of its process,
beside its final name. A killed process leaves no more than that behind, and the next one that writes there removes it.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import mmap
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trimtab import failpoints

WRITING = ".writing-"  # the prefix of unfinished files and folders
MARKER = ".trimtab"  # in a folder of several runs: says that a command made the folder
MOST_NAMES = 3  # of files, in an error
LARGE_FILE = 1 << 24  # bytes from which a checksum is kept: below, it takes less than 20 ms
MOST_DIGESTS = 1_000
# A file may change again within the same tick of its time: the checksum of one that was just written is not kept.
SETTLED_SECONDS = 2.0


@contextmanager
def errors_with_path(path: Path) -> Iterator[None]:
    """Add the path that is being written to an error of the system that names no file."""
    try:
        yield
    except OSError as error:
        # A failed write or fsync knows its descriptor only: on a full disk nobody could tell which disk it is.
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_atomically(path: Path, data: str | bytes | memoryview | Iterable[str], *, named: bool = False) -> None:
    """Write a file so that a reader finds all of the data or what was there before, even after a power cut.

    A pipe or a device is written to only if the user has `named` it, as /dev/stdout: elsewhere it would block for ever.
    """
    pieces = [data] if isinstance(data, str | bytes | memoryview) else data
    encoded = (piece.encode() if isinstance(piece, str) else piece for piece in pieces)
    if path.exists() and not path.is_file():  # a rename would replace it
        if not named:
            raise FileExistsError(errno.EEXIST, "it is not a regular file: remove it", str(path))
        with errors_with_path(path), path.open("wb") as file:
            file.writelines(encoded)
        return
    # In the same folder, because a rename is atomic only within one file system. Of this process only, because two may
    # write the same report at the same time.
    remove_unfinished(path.parent, path.name)
    temporary = path.with_name(f"{WRITING}{path.name}-{os.getpid()}")
    try:
        with errors_with_path(path), temporary.open("wb") as file:
            file.writelines(encoded)
            # Without fsync the rename may reach the disk before the data does, and a power cut leaves an empty file.
            file.flush()
            os.fsync(file.fileno())
        failpoints.failpoint("file.written")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def require_empty(folder: Path, besides: Iterable[str] = (), option: str = "--out") -> None:
    """Raise if a folder has anything in it except these names and leftovers of killed processes.

    A command calls this before it writes into a folder that it did not make: the names that it writes may be there.
    """
    if not folder.is_dir():
        return
    names = sorted({path.name for path in folder.iterdir() if _writer(path) is None} - set(besides))
    if names:
        shown = ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if (more := len(names) - MOST_NAMES) > 0 else "")
        raise ValueError(
            f"{folder} holds files that trimtab did not write there ({shown}). Nothing was changed: choose another "
            f"{option}, or move them away"
        )


def mark_folder(folder: Path, command: str, runs: Iterable[str] = ()) -> None:
    """Mark a folder as made by a command; one that is not marked may hold these runs and nothing else."""
    if not (folder / MARKER).exists():
        require_empty(folder, set(runs))
        write_atomically(folder / MARKER, f"made by trimtab {command}\n")


@contextmanager
def new_folder(final: Path, *, durable: bool = False, tidy: bool = True) -> Iterator[Path]:
    """Yield an empty folder to fill; when the block ends, it replaces `final`. After an error nothing is left of it.

    A block that removes the folder leaves `final` as it is, and so does one that has not all the names in `final`. With
    `durable` the files survive a power cut as well; with `tidy` what killed processes left beside it is removed, for
    which all names there are read.
    """
    # The parent is not made here: if somebody has removed a run's folder, no half of it may appear again.
    if tidy:
        remove_unfinished(final.parent)
    # Several processes may share the parent (the cache of warm starts), so each has its own temporary name.
    temporary = final.with_name(f"{WRITING}{final.name}-{os.getpid()}")
    temporary.mkdir()
    try:
        with errors_with_path(final):
            yield temporary
        if not temporary.exists():
            return
        if durable:
            for path in (*temporary.iterdir(), temporary):
                sync(path)
        if final.exists():
            _refuse_others(final, temporary)
            remove_folder(final)  # rename replaces a file, but not a folder that has something in it
        failpoints.failpoint("folder.rename")
        temporary.rename(final)
        if durable:
            sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_others(final: Path, temporary: Path) -> None:
    """Raise if a folder that is to be replaced has a file that the new one has not: somebody has put it there."""
    if not final.is_dir():  # also a pipe, which would block
        raise FileExistsError(errno.EEXIST, "it is not a folder: move it away", str(final))
    others = sorted({path.name for path in final.iterdir()} - {path.name for path in temporary.iterdir()})
    if others:
        message = (
            f"{others[0]} is not one of the files that would replace it (and {len(others) - 1} more): move it away"
        )
        raise FileExistsError(errno.EEXIST, message, str(final))


def remove_folder(path: Path) -> None:
    """Remove a folder so that a reader finds all of it or nothing."""
    # Renamed first: while rmtree works, a reader would see a folder with some of its files.
    gone = path.with_name(f"{WRITING}gone-{path.name}-{os.getpid()}")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove a folder that holds nothing but these files; of one that holds others too, remove only these."""
    known = set(names)
    if {path.name for path in folder.iterdir()} <= known:
        remove_folder(folder)
        return
    for name in known:
        (folder / name).unlink(missing_ok=True)


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Remove what killed processes left half-written, of one name or of all; that of processes still alive stays."""
    for path in folder.glob(f"{WRITING}{glob.escape(name) or '*'}-*"):
        process = _writer(path)
        # A process number may be in use again by a stranger: then the file or folder stays until a later call.
        if process is not None and (process == os.getpid() or not _alive(process)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _writer(path: Path) -> int | None:
    """Return the number of the process that has not finished writing this file or folder; None if it is another."""
    found = re.fullmatch(rf"{re.escape(WRITING)}.+-(\d{{1,12}})", path.name, re.ASCII | re.DOTALL)
    return int(found[1]) if found else None


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with errors_with_path(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bounded(path: Path, largest: int) -> bytes:
    """Read a file of at most `largest` bytes; a pipe, which would block, or an endless device raises ValueError."""
    if not path.is_file() and path.exists():
        raise ValueError("it is not a regular file")
    if (size := path.stat().st_size) > largest:
        raise ValueError(f"it has {size} bytes, and {largest} at most may be")
    return path.read_bytes()


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON-lines file atomically."""
    write_atomically(path, map(_json_line, rows))


def append_json_lines(path: Path, *rows: Mapping[str, Any], durable: bool = False) -> None:
    """Append lines of JSON; on a full disk the file stays as it was. With `durable` wait until they are on the disk."""
    data = "".join(map(_json_line, rows)).encode()
    # A full disk may take half a line. Cut off, the file ends with a whole line and can be appended to later.
    end = path.stat().st_size if path.exists() else 0
    try:
        with errors_with_path(path), path.open("ab") as file:
            if failpoints.due("line.torn"):
                file.write(data[: len(data) // 2])
                file.flush()
                failpoints.die()
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        os.truncate(path, end)
        raise


def cut_torn_line(path: Path) -> None:
    """Remove what follows the last newline: a killed process leaves its last line cut off."""
    if not path.exists() or not path.stat().st_size:
        return
    with errors_with_path(path), path.open("r+b") as file:
        # A mapped file is searched from its end without reading the rest, which may be gigabytes.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            size, end = len(data), data.rfind(b"\n") + 1
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file; lines that are none are skipped, and a file that does not exist has none."""
    return [row for _, row in iter_json_lines(path, on_error=lambda problem: None)] if path.exists() else []


def iter_json_lines(
    path: Path, *, on_error: Callable[[str], None] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`FILE, row N`, the JSON object) for every line that is not blank.

    A line that is not a JSON object raises ValueError with its place; with `on_error` it is skipped, and `on_error`
    gets the message.
    """
    with path.open("rb") as file:  # as bytes, so that a byte that is not UTF-8 spoils only its own line
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, row {number}"
            try:
                row = parse_json_line(line)
            except ValueError as error:
                problem = f"{place}: {error}; mend or remove the row"
                if on_error is None:
                    raise ValueError(problem) from None
                on_error(problem)
            else:
                yield place, row


def parse_json_line(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line, or raise ValueError with the reason why there is none."""
    try:
        row = json.loads(line.decode("utf-8-sig"))  # some editors put a byte-order mark before the first line
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON (byte {error.start + 1} is not UTF-8)") from None
    except (ValueError, RecursionError) as error:  # a damaged file may hold thousands of opening brackets
        raise ValueError(f"not JSON ({str(error)[:200]})") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, not {type(row).__name__} {str(row)[:50]}")
    return row


@contextmanager
def locked(folder: Path) -> Iterator[Callable[[], bool]]:
    """Make a folder and lock it against other processes; the kernel releases the lock however this process ends.

    Yield a function that returns whether the folder is still there: it may be removed, moved or replaced meanwhile.
    """
    descriptor = _lock(folder)
    try:
        yield lambda: _is_at(folder, descriptor)
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int:
    """Return the descriptor of a locked folder."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # The folder itself is locked, not a file in it: a killed process leaves no lock file behind.
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # removed again, by a run that failed before its first step
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Removed before it was locked: such a lock keeps nobody out of a new folder of the same name.
            if _is_at(folder, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(f"{folder} is in use by another process: wait for it, or choose another --out") from None
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return whether somebody has locked a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Shared, so that two who ask do not see each other; it is released at once.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def seen_locked(folder: Path) -> bool | None:
    """Return whether somebody has locked a folder, without locking it; None if the system does not say.

    `is_locked` holds a lock for a moment, in which a run could not start. Who asks twice a second asks this.
    """
    try:
        inode = str(folder.stat().st_ino)
        table = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # By the inode only: some file systems report another device here than `stat` does.
    rows = (line.split() for line in table.splitlines())
    return any(row[1:2] == ["FLOCK"] and "WRITE" in row and row[5:6] and row[5].split(":")[-1] == inode for row in rows)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _json_line(row: Mapping[str, Any]) -> str:
    # NaN is not JSON: other readers refuse a file that has it.
    return json.dumps(row, sort_keys=True, allow_nan=False) + "\n"


def _alive(process: int) -> bool:
    try:
        with suppress(PermissionError):  # it exists and belongs to somebody else
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True


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
