"""Draws the live display of a finished run, from its metrics and its records.

`python tools/picture.py RUN docs/demo.svg`
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path

from rich.console import Console

from trimtab.cli.display import RunDisplay
from trimtab.record import open_run
from trimtab.trainer.config import load
from trimtab.trainer.train import SampleText, describe_model, describe_task


def picture(run: Path) -> str:
    """The last frame of the display, as an SVG without anything to fetch."""
    config = load(run / "config.toml")
    title = f"{config.build_objective().name} · {describe_model(config)} · {describe_task(config)}"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    spent = sum(record.get("time/rollout", 0.0) + record.get("time/update", 0.0) for record in records)
    display = RunDisplay(title=title, began=time.monotonic() - spent)
    for record in records:
        step = record.pop("step")
        display.advance("step", step, config.run.steps)
        display.set_metrics(step, record)
    display.set_sample([right_response(run)])
    console = Console(record=True, width=100, height=12, file=io.StringIO(), force_terminal=True)
    console.print(display)
    svg = console.export_svg(title="trimtab train")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, ", "")


def right_response(run: Path) -> SampleText:
    """The first right response of the last recorded step."""
    records = open_run(run)
    step = records.step(records.steps[-1])
    number = step.responses["verdict"].index("correct")
    return SampleText(step.responses["prompt"][number], step.text(number), "", "correct", 1.0)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(Path(sys.argv[1])))
