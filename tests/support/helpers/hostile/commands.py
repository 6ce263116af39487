"""Run many commands of trimtab in one process, as `python commands REQUESTS RESULTS TRAPS`: torch is imported once.

The process is as one that the installed `trimtab` starts: its import path begins with its script's folder, not with the
working directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LIMIT = 3000.0  # seconds for all commands of a process: a hang, and not a slow machine
YES = "y\n" * 200  # what a question on standard input would be answered


@dataclass(frozen=True)
class Request:
    """A command on what an attack made, and what it finds on standard input."""

    kind: str
    attack: str
    words: list[str]
    stdin: str = YES


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, what it printed, and the traps that it ran."""

    kind: str
    attack: str
    words: list[str]
    code: int
    output: str
    sprung: list[str]

    @property
    def traceback(self) -> bool:
        """Whether it ended with an error of Python's instead of words."""
        return "Traceback (most recent call last)" in self.output

    def __str__(self) -> str:
        ran = f" ran {', '.join(self.sprung)};" if self.sprung else ""
        return f"{self.attack}: {' '.join(self.words)}:{ran} exit code {self.code}, {self.output[-300:]!r}"


def launcher(folder: Path) -> list[str]:
    """Write what `pip install` writes as `trimtab`, and return the command that starts it."""
    script = folder / "bin" / "trimtab"
    script.parent.mkdir(exist_ok=True)
    script.write_text("import sys\nfrom trimtab.cli import app\nif __name__ == '__main__':\n    sys.exit(app())\n")
    return [sys.executable, str(script)]


def environment(scratch: Path) -> dict[str, str]:
    """Return the environment of a command: no path of the tests' own, no hub and nothing it has cached, one thread."""
    source = str(Path(__file__).parents[4] / "src")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "HF_"))}
    here = {"HF_HOME": str(scratch / "hub"), "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
    return {**kept, **offline, **here}


def run_all(requests: Sequence[Request], cwd: Path, traps: Path, scratch: Path) -> list[Ended]:
    """Run commands one after the other in one process in a working directory."""
    (scratch / "bin").mkdir(parents=True, exist_ok=True)
    asked, answered, script = scratch / "requests.json", scratch / "results.json", scratch / "bin" / "commands"
    asked.write_text(json.dumps([asdict(request) for request in requests]))
    script.write_text(Path(__file__).read_text())  # a folder of its own: no file of the tests is on the import path
    command = [sys.executable, str(script), str(asked), str(answered), str(traps)]
    with open(scratch / "output", "wb") as output:
        where: Any = {"cwd": cwd, "env": environment(scratch), "stdout": output, "stderr": output}
        subprocess.run(command, **where, timeout=LIMIT, check=False)
    assert answered.exists(), (scratch / "output").read_text(errors="replace")[-3000:]
    return [Ended(**each) for each in json.loads(answered.read_text())]


def main(asked: str, answered: str, traps: str) -> None:
    """Run the requests and write how each ended."""
    requests = [Request(**each) for each in json.loads(Path(asked).read_text())]
    results = [run(request, Path(answered).parent, Path(traps)) for request in requests]
    Path(answered).write_text(json.dumps([asdict(result) for result in results]))


def run(request: Request, scratch: Path, traps: Path) -> Ended:
    """Run a command with files for its standard input and output."""
    from trimtab.cli import app

    typed, printed = scratch / "stdin", scratch / "stdout"
    typed.write_text(request.stdin)
    flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
    for file, numbers in ((os.open(typed, os.O_RDONLY), (0,)), (os.open(printed, flags), (1, 2))):
        for number in numbers:
            os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    code = 0
    try:
        app(args=request.words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        code = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    sprung = sorted(os.listdir(traps))
    for name in sprung:
        (traps / name).unlink()
    output = printed.read_text(errors="replace")
    return Ended(request.kind, request.attack, request.words, code, output, sprung)


if __name__ == "__main__":
    main(*sys.argv[1:])
