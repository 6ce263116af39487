"""Files that try to run code: modules in the working directory, models, runs and data that others have made.

Every file holds traps, whose only effect is to create a file. No command may spring one, and each ends in words or
does its work. That the traps would work is shown beside: by importing, unpickling, rendering or evaluating them.
`TRIMTAB_THOROUGH=1` tries every file with every command; without it, a sixth of them.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch

from helpers.hostile import answers, data_files, model_folders, templates, working_directories
from helpers.hostile.commands import LIMIT, Ended, environment, launcher, run_all
from helpers.hostile.requests import LINES, Siege
from helpers.hostile.traps import Traps, plain
from helpers.made_once import shared_folder
from helpers.thorough import THOROUGH

# How many files there are of each kind, at least.
KINDS = {
    "working directory": 500,
    "model folder": 100,
    "chat template": 50,
    "run folder": 40,
    "evaluation folder": 25,
    "data file": 120,
    "answer": 80,
}
# A trap opens its file and does not close it.
leaves_files_open = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def traps(tmp_path: Path) -> Iterator[Traps]:
    (tmp_path / "traps").mkdir()
    yield Traps(tmp_path / "traps")
    # What traps started with os.popen and dropped is closed here. Else the next Popen, in some later test, would do so.
    for process in [*subprocess._active]:
        process.wait()
    subprocess._cleanup()


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """How all commands ended, run once for all test processes."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with open(root / "hostile.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = root / "hostile.json"
        if not results.exists():
            results.write_text(json.dumps([asdict(end) for end in besiege(root / "hostile")]))
    return [Ended(**each) for each in json.loads(results.read_text())]


def besiege(root: Path) -> list[Ended]:
    """Try all files, or a sixth of them; write down how many there are of each kind."""
    siege = Siege(root, THOROUGH)
    siege.fill_working_directory()
    others = [request for each in (siege.models, siege.runs, siege.evaluations, siege.data) for request in each()]
    names = {kind: len({request.attack for request in others if request.kind == kind}) for kind in KINDS}
    (root / "files.json").write_text(json.dumps(names))
    if not THOROUGH:
        others = random.Random(0).sample(others, len(others) // 6)
    requests = [*siege.everything(), *others, *siege.answers(), *siege.allowed()]
    return run_all(requests, siege.here, siege.traps.folder, root / "scratch")


def of(kind: str, ended: list[Ended]) -> list[Ended]:
    return [end for end in ended if end.kind == kind]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_runs(kind: str, ended: list[Ended]) -> None:
    ran = [str(end) for end in of(kind, ended) if end.sprung]
    assert not ran, f"{len(ran)} of {len(of(kind, ended))}:\n" + "\n".join(ran)


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_ends_in_words(kind: str, ended: list[Ended]) -> None:
    tracebacks = [str(end) for end in of(kind, ended) if end.traceback]
    assert not tracebacks, f"{len(tracebacks)} of {len(of(kind, ended))}:\n" + "\n".join(tracebacks)


def test_all_commands_work_in_a_hostile_working_directory(ended: list[Ended]) -> None:
    failed = [str(end) for end in of("working directory", ended) if end.code]
    assert not failed, "\n".join(failed)
    verdicts = of("working directory", ended)[0].output.splitlines()
    assert [json.loads(line)["kind"] for line in verdicts] == ["correct"] * len(LINES)


def test_a_recipe_may_name_a_python_rule(ended: list[Ended]) -> None:
    """The same file that the others could not run, so the siege reaches what it is aimed at."""
    assert [end.sprung for end in of("allowed", ended)] == [["trap_rule"]]


@pytest.mark.usefixtures("ended")
def test_there_are_hundreds_of_files(tmp_path_factory: pytest.TempPathFactory, traps: Traps) -> None:
    found = json.loads((shared_folder(tmp_path_factory) / "hostile/files.json").read_text())
    found["working directory"] = len(working_directories.module_names())
    found["data file"] += len(data_files.rows(traps, ""))
    found["answer"] = len(list(answers.answers(traps)))
    assert not [kind for kind, least in KINDS.items() if found[kind] < least], found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["module", "package", "bytecode"])
def test_no_module_of_the_working_directory_runs_in_a_command_alone(form: str, tmp_path: Path) -> None:
    siege = Siege(tmp_path, THOROUGH)
    working_directories.fill(siege.here, siege.traps, [form])
    for request in siege.everything():
        command, env = [*launcher(tmp_path), *request.words], environment(tmp_path)
        end = subprocess.run(
            command,
            cwd=siege.here,
            env=env,
            input=request.stdin,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert (end.returncode, siege.traps.sprung()) == (0, []), f"{request.words}: {end.stderr[-2000:]}"


# The traps would work.


def test_modules_of_a_working_directory_would_run(tmp_path: Path, traps: Traps) -> None:
    """What `python -m` and `python -c` do, which have the working directory on their import path."""
    here = tmp_path / "here"
    names = working_directories.fill(here, traps, ["module", "package", "bytecode"])
    load = f"""import importlib.util, importlib.machinery
for name in {working_directories.module_names()}:
    spec = importlib.machinery.PathFinder.find_spec(name, [''])
    spec.loader.exec_module(importlib.util.module_from_spec(spec))"""
    subprocess.run([sys.executable, "-P", "-c", load], cwd=here, timeout=LIMIT, check=True)
    assert traps.reset() == sorted(map(plain, names))
    subprocess.run([sys.executable, "-c", "import selectors"], cwd=here, timeout=LIMIT, check=False)
    assert "selectors" in " ".join(traps.sprung())


@leaves_files_open
def test_pickles_would_run(traps: Traps) -> None:
    for form, how in model_folders.BIN_FORMS:
        if form != "tar":  # torch no longer reads it; its members are plain pickles
            torch.load(io.BytesIO(traps.torch_file(f"{form} {how}", form, how)), weights_only=False)
            assert traps.reset() == [f"{form}-{how}"]
    pickle.loads(traps.pickled("pickle"))
    np.load(io.BytesIO(traps.numpy_file("numpy")), allow_pickle=True)
    assert traps.reset() == ["numpy", "pickle"]


@leaves_files_open
def test_templates_would_run_without_a_sandbox(traps: Traps) -> None:
    def given(message: object) -> str:
        return str(message)

    context = {"messages": [{"content": ""}], "raise_exception": given, "strftime_now": given, "eos_token": ""}
    for name in templates.TEMPLATES:
        text = templates.template(traps, name, name)
        with suppress(jinja2.TemplateError, TypeError):  # after it ran
            jinja2.Environment().from_string(text).render(**context)
        assert traps.reset() == [plain(name)], text


@leaves_files_open
def test_answers_would_run_as_code(traps: Traps) -> None:
    works = 0
    for name in answers.PYTHON:
        with suppress(SyntaxError, NameError, TypeError, KeyError, AttributeError):
            exec(answers.code(traps, name, name), {"sympify": eval, "Symbol": Traps})
        works += traps.reset() == [plain(name)]
    assert works >= len(answers.PYTHON) - 4  # the rest need something before them that they close
