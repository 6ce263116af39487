"""`trimtab eval` on the command line: tables, files, comparisons and errors."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from helpers.evaluate.small_evals import RecordedProgress, answer, graded, serving, small, status, write_sums
from trimtab.cli import app
from trimtab.data.benchmarks import BENCHMARKS, DEFAULT_BENCHMARKS
from trimtab.experiments.evaluate import report
from trimtab.experiments.evaluate.folder import EvalFolder, Generation
from trimtab.experiments.evaluate.launch import LiveProgress, PlainProgress, SampleCounter, make_progress
from trimtab.experiments.evaluate.metrics import compute_metrics
from trimtab.experiments.evaluate.report import PUBLISHED
from trimtab.experiments.evaluate.run import EvalResult
from trimtab.experiments.evaluate.settings import prepare
from trimtab.process import SignalInterrupt

ROOT = Path(__file__).parents[2]
runner = CliRunner()


def call(folder: Path, *words: str, code: int = 0, **environment: str) -> str:
    """Return the output of the command; the model is the demo, the benchmark six sums."""
    write_sums(folder / "data")
    fixed = ["--benchmarks", "gsm8k", "--data", str(folder / "data"), "--samples", "2", "--max-new-tokens", "6"]
    fixed += ["--suffix", "", "--rule", "number", "--device", "cpu", "--out", str(folder / "out")]
    done = runner.invoke(app, ["eval", *fixed, *words], env=environment)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done.output


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def made(folder: Path, **kinds: list[str]) -> EvalResult:
    """An evaluation with verdicts as given, by benchmark: one problem each, named by its place."""
    settings, _ = prepare(small(folder, benchmarks="gsm8k"))
    samples = {
        name: [graded(f"q{n}", None if kind == "failed" else kind, kind, tokens=10.0) for n, kind in enumerate(given)]
        for name, given in kinds.items()
    }
    settings = replace(settings, benchmarks=tuple(kinds), samples=dict.fromkeys(kinds, 1))
    return EvalResult(
        EvalFolder(folder), settings, samples, {name: compute_metrics(s, 1) for name, s in samples.items()}
    )


def test_a_model_is_evaluated_shown_and_kept(tmp_path: Path) -> None:
    output = call(tmp_path, "demo")
    for part in (
        "avg@k",
        "pass@k",
        "maj@k",
        "GSM8K (6)",
        "tokens",
        "truncated %",
        "no answer %",
        "entropy",
        "not graded",
    ):
        assert part in output
    assert re.search(r"GSM8K \(6\)\W+2\W+[\d.]+ \[[\d.]+, [\d.]+\]", output), "a mean with its interval"
    assert "the mean over the population of problems" in output
    found = result(tmp_path / "out")
    assert found["settings"]["temperature"] == 1.0
    assert found["metrics"]["gsm8k"]["average"]["problems"] == 6
    assert found["this_process"]["samples"] == 12
    assert found["this_process"]["tokens_per_second"] > 0
    assert {"python", "torch", "transformers", "trimtab"} == set(found["versions"])
    text = (tmp_path / "out/result.md").read_text()
    assert "| GSM8K (6) | 2 |" in text
    again = call(tmp_path, "demo", "--resume")
    assert "all samples are there already" in again
    assert result(tmp_path / "out")["metrics"] == found["metrics"]


def test_a_file_of_ones_own_is_a_benchmark(tmp_path: Path) -> None:
    mine = tmp_path / "mine sums.jsonl"
    mine.write_text("".join(json.dumps({"q": f"{n}+1=", "r": {"value": n + 1}}) + "\n" for n in range(3)))
    columns = ("--columns", "prompt=q,answer=r.value")
    output = call(tmp_path, "demo", "--benchmarks", f"gsm8k,{mine}", *columns)
    assert "mine sums (3)" in output and "GSM8K (6)" in output
    rows = [json.loads(line) for line in (tmp_path / "out/problems.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows if row["benchmark"] == str(mine)] == [f"mine sums-{n}" for n in range(3)]
    assert "all samples are there already" in call(tmp_path, "demo", "--benchmarks", f"gsm8k,{mine}", *columns)
    regraded = runner.invoke(app, ["eval", "--regrade", str(tmp_path / "out"), "--rule", "exact"])
    assert regraded.exit_code == 0 and "mine sums (3)" in regraded.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--benchmarks", "mine.csv"], "(a file of your own ends in .jsonl or .parquet)"),
        (["--benchmarks", "nowhere.jsonl"], "task file 'nowhere.jsonl' does not exist"),
        (["--columns", "prompt"], "--columns 'prompt': write for example prompt=question,answer=result"),
        (["--columns", "promt=q"], "--columns 'promt=q': no problem has a 'promt': did you mean prompt?"),
    ],
)
def test_a_mistake_in_a_file_of_ones_own_is_found_before_the_model_is_loaded(
    words: list[str], expected: str, tmp_path: Path
) -> None:
    assert expected in call(tmp_path, "no such model", *words, code=2)


def test_wrong_columns_of_a_file_of_ones_own_are_named_with_the_option_that_names_others(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"question": "1+1=", "result": "2"}\n')
    output = call(tmp_path, "no such model", "--benchmarks", str(mine), code=2)
    assert "there is no `prompt`" in output
    assert "name your columns with --columns prompt=question,answer=result" in output and "recipe" not in output


def test_resume_needs_something_to_go_on_with(tmp_path: Path) -> None:
    assert "is not an evaluation" in call(tmp_path, "demo", "--resume", code=2)


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    call(tmp_path, "demo", "--problems", "1")
    output = call(tmp_path, "demo", "--problems", "1", "--preset", "justrl", code=2)
    assert "temperature: 1.0 -> 0.7" in output
    assert "top_p: 1.0 -> 0.9" in output


def test_grading_again_needs_no_model(tmp_path: Path) -> None:
    call(tmp_path, "demo", "--problems", "2")
    before = (tmp_path / "out/generations.jsonl").read_bytes()
    done = runner.invoke(app, ["eval", "--regrade", str(tmp_path / "out"), "--rule", "exact"])
    assert done.exit_code == 0, done.output
    assert "by the rule exact" in done.output
    assert result(tmp_path / "out")["settings"]["rule"] == "exact"
    assert (tmp_path / "out/generations.jsonl").read_bytes() == before
    settings = tmp_path / "out/settings.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"rule": "python:timeit:timeit"}))
    foreign = runner.invoke(app, ["eval", "--regrade", str(tmp_path / "out")])
    assert (foreign.exit_code, "to run it, pass --rule python:timeit:timeit" in foreign.stderr) == (2, True)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"rule": "python:x;reboot"}))
    foreign = runner.invoke(app, ["eval", "--regrade", str(tmp_path / "out")])
    assert "to run it, pass --rule 'python:x;reboot'" in foreign.stderr, "what is pasted into a shell runs nothing"
    missing = runner.invoke(app, ["eval", "--regrade", str(tmp_path / "nowhere")])
    assert missing.exit_code == 2
    assert "is not an evaluation" in missing.output
    assert not (tmp_path / "nowhere").exists()


def test_two_models_are_compared_problem_by_problem(tmp_path: Path) -> None:
    with serving() as server:
        call(tmp_path / "right", "--endpoint", server.url, "--model-name", "right")
    output = call(tmp_path, "demo", "--against", str(tmp_path / "right/out"))
    assert "Against right, paired by problem" in output
    assert "worse" in output
    assert "The two were sampled differently: sampler: 'endpoint' -> 'native'" in output
    found = result(tmp_path / "out")["against"]
    assert found["model"] == "right"
    assert found["differences"]["gsm8k"]["problems"] == 6
    assert found["differences"]["gsm8k"]["high"] < 0


def test_the_other_model_is_evaluated_too_where_it_was_not(tmp_path: Path) -> None:
    with serving() as server:
        output = call(tmp_path, "--endpoint", server.url, "--model-name", "a", "--against", "b")
        assert {request["model"] for request in server.requests} == {"a", "b"}
    assert "Against b" in output
    assert "not significant" in output
    assert result(tmp_path / "out/against")["settings"]["model"] == "b"


def test_an_evaluation_that_is_not_finished_is_no_yardstick(tmp_path: Path) -> None:
    call(tmp_path / "other", "demo")
    folder = EvalFolder(tmp_path / "other/out")
    folder.keep_only(folder.read()[:-1])
    assert "is not finished" in call(tmp_path, "demo", "--against", str(folder.path), code=2)


def test_evaluations_without_a_benchmark_in_common_are_not_compared(tmp_path: Path) -> None:
    ours, theirs = made(tmp_path, aime24=["correct"]), made(tmp_path, aime25=["correct"])
    with pytest.raises(ValueError, match="no benchmark in common"):
        report.compare_results(ours, theirs)


def test_a_folder_without_a_benchmark_in_common_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    call(tmp_path / "other", "demo", "--problems", "1")
    words = "demo", "--benchmarks", "aime24,amc23", "--against", str(tmp_path / "other/out")
    output = call(tmp_path, *words, code=2)
    assert "has gsm8k and no benchmark in common with aime24, amc23" in output
    assert not (tmp_path / "out").exists()


def test_what_papers_print_stands_beside_it_with_its_source(tmp_path: Path) -> None:
    output = call(tmp_path, "demo", "--problems", "2", "--papers")
    assert "JustRL-DeepSeek-1.5B" in output
    assert "arXiv 2602.15620" in output
    assert "JustRL-DeepSeek-1.5B" in (tmp_path / "out/result.md").read_text()


def test_every_printed_number_has_a_source_and_is_a_percentage() -> None:
    for line in PUBLISHED:
        assert "arXiv" in line.source
        assert line.scores or line.average is not None
        assert set(line.scores) <= set(DEFAULT_BENCHMARKS)
        for value in (*line.scores.values(), line.average or 0.0):
            assert 0 <= value <= 100
    justrl = next(line for line in PUBLISHED if line.model == "JustRL-DeepSeek-1.5B")
    assert justrl.scores == {
        **{"aime24": 52.60, "aime25": 38.75, "amc23": 91.02, "math500": 91.65, "minerva": 51.47},
        "olympiadbench": 67.99,
    }


def test_a_server_is_evaluated_through_its_address(tmp_path: Path) -> None:
    with serving(status(500)) as server:
        output = call(tmp_path, "--endpoint", server.url, "--model-name", "tiny", "--quiet", OPENAI_API_KEY="sk-hidden")
        assert server.keys[0] == "Bearer sk-hidden"
    assert "There is no entropy" in output
    assert "100.0 [" in output
    kept = "".join(path.read_text() for path in (tmp_path / "out").iterdir() if path.is_file())
    assert "sk-hidden" not in output + kept


def test_failures_are_noted_below_the_table(tmp_path: Path) -> None:
    with serving(otherwise=answer(lambda asked: ["0"] * asked["n"])) as server:
        server.script.append(status(400))
        output = call(tmp_path, "--endpoint", server.url, "--model-name", "tiny")
    assert "2 samples could not be generated; they are in no mean" in output
    assert "1 problems have no graded sample" in output
    assert "if all of those were wrong, avg@k would be 0.0 %" in output


def test_no_server_is_an_error_and_not_a_table_of_dashes(tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # a port that nobody listens on
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        output = call(tmp_path, "--endpoint", url, "--model-name", "X", "--retries", "0", code=2)
    assert f"no server answers at {url}" in output
    assert "avg@k" not in output


def test_an_evaluation_without_a_single_response_is_no_success(tmp_path: Path) -> None:
    with serving(otherwise=status(500)) as server:
        output = call(tmp_path, "--endpoint", server.url, "--model-name", "X", "--retries", "0", code=2)
    assert "nothing was evaluated" in output
    assert "12 samples could not be generated" in output


@pytest.mark.parametrize(
    ("words", "greedy"),
    [
        pytest.param(lambda asked: ["It is 5."] * asked["n"], True, id="greedy at temperature 1"),
        pytest.param(lambda asked: [f"It is {n}." for n in range(asked["n"])], False, id="sampled"),
    ],
)
def test_a_server_that_does_not_sample_is_noticed(tmp_path: Path, words: Any, greedy: bool) -> None:
    with serving(otherwise=answer(words)) as server:
        output = call(tmp_path, "--endpoint", server.url, "--model-name", "tiny")
    warning = "Warning: GSM8K: in 6 of 6 problems all samples are the same text, at temperature 1"
    assert (warning in output) == greedy
    assert ("avg@k, pass@k and maj@k are those of one greedy answer" in output) == greedy
    assert (warning in (tmp_path / "out/result.md").read_text()) == greedy
    assert result(tmp_path / "out")["metrics"]["gsm8k"]["problems_of_equal_samples"] == (6 if greedy else 0)


def test_greedy_decoding_that_was_asked_for_is_nothing_to_warn_of(tmp_path: Path) -> None:
    with serving(otherwise=answer()) as server:
        assert "same text" not in call(tmp_path, "--endpoint", server.url, "--model-name", "tiny", "--temperature", "0")


def test_a_server_that_refuses_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    with serving(otherwise=status(404, b'{"error": "no model \x1b[31mX"}')) as server:
        output = call(tmp_path, "--endpoint", server.url, "--model-name", "X", code=2)
    assert "returned status 404" in output
    assert "\x1b" not in output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "no model given"),
        (["--data", "/nowhere"], "no model given"),
        (["demo", "--benchmarks", "aime42"], "did you mean aime25 or aime24"),
        (["demo", "--preset", "trian"], "did you mean train"),
        (["demo", "--rule", "maths"], "no rule 'maths'"),
        (["demo", "--data", "/nowhere"], "is not a folder"),
        (["demo", "--benchmarks", "aime24"], "AIME24 is not in"),
        (["demo", "--samples", "0"], "--samples 0"),
        (["demo", "--device", "tpu"], "tpu"),
        (["demo", "--precision", "fp8"], "fp32 or bf16"),
        (["--endpoint", "localhost:80", "--model-name", "x"], "is not a URL"),
        (["--endpoint", "http://localhost:80/v1"], "no model given"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(words: list[str], expected: str, tmp_path: Path) -> None:
    assert expected in call(tmp_path, *words, code=2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_keeps_finished_samples_and_prints_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    append, seen = EvalFolder.append, []

    def interrupted(self: EvalFolder, batch: list[Generation]) -> None:
        append(self, batch)
        seen.append(batch)
        raise SignalInterrupt(number)

    monkeypatch.setattr(EvalFolder, "append", interrupted)
    output = call(tmp_path, "demo", "--batch", "4", code=128 + number)
    assert "the same command resumes it" in output
    monkeypatch.setattr(EvalFolder, "append", append)
    assert "4 of 12 samples are there already" in call(tmp_path, "demo", "--batch", "4")


def test_an_evaluation_of_several_benchmarks_has_their_mean(tmp_path: Path) -> None:
    ours = made(tmp_path, aime24=["correct", "wrong"], gsm8k=["correct", "correct", "wrong", "wrong", "wrong"])
    mean = report.as_json(ours)["average"]
    assert mean["mean"] == pytest.approx(0.45)
    assert mean["low"] < 0.45 < mean["high"]
    assert "mean of benchmarks" in [row[0] for row in report.tables(ours)[0].rows]
    assert report.as_json(made(tmp_path, aime24=["correct"]))["average"] is None


def test_a_mean_of_benchmarks_leaves_none_out(tmp_path: Path) -> None:
    ours = made(tmp_path, aime24=["correct", "wrong"], gsm8k=["failed", "failed"])
    assert report.as_json(ours)["average"] is None
    rows = {row[0]: row for row in report.tables(ours)[0].rows}
    assert rows["GSM8K (2)"][2] == "-", "nothing is known, and that is not zero"


def test_better_and_worse_need_an_interval_without_zero(tmp_path: Path) -> None:
    good, bad = ["correct"] * 20 + ["wrong"] * 4, ["wrong"] * 20 + ["correct"] * 4
    pairs = [(good, bad, "better"), (bad, good, "worse"), (good, good, "not significant")]
    for ours, theirs, verdict in pairs:
        page = report.tables(made(tmp_path, aime24=ours), made(tmp_path, aime24=theirs))[-1]
        assert page.rows[0][-1] == verdict


def test_a_models_name_can_do_nothing_to_the_table_or_the_page(tmp_path: Path) -> None:
    ours = made(tmp_path, aime24=["correct"])
    ours = replace(ours, settings=replace(ours.settings, model="[red]x[/red]|<script>\x1b[2J"))
    report.write(ours)
    text = (tmp_path / "result.md").read_text()
    assert "<script>" not in text
    assert "\x1b" not in text
    screen = io.StringIO()
    report.show(Console(file=screen, width=200), ours)
    assert "[red]x[/red]|<script>\\x1b[2J" in screen.getvalue()


def test_progress_counts_what_came_and_what_failed() -> None:
    lines: list[str] = []
    row = Generation("gsm8k", "q", 0, "", "", 0, tokens=50)
    with PlainProgress(lines.append, every=0.0).samples(10, 4) as advance:
        advance([row, row])
        advance([replace(row, failed="busy"), row, row, row])
    assert [line.split("  ")[0] for line in lines] == ["samples 6/10", "samples 10/10"]
    assert "1 failed" in lines[1]
    assert "tokens/s" in lines[1]
    assert SampleCounter(10, 0).status().startswith("0 tokens/s, - left")


def test_a_terminal_gets_a_bar() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    progress = LiveProgress(console)
    progress.message("a \x1b[31mword")
    with progress.samples(4, 1) as advance:
        advance([Generation("gsm8k", "q", 0, "", "", 0, tokens=50)] * 3)
    assert "4/4" in screen.getvalue()
    assert "\x1b[31mword" not in screen.getvalue()
    assert isinstance(make_progress(console, quiet=True), PlainProgress)


def test_plain_progress_writes_a_line_now_and_then() -> None:
    lines: list[str] = []
    with PlainProgress(lines.append, every=1000.0).samples(1000, 0) as advance:
        for _ in range(1000):
            advance([Generation("gsm8k", "q", 0, "", "", 0, tokens=1)])
    assert len(lines) == 1


def test_warnings_name_another_number_of_threads(tmp_path: Path) -> None:
    from trimtab.experiments.evaluate.run import evaluate

    wanted = small(tmp_path, problems=1)
    evaluate(wanted, RecordedProgress())
    path = tmp_path / "out/settings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "threads": 99}))
    log = RecordedProgress()
    evaluate(wanted, log)
    assert log.has_message("warning: begun with threads 99")


def test_models_graded_by_different_rules_are_noted(tmp_path: Path) -> None:
    ours, theirs = made(tmp_path, aime24=["correct"]), made(tmp_path, aime24=["correct"])
    theirs = replace(theirs, settings=replace(theirs.settings, rule="exact"))
    assert "The two were graded differently: exact -> number" in report.notes(ours, theirs)


def test_the_document_names_every_benchmark_option_and_command() -> None:
    page = (ROOT / "docs/evaluation.md").read_text()
    for benchmark in BENCHMARKS.values():
        assert benchmark.title in page
    shown = runner.invoke(app, ["eval", "--help"], env={"COLUMNS": "200"}).output
    options = set(re.findall(r"--[a-z][a-z-]+", page))
    known = set(re.findall(r"--[a-z][a-z-]+", shown)) | {
        "--port",
        "--served-model-name",
        "--enable-auto-tool-choice",
    }  # vLLM's
    assert options <= known, options - known
