"""Evaluating an agent, on a model in this process and on a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.evaluate.small_evals import RecordedProgress, Reply, answer, completion, served, serving, small, status
from helpers.train.short_runs import trained
from trimtab.experiments.evaluate import EvalOptions
from trimtab.experiments.evaluate.endpoint import EndpointError
from trimtab.experiments.evaluate.run import EvalResult, evaluate

AGENTS = "python:helpers.train.own_agents:"
AGENT = {"agent": f"{AGENTS}graded", "concurrency": 2, "samples": 2}
KEY = "sk-secret-4242"


def run(folder: Path, *script: Reply, otherwise: Reply | None = None, **changes: Any) -> tuple[EvalResult, Any]:
    """An evaluation on a server that begins with a script, and the server."""
    with serving(*script, otherwise=otherwise) as server:
        return evaluate(served(folder, server, retries=0, **{**AGENT, **changes}), RecordedProgress()), server


def test_an_agent_is_evaluated_on_a_model_and_a_resumed_evaluation_adds_nothing(tmp_path: Path) -> None:
    wanted = small(tmp_path, **AGENT)
    done = evaluate(wanted, RecordedProgress())
    found = done.metrics["gsm8k"]
    assert (found.problems, found.samples, found.failed_samples) == (6, 2, 0)
    kept = done.folder.read()
    assert all(each.tokens and each.logp is not None and each.conversation is not None for each in kept)
    again = evaluate(wanted, RecordedProgress())
    assert again.new_samples == 0 and again.folder.read() == kept
    assert done.settings.agent == f"{AGENTS}graded" and not done.tools


def test_rewards_of_an_agent_are_scores_and_its_errors_no_answers(tmp_path: Path) -> None:
    scored = evaluate(small(tmp_path / "one", **{**AGENT, "agent": f"{AGENTS}each"}), RecordedProgress())
    assert all(1 / 3 <= each.conversation["reward"] <= 2 / 3 for each in scored.folder.read() if each.conversation)
    failed = evaluate(small(tmp_path / "two", **{**AGENT, "agent": f"{AGENTS}broken"}), RecordedProgress())
    assert failed.metrics["gsm8k"].failed_samples == 12
    assert all("no such thing as [key]" in str(each.failed) for each in failed.folder.read())


def test_an_agent_is_evaluated_on_a_server_under_its_name_and_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    done, server = run(tmp_path, temperature=0.5, top_p=0.9, max_new_tokens=33)
    found = done.metrics["gsm8k"]
    assert found.average is not None and found.average.mean == 1.0 and found.failed_samples == 0
    assert len(server.requests) == 12 and set(server.keys) == {f"Bearer {KEY}"}
    for request in server.requests:
        told = {name: request[name] for name in ("model", "temperature", "top_p", "max_tokens")}
        assert told == {"model": "tiny", "temperature": 0.5, "top_p": 0.9, "max_tokens": 33}
    assert len({request["seed"] for request in server.requests}) == 12
    assert all(each.tokens == 7 for each in done.folder.read())
    assert all(KEY not in path.read_text() for path in done.folder.path.iterdir() if path.is_file())


def test_what_a_server_refuses_an_agent_is_told_and_the_sample_has_failed(tmp_path: Path) -> None:
    done, server = run(tmp_path, status(400, b'{"error": "too long"}'))
    assert done.metrics["gsm8k"].failed_samples == 1
    (failed,) = [each for each in done.folder.read() if each.failed]
    assert "BadRequestError" in str(failed.failed) and "too long" in str(failed.failed)
    assert len(server.requests) == 12


def test_a_server_that_refuses_everything_ends_the_evaluation(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="status 401"):
        run(tmp_path, otherwise=status(401))


def test_garbage_of_a_server_is_a_failed_sample(tmp_path: Path) -> None:
    done, _ = run(tmp_path, otherwise=answer(lambda request: []), problems=1)
    assert done.metrics["gsm8k"].failed_samples == 2
    assert completion([])["choices"] == []


def test_a_runs_agent_is_code_of_its_own(tmp_path: Path) -> None:
    changes = {
        "agent.run": f"{AGENTS}twice", "agent.concurrency": "2", "rollout.max_prompt_tokens": "24",
        "rollout.max_new_tokens": "6", "reward.overlong_buffer": "0", "run.steps": "1", "run.eval_every": "0",
    }  # fmt: skip
    trained(tmp_path / "run", changes)
    options = EvalOptions(str(tmp_path / "run"), device="cpu", out=tmp_path / "out", problems=2, concurrency=2)
    with pytest.raises(ValueError, match=r"was trained through an agent .*own_agents:twice.*add --own-code"):
        evaluate(options, RecordedProgress())
    done = evaluate(
        EvalOptions(
            str(tmp_path / "run"), device="cpu", out=tmp_path / "out", problems=2, concurrency=2, own_code=True
        ),
        RecordedProgress(),
    )
    assert done.settings.agent.endswith("twice") and done.new_samples == 2


def test_options_that_exclude_each_other(tmp_path: Path) -> None:
    for changes, words in (
        ({"agent": " "}, "names neither"),
        ({"agent": f"{AGENTS}graded", "tools": "calculator"}, "calls its tools itself"),
        ({"agent": "python:no_such_module:solve"}, "there is no module"),
    ):
        with pytest.raises(ValueError, match=words):
            evaluate(small(tmp_path, **changes), RecordedProgress())
