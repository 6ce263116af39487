"""`trimtab eval RUN` evaluates a run on its own held-out problems, by its own rule, with intervals."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.evaluate.small_evals import RecordedProgress
from helpers.evaluate.small_evals import graded as with_verdict
from helpers.train.short_runs import trained
from trimtab.cli import app
from trimtab.data import DEFAULT_BENCHMARKS
from trimtab.experiments.evaluate import EvalOptions
from trimtab.experiments.evaluate.folder import EvalFolder
from trimtab.experiments.evaluate.metrics import compute_metrics, score_difference
from trimtab.experiments.evaluate.run import EvalResult, evaluate, grade_evaluation
from trimtab.experiments.evaluate.settings import prepare, with_benchmarks

# Numbers of 0, 1/3, 2/3 or 1, whatever the model says; what the rule asks for of a row must have come through.
RULE = """
def graded(response, answer, extra, *, source):
    assert source == "sums" and extra["weight"] == 2
    return (sum(map(ord, response)) + int(answer)) % 4 / 3
"""


def options(model: Path | str, out: Path, **changes: Any) -> EvalOptions:
    return EvalOptions(model=str(model), out=out, device="cpu", **changes)


def evaluated(model: Path | str, out: Path, **changes: Any) -> EvalResult:
    return evaluate(options(model, out, **changes), RecordedProgress())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of additions, with 40 held-out problems."""
    folder = tmp_path_factory.mktemp("runs") / "sums"
    trained(folder, {"run.steps": "2", "run.eval_every": "2", "run.eval_problems": "40", "task.size": "100"})
    return folder


def test_a_run_is_evaluated_as_it_evaluates_itself(run: Path, tmp_path: Path) -> None:
    result = evaluated(run, tmp_path / "out")
    (metrics,) = result.metrics.values()
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert metrics.average is not None and metrics.average.mean == pytest.approx(last["eval/accuracy"])
    assert metrics.average.high is not None and metrics.average.high > metrics.average.mean
    assert (metrics.problems, metrics.samples, metrics.score) == (40, 1, None)
    assert (result.settings.rule, result.settings.temperature, result.settings.max_new_tokens) == ("exact", 0.0, 4)
    assert next(iter(result.metrics)) == f"held-out:{run}"
    assert grade_evaluation(EvalFolder(tmp_path / "out")).metrics == result.metrics


def test_the_command_names_the_run(run: Path, tmp_path: Path) -> None:
    words = ["eval", str(run), "--out", str(tmp_path / "out"), "--device", "cpu", "--problems", "5", "--quiet"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "sums, held-out (5)" in done.output
    assert "suffix" not in done.output, "the prompts are those of the run"
    refused = CliRunner().invoke(app, [*words, "--suffix", "Think."])
    assert refused.exit_code == 2 and "--suffix is not added to the held-out problems" in refused.output


def test_a_run_that_is_not_there_is_said_to_be_looked_up_as_a_model(tmp_path: Path) -> None:
    words = ["eval", "runs/mistyped", "--out", str(tmp_path / "out"), "--data", str(tmp_path), "--quiet"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "MODEL = 'runs/mistyped' is no folder here: it is looked up on the Hugging Face hub" in done.output


def test_another_model_is_compared_on_the_same_problems(run: Path, tmp_path: Path) -> None:
    ours, other = evaluated(run, tmp_path / "a"), evaluated("demo", tmp_path / "b", benchmarks=f"held-out:{run}",
        temperature=0.0, samples=1, max_new_tokens=4)  # fmt: skip
    assert ours.metrics.keys() == other.metrics.keys()
    assert EvalFolder(tmp_path / "a").problems() == EvalFolder(tmp_path / "b").problems()


def test_what_is_named_is_not_replaced(run: Path) -> None:
    usual = ",".join(DEFAULT_BENCHMARKS)
    assert with_benchmarks(EvalOptions(model=str(run), benchmarks="gsm8k")).benchmarks == "gsm8k"
    assert with_benchmarks(EvalOptions(model=str(run), data=run)).benchmarks == usual
    assert with_benchmarks(EvalOptions(model="demo")).benchmarks == usual
    sampled = with_benchmarks(EvalOptions(model=str(run), temperature=0.5, samples=3, max_new_tokens=7))
    assert (sampled.temperature, sampled.samples, sampled.max_new_tokens) == (0.5, 3, 7)
    published = with_benchmarks(EvalOptions(model=str(run), preset="justrl"))
    assert (published.temperature, published.samples) == (None, None)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run whose rule is a function that returns numbers."""
    folder = tmp_path_factory.mktemp("graded")
    (folder / "own_rule.py").write_text(RULE)
    rows = [{"prompt": f"{n}+{n}=", "answer": str(n), "source": "sums", "extra": {"weight": 2}} for n in range(9)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = '{prompt="prompt", answer="answer", source="source", extra="extra"}'
    files = 'path="sums.jsonl", eval_path="sums.jsonl"'
    changes: dict[str, Any] = {
        "task": f'{{name="file", {files}, rule="python:own_rule:graded", columns={columns}}}',
        "warm_start.steps": "0",
        "run.steps": "2",
        "run.eval_every": "2",
        "run.eval_problems": "9",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trained(folder / "run", changes | dict.fromkeys(("task.size", "task.digits")))
        yield folder / "run"


def test_a_rule_of_the_users_own_runs_only_if_it_is_trusted(graded: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"need code of its own \(python:own_rule:graded\): to run it, add --own-code"):
        evaluated(graded, tmp_path / "out")
    result = evaluated(graded, tmp_path / "out", own_code=True)
    (metrics,) = result.metrics.values()
    last = [json.loads(line) for line in (graded / "metrics.jsonl").read_text().splitlines()][-1]
    assert metrics.score is not None and 0 < metrics.score.mean == pytest.approx(last["eval/score"])
    assert metrics.average is not None and 0 < metrics.average.mean == pytest.approx(last["eval/accuracy"])
    assert None not in (metrics.score.low, metrics.average.low)
    assert metrics.kinds.get("crashed", 0) == 0, "the rule gets the row's source and extra"
    again = grade_evaluation(EvalFolder(tmp_path / "out"))
    assert again.metrics == result.metrics, "stored verdicts keep their numbers"


def test_a_run_without_held_out_problems_says_what_to_do(graded: Path, tmp_path: Path) -> None:
    other = shutil.copytree(graded, tmp_path / "run")
    config = re.sub(r"eval_path = .*", "", (graded / "config.toml").read_text())
    (other / "config.toml").write_text(config.replace("python:own_rule:graded", "number"))
    with pytest.raises(ValueError, match=r"has no held-out problems .*--benchmarks"):
        prepare(with_benchmarks(options(other, tmp_path / "out")))


def test_problems_of_several_rules_need_one_to_be_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    several = options(run, tmp_path / "out", benchmarks=f"held-out:{run},{tmp_path / 'mine.jsonl'}",
        columns="prompt=prompt,answer=answer", max_new_tokens=4)  # fmt: skip
    with pytest.raises(ValueError, match=r"several rules \(exact, math\): name one with --rule"):
        prepare(several)


def test_scores_have_an_interval_and_a_paired_difference() -> None:
    ours = [with_verdict(f"q{n}", "wrong", score=0.25 * n) for n in range(5)]
    theirs = [with_verdict(f"q{n}", "wrong", score=0.25 * n - 1.0) for n in range(5)]
    found = compute_metrics(ours, 1).score
    assert found is not None and found.mean == 0.5 and found.low is not None and found.low < 0.5
    difference = score_difference(ours, theirs)
    assert difference is not None and difference.mean == difference.low == difference.high == 1.0
    plain = [with_verdict("q0", "correct")]
    assert compute_metrics(plain, 1).score is None and score_difference(plain, plain) is None
