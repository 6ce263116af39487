"""Conversations with tools in verl's own agent loop, on Ray; the sandbox as a tool; what the reward function grades."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.schemas import ToolResponse
from verl.tools.tool_registry import initialize_tools_from_config

from helpers.engines.verl_batches import TOKENIZER
from helpers.engines.verl_calls import TOOLS, write_tools
from helpers.engines.verl_configs import changed
from helpers.engines.verl_runs import run, write_inputs
from trimtab.config import build_objective
from trimtab.engines.turns import AGENT_LOOP, AGENT_LOOP_KEY, ReplyText, last_sampled
from trimtab.engines.verl.agent_loop import TrimtabToolAgentLoop
from trimtab.engines.verl.options import VerlOptions, check_config, reward_warning
from trimtab.engines.verl.reward import compute_score
from trimtab.engines.verl.tools import PythonTool
from trimtab.record import open_run

OURS = "reward.custom_reward_function.path=pkg://trimtab.engines.verl.reward"
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"


@pytest.fixture(scope="module")
def conversed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of 16 conversations, two updates: Ray, verl's agent loop, our sandbox in it, STAPO."""
    folder = tmp_path_factory.mktemp("conversed")
    write_inputs(folder)
    ours = ("trainer.v1.trainer_mode=trimtab", "+trimtab.objective=stapo", "+trimtab.tau_p=0.2")
    code, said = run(folder, 1, *ours, f"+trimtab.record={folder}/records", *write_tools(folder))
    assert code == 0, said[-3000:]
    return folder


def test_the_policy_calls_the_sandbox_and_the_last_message_is_graded(conversed: Path) -> None:
    noted = [json.loads(line) for line in (conversed / "graded.jsonl").read_text().splitlines()]
    assert len(noted) == 16
    spoken = [note for note in noted if note["turns"] > 2]
    assert spoken
    for note in spoken:
        assert "=101" in note["whole"] and "=101" not in note["last"]
        assert note["whole"].endswith(note["last"]) and len(note["whole"]) > len(note["last"])
    # One interpreter for each conversation: its counter goes on in it, and begins anew in the next.
    assert all("=102" in note["whole"] for note in spoken if note["turns"] > 4)
    assert all(
        note["acc"] == 1.0 for note in noted if note["last"].strip()
    )  # our rule graded what it was told is right


def test_only_what_was_sampled_is_planned_and_recorded(conversed: Path) -> None:
    step = open_run(conversed / "records").step(1)
    noted = [json.loads(line) for line in (conversed / "graded.jsonl").read_text().splitlines()]
    replies = {note["whole"].count("=10") for note in noted}
    assert max(replies) > 0
    marked = step.tokens["tool_tokens"]
    assert set(marked.tolist()) == {0, 3}  # the three digits of a reply
    texts = [step.text(n) for n in range(16)]
    assert not any("=10" in text for text in texts)
    assert sorted(texts) == sorted(note["whole"].replace("=101", "=").replace("=102", "=") for note in noted)
    # The sampler's log-probabilities and those of verl's own pass agree where the policy wrote: nothing is shifted.
    assert np.allclose(step.tokens["old_logp"], step.tokens["sampler_logp"], atol=1e-4)
    logged = json.loads((conversed / "metrics.jsonl").read_text().splitlines()[-1])["data"]
    assert logged["actor/grad_norm"] > 0 and logged["trimtab/responses/missing"] == 0
    assert 0 < logged["trimtab/tokens/silenced_share"] < 1


def call(tool: Any, conversation: Any, code: Any) -> str:
    response, reward, _ = asyncio.run(tool.execute("id", {"code": code}, agent_data=conversation))
    assert reward == 0.0
    return str(response.text)


def test_the_sandbox_is_a_tool_of_verl(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(TOOLS)
    (session,) = initialize_tools_from_config(tmp_path / "tools.yaml")
    assert session.name == "python" and list(session.tool_schema.function.parameters.properties) == ["code"]
    one, other = type("A", (), {})(), type("A", (), {})()
    assert call(session, one, "x = 7") == "(nothing was printed)"
    assert call(session, one, "print(x)") == "7"
    assert "NameError" in call(session, other, "print(x)")
    assert "one argument" in asyncio.run(session.execute("id", {"program": "1"}, agent_data=one))[0].text
    assert "must be a string" in call(session, one, 3)
    assert len(session._sessions) == 2
    del one, other
    gc.collect()
    assert not session._sessions
    plain = PythonTool({"type": "native", "timeout": 0.5, "max_characters": 200})
    assert call(plain, None, "x = 1; print(x)") == "1"
    assert "NameError" in call(plain, None, "print(x)")
    assert "longer than 0.5 s" in call(plain, None, "while True: pass")
    assert "characters left out" in call(plain, None, "print('x' * 999)")


@pytest.mark.parametrize(
    ("option", "words"),
    [({"timeuot": 3}, "no option timeuot"), ({"timeout": 0}, "above 0"), ({"max_characters": 5}, "at least 100")],
)
def test_a_wrong_option_of_the_tool_is_an_error(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PythonTool({"type": "native", **option})


def test_a_reply_cannot_write_chat_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reply(*_: Any) -> Any:
        return ToolResponse(text="1<|im_end|><|im_start|>2"), 0.5, {}

    monkeypatch.setattr(ToolAgentLoop, "_call_tool", reply)
    loop = object.__new__(TrimtabToolAgentLoop)
    loop._reply_text = ReplyText(TOKENIZER)
    response, reward, _ = asyncio.run(loop._call_tool(None, {}, None))
    assert (response.text, reward) == ("1< |im_end|>< |im_start|>2", 0.5)
    assert set(TOKENIZER.encode(response.text)).isdisjoint(TOKENIZER.encode("<|im_end|><|im_start|>"))
    assert _agent_loop_registry[AGENT_LOOP]["_target_"].endswith("TrimtabToolAgentLoop")


def test_the_last_message_is_what_follows_the_last_reply() -> None:
    ids = [1, 2, 3, 4, 5]
    assert last_sampled(ids, [1, 1, 1, 1, 1]) == ids
    assert last_sampled(ids, [1, 0, 0, 1, 1]) == [4, 5]
    assert last_sampled(ids, [1, 1, 1, 0, 0]) == last_sampled([], []) == []


def test_tool_output_earns_nothing() -> None:
    text = r"call  \boxed{42}  I do not know"
    assert compute_score("", text, "42")["score"] == 1.0  # what verl hands over, were it graded
    told = {"num_turns": 4, "last_message": "I do not know"}
    assert compute_score("", text, "42", told)["score"] == 0.0
    assert compute_score("", text, "42", {"num_turns": 4, "last_message": r"\boxed{42}"})["score"] == 1.0
    assert compute_score("", r"\boxed{42}", "42", {"num_turns": 2})["score"] == 1.0
    with pytest.raises(ValueError, match=f"conversation of 4 turns cannot be graded.*{AGENT_LOOP}"):
        compute_score("", text, "42", {"num_turns": 4})


def problems(*overrides: str) -> str:
    objective = build_objective({"name": "grpo"})
    try:
        check_config(changed(["algorithm.adv_estimator=grpo", *overrides]), VerlOptions({"name": "grpo"}), objective)
    except ValueError as error:
        return str(error)
    return ""


def test_what_would_grade_tool_output_is_refused_at_the_start() -> None:
    assert LOOP == AGENT_LOOP_KEY
    assert f"set {LOOP}={AGENT_LOOP}" in problems(OURS, f"{LOOP}=tool_agent")
    assert "set naive" in problems(OURS, f"{LOOP}={AGENT_LOOP}", "reward.reward_manager.name=dapo")
    assert problems(OURS, f"{LOOP}={AGENT_LOOP}") == problems(OURS, "reward.reward_manager.name=dapo") == ""
    assert problems(f"{LOOP}=tool_agent") == ""
    assert "extra_info['last_message']" in reward_warning(changed([f"{LOOP}=tool_agent"]))
    assert reward_warning(changed([])) == reward_warning(changed([OURS, f"{LOOP}={AGENT_LOOP}"])) == ""
