"""A run with tools that is killed in the middle of its conversations ends as one that was not."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from helpers.train.short_runs import RunProcess, contents, differences

# The warm start is long enough for most conversations to have a call.
CHANGES = {
    "model.path": '"demo-tools"',
    "task.family": '"product"',
    "task.calls": "1.0",
    "tools.use": '["calculator"]',
    "rollout.max_turns": "2",
    "rollout.max_new_tokens": "24",
    "rollout.max_observation_tokens": "16",
    "reward.overlong_buffer": "24",
    "warm_start.steps": "60",
    "warm_start.eval_every": "60",
    "warm_start.batch_size": "16",
    "warm_start.lr": "5e-3",
    "run.steps": "4",
    "update.token_budget": "512",
}


def test_a_run_killed_in_the_middle_of_conversations_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = RunProcess(tmp_path / "whole", CHANGES)
    assert whole.run() == 0, whole.messages
    lines = [json.loads(line) for line in (whole.folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("tools/ok", 0) for line in lines) > 0
    # Evaluations before the first, after the third and the last step: it dies in the fourth step, after a checkpoint.
    assert whole.failpoints["conversations.replied"] == 7
    process = RunProcess(tmp_path / "run", CHANGES, failpoint="conversations.replied:6")
    assert process.run() == -signal.SIGKILL, process.messages
    resumed = process.resumed()
    assert resumed.run() == 0, resumed.messages
    assert "resumed from step 2" in resumed.messages
    assert not differences(contents(resumed.folder), contents(whole.folder))
