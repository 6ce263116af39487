"""Runs whose responses are what an agent of the user's own asks for, over HTTP, with the openai package."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.parallel.thread_ranks import train_ranks, use_sgd
from helpers.train import own_agents
from helpers.train.short_runs import RunProcess, contents, differences, recipe, run_in_child, short_run, trained
from trimtab.agents import (
    AgentPool,
    AgentRun,
    AgentWorker,
    Branch,
    Message,
    RolloutStats,
    SealedRollout,
)
from trimtab.agents.agent_pool import Access
from trimtab.data import Problem, Response, Sample, user
from trimtab.insight.replay import replay
from trimtab.record import open_run
from trimtab.trainer.train import RunStoppedError
from trimtab.trainer.train.agents import samples_of
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.rollouts import sampled_by_others

SECONDS = 60.0  # that a test waits for a process before it fails
AGENT = "python:helpers.train.own_agents:"
SHORT: dict[str, str] = {
    "reward.overlong_buffer": "0",
    "rollout.max_prompt_tokens": "24",
    "rollout.max_new_tokens": "6",
    "agent.concurrency": "4",
    "run.steps": "2",
    "run.checkpoint_every": "1",
    "run.eval_every": "2",
    "run.report": "false",
}
MISBEHAVING: dict[str, str | None] = {
    **SHORT,
    "task.name": f"{AGENT}kinds",
    "task.size": None,
    "task.digits": None,
    "agent.run": f"{AGENT}mixed",
    "agent.timeout": "1.0",
    "rollout.prompts": str(own_agents.KINDS),
    "rollout.samples": "2",
    "update.per_step": "1",
    "warm_start.steps": "0",
    "run.eval_every": "0",
    "run.steps": "1",
}


def settings(agent: str, **changes: str) -> dict[str, str]:
    return SHORT | {"agent.run": AGENT + agent} | {key.replace("__", "."): value for key, value in changes.items()}


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    found = Notes(tmp_path / "notes")
    monkeypatch.setenv(own_agents.NOTES, str(found.path))
    yield found
    os.close(found.pipe)


class Notes:
    """What agents tell a test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self.pipe = os.open(path, os.O_RDWR)  # both ways, so that it never ends
        self.unread = b""

    def line(self) -> str:
        """Wait for the next line."""
        while b"\n" not in self.unread:
            assert select.select([self.pipe], [], [], SECONDS)[0], "no agent says anything"
            self.unread += os.read(self.pipe, 4096)
        line, _, self.unread = self.unread.partition(b"\n")
        return line.decode()


def assert_ends(pid: int) -> None:
    """Wait until a process is gone; a zombie whose parent does not look counts as gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], SECONDS)[0], f"process {pid} still runs"
    finally:
        os.close(handle)


# --- a run


def test_a_run_trains_through_the_openai_package_and_a_second_one_is_the_same(tmp_path: Path) -> None:
    changes = settings("twice")
    for name in ("one", "two"):
        run, _ = trained(tmp_path / name, changes)
        assert run.progress.step == 2
    assert not differences(_comparable(tmp_path / "one"), _comparable(tmp_path / "two"))
    first = metrics(tmp_path / "one")[1]
    assert first["agent/requests_mean"] == first["agent/turns_mean"] == 2.0
    assert first["agent/branches_mean"] == 1.0 and first["agent/merged_share"] == 0.5
    assert first["agent/failed_share"] == first["agent/timeout_share"] == 0.0
    assert first["groups/mixed_share"] > 0 and first["update/grad_norm"] > 0
    assert first["sampler/mismatch_max"] < 1e-4
    assert metrics(tmp_path / "one")[0]["eval/requests_mean"] == 2.0
    table = open_run(tmp_path / "one").step(1)
    assert set(table.responses["branch"].tolist()) == {0}
    assert all("1+1=" in each[0].text for each in map(table.observations, range(table.info.responses)))
    assert replay(tmp_path / "one", ["grpo"])


def _comparable(folder: Path) -> dict[str, str]:
    """What is the same whatever the clock does: the sampler's log-probs have other last bits in another batch."""
    kept = {name: text for name, text in contents(folder).items() if not name.startswith("tokens/")}
    for name, text in kept.items():
        if name.startswith("step "):
            record = {key: value for key, value in json.loads(text).items() if not key.startswith("sampler/")}
            kept[name] = json.dumps(record)
    return kept


def test_a_run_killed_in_the_middle_of_rollouts_ends_as_one_that_was_not(tmp_path: Path) -> None:
    changes = settings("twice", run__steps="3")
    whole = RunProcess(tmp_path / "whole", changes)
    assert whole.run() == 0, whole.messages
    # Evaluations before the first, after the second and the last step: it dies in the third step.
    assert whole.failpoints["agents.ended"] == 6
    process = RunProcess(tmp_path / "run", changes, failpoint="agents.ended:5")
    assert process.run() == -signal.SIGKILL, process.messages
    resumed = process.resumed()
    assert resumed.run() == 0, resumed.messages
    assert "resumed from step 2" in resumed.messages
    assert not differences(_comparable(resumed.folder), _comparable(whole.folder))


def test_the_rule_grades_the_last_message_if_the_agent_returns_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "run", settings("graded", run__steps="1"))
    table = open_run(tmp_path / "run").step(1)
    for response in range(table.info.responses):
        said = "".join(table.pieces(response)).removesuffix("<eos>").strip()
        right = said == table.responses["answer"][response]
        assert (table.responses["verdict"][response] == "correct") == right, (said, table.responses["answer"][response])


def test_rewards_of_requests_are_those_of_their_branches(tmp_path: Path) -> None:
    trained(tmp_path / "run", settings("each", run__steps="1"))
    table = open_run(tmp_path / "run").step(1)
    rewards: dict[tuple[int, int], list[float]] = {}
    columns = (table.responses[name].tolist() for name in ("group", "sample", "branch", "reward"))
    for group, sample, branch, reward in sorted(zip(*columns, strict=True)):
        rewards.setdefault((group, sample), []).append(reward)
        assert branch == len(rewards[group, sample]) - 1
    assert all(found[:2] == [0.0, 1.0] and 0 < found[2] < 1 for found in rewards.values())
    # Of rollouts: which worker runs an agent depends on the clock, and its random numbers do not.
    assert len({found[2] for found in rewards.values()}) == len(rewards) == 16


def test_a_budget_that_is_used_up_is_an_outcome_and_no_error(tmp_path: Path) -> None:
    _, log = trained(tmp_path / "run", settings("greedy_for_tokens", run__steps="1", run__eval_every="0"))
    (step,) = metrics(tmp_path / "run")
    assert step["agent/token_budget_share"] == 1.0 and step["agent/failed_share"] == 0.0
    assert step["reward/no_answer_share"] == 1.0 and step["reward/crashed_share"] == 0.0
    assert not log.has("failed")


def test_dynamic_sampling_and_noise_work_on_rollouts(tmp_path: Path) -> None:
    changes = {"rollout__dynamic_sampling": "true", "rollout__dynamic_max_rounds": "2", "run__steps": "1"}
    trained(tmp_path / "dynamic", settings("each", **changes))
    assert metrics(tmp_path / "dynamic")[-1]["groups/mixed_share"] == 1.0
    trained(tmp_path / "noisy", settings("graded", reward__noise="0.5", run__steps="1"))
    assert 0 < metrics(tmp_path / "noisy")[-1]["reward/flipped_share"] < 1


def test_each_of_several_processes_runs_the_agent_for_its_share() -> None:
    changes = settings("twice", update__token_budget="64")
    (alone,), several = (train_ranks(recipe(changes), size, 2, use_sgd) for size in (1, 2))
    for rank in several:
        assert rank.tokens == alone.tokens
        assert (rank.weights - alone.weights).norm() < 1e-4 * (alone.weights - alone.start).norm()
    names = ("agent/requests_mean", "agent/branches_mean", "agent/merged_share", "reward/mean")
    for mine, other in zip(several[0].metrics, alone.metrics, strict=True):
        assert {name: mine[name] for name in names} == pytest.approx({name: other[name] for name in names})


# --- failures are heard


def test_an_agent_that_always_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    run, log = short_run(tmp_path / "run", settings("broken", run__eval_every="0"))
    with pytest.raises(RunStoppedError, match=r"the agent failed on 100% of the responses.*no such thing as \[key\]"):
        train(run)
    assert log.has(f"the agent {AGENT}broken failed on 16 rollouts", "own_agents.py", "RuntimeError: no such thing")
    (record,) = map(json.loads, (tmp_path / "run" / "rule_errors.jsonl").read_text().splitlines())
    assert record["what"] == "agent" and record["count"] == 16
    assert all("sk-" not in path.read_text("utf-8", "replace") for path in _texts(tmp_path / "run"))


def test_an_agent_that_asks_nothing_is_an_error_and_never_a_reward(tmp_path: Path) -> None:
    run, log = short_run(tmp_path / "run", settings("silent", run__eval_every="0"))
    with pytest.raises(RunStoppedError, match="it made no request to the endpoint"):
        train(run)
    (step,) = metrics(tmp_path / "run")
    assert step["agent/failed_share"] == step["reward/crashed_share"] == 1.0
    assert step["reward/excluded"] == 16 and step["tokens/count"] == 0
    assert log.has("nothing to train on")


def test_an_agent_that_cannot_be_loaded_is_refused_before_the_model_is(tmp_path: Path) -> None:
    run, _ = short_run(tmp_path / "run", settings("no_such_function"))
    with pytest.raises(ValueError, match=r"own_agents\.py has no no_such_function"):
        train(run)
    run, _ = short_run(tmp_path / "run", SHORT | {"agent.command": '["no-such-program"]'})
    with pytest.raises(ValueError, match="there is no program 'no-such-program'"):
        train(run)


def test_agents_that_hang_crash_flood_fork_and_return_garbage_change_nothing_for_the_others(tmp_path: Path) -> None:
    run, log = short_run(tmp_path / "run", MISBEHAVING)
    with pytest.raises(RunStoppedError):  # five of eight fail in its only step
        train(run)
    (step,) = metrics(tmp_path / "run")
    assert step["agent/timeout_share"] == 2 / 8
    assert step["agent/failed_share"] == 4 / 8
    assert step["reward/excluded"] == 12 and step["reward/mean"] == 1.0
    errors = (tmp_path / "run" / "rule_errors.jsonl").read_text()
    for words in (
        "it took more than 1 s", "it crashed", "the agent returned 'a text'", "SystemExit: 3",
        "returned 1000 rewards, but it made 1 requests",
    ):  # fmt: skip
        assert words in errors, errors
    assert log.has("prints; it goes to")
    # A megabyte of each of the two that flood; beyond it what a pipe and one read of it hold when the next one begins.
    assert (tmp_path / "run" / "rule_output.txt").stat().st_size <= 2 * ((1 << 20) + 2 * (1 << 16)) + 4096


def test_what_a_timeout_pays_can_be_chosen(tmp_path: Path) -> None:
    run, _ = short_run(tmp_path / "run", {**MISBEHAVING, "agent.on_timeout": "wrong"})
    train(run)  # without those, no more than half have failed
    (step,) = metrics(tmp_path / "run")
    assert step["agent/timeout_share"] == 2 / 8 and step["reward/excluded"] == 8
    assert step["reward/mean"] == 0.5


def test_an_agent_that_comes_back_after_its_end_is_refused(tmp_path: Path, notes: Notes) -> None:
    trained(tmp_path / "run", settings("lingering", run__steps="1", run__eval_every="0", rollout__prompts="2"))
    told = {notes.line() for _ in range(3)}
    assert told <= {"ConflictError rollout_sealed", "APIConnectionError None"} and told


def test_many_agents_at_once(tmp_path: Path) -> None:
    changes = {"agent__concurrency": "64", "rollout__prompts": "16", "rollout__samples": "8"}
    trained(tmp_path / "run", settings("twice", run__steps="1", run__eval_every="0", **changes))
    (step,) = metrics(tmp_path / "run")
    assert step["agent/requests_mean"] == 2.0 and step["agent/failed_share"] == 0.0


# --- processes


def test_nothing_is_left_when_the_trainer_is_killed(tmp_path: Path, notes: Notes) -> None:
    process = RunProcess(tmp_path / "run", settings("never", agent__concurrency="2", run__eval_every="0"))
    pids: list[int] = []

    def kill() -> None:
        for _ in range(2):
            pids.extend(map(int, notes.line().split()))
        for child in multiprocessing.active_children():
            child.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    assert process.run(target=_with_notes) == -signal.SIGKILL, process.messages
    killer.join(SECONDS)
    assert len(pids) == 4
    for pid in pids:
        assert_ends(pid)


def _with_notes(process: RunProcess) -> None:
    os.environ[own_agents.NOTES] = str(process.folder.parent / "notes")
    run_in_child(process)


def test_nothing_is_left_when_ctrl_c_ends_the_step(tmp_path: Path, notes: Notes) -> None:
    run, log = short_run(tmp_path / "run", settings("never", agent__concurrency="2", run__eval_every="0"))
    pids: list[int] = []
    main, announced = threading.get_ident(), threading.Event()
    log.message = lambda text: announced.set() if "press Ctrl-C again" in text else None  # type: ignore[method-assign]

    def interrupt() -> None:
        for _ in range(2):
            pids.extend(map(int, notes.line().split()))
        signal.pthread_kill(main, signal.SIGINT)  # asks for the end of the step, which would not come
        announced.wait(SECONDS)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        train(run)
    thread.join(SECONDS)
    assert len(pids) == 4
    for pid in pids:
        assert_ends(pid)


def pool_runs(pool: AgentPool, count: int, problem: Problem) -> list[AgentRun]:
    found: dict[int, AgentRun] = {}

    def run(number: int, worker: AgentWorker) -> None:
        found[number] = worker.run(problem, Access("http://127.0.0.1:9/v1", f"secret-{number}", number))

    for future in pool.start(count, run):
        future.result(SECONDS)
    return [found[number] for number in range(count)]


PROBLEM = Problem(user("1+1="), "2", "exact", "made", extra={"kind": 0})


def program(code: str, **changes: Any) -> AgentRun:
    pool = AgentPool(command=[sys.executable, "-c", code], **{"timeout": SECONDS, **changes})
    try:
        return pool_runs(pool, 1, PROBLEM)[0]
    finally:
        pool.close()


def test_the_last_line_of_a_program_is_graded_or_is_its_reward() -> None:
    read = "import json, sys; problem = json.load(sys.stdin); "
    assert program(read + "print('first'); print(problem['answer'], end='\\n\\n')").text == "2"
    assert program("print('{\"reward\": 0.25}')").reward == 0.25
    nothing = program("pass")
    assert nothing.outcome == "returned" and nothing.reward is None and nothing.text is None
    wrong = program('print(\'{"reward": "much"}\')')
    assert wrong.outcome == "failed" and "returned 'much'" in wrong.error
    failed = program("import sys; sys.exit('some words')")
    assert failed.outcome == "failed" and "exit code 1" in failed.error and "some words" in failed.error


def test_a_program_gets_its_key_and_no_other_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "HARMLESS"):
        monkeypatch.setenv(name, "of the parent")
    names = program("import os; print(sorted(n for n, v in os.environ.items() if v == 'of the parent'))").text
    assert names == "['HARMLESS']"
    assert program("import os; print(os.environ['OPENAI_BASE_URL'])").text == "http://127.0.0.1:9/v1"


def test_a_key_in_an_answer_or_an_error_is_hidden() -> None:
    key = "import os, sys; key = 'it is ' + os.environ['OPENAI_API_KEY']; "
    assert program(key + "print(key)").text == "it is [key]"
    failed = program(key + "sys.exit(key)")
    assert "it is [key]" in failed.error and "secret-0" not in failed.error


def test_a_program_that_floods_is_read_to_its_end_and_its_last_line_kept() -> None:
    flooding = (
        "import sys\nfor _ in range(300): sys.stdout.write('x' * 99_999 + '\\n'); sys.stderr.write('y' * 99_999)\n"
    )
    assert program(flooding + "print('7')").text == "7"


def test_what_a_program_starts_ends_with_it(notes: Notes) -> None:
    code = f"""
import subprocess, os
sleeping = subprocess.Popen(["sleep", "{own_agents.FOREVER}"], start_new_session=True)
open({str(notes.path)!r}, "w").write(f"{{sleeping.pid}}\\n")
print("done")
"""
    assert program(code).text == "done"
    assert_ends(int(notes.line()))


def test_a_worker_is_used_again_until_it_is_killed() -> None:
    pool = AgentPool(f"{AGENT}process_id", concurrency=1)
    crashing = replace(PROBLEM, extra={"kind": 2})
    try:
        runs = [run for problem in (PROBLEM, crashing, PROBLEM) for run in pool_runs(pool, 2, problem)]
    finally:
        pool.close()
    assert [run.outcome for run in runs] == 2 * ["returned"] + 2 * ["failed"] + 2 * ["returned"]
    first, second, *_, third, fourth = (run.reward for run in runs)
    assert first == second != third == fourth


# --- from rollouts to samples


def sealed(*branches: Branch, **stats: Any) -> SealedRollout:
    return SealedRollout(branches, "the last", RolloutStats(requests=len(branches), branches=len(branches), **stats))


def branch(tokens: int, reward: float | None = None, prompt: int = 3) -> Branch:
    response = Response([5] * tokens, [-1.0] * tokens, True, 2)
    return Branch([4] * prompt, response, [Message("assistant", "said")], (0,), reward)


def test_outcomes_become_verdicts_and_exclusions() -> None:
    def of(run: AgentRun, *branches: Branch, **stats: Any) -> Sample:
        return samples_of(PROBLEM, 9, 2, run, sealed(*branches, **stats))[0]

    right = of(AgentRun("returned", 1.0, True), branch(2))
    assert right.verdict.kind == "correct" and not right.excluded and (right.group, right.branch) == (9, 0)
    scored = of(AgentRun("returned", 1.0, -0.5), branch(2))
    assert scored.verdict.score == -0.5
    ungraded = of(AgentRun("returned", 1.0, text="a line"), branch(2))
    assert ungraded.verdict is None and ungraded.text == "a line"
    assert of(AgentRun("returned", 1.0), branch(2)).text == "the last"
    failed = of(AgentRun("failed", 1.0, error="why"), branch(2))
    assert failed.excluded and failed.verdict.error == "why"
    limited = of(AgentRun("failed", 1.0, error="400"), branch(2), ended="context_length")
    assert limited.verdict.kind == "no_answer" and not limited.excluded
    nothing = of(AgentRun("failed", 1.0, error="400"), ended="context_length", refused={"context_length_exceeded": 1})
    assert nothing.excluded and "1 x context_length_exceeded" in nothing.verdict.error
    ours = of(AgentRun("returned", 1.0, 1.0), branch(2), error="a bug")
    assert ours.excluded and ours.verdict.error == "a bug"


def test_the_overlong_penalty_is_about_all_branches_together() -> None:
    samples = samples_of(PROBLEM, 0, 0, AgentRun("returned", 1.0, 1.0), sealed(branch(2), branch(5)))
    other = samples_of(PROBLEM, 0, 1, AgentRun("returned", 1.0, 1.0), sealed(branch(3)))
    for each in other:
        each.response = replace(each.response, sample=1)
    assert sampled_by_others([*samples, *other]) == [5, 2, 0]


def _texts(folder: Path) -> list[Path]:
    return [
        path for path in folder.rglob("*") if path.is_file() and path.suffix in (".jsonl", ".toml", ".txt", ".json")
    ]
