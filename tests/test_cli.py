"""The command line: the methods and their pages, the worked example, light imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from method_docs import methods_reference
from trimtab.cli import app
from trimtab.objectives import METHODS
from trimtab.objectives.methods.compose import describe

ROOT = Path(__file__).parent.parent
run = CliRunner()


def test_methods_lists_the_catalog() -> None:
    result = run.invoke(app, ["methods"], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    for name in METHODS:
        assert name in result.output


@pytest.mark.parametrize("name", [*METHODS, "s2t", "kl"])
def test_one_method_shows_formula_options_defaults_and_paper(name: str) -> None:
    result = run.invoke(app, ["methods", name])
    assert result.exit_code == 0
    assert result.output.strip() == describe(name).strip()


def test_stapos_page_has_its_numbers() -> None:
    page = describe("stapo")
    for text in ("2602.15620", "p < 0.002", "| `tau_p` | 0.002 |", "| `quantile` | 0.75 |", "clip(r, 0.8, 1.28)"):
        assert text in page


def test_a_combination_is_explained() -> None:
    result = run.invoke(app, ["methods", "sspo + s2t"])
    assert "subsentence" in result.output
    assert "silenced where" in result.output


def test_an_unknown_method_offers_the_nearest() -> None:
    result = run.invoke(app, ["methods", "stapoo"])
    assert result.exit_code == 2
    assert "did you mean stapo" in result.output
    assert "Traceback" not in result.output


def test_eval_takes_a_model_and_explains_its_options() -> None:
    result = run.invoke(app, ["eval", "--help"], env={"COLUMNS": "160"})
    for text in ("eval [OPTIONS] [model]", "A folder or hub name of a model", "Any of aime24, aime25", "--resume"):
        assert text.lower() in result.output.lower()  # versions of typer differ in the case of [model]
    assert "--no-resume" not in result.output


def test_the_docs_are_the_same_text() -> None:
    assert (ROOT / "docs/methods.md").read_text() == methods_reference()


def test_the_worked_example_silences_the_banana() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/worked_example.py"], capture_output=True, text=True, check=True
    )
    (row,) = [line for line in done.stdout.splitlines() if "banana" in line]
    assert "silenced" in row
    assert "+0.0000" in row


def test_a_warning_is_a_line_without_the_place_in_the_code(tmp_path: Path) -> None:
    rows = ['{"prompt": "1+1=", "answer": "2"}', '{"prompt": "1+2="}', '{"prompt": "1+3=", "answer": "4"}']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    settings = [
        *("task.name=file", f"task.path={tmp_path}/rows.jsonl", 'task.columns={answer="answer"}', "task.rule=exact"),
        *("task.skip_bad_rows=true", "warm_start.steps=0", "run.eval_every=0"),
    ]
    command = [sys.executable, "-m", "trimtab", "train", "--dry-run", *(f"--set={setting}" for setting in settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("warning: 1 of 3 rows are left out (task.skip_bad_rows = true):\n")
    assert "UserWarning" not in done.stderr and ".py" not in done.stderr


def test_the_objectives_import_torch_alone() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import trimtab.objectives; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['trimtab']"


COMMAND = re.compile(rf"trimtab (?:{'|'.join(typer.main.get_command(app).commands)}) [^`\n]*$")


def unquoted(source: str) -> list[str]:
    """Return the beginnings of the commands in f-strings that go on with a value."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for before, value in pairwise(node.values if isinstance(node, ast.JoinedStr) else []):
            text = before.value if isinstance(before, ast.Constant) else ""
            found += [text] if COMMAND.search(text) and isinstance(value, ast.FormattedValue) else []
    return found


def test_no_message_puts_a_name_into_a_command_without_quotes() -> None:
    """A name may hold spaces, or come from a stranger; `trimtab.text.command` quotes it for the shell."""
    assert unquoted('f"go on: trimtab train --resume {run}"') == ["go on: trimtab train --resume "]
    files = sorted((ROOT / "src" / "trimtab").rglob("*.py"))
    assert {str(file): texts for file in files if (texts := unquoted(file.read_text(encoding="utf-8")))} == {}
