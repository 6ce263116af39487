"""trimtab's tools as engines call them: what a model does to an environment costs its conversation, not the run."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from trimtab.data import Problem
from trimtab.engines import conversations
from trimtab.engines.conversations import ConversationTools
from trimtab.engines.options import EngineOptions, read_options
from trimtab.own_parts import OwnPartError, look_beside
from trimtab.trainer.config import RecordConfig, ToolsConfig

MODULE = """
import time


class Fragile:
    def reset(self, problem) -> str:
        if problem.answer == "none":
            raise KeyError("no such problem")
        return "begin"

    def hang(self, seconds: int) -> str:
        \"\"\"Sleep.

        Args:
            seconds: How long.
        \"\"\"
        time.sleep(seconds)
        return "awake"

    def reward(self, conversation) -> float:
        return 1.0 / (len(conversation.messages) - 1)
"""
SAID = [{"role": "assistant", "content": "hang", "tool_calls": [1]}, {"role": "tool", "content": "awake"}]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineOptions]:
    folder = tmp_path_factory.mktemp("fragile")
    (folder / "fragile_env.py").write_text(MODULE)
    look_beside(folder)
    yield EngineOptions(environment="python:fragile_env:Fragile", tool_timeout=60.0)
    conversations.tool_set.cache_clear()


def opened(options: EngineOptions, answer: str = "7") -> ConversationTools:
    return ConversationTools(options, Problem(({"role": "user", "content": "?"},), answer, "math", "here"))


def test_an_environment_lives_through_its_conversation(options: EngineOptions) -> None:
    tools = opened(options)
    assert tools.opening() == "begin"
    assert tools.call("hang", {"seconds": 0}) == "awake"
    assert tools.reward(SAID) == 1.0
    assert [(call.tool, call.outcome) for call in tools.calls] == [("hang", "ok")]
    assert "no tool 'sleep'" in tools.call("sleep", {})
    assert "the argument seconds is" in tools.call("hang", {"seconds": "9"})


def test_a_call_that_hangs_and_a_reward_that_fails_pay_nothing(
    options: EngineOptions, caplog: pytest.LogCaptureFixture
) -> None:
    conversations._failed.clear()
    options = options.model_copy(update={"tool_timeout": 1.0})
    tools = opened(options)
    with caplog.at_level(logging.ERROR):
        assert "more than 1 s" in tools.call("hang", {"seconds": 900})
        assert "more than 1 s" in tools.call("hang", {"seconds": 0})  # it is gone
        assert tools.reward(SAID) == 0.0
        assert opened(options).reward(SAID[:1]) == 0.0  # divides by zero
    assert [record.getMessage().split(" failed")[0] for record in caplog.records] == ["hang", "reward"]


def test_an_error_that_quotes_the_model_cannot_control_the_terminal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "_failed", set())
    conversations._log_once("guess", "Traceback\nKeyError: \x1b]0;title\x07\u202e")
    assert caplog.records[0].getMessage().endswith("on:\nTraceback\nKeyError: \\x1b]0;title\\x07\\u202e")


def test_what_is_wrong_with_the_data_or_the_tools_is_raised(options: EngineOptions) -> None:
    with pytest.raises(OwnPartError, match="no such problem"):
        opened(options, "none").opening()
    with pytest.raises(ValueError, match="there is no tool 'pyhton': did you mean python"):
        assert EngineOptions(tools=("pyhton",)).tool_set
    with pytest.raises(ValueError, match=r"tool_timeout=0\.0 must be greater than 0"):
        read_options("trl", {"tools": ("python",), "tool_timeout": 0.0})


def test_the_options_are_those_of_a_recipe_and_an_old_name_is_told_the_new_one() -> None:
    options = EngineOptions()
    record, tools = RecordConfig(), ToolsConfig()
    recorded = (options.record_every, options.record_group_share, options.record_max_megabytes)
    assert recorded == (record.every, record.group_share, record.max_megabytes)
    assert (options.tool_timeout, options.tool_workers) == (tools.timeout, tools.workers)
    with pytest.raises(ValueError, match="unknown option timeout: did you mean tool_timeout"):
        read_options("trl", {"tools": ("python",), "timeout": 5.0})
    with pytest.raises(ValueError, match="advantage='verl' must be 'method'"):
        read_options("trl", {"advantage": "verl"})


def test_the_tools_need_no_torch() -> None:
    code = "import sys, trimtab.engines.options; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
