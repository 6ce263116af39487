"""Install the wheel in bare environments, by itself and with every extra, and measure what a new user meets.

For every interpreter: how long the installation takes and how large it is, whether the demo trains from an empty
folder, and how much CPU time `--help`, `methods` and `schema` take beyond Python's own start. Every extra is then added
to a copy of that environment and used once; those that take too long are only resolved. `--out` writes
the JSON after every extra. If the file is there, only what it lacks, or what failed, is measured: a stopped run can go
on. Needs nothing but Python itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from result_file import about

ROOT = Path(__file__).parent.parent
CORE = "core"  # the wheel without an extra
QUIET = ["--quiet", "--set", "run.steps=2", "--set", "run.threads=1"]
SHORT = [*QUIET, "--set", "run.eval_every=0", "--set", "warm_start.steps=0", "--set", "run.report=false"]
COMMANDS = ("--help", "methods", "schema")
ROUNDS = 10  # the least of so many starts: other work on the machine only adds to it

# What shows that an extra is enough: a short run that needs it, or the import of what users import.
USES: Mapping[str, Sequence[str]] = {
    CORE: ["-m", "trimtab", "train", *QUIET],
    "gym": ["-c", "from trimtab.data import build_task; build_task('gym:basic_arithmetic', {}, 'train', 1)[0]"],
    "hub": ["-c", "import datasets"],
    "lora": ["-m", "trimtab", "train", *SHORT, "--set", "model.lora_rank=4"],
    "tensorboard": ["-m", "trimtab", "train", *SHORT, "--set", "run.loggers=['tensorboard']"],
    "trackio": ["-m", "trimtab", "train", *SHORT, "--set", "run.loggers=['trackio']"],
    "trl": ["-c", "from trimtab.engines.trl import TrimtabConfig, TrimtabTrainer"],
    "verifiers": ["-c", "import verifiers"],
    "verl": ["-c", "import trimtab.engines.verl.trainer"],
    "wandb": ["-m", "trimtab", "train", *SHORT, "--set", "run.loggers=['wandb']"],
}
# Only resolved, by `pip install --dry-run`: vLLM fixes a torch of its own, with gigabytes of CUDA, and smollm2's
# llama-cpp-python is compiled for many minutes.
RESOLVED = ["vllm", "smollm2"]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters")
    parser.add_argument("--extras", nargs="+", default=[*RESOLVED, *USES], choices=[*RESOLVED, *USES])
    parser.add_argument("--wheel", type=Path, help="default: built from this repository")
    parser.add_argument("--require", nargs="*", default=[], help="constraints, as torch==2.13.0")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trimtab-install-") as folder:
        wheel = args.wheel.resolve() if args.wheel else build(Path(folder))
        result: dict[str, Any] = {
            **about("the wheel in bare environments: installation, first command, start-up"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "constraints": args.require,
            "wheel": {"file": wheel.name, "kilobytes": round(wheel.stat().st_size / 1e3)},
            "environments": [{} for _ in args.python],
        }
        if args.out and args.out.exists():
            result = json.loads(args.out.read_text())

        def save() -> None:
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")

        for python, environment in zip(args.python, result["environments"], strict=True):
            done = [name for name, of in environment.get("extras", {}).items() if "error" not in of]
            environment["to_do"] = [extra for extra in args.extras if extra not in done]
            if environment["to_do"]:
                measure(environment, python, wheel, args.require, Path(folder), save)
            del environment["to_do"]
            save()
    print(json.dumps(result, indent=1))
    failed = [extra for each in result["environments"] for extra, of in each["extras"].items() if "error" in of]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def build(folder: Path) -> Path:
    """Build the wheel of this repository, of its files as they are."""
    source = folder / "source"  # setuptools leaves a build folder beside pyproject.toml
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environment = folder / "build"
    run([sys.executable, "-m", "venv", environment])
    run([environment / "bin/python", "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder / "dist", source])
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def measure(
    result: dict[str, Any], python: str, wheel: Path, require: Sequence[str], folder: Path, save: Callable[[], None]
) -> None:
    """Install the wheel for one interpreter, use it, and then every extra in a copy of that environment."""
    base = folder / "base"
    run([python, "-m", "venv", base])
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(require) + "\n")
    empty = megabytes(base)
    installed = install(base, str(wheel), constraints)
    if "extras" not in result:
        version = run([base / "bin/python", "-c", "import platform; print(platform.python_version())"]).stdout.strip()
        result |= {
            "python": version,
            "install_seconds": installed["install_seconds"],
            "megabytes": megabytes(base) - empty,
            "packages": len(installed["versions"]),
            "versions": installed["versions"],
            "start": start_up(base),
            "extras": {},
        }
    while result["to_do"]:
        save()
        extra = result["to_do"][0]
        result["extras"][extra] = measure_extra(extra, base, wheel, constraints, installed["versions"], folder)
        del result["to_do"][0]
    shutil.rmtree(base)


def last_line(error: RuntimeError) -> str:
    """Return the last line of what a command said, which says why it failed."""
    return str(error).rstrip().rpartition("\n")[2]


def measure_extra(
    extra: str, base: Path, wheel: Path, constraints: Path, core: Mapping[str, str], folder: Path
) -> dict[str, Any]:
    """Add an extra to a copy of the environment and use it once; an error is part of the result."""
    wanted = f"{wheel}[{extra}]"
    if extra in RESOLVED:
        return resolve(base, wanted, constraints, core, folder)
    copy = folder / "copy"
    # Hard links take no room, and pip replaces files instead of writing into them.
    shutil.copytree(base, copy, symlinks=True, copy_function=os.link)
    result: dict[str, Any] = {}
    try:
        if extra != CORE:
            added = install(copy, wanted, constraints)
            result = {"install_seconds": added["install_seconds"], "megabytes": megabytes(copy) - megabytes(base)}
            changed = {name: version for name, version in added["versions"].items() if core.get(name) != version}
            result["versions"] = changed
        result["use"] = use(copy, USES[extra], folder)
    except RuntimeError as error:
        result["error"] = last_line(error)
    finally:
        shutil.rmtree(copy)
    return result


def install(environment: Path, what: str, constraints: Path) -> dict[str, Any]:
    """Install with pip; return the seconds and the versions of all packages."""
    pip: list[str | Path] = [environment / "bin/python", "-m", "pip"]
    begun = time.monotonic()
    run([*pip, "install", "--quiet", "--no-cache-dir", "--constraint", constraints, what])
    seconds = time.monotonic() - begun
    run([*pip, "check"])
    listed = json.loads(run([*pip, "list", "--format", "json"]).stdout)
    return {"install_seconds": round(seconds), "versions": {each["name"]: each["version"] for each in listed}}


def resolve(base: Path, what: str, constraints: Path, core: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Let pip say what it would install in an empty environment, and return what differs from the core's packages."""
    empty, report = folder / "empty-environment", folder / "report.json"
    try:
        run([base / "bin/python", "-m", "venv", empty])
        pip: list[str | Path] = [empty / "bin/python", "-m", "pip"]
        run([*pip, "install", "--quiet", "--dry-run", "--report", report, "--constraint", constraints, what])
    except RuntimeError as error:
        return {"error": last_line(error)}
    finally:
        shutil.rmtree(empty, ignore_errors=True)
    found = {
        each["metadata"]["name"]: each["metadata"]["version"] for each in json.loads(report.read_text())["install"]
    }
    return {"versions": {name: new for name, new in found.items() if core.get(name) != new}, "only_resolved": True}


def use(environment: Path, command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a command in an empty folder."""
    empty = folder / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    begun = time.monotonic()
    run([environment / "bin/python", "-P", *command], cwd=empty, env=os.environ | {"WANDB_MODE": "offline"})
    made = sorted(path.name for path in empty.glob("runs/*/*"))
    return {"command": " ".join(command), "seconds": round(time.monotonic() - begun), "made": made}


def start_up(environment: Path) -> dict[str, Any]:
    """CPU seconds of commands that only print, and of Python alone."""
    python = environment / "bin/python"
    own = least_cpu([python, "-c", "pass"])
    taken = {command: least_cpu([python, "-P", "-m", "trimtab", command]) for command in COMMANDS}
    beyond = {command: round(seconds - own, 3) for command, seconds in taken.items()}
    return {"rounds": ROUNDS, "python_cpu_seconds": round(own, 3), "cpu_seconds_beyond_python": beyond}


def least_cpu(command: Sequence[str | Path]) -> float:
    """The least CPU time of a process among several rounds: the clock would measure the machine's other work too."""
    seconds = []
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(command)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def megabytes(folder: Path) -> int:
    """The size of all files of a folder."""
    return round(sum(path.lstat().st_size for path in folder.rglob("*")) / 1e6)


def run(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; if it fails, raise what it printed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        shown = " ".join(map(str, command))
        raise RuntimeError(f"{shown} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


if __name__ == "__main__":
    main()
