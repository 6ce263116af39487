"""The folder of an evaluation: whole lines, one writer, settings that do not change, and grading done again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.evaluate.small_evals import RecordedProgress, small
from trimtab.data.benchmarks import BenchmarkProblem
from trimtab.data.problems import Problem, user
from trimtab.experiments.evaluate import EvalOptions, run
from trimtab.experiments.evaluate.folder import EvalFolder, Generation
from trimtab.experiments.evaluate.run import evaluate, grade_evaluation, read_verdicts, rejected_truths
from trimtab.experiments.evaluate.settings import (
    PRESETS,
    EvalSettings,
    check_rule,
    decoding,
    differences,
    parse_benchmarks,
    prepare,
    settings_from,
)
from trimtab.files import locked


def problem(number: int, answer: str = "2") -> BenchmarkProblem:
    return BenchmarkProblem(
        "gsm8k", f"q{number}", f"file, row {number}", Problem(user("1+1?"), answer, "number", "gsm8k")
    )


SETTINGS = EvalSettings(
    model="m",
    sampler="native",
    benchmarks=("gsm8k",),
    samples={"gsm8k": 2},
    temperature=1.0,
    top_p=1.0,
    max_new_tokens=8,
    suffix="",
    seed=0,
    rule="number",
)


def opened(path: Path, settings: EvalSettings = SETTINGS) -> EvalFolder:
    folder = EvalFolder(path)
    folder.open(settings, [problem(0), problem(1)])
    return folder


def generation(problem: str, sample: int, text: str = "2", **fields: Any) -> Generation:
    return Generation("gsm8k", problem, sample, "hash", SETTINGS.digest(), 0, text, **fields)


def test_what_was_added_is_read(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    made = [generation("q0", 0, "\ud800\n\x00"), generation("q0", 1, failed="status 500")]
    folder.append(made)
    folder.append([generation("q1", 0)])
    assert folder.read() == [*made, generation("q1", 0)]
    assert folder.settings() == SETTINGS
    assert [(q.id, q.location, q.problem.answer) for q in folder.problems()] == [
        ("q0", "file, row 0", "2"),
        ("q1", "file, row 1", "2"),
    ]


@pytest.mark.parametrize("kept", [0, 1, 50, -1])
def test_a_last_line_that_was_cut_off_is_taken_away(kept: int, tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append([generation("q0", 0)])
    whole = folder.generations.read_bytes()
    folder.generations.write_bytes(whole + whole[:kept])
    assert folder.read() == [generation("q0", 0)]
    assert folder.generations.read_bytes() == whole
    folder.append([generation("q0", 1)])
    assert len(folder.read()) == 2


def test_a_long_line_that_was_cut_off_is_taken_away_too(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append([generation("q0", 0)])
    with folder.generations.open("ab") as file:
        file.write(b'{"text": "' + b"x" * 300_000)
    assert len(folder.read()) == 1
    folder.generations.write_bytes(b"y" * 200_000)
    assert folder.read() == []
    assert folder.generations.read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "row 2: not JSON"),
        ("[1]", "row 2: must be a JSON object"),
        ('{"benchmark": "gsm8k"}', "row 2: not a generation"),
        ('{"surprise": 1}', "row 2: not a generation"),
        ("[" * 50_000, "row 2: not JSON"),
    ],
)
def test_a_damaged_line_is_named_and_never_skipped(line: str, words: str, tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append([generation("q0", 0)])
    with folder.generations.open("a") as file:
        file.write(line + "\n")
    folder.append([generation("q0", 1)])
    with pytest.raises(ValueError, match=words):
        folder.read()


def test_a_sample_that_is_there_twice_is_named(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append([generation("q0", 0)])
    folder.append([generation("q0", 0)])
    with pytest.raises(ValueError, match="row 2: sample 0 of q0 is there twice"):
        folder.read()


def test_a_generation_of_other_settings_is_named(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append([replace(generation("q0", 0), settings="0123")])
    with pytest.raises(ValueError, match="row 1: a generation of other settings"):
        folder.read()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"temperature": 0.7}, "temperature: 1.0 -> 0.7"),
        ({"samples": {"gsm8k": 4}}, "samples: {'gsm8k': 2} -> {'gsm8k': 4}"),
        ({"model": "other"}, "model: 'm' -> 'other'"),
        ({"suffix": "Think."}, "suffix: '' -> 'Think.'"),
        ({"seed": 3}, "seed: 0 -> 3"),
        ({"max_new_tokens": 9}, "max_new_tokens: 8 -> 9"),
        ({"data": {"gsm8k": "abc"}}, "data: None -> {'gsm8k': 'abc'}"),
        ({"problems": 5}, "problems: None -> 5"),
    ],
)
def test_a_folder_of_other_settings_is_refused_with_what_differs(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    opened(tmp_path).append([generation("q0", 0)])
    with pytest.raises(ValueError, match="was made with other settings; choose another --out") as error:
        opened(tmp_path, replace(SETTINGS, **changes))
    assert str(error.value).splitlines()[1:] == [f"  {line}"]
    assert EvalFolder(tmp_path).settings() == SETTINGS, "nothing was changed"


@pytest.mark.parametrize("changes", [{"device": "cuda"}, {"threads": 8}, {"rule": "math"}, {"endpoint": "http://b/v1"}])
def test_what_shapes_no_response_may_differ(changes: dict[str, Any], tmp_path: Path) -> None:
    opened(tmp_path).append([generation("q0", 0)])
    changed = replace(SETTINGS, **changes)
    assert len(opened(tmp_path, changed).read()) == 1
    assert EvalFolder(tmp_path).settings() == changed


def test_an_evaluation_without_a_sample_may_be_started_anew(tmp_path: Path) -> None:
    opened(tmp_path)
    opened(tmp_path, replace(SETTINGS, max_new_tokens=4))
    assert EvalFolder(tmp_path).settings().max_new_tokens == 4


def test_only_one_process_writes_at_a_time(tmp_path: Path) -> None:
    options = small(tmp_path)
    with locked(options.folder.path), pytest.raises(ValueError, match="is in use by another process"):
        evaluate(options, RecordedProgress())
    assert evaluate(options, RecordedProgress()).metrics


def test_a_folder_that_is_no_evaluation_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not an evaluation: there is no settings\.json"):
        EvalFolder(tmp_path).settings()
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"settings\.json cannot be read"):
        EvalFolder(tmp_path).settings()
    (tmp_path / "settings.json").write_text('{"benchmarks": [], "colour": 1}')
    with pytest.raises(ValueError, match="unknown colour"):
        EvalFolder(tmp_path).settings()


def test_settings_survive_being_stored() -> None:
    stored = json.loads(json.dumps(SETTINGS.as_json()))
    assert settings_from(stored) == SETTINGS
    assert settings_from(stored).digest() == SETTINGS.digest()
    assert differences(SETTINGS, replace(SETTINGS, rule="math", device="x")) == []


def test_the_presets_are_the_published_decodings() -> None:
    assert {name: (preset.temperature, preset.top_p) for name, preset in PRESETS.items()} == {
        "train": (1.0, 1.0),
        "justrl": (0.7, 0.9),
    }
    assert decoding("justrl", None, None) == (0.7, 0.9)
    assert decoding("justrl", 0.0, 1.0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("preset", "temperature", "top_p", "words"),
    [
        ("jusrl", None, None, "unknown preset 'jusrl': did you mean justrl"),
        ("train", -0.1, None, "--temperature -0.1"),
        ("train", 11.0, None, "--temperature 11"),
        ("train", None, 0.0, "--top-p 0"),
        ("train", None, 1.5, "--top-p 1.5"),
        ("train", float("nan"), None, "--temperature nan"),
    ],
)
def test_a_decoding_that_cannot_be_is_refused(
    preset: str, temperature: float | None, top_p: float | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        decoding(preset, temperature, top_p)


def test_benchmarks_go_by_name_with_the_nearest_offered() -> None:
    assert parse_benchmarks("AIME24, math500,aime24,") == ("aime24", "math500")
    with pytest.raises(ValueError, match="unknown benchmark 'aime42': did you mean aime25 or aime24"):
        parse_benchmarks("aime42")
    with pytest.raises(ValueError, match="unknown benchmark 'xyz': there are aime24, "):
        parse_benchmarks("xyz")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 0}, "--samples 0: it must be at least 1"),
        ({"problems": 0}, "--problems 0: it must be at least 1"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0: it must be at least 1"),
        ({"batch": 0}, "--batch 0: it must be at least 1"),
        ({"rule": "guess"}, "no rule 'guess'"),
        ({"model": None}, "no model given"),
        ({"benchmarks": "gsm9k"}, "did you mean gsm8k"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_loaded(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        prepare(small(tmp_path, **changes))
    assert not (tmp_path / "out").exists()


def test_the_defaults_are_the_papers(tmp_path: Path) -> None:
    settings, problems = prepare(replace(small(tmp_path), samples=None, max_new_tokens=EvalOptions.max_new_tokens))
    assert settings.max_new_tokens == 20_480
    assert settings.samples == {"gsm8k": 4}
    assert (settings.temperature, settings.top_p) == (1.0, 1.0)
    assert EvalOptions().prompt_suffix == "\nPlease reason step by step, and put your final answer within \\boxed{}"
    assert len(problems) == 6


def test_the_settings_are_shown_before_anything_starts(tmp_path: Path) -> None:
    log = RecordedProgress()
    evaluate(small(tmp_path, problems=2, preset="justrl"), log)
    shown = log.lines[0]
    for part in (
        "demo",
        "GSM8K x3, first 2 problems",
        "temperature 0.7, top-p 0.9 (justrl)",
        "at most 6 tokens",
        "number",
    ):
        assert part in shown


def test_the_folder_is_named_by_model_and_preset() -> None:
    assert EvalOptions(model="Qwen/Qwen3-1.7B").folder.path == Path("runs/eval-Qwen-Qwen3-1.7B-train")
    assert EvalOptions(model="../../etc/passwd", preset="justrl").folder.path == Path("runs/eval-etc-passwd-justrl")


def test_other_benchmarks_have_another_folder() -> None:
    def name(benchmarks: str) -> str:
        return EvalOptions(model="demo", benchmarks=benchmarks).folder.path.name

    assert name("gsm8k") == "eval-demo-train-gsm8k"
    assert name(" GSM8K, ../my sums.jsonl") == "eval-demo-train-gsm8k+my-sums"
    assert name(",".join(f"{n}.jsonl" for n in range(1000))).startswith("eval-demo-train-0+1+2+")
    assert len(name(",".join(f"{n}.jsonl" for n in range(1000)))) < 120


def test_changed_data_is_not_mixed_with_stored_samples(tmp_path: Path) -> None:
    wanted = small(tmp_path)
    evaluate(wanted, RecordedProgress())
    path = tmp_path / "data/gsm8k_test.jsonl"
    path.write_text(path.read_text().replace("#### 8", "#### 9"))
    with pytest.raises(ValueError, match="They differ in:\n  data: "):
        evaluate(replace(wanted), RecordedProgress())


def test_responses_are_graded_again_without_sampling(tmp_path: Path) -> None:
    wanted = small(tmp_path)
    first = evaluate(wanted, RecordedProgress())
    before = wanted.folder.generations.read_bytes()
    again = grade_evaluation(wanted.folder, "exact")
    assert again.settings.rule == "exact"
    assert wanted.folder.generations.read_bytes() == before
    assert {json.loads(line)["rule"] for line in wanted.folder.verdicts.read_text().splitlines()} == {"exact"}
    assert grade_evaluation(wanted.folder, "number").metrics == first.metrics
    assert grade_evaluation(wanted.folder).metrics == first.metrics, "verdicts that are there are read"


def test_grading_in_batches_gives_the_same_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds one batch of texts at a time, not all that was sampled."""
    wanted = small(tmp_path)
    evaluate(wanted, RecordedProgress())

    def stored() -> list[dict[str, Any]]:
        return [json.loads(line) | {"seconds": 0} for line in wanted.folder.verdicts.read_text().splitlines()]

    whole, sizes, set_verdicts = stored(), [], run.set_verdicts

    def counted(samples: Any) -> None:
        sizes.append(len(samples))
        set_verdicts(samples)

    monkeypatch.setattr(run, "set_verdicts", counted)
    monkeypatch.setattr(run, "CHARACTERS_AT_A_TIME", 20)
    grade_evaluation(wanted.folder, "number")
    assert stored() == whole
    assert sum(sizes) == 18
    assert len(sizes) > 2


def test_verdicts_are_kept_with_what_was_found(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append([generation("q0", 0, "It is 2."), generation("q0", 1, "It is 3."), generation("q1", 0, "Hm.")])
    folder.append([generation("q1", 1, "", failed="status 500")])
    done = grade_evaluation(folder, "number")
    verdicts, rule = read_verdicts(folder)
    assert rule == "number"
    kinds = {key: (verdict.kind, verdict.extracted) for key, verdict in verdicts.items()}
    assert kinds == {
        ("gsm8k", "q0", 0): ("correct", "2"),
        ("gsm8k", "q0", 1): ("wrong", "3"),
        ("gsm8k", "q1", 0): ("no_answer", None),
    }
    assert done.metrics["gsm8k"].kinds == {"correct": 1, "no_answer": 1, "wrong": 1}
    assert done.metrics["gsm8k"].failed_samples == 1


def test_verdicts_that_are_not_whole_are_made_again_by_their_own_rule(tmp_path: Path) -> None:
    """A process may die between sampling and grading: what has no verdict yet did not fail."""
    folder = opened(tmp_path)
    folder.append([generation("q0", 0)])
    grade_evaluation(folder, "exact")
    folder.append([generation("q0", 1, "two")])
    done = grade_evaluation(folder)
    assert done.settings.rule == "exact"
    assert done.metrics["gsm8k"].kinds == {"correct": 1, "wrong": 1}
    assert done.metrics["gsm8k"].failed_samples == 0


def test_out_of_memory_is_an_error_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("trimtab.trainer.sampling.NativeSampler.sample", full)
    with pytest.raises(ValueError, match="out of memory: use a --batch smaller than 6"):
        evaluate(small(tmp_path), RecordedProgress())


def test_a_damaged_verdict_is_named(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append([generation("q0", 0)])
    grade_evaluation(folder, "number")
    folder.verdicts.write_text('{"benchmark": "gsm8k"}\n')
    with pytest.raises(ValueError, match=r"verdicts\.jsonl, row 1: not a verdict"):
        grade_evaluation(folder)


def test_an_answer_that_its_own_rule_does_not_accept_is_named(tmp_path: Path) -> None:
    folder = EvalFolder(tmp_path)
    odd = replace(problem(1), problem=replace(problem(1).problem, answer="2 \\boxed{}"))
    folder.open(replace(SETTINGS, rule="boxed"), [problem(0), odd])
    folder.append([replace(generation("q0", 0), settings=replace(SETTINGS, rule="boxed").digest())])
    assert rejected_truths([problem(0), odd], "boxed") == [odd]
    log = RecordedProgress()
    done = grade_evaluation(folder, "boxed", log.message)
    assert log.has_message("warning: file, row 1", "rejects the answer itself")
    assert done.rejected_truths == ["file, row 1"]


def test_a_rule_that_does_not_exist_is_refused_with_those_that_do() -> None:
    check_rule("number")
    with pytest.raises(ValueError, match=r"no rule 'maths'.*number"):
        check_rule("maths")


ABSURD: list[Any] = [None, -1, 10**30, 10**400, float("nan"), "x", "\x1b[2J", [], {}, {"a": 1}, [[1]], True]


def grading_error(folder: EvalFolder, rule: str | None) -> str:
    try:
        grade_evaluation(folder, rule)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("file", ["settings.json", "problems.jsonl", "generations.jsonl", "verdicts.jsonl"])
def test_a_stored_value_of_any_kind_is_graded_again_or_answered_in_words(tmp_path: Path, file: str) -> None:
    whole = opened(tmp_path)
    whole.append([generation("q0", 0), generation("q0", 1, "3"), generation("q1", 0)])
    grade_evaluation(whole, "number")
    path = tmp_path / file
    text = path.read_text()
    first, *others = [text] if file == "settings.json" else text.splitlines(keepends=True)
    for key in json.loads(first):
        for value in ABSURD:
            for rule in ("number", None):
                path.write_text("".join([json.dumps({**json.loads(first), key: value}) + "\n", *others]))
                error = grading_error(whole, rule)
                assert not error or (str(tmp_path) in error and len(error) < 1_000), (key, value, error)
        path.write_text(text)
