"""Conversations with tools in verl's own agent loop, on Ray; the sandbox as a tool; what the reward function grades."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.schemas import ToolResponse
from verl.workers.rollout.replica import TokenOutput

from helpers.engines.own_environment import ENVIRONMENT, IN_VERL
from helpers.engines.verl_batches import TOKENIZER
from helpers.engines.verl_calls import FORMAT, EqualsParser, write_tools
from helpers.engines.verl_configs import changed
from helpers.engines.verl_runs import run, write_inputs
from trimtab.engines import AGENT_LOOP, AGENT_LOOP_KEY
from trimtab.engines.conversations import ReplyText, last_sampled
from trimtab.engines.options import EngineOptions
from trimtab.engines.verl.agent_loop import TrimtabToolAgentLoop
from trimtab.engines.verl.options import check_config, read_options, reward_warning
from trimtab.engines.verl.reward import compute_score
from trimtab.own_parts import look_beside
from trimtab.record import open_run
from trimtab.trainer.config import build_objective

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
    assert sorted(texts) == sorted(note["whole"].replace("=101", "=").replace("=102", "=") for note in noted)
    # The sampler's log-probabilities and those of verl's own pass agree where the policy wrote: nothing is shifted.
    assert np.allclose(step.tokens["old_logp"], step.tokens["sampler_logp"], atol=1e-4)
    logged = json.loads((conversed / "metrics.jsonl").read_text().splitlines()[-1])["data"]
    assert logged["actor/grad_norm"] > 0 and logged["trimtab/responses/missing"] == 0
    assert 0 < logged["trimtab/tokens/silenced_share"] < 1


@dataclass
class Scripted:
    """A server that gives these texts, one for each turn, and notes what it was asked."""

    texts: list[str]
    asked: list[str] = field(default_factory=list)

    async def generate(self, prompt_ids: list[int], **_: Any) -> TokenOutput:
        self.asked.append(TOKENIZER.decode(prompt_ids))
        ids = TOKENIZER.encode(self.texts[len(self.asked) - 1])
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="completed", num_preempted=0)


def converse(server: Scripted, *overrides: str) -> Any:
    """One conversation of verl's agent loop under these settings, without Ray."""
    wanted = [
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        f"actor_rollout_ref.rollout.multi_turn.format={FORMAT}",
        *overrides,
    ]
    config = changed(wanted)

    async def run_loop() -> Any:
        loop = TrimtabToolAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=server,
            tokenizer=TOKENIZER,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(config.data),
            hf_model_type="qwen3",
            tools=ToolListWrap([]),
        )
        row = {"raw_prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}}
        return await loop.run({}, **row, extra_info={"index": 3}, data_source="sums")

    return asyncio.run(run_loop())


def test_the_environment_of_the_documentation_runs_in_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl_notebook.py").write_text(ENVIRONMENT)
    look_beside(tmp_path)
    monkeypatch.setattr(EqualsParser, "tool", "add")
    monkeypatch.setattr(EqualsParser, "arguments", {"number": 5})
    server = Scripted(["7=", "8=", "9"])
    # Under another name: one process loads one module of a name, and TRL's test may have done so.
    output = converse(server, *(setting.replace(":notebook:", ":verl_notebook:") for setting in IN_VERL))
    assert server.asked[0].endswith(" 2")  # what `reset` returned; the tiny tokenizer knows no letters
    assert TOKENIZER.decode(output.response_ids) == "7=58=109"
    assert output.response_mask == [1, 1, 0, 1, 1, 0, 0, 1]
    assert output.response_logprobs == [-1.0, -1.0, 0.0, -1.0, -1.0, 0.0, 0.0, -1.0]
    assert output.extra_fields["last_message"] == "9"
    assert output.reward_score == pytest.approx(10.05)  # five messages


def test_a_call_that_goes_wrong_is_told_in_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = []
    for name, arguments in (
        ("python", {"code": "while True: pass"}),
        ("python", {"code": "print('x' * 9999)"}),
        ("python", {"program": "1"}),
        ("calculator", {"expression": "2 ** 100"}),
    ):
        monkeypatch.setattr(EqualsParser, "tool", name)
        monkeypatch.setattr(EqualsParser, "arguments", arguments)
        seen: list[str] = []
        plain = ReplyText.__call__
        monkeypatch.setattr(ReplyText, "__call__", lambda self, text, seen=seen: seen.append(text) or "0")
        seconds = 0.5 if "while" in str(arguments) else 60
        options = ("+trimtab.tools=[python,calculator]", "+trimtab.tool_characters=400")
        output = converse(Scripted(["7=", "9"]), *options, f"+trimtab.tool_timeout={seconds}")
        monkeypatch.setattr(ReplyText, "__call__", plain)
        assert TOKENIZER.decode(output.response_ids) == "7=09" and output.reward_score is None
        replies += seen
    assert "more than 0.5 s" in replies[0]
    assert "characters left out" in replies[1] and 256 < len(replies[1]) < 500
    assert "unknown argument 'program'" in replies[2]
    assert replies[3] == str(2**100)


def section(**keys: Any) -> dict[str, Any]:
    return {"objective": "grpo", **keys}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tools": ["python"], "tool_timeout": 0}, "greater than 0"),
        ({"tools": ["python"], "tool_characters": 5}, "greater than or equal to 100"),
        ({"tool_timeout": 5}, "trimtab.tool_timeout without tools"),
        ({"tool": ["python"]}, "did you mean tools"),
    ],
)
def test_a_wrong_option_for_tools_is_an_error(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_options(section(**keys))


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
        check_config(
            changed(["algorithm.adv_estimator=grpo", *overrides]), EngineOptions(objective={"name": "grpo"}), objective
        )
    except ValueError as error:
        return str(error)
    return ""


def test_what_would_grade_tool_output_is_refused_at_the_start() -> None:
    assert LOOP == AGENT_LOOP_KEY
    assert f"set {LOOP}={AGENT_LOOP}" in problems(OURS, f"{LOOP}=tool_agent")
    assert "set naive" in problems(OURS, f"{LOOP}={AGENT_LOOP}", "reward.reward_manager.name=dapo")
    assert problems(OURS, f"{LOOP}={AGENT_LOOP}") == problems(OURS, "reward.reward_manager.name=dapo") == ""
    assert problems(f"{LOOP}=tool_agent") == ""
    assert "trimtab's tools need its agent loop" in problems("+trimtab.tools=[python]")
    assert problems("+trimtab.tools=[python]", f"{LOOP}={AGENT_LOOP}") == ""
    assert "extra_info['last_message']" in reward_warning(changed([f"{LOOP}=tool_agent"]))
    assert reward_warning(changed([])) == reward_warning(changed([OURS, f"{LOOP}={AGENT_LOOP}"])) == ""
