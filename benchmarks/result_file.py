"""The file of a benchmark's result: what it says about itself, and how it is written."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

import trimtab

CPU = torch.device("cpu")


def about(what: str, device: torch.device = CPU, *packages: str) -> dict[str, Any]:
    """Return the head of a result: what it is, when, where and by which command it was made, with which versions.

    `packages` are named with their versions where they are installed.
    """
    gpu = device.type == "cuda"
    found = {package.metadata["Name"]: package.version for package in distributions()}
    return {
        "what": what,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads",
        "load": round(os.getloadavg()[0], 1),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: found[name] for name in ("transformers", *packages) if name in found},
            "trimtab": trimtab.__version__,
        },
    }


def added_to(out: Path, head: dict[str, Any]) -> dict[str, Any]:
    """Return the result of earlier calls in `out` under a new head, which names the commands of all calls."""
    earlier = json.loads(out.read_text()) if out.exists() else {}
    former = earlier.get("command", [])
    commands = [*([former] if isinstance(former, str) else former), head["command"]]
    return earlier | head | {"command": commands if len(commands) > 1 else commands[0]}


def save(result: Mapping[str, Any], out: Path) -> None:
    """Write what is known so far: a benchmark that fails later leaves what it had."""
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
