"""Evaluating a model in this process: resumed is the same as unbroken, to the letter."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.evaluate.small_evals import SUMS, RecordedProgress, small
from helpers.thorough import slow_but
from helpers.train.short_runs import trained
from trimtab.data import Sampler
from trimtab.experiments.evaluate import EvalOptions, native
from trimtab.experiments.evaluate import run as runs
from trimtab.experiments.evaluate import settings as eval_settings
from trimtab.experiments.evaluate.folder import EvalFolder
from trimtab.experiments.evaluate.native import NativeGenerator, open_model
from trimtab.experiments.evaluate.run import EvalResult, evaluate, open_generator
from trimtab.experiments.evaluate.settings import prepare
from trimtab.trainer.config import RolloutConfig, model_digest
from trimtab.trainer.model import Policy, Transcript, score
from trimtab.trainer.train import build_sampler
from trimtab.trainer.train.run_folder import RunFolder


def lines(folder: EvalFolder) -> list[str]:
    """What was kept, in an order of its own."""
    return sorted(folder.generations.read_text().splitlines())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> EvalResult:
    return evaluate(small(tmp_path_factory.mktemp("unbroken")), RecordedProgress())


def generator_of(wanted: EvalOptions) -> NativeGenerator:
    settings, problems = prepare(wanted)
    source = open_generator(wanted, settings, problems)
    assert isinstance(source, NativeGenerator)
    return source


def test_every_sample_of_every_problem_is_generated_once(unbroken: EvalResult) -> None:
    kept = unbroken.folder.read()
    assert sorted(generation.key for generation in kept) == sorted(
        ("gsm8k", f"gsm8k-{problem}", sample) for problem in range(len(SUMS)) for sample in range(3)
    )
    assert unbroken.new_samples == 18
    found = unbroken.metrics["gsm8k"]
    assert (found.problems, found.samples, found.failed_samples, found.grader_failures) == (6, 3, 0, 0)
    assert len({generation.text for generation in kept}) > 5, "samples differ"


def test_a_stored_generation_has_every_field(unbroken: EvalResult) -> None:
    row = json.loads(unbroken.folder.generations.read_text().splitlines()[0])
    assert set(row) == {
        *("benchmark", "problem", "sample", "prompt_hash", "settings", "seed", "text", "tokens", "finished"),
        *("logp", "entropy", "failed"),
    }
    assert row["settings"] == unbroken.settings.digest()
    assert row["tokens"] >= 1
    assert row["logp"] < 0 < row["entropy"]
    problems = [json.loads(line) for line in (unbroken.folder.path / "problems.jsonl").read_text().splitlines()]
    assert row["prompt_hash"] in {problem["prompt_hash"] for problem in problems}


def test_the_entropy_is_the_models_own_over_the_response(tmp_path: Path) -> None:
    wanted = small(tmp_path, temperature=0.7)
    evaluate(wanted, RecordedProgress())
    policy = open_model("demo", "cpu", "fp32", True)
    for generation in wanted.folder.read()[:4]:
        if not generation.finished:
            continue
        problem = next(q for q in wanted.folder.problems() if q.id == generation.problem)
        response = [*policy.tokenizer.encode(generation.text, add_special_tokens=False), policy.tokenizer.eos_token_id]
        if len(response) != generation.tokens:
            continue  # it drew a token that has no text
        measured = score(policy, [Transcript(policy.encode(problem.problem.prompt), response)], 0.7, 1000, 100)
        assert generation.entropy == pytest.approx(float(measured.entropy.mean()), rel=1e-4)
        assert generation.logp == pytest.approx(float(measured.logp.mean()), rel=1e-4)


def test_without_entropy_nothing_is_scored_again(tmp_path: Path, unbroken: EvalResult) -> None:
    done = evaluate(small(tmp_path, entropy=False), RecordedProgress())
    assert done.metrics["gsm8k"].entropy is None
    assert done.metrics["gsm8k"].surprisal is not None
    assert [g.text for g in done.folder.read()] == [g.text for g in unbroken.folder.read()]


def test_the_same_command_again_generates_nothing(unbroken: EvalResult, tmp_path: Path) -> None:
    log = RecordedProgress()
    wanted = small(tmp_path)
    first = evaluate(wanted, RecordedProgress())
    again = evaluate(wanted, log)
    assert log.has_message("all samples are there already")
    assert (again.new_samples, log.batches) == (0, [])
    assert again.metrics == first.metrics == unbroken.metrics


@pytest.mark.parametrize("cut", [1, 100, 1000, 2500, 4000])
def test_an_evaluation_that_was_cut_anywhere_ends_as_the_unbroken_one(
    cut: int, unbroken: EvalResult, tmp_path: Path
) -> None:
    wanted = small(tmp_path)
    evaluate(wanted, RecordedProgress())
    whole = wanted.folder.generations.read_bytes()
    assert cut < len(whole)
    wanted.folder.generations.write_bytes(whole[:cut])
    log = RecordedProgress()
    resumed = evaluate(wanted, log)
    assert lines(wanted.folder) == lines(unbroken.folder)
    assert resumed.metrics == unbroken.metrics
    assert 0 < resumed.new_samples <= 18


def test_a_batch_that_lost_a_line_is_generated_again(unbroken: EvalResult, tmp_path: Path) -> None:
    """A sample generated alone could differ from the one in its batch, by rounding."""
    wanted = small(tmp_path)
    evaluate(wanted, RecordedProgress())
    kept = wanted.folder.generations.read_text().splitlines(keepends=True)
    wanted.folder.generations.write_text("".join(kept[:7] + kept[8:]))
    log = RecordedProgress()
    evaluate(wanted, log)
    assert [len(batch) for batch in log.batches] == [6]
    assert log.has_message("12 of 18 samples are there already")
    assert lines(wanted.folder) == lines(unbroken.folder)


MOMENTS = [
    "line.torn:2",
    "generations.written:1",
    "line.torn:1",
    "line.torn:3",
    "generations.written:3",
    "file.written:1",
    "file.written:3",
]


@pytest.mark.parametrize("moment", slow_but(MOMENTS[:1], MOMENTS))
def test_after_kill_9_no_sample_is_lost_or_repeated(moment: str, unbroken: EvalResult, tmp_path: Path) -> None:
    wanted = small(tmp_path)
    command = [
        *(sys.executable, "-m", "trimtab", "eval", "demo", "--benchmarks", "gsm8k", "--data", tmp_path / "data"),
        *("--samples", "3", "--max-new-tokens", "6", "--suffix", "", "--rule", "number", "--batch", "6"),
        *("--device", "cpu", "--out", tmp_path / "out", "--quiet"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRIMTAB_FAILPOINT": moment}
    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    log = RecordedProgress()
    resumed = evaluate(wanted, log)
    assert not log.has_message("warning")
    assert lines(wanted.folder) == lines(unbroken.folder)
    assert resumed.metrics == unbroken.metrics


def test_another_seed_gives_other_samples(unbroken: EvalResult, tmp_path: Path) -> None:
    other = evaluate(small(tmp_path, seed=1), RecordedProgress())
    assert [g.text for g in other.folder.read()] != [g.text for g in unbroken.folder.read()]


def test_the_samples_of_a_problem_do_not_depend_on_other_problems(unbroken: EvalResult, tmp_path: Path) -> None:
    few = evaluate(small(tmp_path, problems=2, batch=3), RecordedProgress())
    texts = {generation.key: generation.text for generation in unbroken.folder.read()}
    assert [g.text for g in few.folder.read()] == [texts[g.key] for g in few.folder.read()]


def test_batches_hold_one_benchmark_and_prompts_of_like_length(tmp_path: Path) -> None:
    wanted = small(tmp_path)
    _, problems = prepare(wanted)
    source = generator_of(wanted)
    batches = source.batches(problems)
    lengths = [len(source.policy.encode(item.problem.prompt)) for batch in batches for item in batch]
    assert [len(batch) for batch in batches] == [2, 2, 2], "six responses at a time are two problems of three samples"
    assert lengths == sorted(lengths, reverse=True)
    assert [len(batch) for batch in generator_of(small(tmp_path, batch=1)).batches(problems)] == [1] * 6


def test_greedy_decoding_gives_every_sample_the_same_text(tmp_path: Path) -> None:
    done = evaluate(small(tmp_path, temperature=0.0), RecordedProgress())
    texts: dict[str, set[str]] = {}
    for generation in done.folder.read():
        texts.setdefault(generation.problem, set()).add(generation.text)
    assert all(len(found) == 1 for found in texts.values())


def test_a_response_longer_than_the_models_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"context is 64 tokens .* use --max-new-tokens 58 or less"):
        evaluate(small(tmp_path, max_new_tokens=59), RecordedProgress())
    evaluate(small(tmp_path, problems=1, samples=1, max_new_tokens=58), RecordedProgress())


def test_a_prompt_longer_than_the_models_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the longest prompt alone has"):
        evaluate(small(tmp_path, suffix="1" * 80), RecordedProgress())


def test_a_run_of_trimtabs_is_evaluated_by_its_folder_or_a_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    first, last = sorted(run.checkpoints.glob("step-*"))[0], sorted(run.checkpoints.glob("step-*"))[-1]
    finished, at_first, at_last = (open_model(str(path), "cpu", "fp32", True) for path in (run.path, first, last))
    weights = [dict(policy.model.named_parameters()) for policy in (finished, at_first, at_last)]
    assert all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0]), "it has learned something"
    assert len({model_digest(str(path)) for path in (run.path, first, last)}) == 3
    done = evaluate(small(tmp_path, model=str(run.path), problems=2), RecordedProgress())
    assert done.new_samples == 6


def test_a_run_that_has_nothing_yet_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ValueError, match="neither a finished model nor a checkpoint"):
        open_model(str(tmp_path), "cpu", "fp32", True)


def test_other_weights_in_the_same_place_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    policy = open_model("demo", "cpu", "fp32", True)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    evaluate(small(tmp_path, model=str(folder), problems=1), RecordedProgress())
    with torch.no_grad():
        policy.model.get_output_embeddings().weight += 1
    policy.model.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"other settings.*\n  weights: "):
        evaluate(small(tmp_path, model=str(folder), problems=1), RecordedProgress())


@pytest.mark.parametrize("layer", ["mlp.down_proj", "mlp.gate_proj"])
def test_other_weights_in_the_middle_of_a_file_are_noticed(layer: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    policy = open_model("demo", "cpu", "fp32", True)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    before, size = model_digest(str(folder)), (folder / "model.safetensors").stat().st_size
    assert size > 4 * (1 << 16), "the change is far from both ends of the file"
    with torch.no_grad():
        policy.model.get_submodule(f"model.layers.0.{layer}").weight += 1
    policy.model.save_pretrained(folder)
    assert (folder / "model.safetensors").stat().st_size == size
    assert model_digest(str(folder)) != before


def test_vllm_samples_with_room_for_the_longest_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the native sampler in vLLM's place: what it is built with, and what is stored."""
    asked: list[RolloutConfig] = []

    def build(policy: Policy, rollout: RolloutConfig | None = None) -> Sampler:
        asked.extend([rollout] if rollout else [])
        return build_sampler(policy)

    monkeypatch.setattr(native, "build_sampler", build)
    monkeypatch.setattr(eval_settings, "require_vllm", lambda purpose: None)
    log = RecordedProgress()
    done = evaluate(small(tmp_path, engine="vllm"), log)
    assert [rollout.engine for rollout in asked] == ["vllm"]
    assert (asked[0].max_prompt_tokens, asked[0].max_new_tokens, asked[0].batch_size) == (len("120+3="), 6, 6)
    assert done.settings.sampler == "vllm" and log.has_message("sampled with vLLM")
    assert all(generation.entropy is not None for generation in done.folder.read())
    with pytest.raises(ValueError, match="sampler: 'vllm' -> 'native'"):
        evaluate(small(tmp_path), RecordedProgress())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "sglang"}, "--engine sglang: it must be native or vllm"),
        ({"engine": "vllm", "endpoint": "http://host/v1", "model_name": "x"}, "leave it out with --endpoint"),
    ],
)
def test_an_engine_that_cannot_be_used_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        evaluate(small(tmp_path, **changes), RecordedProgress())
    assert not (tmp_path / "out").exists()


def test_without_vllm_the_error_names_the_option_and_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: (name != "vllm" and found(name, *rest)) or None
    )
    with pytest.raises(ValueError, match="--engine vllm needs the package vllm=="):
        evaluate(small(tmp_path, engine="vllm"), RecordedProgress())


@pytest.mark.parametrize("precision", ["fp16", "int8", ""])
def test_a_precision_that_does_not_exist_is_refused(precision: str) -> None:
    with pytest.raises(ValueError, match="it must be fp32 or bf16"):
        open_model("demo", "cpu", precision, True)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such folder"):
        evaluate(small(tmp_path, model=str(tmp_path / "nowhere")), RecordedProgress())


def test_a_model_whose_logits_are_nan_is_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runs.open_model

    def broken(*args: Any, **options: Any) -> Policy:
        policy = whole(*args, **options)
        with torch.no_grad():
            policy.backbone.norm.weight.fill_(math.nan)
        return policy

    monkeypatch.setattr(runs, "open_model", broken)
    with pytest.raises(ValueError, match=r"the model's logits are NaN for .*use another checkpoint"):
        evaluate(small(tmp_path, problems=1, samples=1), RecordedProgress())
