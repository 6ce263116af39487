"""Writes the docs that are made from the code and from results; with --check, says which are out of date instead."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import agent_tables
import diagrams
import engine_tables
import gpu_tables
import install_tables
import laboratory_pages
import laboratory_pictures
import rival_tables
import scaling_pages
import signal_pages
import study_pages
import tool_pages
from command_docs import commands_page
from method_docs import methods_reference
from recipe_docs import recipes_page
from trimtab.engines.options import EngineOptions
from trimtab.insight.alarms import ALARM_KINDS, threshold_reasons
from trimtab.record import COLLAPSE_DEFINITION, TABLES
from trimtab.trainer.config import json_schema
from trimtab.trainer.train import METRICS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
# A figure inside a sentence: the words between the signs say which one, and the text between the marks is made anew.
FACT = re.compile(r"(<!-- = (.+?) -->).*?(<!-- /= -->)")
FACTS: dict[str, Callable[..., str]] = {"stress": study_pages.fact, "laboratory": laboratory_pages.fact}


def costs() -> str:
    """The table of what the methods cost compared with GRPO."""
    names = ("stapo", "stare", "sspo")
    lines = ["| ratio to GRPO | " + " | ".join(name.upper() for name in names) + " |", "|---" * 4 + "|"]
    for path in sorted(RESULTS.glob("objectives-*.json")):
        result = json.loads(path.read_text())
        cells = [f"{result['ratios'][name]['ratio']:.2f}" for name in names]
        lines.append(f"| {result['machine']}, torch {result['versions']['torch']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def smollm2() -> str:
    """The table of the runs of a real language model."""
    lines = [
        "| task | before RL | after RL | sampled, first and last 5 steps | steps | minutes of RL |",
        "|---" * 6 + "|",
    ]
    for path in sorted(RESULTS.glob("smollm2-*.json")):
        if "tools" in path.name:
            continue  # docs/tools.md has them
        result = json.loads(path.read_text())
        sampled = [value for _, value in result["curves"]["reward/accuracy"]]
        first, last = sum(sampled[:5]) / 5, sum(sampled[-5:]) / 5
        lines.append(
            f"| {result['task']} | {result['accuracy_before_rl']:.1%} | {result['accuracy_after_rl']:.1%} "
            f"| {first:.1%}, {last:.1%} | {result['rl_steps']} | {result['rl_seconds'] / 60:.1f} |"
        )
    return "\n".join(lines)


def objectives_page() -> str:
    """docs/objectives.md with the measured costs filled in."""
    return filled("docs/objectives.md", {"costs": costs})


def record_page() -> str:
    """docs/record.md with its columns, its measured figures and the output of a real replay filled in."""
    return filled("docs/record.md", {"columns": columns, "measured": recorder, "replay": replay_output})


def columns() -> str:
    """The tables of what is recorded."""
    parts = []
    for name, table in TABLES.items():
        rows = [f"| `{c.name}` | {c.type} | {c.presence} | {c.meaning} |" for c in table]
        parts.append(
            "\n".join([f"### `{name}`", "", "| column | type | present | meaning |", "|---|---|---|---|", *rows])
        )
    return "\n\n".join(parts)


def recorder() -> str:
    """What recording costs, as measured."""
    path = RESULTS / "record-cpu.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    demo, made = result["demo"], result["replay"]
    rows = [
        ("bytes per token, addition", f"{demo['bytes_per_token']:.1f}"),
        ("bytes per token, a made run with the sizes of a real one", f"{made['bytes_per_token']:.1f}"),
        ("step time with recording, addition", f"{demo['overhead_share']:+.1%}"),
        ("the training thread's own CPU time, addition", f"{demo['training_thread_cpu_share']:+.1%}"),
        (f"replay under {', '.join(made['objectives'])} together", f"{made['tokens_per_second'] / 1e6:.1f} M tokens/s"),
    ]
    lines = ["| | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)]
    return "\n".join([*lines, "", f"{result['machine']}; medians; by `benchmarks/record.py`, {result['date']}."])


def replay_output() -> str:
    """What `trimtab replay` printed for a run of addition."""
    path = RESULTS / "replay-demo.txt"
    return f"```\n{path.read_text().rstrip()}\n```" if path.exists() else ""


def report_page() -> str:
    """docs/report.md with its measured figures filled in."""
    return filled("docs/report.md", {"measured": report_measured})


def report_measured() -> str:
    """What the report of a large run takes, as `benchmarks/report.py` wrote it."""
    path = RESULTS / "report-cpu.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    rows = [
        ("the report", f"{result['seconds']:g} s, at best {result['seconds_least']:g} s"),
        ("of which CPU", f"{result['cpu_seconds']:g} s"),
        ("most memory", f"{result['peak_megabytes']} MB"),
        ("the page", f"{result['page_megabytes']:.1f} MB"),
        ("first paint in Chromium, from the disk", f"{result['first_paint_ms'] / 1000:.1f} s"),
        ("the microscope is there", f"{result['microscope_ms'] / 1000:.1f} s"),
    ]
    lines = ["| | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)]
    how = f"medians of {result['rounds']}; by `benchmarks/report.py`, {result['date']}"
    return "\n".join([*lines, "", f"{result['machine']}; {how}."])


def watch_page() -> str:
    """docs/watch.md with its measured figures filled in."""
    return filled("docs/watch.md", {"measured": watch_measured})


def watch_measured() -> str:
    """What opening a long run takes and what the page takes from a run, as `benchmarks/watch.py` wrote it."""
    path = RESULTS / "watch-cpu.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    long, cost = result["long_run"], result.get("cost")
    rows = [
        (f"a run of {long['steps']:,} steps: first paint in Chromium", f"{long['first_paint_ms'] / 1000:.1f} s"),
        ("all curves drawn", f"{long['curves_ms'] / 1000:.1f} s, at most {long['curves_ms_most'] / 1000:.1f} s"),
        (
            "CPU time of that, of the server and of the browser",
            f"{long['opening_server_cpu_seconds']:.1f} s and {long['opening_browser_cpu_seconds']:.1f} s",
        ),
        (
            "from a new line in the file to the page",
            f"{long['new_line_seconds']:g} s, at most {long['new_line_seconds_most']:g} s",
        ),
        ("a frame while scrolling", f"{long['frame_ms_median']:g} ms, 95th percentile {long['frame_ms_p95']:g} ms"),
        ("memory of the server, most", f"{long['server_megabytes']} MB"),
    ]
    if cost:
        idle, used = cost["nobody_looks"], cost["page_open"]
        rows += [
            ("CPU time beside a run of the demo, while nobody looks", f"{idle['share']:.2%} of the run's"),
            (
                f"the same with an open page, at load {cost['load']:g}",
                f"{used['share']:.1%} of the run's, {used['watch_cpu_seconds'] / cost['seconds']:.1%} of a core",
            ),
            ("CPU time to open the page, once", f"{used['opening_cpu_seconds']:.1f} s"),
        ]
    lines = ["| | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)]
    how = f"load {long['load']:g}; medians of {long['rounds']}; by `benchmarks/watch.py`, {result['date']}"
    return "\n".join([*lines, "", f"{result['machine']}, {how}."])


def metrics_page() -> str:
    """docs/metrics.md with the table of every area filled in."""
    return filled("docs/metrics.md", {area: partial(metric_table, area) for area in _areas()})


def _areas() -> list[str]:
    return sorted({name.partition("/")[0] for name in METRICS})


def metric_table(area: str) -> str:
    """The metrics of an area, as `reward/...`."""
    named = {name: meaning for name, meaning in METRICS.items() if name.partition("/")[0] == area}
    rows = [f"| `{name}` | {named[name].replace('|', chr(92) + '|')} |" for name in sorted(named)]
    return "\n".join(["| metric | meaning |", "|---|---|", *rows])


def filled(name: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """A page with the parts between its marks, and the figures in its sentences, made anew."""
    text = (ROOT / name).read_text()
    for part, make in parts.items():
        mark, made = rf"(<!-- {part}\b[^>]*-->\n).*?(<!-- end -->)", make()
        text = re.sub(mark, lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text, count=1, flags=re.DOTALL)  # type: ignore[misc]
    return FACT.sub(lambda found: f"{found[1]}{fact(found[2])}{found[3]}", text)


def fact(words: str) -> str:
    """A figure by its words, as `stress / zero / stapo / 1e-4 / seeds` or `laboratory / expression / dapo / greedy`."""
    source, *names = words.split(" / ")
    return FACTS[source](*names)


def sandbox_page() -> str:
    """docs/sandbox.md with the probe's words on the benchmark's machine and the measured figures filled in."""
    result = json.loads((RESULTS / "sandbox-cpu.json").read_text())
    return filled(
        "docs/sandbox.md", {"probe": lambda: sandbox_probe(result), "measured": lambda: sandbox_table(result)}
    )


def sandbox_probe(result: Mapping[str, Any]) -> str:
    """What the probe said, as root and as an ordinary user."""
    line = result["probe"]
    return f"```\n{line}\n{line.replace('uid dropped', 'no root')}\n```"


def sandbox_table(result: Mapping[str, Any]) -> str:
    """What runs take beside bubblewrap's, and what ten thousand leave behind."""
    rows = ["| | sandbox, all layers | bubblewrap and a fresh interpreter | times the runs per second |"]
    rows.append("|---|---|---|---|")
    for name, words in (
        ("tiny", "`print(1 + 1)`, one after another"),
        ("tiny_from_threads", f"`print(1 + 1)`, from {result['tiny_from_threads']['threads']} threads"),
        ("numpy_and_sympy", "a line of numpy and sympy, one after another"),
    ):
        cells = [
            f"{of['median_ms']:g} ms (p90 {of['p90_ms']:g}), {of['runs_per_second']:g} runs/s"
            for of in (result[name]["sandbox"], result[name]["bubblewrap"])
        ]
        rows.append(f"| {words} | {' | '.join(cells)} | {result[name]['times_bubblewrap']:g} |")
    memory, soak = result["memory"], result["soak"]
    left = ", ".join(
        f"{name.replace('_', ' ')} {soak['before'][name]} and {soak['after'][name]}" for name in soak["before"]
    )
    return "\n".join(rows) + (
        f"\n\n{result['machine']}, Python {result['versions']['python']}; other work kept both cores busy (load "
        f"{result['load']:g}), so both were measured at {result['priority_of_both']} priority, in "
        f"{result['rounds']} rounds of one after the other. The server takes "
        f"{memory['server_rss_mb']:g} MB, a worker {memory['worker_own_mb']:g} MB beyond what they share. Before "
        f"and after {soak['runs']:,} runs in a row: {left}. (`benchmarks/sandbox.py`)"
    )


def alarms_page() -> str:
    """docs/alarms.md with the alarms, their thresholds, and what was measured filled in."""
    made = {
        "alarms": alarm_list,
        "measured": alarms_measured,
        "ratios": alarms_of_ratios,
        "real": alarms_on_real_runs,
        "collapse": lambda: COLLAPSE_DEFINITION,
        "thresholds": alarm_thresholds,
    }
    return filled("docs/alarms.md", made)


def alarm_list() -> str:
    """Every alarm: what it looks for, at which metrics and thresholds, and what to try."""
    parts = []
    for name, kind in ALARM_KINDS.items():
        limits = ", ".join(f"`{limit}` {threshold_reasons()[limit][0]:g}" for limit in kind.thresholds)
        metrics = ", ".join(f"`{metric}`" for metric in kind.metrics)
        looks = (kind.detect.__doc__ or "").strip()
        limits = f" Thresholds: {limits}." if limits else ""
        parts.append(f"### `{name}`\n\n{looks}\n\nReads {metrics}.{limits}\n\n**What to do:** {kind.suggestion}.")
    return "\n\n".join(parts)


def alarm_thresholds() -> str:
    """Every number that alarms depend on."""
    rows = [f"| `{name}` | {value:g} | {why} |" for name, (value, why) in threshold_reasons().items()]
    return "\n".join(["| threshold | value | meaning |", "|---|---|---|", *rows])


def alarms_measured() -> str:
    """Detection, lead time and false alarms on addition, as `benchmarks/alarms.py` wrote them."""
    path = RESULTS / "alarms-demo.md"
    return path.read_text().strip() if path.exists() else ""


def alarms_of_ratios() -> str:
    """Lead times of the alarms of ratios, as `benchmarks/alarms_ratios.py` wrote them."""
    path = RESULTS / "alarms-ratios.md"
    return path.read_text().strip() if path.exists() else ""


def alarms_on_real_runs() -> str:
    """The same on runs of a real language model, as `benchmarks/alarms_real.py` wrote it."""
    path = RESULTS / "alarms-smollm2.md"
    return path.read_text().strip() if path.exists() else ""


def engine_options() -> str:
    """The options that TRL and verl share."""
    rows = []
    for name, option in EngineOptions.model_fields.items():
        default = option.get_default(call_default_factory=True)
        if option.description:
            shown = "none" if default in (None, (), {}) else f"`{default}`"
            rows.append(f"| `{name}` | {shown} | {option.description} |")
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


def gpu_page() -> str:
    """docs/gpu.md with what was measured on a GPU filled in."""
    return filled("docs/gpu.md", {**gpu_tables.PARTS, **rival_tables.PARTS, **engine_tables.PARTS, "smollm2": smollm2})


def evaluation_page() -> str:
    """docs/evaluation.md with a real evaluation filled in."""
    return filled("docs/evaluation.md", {"smollm2": gpu_tables.evaluated})


def support_page() -> str:
    """docs/support.md with what the installation takes filled in."""
    return filled("docs/support.md", {"install": install_tables.installed})


def study_page() -> str:
    """docs/study.md with the tables of both parts of the study filled in."""
    stress = ("zero", "warm", "further", "off-policy", "demo", "sspo", "combinations")
    made: dict[str, Callable[[], str]] = {
        "findings": laboratory_pages.findings,
        "picture": laboratory_pages.picture,
        "legend": lambda: laboratory_pages.LEGEND + " " + laboratory_pages.CONTROL_LEGEND,
        **{f"laboratory {part}": partial(laboratory_pages.section, part) for part in laboratory_pages.PARTS},
        "laboratory rare": laboratory_pages.rare_tokens,
        "laboratory others": laboratory_pages.others,
        **{f"stress {name}": partial(study_pages.stress_tables, name) for name in stress},
        "stress mixed": lambda: study_pages.stress_tables("entropy"),
        "stress entropies": lambda: study_pages.entropies("zero", "3e-5"),
        "silenced": study_pages.silenced,
    }
    return filled("docs/study.md", made)


def study_picture() -> str:
    """The picture of who survives which learning rate."""
    return study_pages.heat_maps([("RL from nothing", "zero"), ("RL after a warm start", "warm")])


def trim_page() -> str:
    """docs/trim.md with what was measured filled in."""
    made = {name: getattr(laboratory_pages, name) for name in ("picture", "findings", "control")}
    return filled("docs/trim.md", made | {"trim": partial(metric_table, "trim")})


def scaling_page() -> str:
    """The page on how far several GPUs go."""
    return filled("docs/scaling.md", {"steps": scaling_pages.steps, "measured": scaling_pages.measured})


def more_signal_page() -> str:
    """docs/more-signal.md with what was measured filled in."""
    return filled("docs/more-signal.md", {"signal": signal_pages.table, "lag": scaling_pages.lag})


def tools_page() -> str:
    """docs/tools.md with what was measured on a GPU filled in."""
    return filled("docs/tools.md", {"learned": tool_pages.learned, "latency": gpu_tables.slow_tools})


def agents_page() -> str:
    """docs/agents.md with what the recipe learns and what the endpoint costs filled in."""
    return filled("docs/agents.md", {"learned": agent_tables.learned, "overhead": agent_tables.overhead})


def own_parts_page() -> str:
    """docs/own-parts.md with the functions of the example's file filled in."""
    parts: list[list[str]] = [["gentle"], ["calm"], ["above_mean"], ["doubling", "near", "brief"], ["Warmer"]]
    return filled("docs/own-parts.md", {"-".join(names): partial(own_part, *names) for names in parts})


def own_part(*names: str) -> str:
    """Functions or classes of examples/own_parts/mine.py as they are written there."""
    text = (ROOT / "examples/own_parts/mine.py").read_text()
    nodes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    lines = text.splitlines()
    starts = {name: min([node.lineno, *(each.lineno for each in node.decorator_list)]) for name, node in nodes.items()}
    sources = ["\n".join(lines[starts[name] - 1 : nodes[name].end_lineno]) for name in names]
    return "```py\n" + "\n\n\n".join(sources) + "\n```"


PAGES: dict[str, Callable[[], str]] = {
    "README.md": lambda: filled("README.md", {"picture": laboratory_pages.readme}),
    "docs/agents.md": agents_page,
    "docs/acting-on-an-alarm.md": lambda: filled("docs/acting-on-an-alarm.md", {}),
    "docs/alarms.md": alarms_page,
    "docs/choosing.md": lambda: filled("docs/choosing.md", {}),
    "docs/commands.md": commands_page,
    "docs/evaluation.md": evaluation_page,
    "docs/gpu.md": gpu_page,
    "docs/methods.md": methods_reference,
    "docs/metrics.md": metrics_page,
    "docs/objectives.md": objectives_page,
    "docs/off-policy.md": lambda: filled("docs/off-policy.md", {"truncation": laboratory_pages.truncation}),
    "docs/own-parts.md": own_parts_page,
    "docs/recipes.md": recipes_page,
    "docs/record.md": record_page,
    "docs/sandbox.md": sandbox_page,
    "docs/report.md": report_page,
    "docs/watch.md": watch_page,
    "docs/study.md": study_page,
    "docs/study.svg": study_picture,
    "docs/support.md": support_page,
    "docs/more-signal.md": more_signal_page,
    "docs/scaling.md": scaling_page,
    "docs/theory.md": lambda: filled("docs/theory.md", {"length": laboratory_pictures.length_text}),
    "docs/tools.md": tools_page,
    "docs/tools.svg": tool_pages.curves,
    "docs/trim.md": trim_page,
    "docs/verl.md": lambda: filled("docs/verl.md", {"options": engine_options}),
    **{name: (lambda text=text: text) for name, text in laboratory_pictures.pictures().items()},  # type: ignore[misc]
    **{f"docs/diagram-{name}.svg": diagram.svg for name, diagram in diagrams.DIAGRAMS.items()},
    "src/trimtab/recipes/schema.json": lambda: json.dumps(json_schema(), indent=2) + "\n",
}


def main() -> int:
    """Write or compare every page."""
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / name, make()
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(name)
    if stale:
        print(f"out of date: {', '.join(stale)}; run `make docs` and commit the result")
    return len(stale)


if __name__ == "__main__":
    sys.exit(main())
