"""docs/trl.md and examples/trl_arithmetic.py, run as they are written."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed here: `make test-engines` runs these tests")

import datasets

from helpers.hostile.model_folders import base_model

ROOT = Path(__file__).parents[2]
SHORT_RUN = {"max_steps": 2, "per_device_train_batch_size": 8, "max_completion_length": 8, "use_cpu": True,
             "bf16": False, "gradient_checkpointing": False, "report_to": "none"}  # fmt: skip


def test_the_script_of_the_page_trains_and_its_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from trimtab.cli import app

    (script,) = re.findall(r"```py\n# train\.py\n(.*?)```", (ROOT / "docs/trl.md").read_text(), re.DOTALL)
    model = base_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    prompts = [[{"role": "user", "content": f"What is {asked}?"}] for asked in ("1+1", "2+3")]
    rows = {"prompt": prompts, "solution": ["$2$", "$5$"]}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: datasets.Dataset.from_dict(rows))
    monkeypatch.chdir(tmp_path)
    # Another model and data, and shorter: nothing else differs from the page.
    short = ", ".join(f"{key}={value!r}" for key, value in SHORT_RUN.items())
    assert '"Qwen/Qwen2-0.5B-Instruct"' in script and 'record="runs/stapo"' in script
    script = script.replace('"Qwen/Qwen2-0.5B-Instruct"', repr(str(model)))
    script = script.replace('record="runs/stapo"', f'record="runs/stapo", {short}')
    exec(compile(script, "docs/trl.md", "exec"), {})
    assert [json.loads(line)["step"] for line in Path("runs/stapo/metrics.jsonl").read_text().splitlines()] == [1, 2]
    for words in (["report", "runs/stapo"], ["replay", "runs/stapo", "--objective", "gspo"], ["alarms", "runs/stapo"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output


def test_the_example_of_sums_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/trl_arithmetic.py"))
    (start, end) = map(float, re.findall(r"mean reward ([\d.]+) at the start, ([\d.]+)", capsys.readouterr().out)[0])
    assert end > start + 0.08
