"""The tables of docs/support.md: what `benchmarks/install.py` measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks/results"


def installed() -> str:
    """What the installation, each extra and the first commands took."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("install-*.json"))]
    if not results:
        return ""
    environments = [environment for result in results for environment in result["environments"]]
    lines = ["| | size | packages | Python's own start | `trimtab --help` | `methods` | `schema` |", "|---" * 7 + "|"]
    lines += [_environment(environment) for environment in environments]
    named = " and ".join(environment["python"] for environment in environments)
    lines += ["", f"What an extra adds, installed by itself, with Python {named}:", ""]
    lines += ["| extra | size | packages | tried with |", "|---|---|---|---|"]
    for name in dict.fromkeys(name for environment in environments for name in environment["extras"]):
        found = [environment["extras"][name] for environment in environments if name in environment["extras"]]
        if measured := [each for each in found if "versions" in each]:
            lines.append(_extra(name, measured))
    for environment in environments:
        if environment.get("to_do"):
            names = ", ".join(f"`{name}`" for name in environment["to_do"])
            lines += ["", f"Not measured with Python {environment['python']}: {names}."]
    last = results[0]
    return "\n".join(lines) + (
        "\n\nThe commands: CPU seconds beyond those of `python -c pass`, the least of "
        f"{' and '.join(str(each['start']['rounds']) for each in environments)} starts, "
        "on a machine with more work than cores (load "
        f"{' and '.join(format(result['load'], 'g') for result in results)}). "
        f"The wheel has {last['wheel']['kilobytes'] / 1000:.1f} MB. "
        f"{last['machine']}; by `benchmarks/install.py`, {last['date']}."
    )


def _environment(of: Mapping[str, Any]) -> str:
    versions, start = of["versions"], of["start"]["cpu_seconds_beyond_python"]
    name = f"Python {of['python']}, torch {versions['torch']}, transformers {versions['transformers']}"
    seconds = " | ".join(f"{start[command]:.2f} s" for command in ("--help", "methods", "schema"))
    own = f"{of['start']['python_cpu_seconds']:.3f} s"
    return f"| {name} | {of['megabytes'] / 1000:.1f} GB | {of['packages']} | {own} | {seconds} |"


def _extra(name: str, of: Sequence[Mapping[str, Any]]) -> str:
    packages = " and ".join(str(len(each["versions"])) for each in of)
    if "only_resolved" in of[0]:
        return f"| `{name}` | not installed | {packages} | `pip install --dry-run` |"
    size = " and ".join(str(max(each["megabytes"], 0)) for each in of)
    shown = "its import" if of[0]["use"]["command"].startswith("-c") else "a short run"
    return f"| `{name}` | {size} MB | {packages} | {shown} |"
