"""Conversations: how they go on and end, who is told what, and what is graded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from helpers.agents.tokenizers_of_models import CHATML, PROBLEM, converse, hermes, small_tokenizer
from trimtab.agents import Conversations, Limits, ReplyTemplate, ToolSet
from trimtab.data import Response
from trimtab.own_parts import OwnPartError

HERE = "python:helpers.agents.misbehaving_tools"
ANSWER = "It is \\boxed{6}"


@pytest.fixture(scope="module")
def tools() -> Iterator[ToolSet]:
    made = ToolSet(["python", "calculator", f"{HERE}:misbehave"], workers=2, memory_mb=512)
    yield made
    made.close()


@pytest.fixture(scope="module")
def counter() -> Iterator[ToolSet]:
    made = ToolSet(environment=f"{HERE}:Counter", workers=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def template(tools: ToolSet) -> ReplyTemplate:
    return ReplyTemplate(small_tokenizer(CHATML), tools)


def test_a_message_without_a_call_is_the_answer(tools: ToolSet, template: ReplyTemplate) -> None:
    conversation, response = converse(tools, template, [hermes("calculator", expression="2*3"), ANSWER])
    assert (conversation.ended, conversation.turns, conversation.last_message) == ("answer", 2, ANSWER)
    assert [(m.role, m.name, m.text) for m in conversation.messages[1:]] == [
        ("tool", "calculator", "6"),
        ("assistant", "", ANSWER),
    ]
    [call] = conversation.calls
    assert (call.tool, call.arguments, call.outcome, call.text) == ("calculator", {"expression": "2*3"}, "ok", "6")
    assert conversation.observation_tokens == sum(end - start for start, end in response.observed)


def test_what_a_tool_prints_is_never_graded(tools: ToolSet, template: ReplyTemplate) -> None:
    shout = hermes("python", code="print('\\\\boxed{6}')")
    conversation, _ = converse(tools, template, [shout] * 9, Limits(max_turns=2))
    assert (conversation.ended, conversation.turns, len(conversation.calls)) == ("turns", 2, 1)
    assert conversation.calls[0].text == "\\boxed{6}" and conversation.last_message == shout


def test_several_calls_in_one_message(tools: ToolSet, template: ReplyTemplate) -> None:
    calls = "\n".join([hermes("calculator", expression="2*3"), hermes("nothing"), "<tool_call>{</tool_call>"])
    conversation, _ = converse(tools, template, [calls, ANSWER])
    assert [call.outcome for call in conversation.calls] == ["ok", "unknown_tool", "malformed"]
    assert [message.role for message in conversation.messages] == ["assistant", "tool", "tool", "tool", "assistant"]
    assert conversation.void_turns == 0
    many, _ = converse(tools, template, [hermes("calculator", expression="1") * 20, ANSWER])
    assert len(many.calls) == 8 and "Further calls were not run" in many.messages[-2].text


@pytest.mark.parametrize(
    ("message", "ended", "void"),
    [
        ("", "void", 1),
        ("<think>I never stop", "void", 1),
        ("<think>so</think>6", "answer", 0),
        ("<tool_call>{}</tool_call>", "turns", 1),
    ],
)
def test_void_turns(tools: ToolSet, template: ReplyTemplate, message: str, ended: str, void: int) -> None:
    conversation, _ = converse(tools, template, [message], Limits(max_turns=1))
    assert (conversation.ended, conversation.void_turns) == (ended, void)


def test_the_budget_of_tokens(tools: ToolSet, template: ReplyTemplate) -> None:
    conversations = Conversations([PROBLEM], 2, tools, template, Limits())
    call = [*template.tokenizer.encode(hermes("calculator", expression="2*3")), template.tokenizer.eos_token_id]
    conversations.submit(0, 0, call)
    [reply] = conversations.replies(True)
    assert reply.tokens is not None
    cut = template.tokenizer.encode("It is")
    tokens, observed = [*call, *reply.tokens, *cut], (len(call), len(call) + len(reply.tokens))
    responses = [Response(tokens, [], False, 0, (observed,)), Response(cut, [], False, 1)]
    [conversation_list] = conversations.finish([responses])
    assert [c.ended for c in conversation_list] == ["tokens", "tokens"]
    assert [c.last_message for c in conversation_list] == ["It is", "It is"]
    assert [c.turns for c in conversation_list] == [2, 1]


def test_a_deadline_of_all_calls_together(tools: ToolSet, template: ReplyTemplate) -> None:
    hang = hermes("misbehave", how="hang")
    conversation, _ = converse(tools, template, [hang] * 9, Limits(max_turns=9, timeout=0.2, deadline=0.3))
    assert conversation.ended == "deadline" and {call.outcome for call in conversation.calls} == {"timeout"}
    assert len(conversation.calls) <= 2


def test_replies_come_as_they_are_ready_and_submit_does_not_wait(tools: ToolSet, template: ReplyTemplate) -> None:
    conversations = Conversations([PROBLEM] * 2, 2, tools, template, Limits(timeout=30.0))
    assert conversations.replies(block=False) == [] and conversations.replies(block=True) == []
    expected = {}
    for prompt in range(2):
        for sample in range(2):
            text = hermes("python", code=f"print({prompt}, {sample})")
            conversations.submit(prompt, sample, [*template.tokenizer.encode(text), template.tokenizer.eos_token_id])
            expected[prompt, sample] = f"{prompt} {sample}"
    got = {}
    while len(got) < 4:
        for reply in conversations.replies(block=True):
            assert reply.tokens is not None
            got[reply.prompt, reply.sample] = template.tokenizer.decode(reply.tokens)
    assert all(expected[key] in text for key, text in got.items())


def test_an_environment_says_the_reward(counter: ToolSet) -> None:
    template = ReplyTemplate(small_tokenizer(CHATML), counter)
    [messages] = template.prompts([PROBLEM])
    assert messages[-1]["content"] == "What is 2*3?\n\nCount to 6."
    conversation, _ = converse(counter, template, [hermes("add", number=4), hermes("add", number=2), "done"])
    assert (conversation.ended, conversation.reward) == ("answer", 7.0)
    silent, _ = converse(counter, template, ["nothing to do"])
    assert (silent.ended, silent.reward) == ("answer", 0.0)  # it was reset for this


def test_nothing_is_paid_for_a_call_that_ended_the_environment(counter: ToolSet) -> None:
    template = ReplyTemplate(small_tokenizer(CHATML), counter)
    die = hermes("fail", how="exit")
    told, _ = converse(counter, template, [hermes("add", number=4), die, "well"])
    assert (told.ended, told.reward, told.calls[-1].outcome) == ("answer", 0.0, "killed")
    assert "The environment has ended. Answer without its tools." in told.messages[-2].text
    again, _ = converse(counter, template, [die, hermes("add", number=4)])
    assert (again.ended, again.reward, len(again.calls)) == ("environment", 0.0, 1)


def test_a_model_that_goes_on_calling_a_dead_environment_gets_nothing() -> None:
    silent = ToolSet(environment=f"{HERE}:Silent")
    template = ReplyTemplate(small_tokenizer(CHATML), silent)
    ended, _ = converse(silent, template, [hermes("leave"), hermes("look")])
    assert (ended.ended, ended.reward, [call.outcome for call in ended.calls]) == ("environment", 0.0, ["killed"])
    answered, _ = converse(silent, template, [hermes("leave"), "6"])
    assert (answered.ended, answered.reward) == ("answer", None)  # the task's rule grades it
    silent.close()


def test_a_failure_of_the_users_own_code_is_for_the_run_to_see(counter: ToolSet) -> None:
    template = ReplyTemplate(small_tokenizer(CHATML), counter)
    broken = replace(PROBLEM, answer="broken")
    conversation, _ = converse(counter, template, [hermes("add", number=4)], problem=broken)
    assert (conversation.ended, conversation.reward) == ("environment", None)
    assert "ValueError: no such goal" in conversation.error and "misbehaving_tools.py" in conversation.error
    unpaid, _ = converse(counter, template, ["broken"])
    assert unpaid.ended == "environment" and "RuntimeError: no reward" in unpaid.error


def test_an_error_of_ours_is_raised_where_the_sampler_is(template: ReplyTemplate) -> None:
    closed = ToolSet(["python"])
    conversations = Conversations([PROBLEM], 1, closed, template, Limits())
    assert closed.sandbox is not None
    closed.sandbox.close()
    code = hermes("python", code="print(1)")
    conversations.submit(0, 0, [*template.tokenizer.encode(code), template.tokenizer.eos_token_id])
    with pytest.raises(OSError, match="the sandbox is closed"):
        conversations.replies(block=True)
    closed.close()


def test_a_module_that_only_the_trainer_can_load_is_an_error(
    template: ReplyTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = ToolSet([f"{HERE}:double"])
    monkeypatch.setitem(tools._functions, "double", "python:no_such_module:double")
    conversations = Conversations([PROBLEM], 1, tools, template, Limits())
    call = hermes("double", number=1)
    conversations.submit(0, 0, [*template.tokenizer.encode(call), template.tokenizer.eos_token_id])
    with pytest.raises(OwnPartError, match=r"cannot load the module: .*there is no module no_such_module"):
        conversations.replies(block=True)
    tools.close()
