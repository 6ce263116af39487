"""Write what a checkout computes (runs, records, a replay, verdicts, an evaluation), or compare two such folders.

For changes that must not change a number: `golden.py make A` before, `golden.py make B` after, `golden.py diff A B`.
It uses the command line alone, so that it works on any checkout; keys that were renamed are given as OLD=NEW.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

OBJECTIVES = ("stapo", "stare", "sspo")
SUMS = [("1+1=", "2"), ("2+3=", "5"), ("10+7=", "17"), ("4+4=", "8"), ("12+34=", "46"), ("9+0=", "9")]
ANSWERS = [
    (r"so \boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{x=3}", "3"),
    (r"\boxed{3, 4}", "(3, 4)"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{10\%}", "0.1"),
    (r"\boxed{41 = 42}", "42"),
    (r"\boxed{[1, 2)}", "[1,2)"),
    (r"\boxed{7\text{ cm}}", "7"),
    (r"\boxed{9^{9^{9}}}", "1"),
    ("no box, 42", "42"),
    ("", "42"),
]


def trimtab(arguments: list[str], stdin: str = "") -> str:
    """Run a command of the checkout that this interpreter has installed and return its standard output."""
    command = [sys.executable, "-P", "-m", "trimtab", *arguments]
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1"}
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, check=False)
    if done.returncode not in (0, 2):
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def make(out: Path, steps: int) -> dict[str, Any]:
    """Run everything under `out` and return the golden."""
    golden: dict[str, Any] = {}
    for name in OBJECTIVES:
        run = out / name
        settings = [f"objective.name={name}", f"run.steps={steps}", "run.eval_every=25", "run.report=false"]
        flags = [flag for setting in settings for flag in ("--set", setting)]
        trimtab(["train", "addition", "--quiet", "--out", str(run), *flags])
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        golden[f"{name}/metrics"] = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in lines]
        golden[f"{name}/weights"] = weights(run / "model" / "model.safetensors")
        golden[f"{name}/records"] = records(run / "tokens")
    replayed = out / "replay.json"
    names = ("recorded", "sspo + s2t", "gspo", "stare", "grpo")
    trimtab(["replay", str(out / "stapo"), *(f for n in names for f in ("--objective", n)), "--json", str(replayed)])
    golden["replay"] = json.loads(replayed.read_text())
    rows = "".join(json.dumps({"response": response, "answer": answer}) + "\n" for response, answer in ANSWERS)
    verdicts = [json.loads(line) for line in trimtab(["grade"], rows).splitlines()]
    golden["grade"] = [{k: v for k, v in verdict.items() if k != "seconds"} for verdict in verdicts]
    golden["eval"] = evaluation(out)
    return golden


def weights(path: Path) -> dict[str, str]:
    """The digest of every tensor of a model."""
    from safetensors.numpy import load_file

    return {name: digest(tensor.tobytes()) for name, tensor in sorted(load_file(path).items())}


def records(folder: Path) -> dict[str, str]:
    """The digest of every recorded column, over all steps in order."""
    import pyarrow.parquet as pq

    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*/*.parquet")):
        for name, column in pq.read_table(path).to_pydict().items():
            found.setdefault(f"{path.stem}.{name}", hashlib.sha256()).update(repr(column).encode())
    return {name: state.hexdigest() for name, state in sorted(found.items())}


def evaluation(out: Path) -> dict[str, Any]:
    """The figures and the responses of a small evaluation of the trained model."""
    data = out / "data"
    data.mkdir(exist_ok=True)
    rows = (json.dumps({"question": q, "answer": f"Add.\n#### {a}"}) for q, a in SUMS)
    (data / "gsm8k_test.jsonl").write_text("".join(f"{row}\n" for row in rows))
    flags = ["--benchmarks", "gsm8k", "--samples", "4", "--max-new-tokens", "6", "--suffix", "", "--rule", "number"]
    where = ["--data", str(data), "--device", "cpu", "--out", str(out / "eval"), "--quiet"]
    trimtab(["eval", str(out / "stapo"), *flags, *where])
    result = json.loads((out / "eval" / "result.json").read_text())
    lines = [json.loads(line) for line in (out / "eval" / "generations.jsonl").read_text().splitlines()]
    return {
        "figures": result.get("metrics") or result["figures"],  # the key's old name
        # The digest of the settings holds the path of the model, which is another one in every golden.
        "generations": sorted(
            ({**line, "settings": None} for line in lines), key=lambda line: str(sorted(line.items()))
        ),
    }


def digest(data: bytes) -> str:
    """A short name for bytes."""
    return hashlib.sha256(data).hexdigest()


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of nested tables by its path."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{path}|{key}").items()}
    if isinstance(value, list):
        return {k: v for n, inner in enumerate(value) for k, v in flat(inner, f"{path}|{n}").items()}
    return {path: value}


def renamed(leaves: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The leaves with the renamed keys of their paths."""
    return {"|".join(names.get(key, key) for key in path.split("|")): value for path, value in leaves.items()}


def diff(before: Path, after: Path, names: dict[str, str]) -> int:
    """Print what differs; the number of differences."""
    then = renamed(flat(json.loads((before / "golden.json").read_text())), names)
    now = flat(json.loads((after / "golden.json").read_text()))
    lines = [f"only before: {path}" for path in sorted(then.keys() - now.keys())]
    lines += [f"only after: {path}" for path in sorted(now.keys() - then.keys())]
    lines += [f"{p}: {then[p]!r:.80} -> {now[p]!r:.80}" for p in sorted(then.keys() & now.keys()) if then[p] != now[p]]
    print("\n".join(lines[:60]) or f"equal: {len(then)} values")
    return len(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("out", type=Path)
    making.add_argument("--steps", type=int, default=50)
    comparing = commands.add_parser("diff")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("renamed", nargs="*", metavar="OLD=NEW")
    given = parser.parse_args()
    if given.command == "diff":
        return min(diff(given.before, given.after, dict(pair.split("=", 1) for pair in given.renamed)), 1)
    given.out.mkdir(parents=True)
    golden = make(given.out.resolve(), given.steps)
    (given.out / "golden.json").write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
