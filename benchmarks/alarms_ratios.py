"""Measure the alarms of ratios: the sampler's mismatch with and without its trend, and the effective sample size.

`alarms.py run --out FOLDER --only frozen_sampler growing_noise off_policy no_clip healthy_dapo` makes the runs;
`alarms_ratios.py FOLDER ...` replays the alarms over those that have ended and over the archived runs of the study, and
writes `results/alarms-ratios.json` and `.md`. The archived runs have no effective sample size.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from alarm_suite import SCENARIOS
from result_file import about
from study import unpack
from trimtab.insight.alarms import DetectorInput, Thresholds, alarm_monitor, read_metrics, replay_metrics, replay_run
from trimtab.insight.alarms.monitor import AlarmMonitor
from trimtab.record import find_collapse
from trimtab.trainer.config import parse, parse_toml

RESULTS = Path(__file__).parent / "results"
ALARMS = ("sampler_mismatch", "effective_samples")
ARCHIVES = ("demo", "entropy", "further", "warm", "zero")


def run_row(folder: Path) -> dict[str, Any]:
    """Return when a run collapsed, and when each alarm rang first."""
    scenario, _, seed = folder.name.rpartition("-seed")
    records = read_metrics(folder / "metrics.jsonl")
    collapse = find_collapse(records)
    first: dict[str, int] = {}
    for alarm in replay_run(folder):
        first.setdefault(alarm.alarm, alarm.step)
    no_trend = Thresholds(mismatch_rising_min=math.inf, samples_rising_min=math.inf)
    late: dict[str, int] = {}
    for alarm in replay_metrics(records, AlarmMonitor(DetectorInput(limits=no_trend))):
        late.setdefault(alarm.alarm, alarm.step)
    others = [step for name, step in first.items() if name not in (*ALARMS, "collapse")]
    return {
        "run": scenario,
        "seed": int(seed),
        "steps": int(records[-1]["step"]),
        "collapse": None if collapse is None else collapse.step,
        "rang": {name: first.get(name) for name in ALARMS},
        "rang_without_trend": {name: late.get(name) for name in ALARMS},
        "first_other": min(others, default=None),
    }


def archived() -> dict[str, int]:
    """Return how often the mismatch alarm rang in archived runs that did not collapse, and in how many steps."""
    counts = {"runs": 0, "steps": 0, "rang": 0}
    for name in ARCHIVES:
        with tempfile.TemporaryDirectory() as place:
            unpack(RESULTS / f"runs-{name}.tar.xz", Path(place))
            for path in Path(place).glob("*/config.toml"):
                records = read_metrics(path.with_name("metrics.jsonl"))
                if find_collapse(records) is not None:
                    continue
                table = parse_toml(path.read_text())
                config = parse({key: section for key, section in table.items() if key != "task"})
                rung = replay_metrics(records, alarm_monitor(config))
                counts["runs"] += 1
                counts["steps"] += int(records[-1]["step"])
                counts["rang"] += sum(alarm.alarm == "sampler_mismatch" for alarm in rung)
    return counts


def markdown(result: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    lines = []
    for row in result["runs"]:
        cells = [SCENARIOS[row["run"]].description, row["seed"], row["collapse"]]
        for name in ALARMS:
            step, collapse = row["rang"][name], row["collapse"]
            lead = f" ({collapse - step} before)" if step and collapse and step < collapse else ""
            cells += [f"{step}{lead}" if step else None, row["rang_without_trend"][name]]
        cells.append(row["first_other"])
        lines.append("| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |")
    old = result["archived"]
    return "\n".join([
        "Steps at which these alarms rang first, at which they would have without looking at trends, and at which "
        "another alarm did. In brackets: steps before the collapse.",
        "",
        f"| run of addition | seed | collapsed | `{ALARMS[0]}` | no trend | `{ALARMS[1]}` | no trend | other |",
        "|---" * 8 + "|",
        *lines,
        "",
        f"In {old['runs']} archived runs that did not collapse, with {old['steps']:,} steps, `sampler_mismatch` rang "
        f"{old['rang']} times. Thresholds were set before these runs were looked at. {result['machine']}, torch "
        f"{result['versions']['torch']}, {result['date']}.",
        "",
    ])  # fmt: skip


def main() -> int:
    """Replay, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    args = parser.parse_args()
    ended = [path.parent for folder in args.folders for path in folder.glob("*-seed*/done")]
    order = list(SCENARIOS)
    rows = sorted(map(run_row, ended), key=lambda row: (order.index(row["run"]), row["seed"]))
    result = {**about("alarms of ratios"), "runs": rows, "archived": archived()}
    (RESULTS / "alarms-ratios.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "alarms-ratios.md").write_text(markdown(result))
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
