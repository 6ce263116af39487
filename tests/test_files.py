"""Shared file operations: whole or not at all, and every bad line named."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab.files import (
    append_json_lines,
    cut_torn_line,
    iter_json_lines,
    locked,
    new_folder,
    read_json_lines,
    sync,
    write_atomically,
    write_json_lines,
)


def test_a_file_is_replaced_by_all_of_the_new_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for data in ("old", b"bytes", iter(["ne", "w"])):
        write_atomically(path, data)
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "old")
    with pytest.raises(ZeroDivisionError):
        write_atomically(path, (str(1 // n) for n in (1, 0)))
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Let the system refuse to write more than 64 bytes to a file, which is an error without a file name."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fill_folder(path: Path) -> None:
    with new_folder(path) as folder, open(folder / "weights", "wb") as file:
        file.write(bytes(1000))


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_atomically(path, "x" * 1000),
        lambda path: append_json_lines(path, {"text": "x" * 1000}),
        fill_folder,
    ],
)
def test_the_error_of_a_full_disk_names_what_was_to_be_written(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "report.html"
    with pytest.raises(OSError, match=re.escape(f"File too large: '{path}'")):
        write(path)


def test_the_error_of_a_failed_fsync_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=re.escape(f"[Errno 28] No space left on device: '{tmp_path}'")):
        sync(tmp_path)


def test_rows_that_are_appended_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert read_json_lines(path) == []
    write_json_lines(path, [{"n": 1}])
    append_json_lines(path, {"n": 2}, {"n": 3}, durable=True)
    assert read_json_lines(path) == [{"n": 1}, {"n": 2}, {"n": 3}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"junk", "row 3: not JSON"),
        (b"[1]", "row 3: must be a JSON object, not list [1]"),
        (b'{"a": "\xff"}', "row 3: not JSON (byte 8 is not UTF-8)"),
        (b"[" * 100_000, "row 3: not JSON"),
    ],
)
def test_a_line_that_is_no_object_is_named_or_skipped(line: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\n\n' + line + b'\n{"n": 4}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path}, {problem}")) as error:
        list(iter_json_lines(path))
    problems: list[str] = []
    rows = list(iter_json_lines(path, on_error=problems.append))
    assert rows == [(f"{path}, row 1", {"n": 1}), (f"{path}, row 4", {"n": 4})]
    assert problems == [str(error.value)]


@pytest.mark.parametrize(("text", "kept"), [("a\nb\nto", "a\nb\n"), ("to", ""), ("a\n", "a\n"), ("", "")])
def test_a_torn_last_line_is_cut_off(text: str, kept: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    cut_torn_line(path)
    assert path.read_text() == kept


@pytest.mark.parametrize("durable", [False, True])
def test_a_new_folder_replaces_the_old_one_when_it_is_complete(durable: bool, tmp_path: Path) -> None:
    final = tmp_path / "parent" / "final"
    with pytest.raises(FileNotFoundError), new_folder(final):  # a parent that was removed is not made again
        pass
    final.parent.mkdir()
    for text in ("old", "new"):
        with new_folder(final, durable=durable) as folder:
            (folder / "file").write_text(text)
            assert not final.exists() or (final / "file").read_text() == "old"
    assert (final / "file").read_text() == "new"
    with pytest.raises(IsADirectoryError), new_folder(final) as folder:
        folder.write_text("an error in the block")
    with new_folder(final) as folder:
        folder.rmdir()
    assert list(final.parent.iterdir()) == [final] and [path.name for path in final.iterdir()] == ["file"]


def test_a_file_in_the_place_of_a_folder_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(FileExistsError, match="it is not a folder: move it away"), new_folder(tmp_path / "model"):
        pass
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model", "mine")]


def test_a_folder_with_a_file_that_the_new_one_has_not_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with (
        pytest.raises(FileExistsError, match=r"notes\.txt is not one of the files"),
        new_folder(tmp_path / "model") as new,
    ):
        (new / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "notes.txt"]


def test_two_processes_write_one_file_and_each_writes_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ours = tmp_path / "report.html", os.getpid()

    def pieces() -> Iterator[str]:
        yield "of one"
        monkeypatch.setattr(os, "getpid", os.getppid)  # another process that is alive, in the middle of ours
        write_atomically(path, "all of the other")
        assert path.read_text() == "all of the other"
        monkeypatch.setattr(os, "getpid", lambda: ours)
        yield " and the same"

    write_atomically(path, pieces())
    assert path.read_text() == "of one and the same" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_a_killed_process_left_half_written_is_removed_by_the_next(tmp_path: Path) -> None:
    dead, other = tmp_path / ".writing-a.txt-999999999", tmp_path / ".writing-b.txt-999999999"
    for path in (dead, other):
        path.write_text("half")
    write_atomically(tmp_path / "a.txt", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "a.txt"]


# --- locks


def test_a_folder_is_locked_once_and_the_other_process_is_told(tmp_path: Path) -> None:
    with locked(tmp_path / "run") as is_there:
        with pytest.raises(ValueError, match="in use by another process"), locked(tmp_path / "run"):
            pass
        assert is_there()
    with locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize("moment", ["open", "flock"])
def test_a_folder_that_goes_away_while_it_is_being_locked_is_made_and_locked_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, module = tmp_path / "run", {"open": os, "flock": fcntl}[moment]
    original, left = getattr(module, moment), [2]

    def removed_before(*args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            folder.rmdir()  # by its last owner, between our mkdir and our lock
        return original(*args)

    monkeypatch.setattr(module, moment, removed_before)
    with locked(folder) as is_there:
        assert is_there() and left == [0]
        with pytest.raises(ValueError, match="in use"), locked(folder):
            pass


@pytest.mark.parametrize("change", ["removed", "moved", "replaced"])
def test_a_locked_folder_that_goes_away_is_noticed(change: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with locked(folder) as is_there:
        folder.rename(tmp_path / "moved")
        if change == "removed":
            (tmp_path / "moved").rmdir()
        if change == "replaced":
            folder.mkdir()
        assert not is_there()


def test_only_what_dead_processes_left_half_written_is_removed(tmp_path: Path) -> None:
    dead = tmp_path / ".writing-one-999999999"  # above the largest process number of Linux
    theirs = tmp_path / f".writing-one-{os.getppid()}"
    for path in (dead, theirs):
        path.mkdir()
    with new_folder(tmp_path / "two"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([theirs.name, "two"])
