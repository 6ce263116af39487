"""The pack of peers for a machine without network: what an import loads is in it, what the machine has is not."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest

import pack_peers


def test_a_pack_has_what_an_import_loads_without_what_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pack_peers, "IMPORTS", {"pytest": ("pytest", "no_such_module")})
    pack_peers.main(
        ["--python", sys.executable, "--out", str(tmp_path), "--have", "pygments", "plugg*", "--piece", "1"]
    )
    said = capsys.readouterr().out
    assert "not imported, so packages of it may be missing: no_such_module: ModuleNotFoundError" in said
    pieces = sorted(tmp_path.iterdir())
    assert [piece.name for piece in pieces] == [f"peers.{number:02d}" for number in range(len(pieces))]
    whole = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(fileobj=whole, mode="r:xz") as tar:
        names = tar.getnames()
    assert "pytest/__init__.py" in names and "_pytest/config/__init__.py" in names
    assert any(name.startswith("pytest-") and name.endswith("METADATA") for name in names)  # its version is known
    assert not [name for name in names if name.startswith(("pluggy", "pygments", "..", "/")) or "__pycache__" in name]
