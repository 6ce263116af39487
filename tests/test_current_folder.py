"""No Python file of the current folder is run: the folder may hold data that somebody else made.

Every file here writes its name to `ran` when it is imported. The one exception is a grading function of the user's own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HANG = 600.0  # seconds after which a process is taken for hung
INSTALLED = [
    "mpmath",
    "numpy",
    "pydantic",
    "rich",
    "safetensors",
    "sympy",
    "tokenizers",
    "torch",
    "transformers",
    "typer",
]
OWN = ["trimtab", "sitecustomize", "usercustomize", "gmpy2", "__main__", "conftest"]
SCRIPT = "import sys\nfrom trimtab.cli import app\nsys.exit(app())\n"  # what pip writes for `trimtab`
ANSWER = {"response": r"\boxed{2\sin x\cos x}", "answer": r"\sin 2x"}  # needs sympy, so a worker

TINY = """
[warm_start]
steps = 0
[rollout]
prompts = 2
samples = 2
max_new_tokens = 2
[run]
steps = 1
eval_every = 0
threads = 1
device = "cpu"
report = false
"""


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder with a file for every module that could be looked for."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in [*sys.stdlib_module_names, *INSTALLED, *OWN]:
        (folder / f"{name}.py").write_text(_noting())
    return folder


def _noting(code: str = "") -> str:
    # Without an import: those would run the neighbours of this file.
    return f"print(__name__, file=open(__file__.rpartition('/')[0] + '/ran', 'a'))\n{code}"


def ran(folder: Path) -> list[str]:
    return (folder / "ran").read_text().split() if (folder / "ran").exists() else []


def start(folder: Path, command: list[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )


@pytest.fixture
def trimtab(tmp_path: Path) -> str:
    script = tmp_path / "bin" / "trimtab"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    return str(script)


def test_grading_runs_no_file_of_the_current_folder(trap: Path, trimtab: str) -> None:
    done = start(trap, [trimtab, "grade"], json.dumps(ANSWER))
    assert json.loads(done.stdout)["kind"] == "correct", done.stderr
    assert ran(trap) == []


def test_grading_from_a_notebook_in_the_folder_starts_a_worker_without_it(trap: Path) -> None:
    # There `""` is on `sys.path`, and `PYTHONPATH` may have an empty entry: set here after the notebook's own imports.
    code = (
        "import os, sys; from trimtab.grading import grade; sys.path.insert(0, ''); "
        "os.environ['PYTHONPATH'] = os.environ.get('PYTHONPATH', '') + os.pathsep; "
        f"print(grade({ANSWER['response']!r}, {ANSWER['answer']!r}).kind)"
    )
    done = start(trap, ["-P", "-c", code])
    assert done.stdout.split() == ["correct"], done.stderr
    assert ran(trap) == []


@pytest.mark.slow
def test_the_runs_of_a_comparison_run_no_file_of_the_current_folder(trap: Path, trimtab: str) -> None:
    (trap / "tiny.toml").write_text(TINY)
    done = start(trap, [trimtab, "compare", "grpo", "--recipe", "tiny.toml", "--seeds", "1", "--out", "out"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert ran(trap) == []


def test_python_m_removes_the_current_folder_before_it_imports_anything(tmp_path: Path) -> None:
    for name in [*INSTALLED, "json", "inspect", "trimtab_data", "sitecustomize"]:
        (tmp_path / f"{name}.py").write_text(_noting())
    done = start(tmp_path, ["-m", "trimtab", "grade"], json.dumps(ANSWER))
    assert json.loads(done.stdout)["kind"] == "correct", done.stderr
    assert ran(tmp_path) == []


def test_processes_of_libraries_inherit_that_the_current_folder_is_not_searched(trap: Path, trimtab: str) -> None:
    """Such as torch's compile workers: they start as `python -c` and `python -m` too."""
    start_python = "subprocess.call([sys.executable, '-c', 'import typing'])"
    (trap / "my_rule.py").write_text(f"import subprocess, sys\ndef f(r, a, e):\n    return not {start_python}")
    done = start(trap, [trimtab, "grade", "--rule", "python:my_rule:f"], json.dumps(ANSWER))
    assert json.loads(done.stdout)["kind"] == "correct", done.stderr
    assert ran(trap) == []


def test_a_grading_function_of_ones_own_is_found_in_the_current_folder_and_its_neighbours_too(
    trap: Path, trimtab: str
) -> None:
    (trap / "my_rule.py").write_text(_noting("import json, my_words\ndef f(r, a, e):\n    return my_words.same(r, a)"))
    (trap / "my_words.py").write_text(_noting("def same(a, b):\n    return a == b"))
    done = start(trap, [trimtab, "grade", "--rule", "python:my_rule:f"], json.dumps({"response": "1", "answer": "1"}))
    assert json.loads(done.stdout)["kind"] == "correct", done.stderr
    assert set(ran(trap)) == {"my_rule", "my_words"}  # in the command itself, which checks it, and in the worker


def test_an_installed_module_comes_before_one_of_the_current_folder(trap: Path, trimtab: str) -> None:
    (trap / "gmpy2.py").unlink()  # sympy imports it where there is one, and here there is none but this
    done = start(trap, [trimtab, "grade", "--rule", "python:sympy:my_function"], json.dumps(ANSWER))
    assert "sympy/__init__.py has no my_function" in done.stderr
    assert ran(trap) == []
