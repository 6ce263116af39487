"""Measure the alarms on real runs: replay them over the curves of SmolLM2's runs, count leads and false alarms.

`tokens/count` is not among the curves: it is the mean length times the responses per step. Nor was
`tokens/spurious_share` at first, and without it `spurious_growth` cannot be replayed. All else that rang while the runs
went on was reproduced exactly by the alarms of that day. Changes of the alarms were fitted on the runs of one seed; the
figures of the others count, and those of the study's runs after a warm start, on which nothing was fitted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from study import unpack
from trimtab.insight.alarms import ALARM_KINDS, alarm_monitor, replay_metrics
from trimtab.record import HOLD_STEPS, find_collapse, iter_step_lines, merge_curves
from trimtab.trainer.config import load, parse, parse_toml
from trimtab.trainer.train import RunFolder

RESULTS = Path(__file__).parent / "results"
FITTED = 0  # the seed that changes were fitted on
STILL_LEARNING = 0.1  # rise of held-out accuracy to its best after an alarm: it was no time to act
LOST = 0.25  # part of the best held-out accuracy: the alarm was right, though the run did not collapse
NOT_REPLAYED = ("spurious_growth",)


@dataclass(frozen=True)
class RealRun:
    """A run: when it collapsed, its held-out accuracies, and the first ring of every alarm, then and now."""

    seed: int
    collapse: int | None
    held_out: list[tuple[int, float]]
    recorded: dict[str, int]
    replayed: dict[str, int]

    def learned_after(self, step: int) -> bool:
        """Return whether held-out accuracy rose clearly after a step."""
        before = [value for at, value in self.held_out if at <= step][-1]
        return max((value for at, value in self.held_out if at > step), default=0.0) - before >= STILL_LEARNING

    def lost_some(self) -> bool:
        """Return whether held-out accuracy fell by a good part of the best before."""
        values = [value for _, value in self.held_out]
        return any(after < (1 - LOST) * max(values[: at + 1]) for at, after in enumerate(values))


def read_runs(path: Path) -> list[RealRun]:
    """Read the runs of `stability-h200.json` and replay their alarms."""
    return [_read_run(run) for run in json.loads(path.read_text())["runs"]]


def _read_run(run: dict[str, Any]) -> RealRun:
    config = load("smollm2", run["settings"])
    responses = config.rollout.prompts * config.rollout.samples
    tokens = [(step, responses * length) for step, length in run["curves"]["response/length_mean"]]
    records = merge_curves({**run["curves"], "tokens/count": tokens})
    collapse = find_collapse(records)
    held_out = [(step, value) for step, value in run["curves"]["eval/accuracy"]]
    rung = replay_metrics(records, alarm_monitor(config))
    return RealRun(
        run["seed"],
        collapse.step if collapse else None,
        held_out,
        _first((step, name) for step, name in run["alarms"]),
        _first((alarm.step, alarm.alarm) for alarm in rung),
    )


def archived_runs(*regimes: str) -> list[RealRun]:
    """Read the runs in the archives of `study.py` and replay their alarms."""
    found = []
    for regime in regimes:
        with tempfile.TemporaryDirectory() as name:
            unpack(RESULTS / f"runs-{regime}.tar.xz", Path(name))
            folders = [RunFolder(ended.parent) for ended in sorted(Path(name).glob("*/ended.json"))]
            found += [_archived_run(folder) for folder in folders]
    return found


def _archived_run(folder: RunFolder) -> RealRun:
    # Alarms do not ask what the task was; these runs are older than the options that tasks have today.
    table = parse_toml(folder.config.read_text())
    config = parse({name: section for name, section in table.items() if name != "task"})
    records = folder.records()
    collapse = find_collapse(records)
    held_out = [(int(record["step"]), record["eval/accuracy"]) for record in records if "eval/accuracy" in record]
    rung = replay_metrics(records, alarm_monitor(config))
    then = iter_step_lines(folder.alarms, print)
    return RealRun(
        config.run.seed,
        collapse.step if collapse else None,
        held_out,
        _first((line["step"], line["alarm"]) for line in then),
        _first((alarm.step, alarm.alarm) for alarm in rung),
    )


def _first(rung: Any) -> dict[str, int]:
    """Return the first step of every alarm."""
    return {name: step for step, name in sorted(rung, reverse=True)}


def figures(runs: Sequence[RealRun], rung: Sequence[dict[str, int]]) -> dict[str, Any]:
    """Return what the alarms that rang are worth, by alarm."""
    collapsed = [run.collapse is not None for run in runs]
    names = [name for name in ALARM_KINDS if any(name in alarms for alarms in rung)]
    warnings = [{name: step for name, step in alarms.items() if name != "collapse"} for alarms in rung]
    any_alarm = [{"any": min(alarms.values())} if alarms else {} for alarms in warnings]
    return {
        "runs": len(runs),
        "collapsed": sum(collapsed),
        "alarms": [_row(name, runs, rung) for name in names],
        "any": _row("any", runs, any_alarm),
    }


def _row(name: str, runs: Sequence[RealRun], rung: Sequence[dict[str, int]]) -> dict[str, Any]:
    pairs = [(run, alarms[name]) for run, alarms in zip(runs, rung, strict=True) if name in alarms]
    leads = sorted(run.collapse - step for run, step in pairs if run.collapse is not None)
    healthy = [(run, step) for run, step in pairs if run.collapse is None]
    return {
        "alarm": name,
        "rang": len(pairs),
        "leads": leads,
        "before": sum(lead > 0 for lead in leads),
        "before_certain": sum(lead > -HOLD_STEPS for lead in leads),
        "missed": sum(run.collapse is not None for run in runs) - len(leads),
        "false": len(healthy),
        "false_lost": sum(run.lost_some() for run, _ in healthy),
        "false_still_learning": sum(run.learned_after(step) for run, step in healthy),
    }


def parts(runs: Sequence[RealRun], unseen: Sequence[RealRun]) -> dict[str, dict[str, Any]]:
    """Return the figures then and now, of the seed that changes were fitted on, of the others, and of other runs."""
    made = {}
    for title, mine in (
        (f"seed {FITTED}, which changes were fitted on", [run for run in runs if run.seed == FITTED]),
        ("other seeds", [run for run in runs if run.seed != FITTED]),
        ("after a warm start, also with wrong verdicts", unseen),
    ):
        made[title] = {
            "before": figures(mine, [run.recorded for run in mine]),
            "now": figures(mine, [run.replayed for run in mine]),
        }
    return made


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of today's alarms in Markdown, each with a sentence on the alarms of the day of the runs."""
    missing = ", ".join(f"`{name}`" for name in NOT_REPLAYED)
    lines = [
        f"From {result['made_from']}, replayed on {result['date']} by `benchmarks/alarms_real.py`. The tables show the "
        f"alarms of today. An alarm without a row did not ring. Only {missing} could not be replayed in the first two "
        "tables, because its metric was not kept.",
        "",
    ]
    for title, part in result["parts"].items():
        now, then = part["now"], part["before"]["any"]
        healthy = now["runs"] - now["collapsed"]
        lines += [
            f"**{title.capitalize()}**: {now['runs']} runs, {now['collapsed']} collapsed. With the alarms of the day "
            f"of the runs, an alarm but `collapse` rang before {then['before']} of the {now['collapsed']} collapses, "
            f"and in {then['false']} of the {healthy} other runs.",
            "",
            "| alarm | before a collapse | lead (steps) | missed | false alarms | lost a quarter | still learning |",
            "|---" * 7 + "|",
            *(_table_row(row, now["collapsed"], healthy) for row in [now["any"], *now["alarms"]]),
            "",
        ]
    return "\n".join(lines)


def _table_row(row: dict[str, Any], collapsed: int, healthy: int) -> str:
    leads = row["leads"]
    cells = [
        "any but `collapse`" if row["alarm"] == "any" else f"`{row['alarm']}`",
        f"{row['before']}/{collapsed}",
        f"{median(leads):g} ({leads[0]} to {leads[-1]})" if leads else "-",
        str(row["missed"]),
        f"{row['false']}/{healthy}",
        str(row["false_lost"]),
        str(row["false_still_learning"]),
    ]
    return f"| {' | '.join(cells)} |"


def unseen_runs() -> list[RealRun]:
    """Return the runs on which nothing was fitted."""
    return archived_runs("warm", "further")


def main() -> None:
    """Replay the alarms and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RESULTS / "stability-h200.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "alarms-smollm2", help="without .json and .md")
    parser.add_argument("--fit", action="store_true", help="print only the seed to fit on, and write nothing")
    args = parser.parse_args()
    made = json.loads(args.runs.read_text())
    runs = read_runs(args.runs)
    result = {
        "what": "the alarms of the day of the runs (before) and of today (now) over the same metrics",
        "date": datetime.date.today().isoformat(),
        "made_from": f"{args.runs.name} ({made['machine']}, {made['date']}) and the study's runs after a warm start",
        "parts": parts([run for run in runs if run.seed == FITTED], []) if args.fit else parts(runs, unseen_runs()),
    }
    print(markdown(result))
    if not args.fit:
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(result))


if __name__ == "__main__":
    main()
