"""docs/record.md says what is so: its lines run, its columns are those of the schema, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from helpers.record.made_records import made_step, record
from trimtab.record import TABLES, RecordSettings

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/record.md").read_text()


def some_steps(run: Path) -> None:
    """A run of which the steps 1, 40, 79 and 118 are recorded."""
    assert record(run, [made_step(step) for step in (1, 40, 79, 118)], settings=RecordSettings(every=39)) == []


def test_the_three_lines_of_the_notebook_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some_steps(tmp_path / "runs/demo-dapo+trim-1")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(code, "docs/record.md", "exec"), {})
    assert "[" in capsys.readouterr().out


def test_every_column_is_in_the_page_with_its_type_and_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w ]+) \| (.+) \|$", PAGE, flags=re.MULTILINE)
    wanted = [(c.name, c.type, c.presence, c.meaning) for table in TABLES.values() for c in table]
    assert rows == wanted


def test_the_files_it_names_are_those_that_are_written(tmp_path: Path) -> None:
    some_steps(tmp_path)
    named = re.findall(r"^RUN/(\S+)", PAGE, flags=re.MULTILINE)
    assert len(named) == 5 and all((tmp_path / name).is_file() for name in named)


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


def test_its_commands_are_real(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from trimtab.cli import app

    some_steps(tmp_path / "RUN")
    commands = re.findall(r"^trimtab (replay RUN .*)$", PAGE, flags=re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        words = [str(tmp_path / word) if word in {"RUN", "out.json"} else word for word in shlex.split(command)]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "out.json").exists()
