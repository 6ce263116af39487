"""The README's way into an environment of the user's own: `pip install .` in a clone, then `trimtab` anywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = ("pyproject.toml", "setup.py", "README.md", "LICENSE")  # by the build
SHORT = ["run.steps=2", "warm_start.steps=2", "run.eval_every=0", "rollout.prompts=4"]


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, timeout=600, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """An environment that `pip install .` was run in, with nothing of this one but what trimtab depends on."""
    folder = tmp_path_factory.mktemp("user")
    clone, place = folder / "trimtab", folder / "environment"
    shutil.copytree(ROOT / "src", clone / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in NEEDED:
        shutil.copy(ROOT / name, clone)
    venv.create(place, with_pip=True)
    python = str(place / "bin/python")
    words = ("PYTHON", "PIP_", "VIRTUAL_ENV", "COV_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(words)}
    environment |= {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    # Nothing is downloaded: the dependencies and setuptools are those of this environment, after the new one's own.
    environment |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"], folder, environment)
    packages = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder, environment)
    lines = f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n"
    (Path(packages.strip()) / "dependencies.pth").write_text(lines)
    (command,) = re.findall(r"^(pip install \S+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    run(command.split(), clone, environment)
    shutil.rmtree(clone)
    return folder, environment


def test_the_command_of_the_readme_installs_a_trimtab_that_needs_no_clone(
    installed: tuple[Path, dict[str, str]],
) -> None:
    folder, environment = installed
    where = run(["python", "-c", "import trimtab; print(trimtab.__file__)"], folder, environment)
    assert Path(where.strip()).is_relative_to(folder / "environment")
    settings = [word for setting in SHORT for word in ("--set", setting)]
    assert "2 of 2 steps" in run(["trimtab", "train", *settings], folder, environment)
    assert (folder / "runs/demo-dapo+trim-1/report.html").is_file()
    assert "finished" in run(["trimtab", "runs"], folder, environment)


def test_its_doctor_names_commands_that_need_no_clone_and_no_index_with_trimtab(
    installed: tuple[Path, dict[str, str]],
) -> None:
    folder, environment = installed
    shown = run(["trimtab", "doctor"], folder, environment | {"COLUMNS": "300"})
    assert sys.version.split()[0] in shown
    assert re.search(r"pip install ['\w]", shown)
    assert "--editable" not in shown and "'trimtab[" not in shown
