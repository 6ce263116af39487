"""`trimtab doctor` and `--version`: one screen on any machine, whatever is missing or broken there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import trimtab
from helpers.agents.tokenizers_of_models import CHATML, llama, qwen, small_tokenizer
from trimtab.cli import app, doctor
from trimtab.engines import TESTED_VERSIONS
from trimtab.text import install_command
from trimtab.trainer.model import demo_tokenizer
from trimtab.trainer.sampling.vllm import TESTED_VERSIONS as VLLM_VERSIONS


def found() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine()}


def test_the_version_is_printed() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"trimtab {trimtab.__version__}\n")


def test_one_screen_says_what_there_is_and_how_to_get_the_rest() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 160
    assert lines[0].startswith(f"trimtab {trimtab.__version__}, torch {torch.__version__}")
    for name in (
        "device",
        "triton",
        "attention",
        "tokenizers",
        "grading",
        "sandbox",
        "vllm",
        "trl",
        "verl",
        "peft",
        "browser",
    ):
        assert any(line.startswith(f"{name} ") for line in lines), name


def test_what_is_missing_comes_with_its_purpose_and_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    gone = {"peft", "vllm", "trl", "triton", "playwright"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else real(name, *rest))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    findings = found()
    assert {findings[name].state for name in ("peft", "vllm", "trl", "triton", "browser", "device")} == {"no"}
    assert findings["peft"].found == "LoRA (model.lora_rank)"
    assert findings["peft"].advice == install_command(extra="lora")
    assert "rollout.engine" in findings["vllm"].found
    assert findings["vllm"].advice == install_command(extra="vllm")
    assert "no GPU" in findings["device"].found
    assert findings["attention"].state == findings["grading"].state == findings["tokenizers"].state == "yes"


@pytest.mark.parametrize(
    ("path", "advice"),
    [("/usr/bin/chromium", "-m pip install playwright"), (None, "Chromium from your system's packages")],
)
def test_how_to_get_a_browser_needs_no_checkout(monkeypatch: pytest.MonkeyPatch, path: str | None, advice: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert doctor._browser().advice.endswith(advice)


def test_a_gpu_is_named_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA X", total_memory=80 << 30, major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    finding = doctor._device()
    more = "and 1 more; a run uses one unless told otherwise (--gpus 2);"
    assert finding.found.startswith(f"NVIDIA X, 80 GiB, compute capability 7.5 {more}")
    assert "bf16 is slow" in finding.advice


def test_another_version_than_the_tested_one_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.31.0+cu130")
    assert doctor._package("vllm", "sampling", "vllm", "0.32.0").advice == "tested with 0.32.0"
    assert not doctor._package("vllm", "sampling", "vllm", "0.31.0").advice


def test_what_fails_is_broken_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("an illegal\ninstruction")

    monkeypatch.setattr(doctor, "causal_attention", fail)
    monkeypatch.setattr(doctor, "grade", lambda *_: SimpleNamespace(kind="crashed"))
    findings = found()
    assert findings["attention"] == doctor.Finding("attention", "broken", "RuntimeError: an illegal instruction")
    assert findings["grading"].found == "1/2 for 0.5 was graded crashed"


def test_the_tested_versions_are_those_of_the_adapters() -> None:
    tested = {name: version for name, _, _, version in doctor.PACKAGES}
    assert tested["vllm"] in VLLM_VERSIONS
    assert {name: tested[name] for name in TESTED_VERSIONS} == TESTED_VERSIONS


def tell(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return the lines that `trimtab doctor --model` shows of a tokenizer, by what they are about."""
    monkeypatch.setattr(doctor, "tokenizer_at_hand", lambda name: tokenizer)
    done = CliRunner().invoke(app, ["doctor", "--model", "some/model"])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stdout.splitlines()[1:] if line.strip()]
    heads = [(number, line) for number, line in enumerate(lines) if "  yes" in line or "  no" in line]
    told: dict[str, list[str]] = {}
    for number, line in heads:
        end = next((later for later, _ in heads if later > number), len(lines))
        name = line.partition("  ")[0].strip()
        told[name] = [line[len(name) :].split()[0], " ".join(" ".join(lines[number:end]).split())]
    return told


@pytest.mark.parametrize(
    ("make", "exact", "words"),
    [
        (lambda: qwen("qwen2_5"), {"plain chat": "yes", "system messages": "yes", "tools": "yes"}, "as hermes writes"),
        (
            lambda: qwen("qwen3"),
            {"plain chat": "yes", "system messages": "yes", "tools": "yes", "thinking": "no"},
            "a user's message after one with reasoning: the template writes earlier messages differently",
        ),
        (llama, {"plain chat": "yes", "system messages": "yes", "tools": "yes"}, "as llama writes"),
        (lambda: small_tokenizer(CHATML), {"plain chat": "yes", "system messages": "yes", "tools": "yes"}, "write"),
        (demo_tokenizer, {"chat template": "yes"}, "there is no chat template"),
    ],
)
def test_a_models_chat_template_is_examined(
    make: Callable[[], Any], exact: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tell(make(), monkeypatch)
    assert {name: state for name, (state, _) in told.items()} == exact
    assert words in " ".join(text for _, text in told.values())


def test_a_template_that_takes_nothing_but_a_question_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    one = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}" + CHATML
    told = tell(small_tokenizer(one), monkeypatch)
    assert {state for state, _ in told.values()} == {"no"}
    assert "does not write it behind a message of the model" in told["plain chat"][1]


def test_a_model_that_is_not_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "tokenizer_at_hand", lambda name: None)
    done = CliRunner().invoke(app, ["doctor", "--model", "some/model"])
    assert done.exit_code != 0 and "hf download some/model" in done.output
