"""A checksum is of the contents, however the file came to them; the folder it is kept in belongs to the user alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab import files
from trimtab.files import content_digest, folder_digest, private_folder


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file that is read to its end; every file counts as large and as written long ago."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "LARGE_FILE", 0)
    monkeypatch.setattr(files, "SETTLED_SECONDS", -1.0)
    read: list[Path] = []
    whole = files._sha256
    monkeypatch.setattr(files, "_sha256", lambda path: (read.append(path), whole(path))[1])
    return read


def replace(path: Path) -> None:
    """Put another file in the place of one, with the same size and time."""
    before = path.stat()
    (path.parent / "new").write_bytes(b"22")
    os.utime(path.parent / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    (path.parent / "new").rename(path)


def rewrite(path: Path) -> None:
    """Write other contents into a file, and set its time back."""
    before = path.stat()
    path.write_bytes(b"22")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_large_file_that_has_not_changed_is_read_once(tmp_path: Path, hashed: list[Path]) -> None:
    (tmp_path / "weights").write_bytes(b"11")
    assert content_digest(tmp_path / "weights") == content_digest(tmp_path / "weights")
    assert hashed == [tmp_path / "weights"]


@pytest.mark.parametrize("change", [replace, rewrite])
def test_other_contents_of_the_same_size_and_time_are_noticed(
    change: Callable[[Path], None], tmp_path: Path, hashed: list[Path]
) -> None:
    (tmp_path / "weights").write_bytes(b"11")
    before = content_digest(tmp_path / "weights")
    change(tmp_path / "weights")
    assert content_digest(tmp_path / "weights") != before


def test_the_checksum_of_a_file_that_was_just_written_is_not_kept(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SETTLED_SECONDS", 1_000.0)
    (tmp_path / "weights").write_bytes(b"11")
    content_digest(tmp_path / "weights")
    content_digest(tmp_path / "weights")
    assert len(hashed) == 2


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, '{"x": 1}'])
def test_a_damaged_list_of_checksums_costs_only_time(content: str, tmp_path: Path, hashed: list[Path]) -> None:
    (tmp_path / "weights").write_bytes(b"11")
    digest = content_digest(tmp_path / "weights")
    (tmp_path / "cache" / "digests" / "digests.json").write_text(content)
    assert content_digest(tmp_path / "weights") == digest and len(hashed) == 2


def test_no_more_than_so_many_checksums_are_kept(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_DIGESTS", 3)
    for number in range(5):
        (tmp_path / str(number)).write_text("x")
        content_digest(tmp_path / str(number))
    assert [Path(name).name for name in files._kept_digests()] == ["2", "3", "4"]


def test_a_folder_has_another_digest_after_a_file_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("x")
    before = folder_digest(tmp_path)
    (tmp_path / "one").rename(tmp_path / "other")
    assert folder_digest(tmp_path) != before


def test_a_private_folder_is_open_to_nobody_else(tmp_path: Path) -> None:
    assert private_folder(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    private_folder(tmp_path / "a" / "b")


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match=r"open to other users.*chmod 700"):
        private_folder(tmp_path / "open")


def test_a_link_in_the_place_of_a_private_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(PermissionError, match="is a link"):
        private_folder(tmp_path / "link")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        private_folder(tmp_path / "theirs")
