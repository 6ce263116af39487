"""The tree of a rollout's messages: what a request goes on from, and the branches that are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from helpers.agents.tokenizers_of_models import CHATML, qwen, small_tokenizer
from trimtab.agents.chat_tokens import ChatTokens
from trimtab.agents.message_tree import MessageTree, Turn, message_key, tokens_through
from trimtab.data import Response

Message = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "calc", "description": "d"}}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Rollout:
    """A tree, and a policy that says what it is told to."""

    def __init__(self, chat: ChatTokens) -> None:
        self.chat, self.tree, self.count = chat, MessageTree(chat, 10_000), 0

    def ask(self, messages: Sequence[Mapping[str, Any]], answer: str, tools: Sequence[Mapping[str, Any]] = ()) -> Turn:
        place = self.tree.place(messages, tools)
        tokens = [*self.chat.tokenizer.encode(answer, add_special_tokens=False), self.chat.tokenizer.eos_token_id]
        logp = [-float(self.count + 1)] * len(tokens)
        read = self.chat.read(tokens, place.opened, tools)
        reply: Message = {"role": "assistant", "content": read.content}
        turn = self.tree.add(place, self.count, Response(tokens, logp, True), reply, read)
        self.count += 1
        return turn

    def check(self) -> None:
        """Every sampled token is in one branch, at the place where it was sampled."""
        seen: list[int] = []
        for branch in self.tree.branches():
            response = branch.response
            numbers = [-round(float(value)) - 1 for value in dict.fromkeys(response.logp.tolist())]
            assert tuple(numbers) == branch.requests
            turns = {turn.number: turn for turn in self.tree.turns}
            assert [*branch.prompt, *response.tokens.tolist()] == tokens_through(turns[numbers[-1]])
            assert [m.tolist() for m in response.messages] == [turns[n].response.tokens.tolist() for n in numbers]
            seen += numbers
        assert len(seen) == len(set(seen)) == len(self.tree.turns) - self.tree.abandoned


@pytest.fixture(scope="module")
def chatml() -> ChatTokens:
    return ChatTokens(small_tokenizer(CHATML))


@pytest.fixture(scope="module")
def qwen3() -> ChatTokens:
    return ChatTokens(qwen("qwen3"))


def test_a_conversation_is_one_branch(chatml: ChatTokens) -> None:
    rollout = Rollout(chatml)
    messages = [user("a")]
    for answer in ("one", "two", "three"):
        turn = rollout.ask(messages, answer)
        messages += [said(answer), user(f"not {answer}")]
        assert turn.place.new_root == ""
    [branch] = rollout.tree.branches(sample=5)
    rollout.check()
    whole = chatml.tokenizer.apply_chat_template(messages[:-1], tokenize=False).removesuffix("\n")
    assert chatml.tokenizer.decode([*branch.prompt, *branch.response.tokens]) == whole
    assert (branch.requests, branch.response.sample, branch.response.finished) == ((0, 1, 2), 5, True)
    assert [message.role for message in branch.messages] == ["user", "assistant"] * 3


def test_the_same_question_asked_three_times_is_three_branches(chatml: ChatTokens) -> None:
    rollout = Rollout(chatml)
    for answer in ("one", "two", "one"):
        rollout.ask([user("a")], answer)
    branches = rollout.tree.branches()
    assert [branch.requests for branch in branches] == [(0,), (1,), (2,)] and rollout.tree.abandoned == 0
    assert branches[0].prompt == branches[1].prompt


def test_a_shared_prefix_is_trained_in_the_earlier_branch_only(chatml: ChatTokens) -> None:
    rollout = Rollout(chatml)
    rollout.ask([user("a")], "one")
    rollout.ask([user("a"), said("one"), user("b")], "two")
    rollout.ask([user("a"), said("one"), user("c")], "three")
    rollout.ask([user("a"), said("one"), user("c"), said("three"), user("d")], "four")
    branches = rollout.tree.branches(rewards={0: 1.0, 1: 0.0, 2: 3.0})
    assert [branch.requests for branch in branches] == [(0, 1), (2, 3)]
    assert [branch.reward for branch in branches] == [0.5, 3.0]
    assert [message.text for message in branches[1].messages] == ["a", "one", "c", "three", "d", "four"]
    rollout.check()


def test_interleaved_conversations_do_not_meet(chatml: ChatTokens) -> None:
    rollout = Rollout(chatml)
    for name in ("A", "B"):
        assert rollout.ask([user(name)], f"{name}1").place.new_root == ""
    for name in ("A", "B"):
        rollout.ask([user(name), said(f"{name}1"), user("go on")], f"{name}2")
    assert [branch.requests for branch in rollout.tree.branches()] == [(0, 2), (1, 3)]
    rollout.check()


def test_a_sibling_that_was_received_is_trained_also_if_nobody_went_on_from_it(chatml: ChatTokens) -> None:
    rollout = Rollout(chatml)
    rollout.ask([user("a")], "one of two")
    rollout.ask([user("a")], "the other")
    rollout.ask([user("a"), said("the other"), user("b")], "more")
    assert [branch.requests for branch in rollout.tree.branches()] == [(0,), (1, 2)] and rollout.tree.abandoned == 0
    rollout.check()


def test_an_answer_that_nobody_received_is_abandoned(chatml: ChatTokens) -> None:
    rollout = Rollout(chatml)
    rollout.ask([user("a")], "one")
    rollout.ask([user("a"), said("one"), user("b")], "lost").received = False
    assert [branch.requests for branch in rollout.tree.branches()] == [(0,)] and rollout.tree.abandoned == 1


def test_of_two_that_said_the_same_the_newest_goes_on(chatml: ChatTokens) -> None:
    rollout = Rollout(chatml)
    rollout.ask([user("a")], "one")
    second = rollout.ask([user("a")], "one")
    assert rollout.ask([user("a"), said("one"), user("b")], "two").place.parent is second


CALL = {"id": "x", "type": "function", "function": {"name": "calc", "arguments": {"a": 1, "b": [2]}}}
OTHER = {"function": {"arguments": {"b": [2], "a": 1}, "name": "calc"}, "id": "y"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said("a"), said(" a\n")),
        (said("a"), {**said("a"), "reasoning_content": "hm"}),
        (said("a"), said("<think>\nhm\n</think>\n\na")),
        ({**said(""), "tool_calls": [CALL]}, {**said(""), "tool_calls": [OTHER]}),
        ({"role": "tool", "content": "5", "tool_call_id": "x"}, {"role": "tool", "content": "5", "tool_call_id": "y"}),
    ],
)
def test_messages_that_say_the_same(one: Message, other: Message) -> None:
    assert message_key(one) == message_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said("a"), user("a")),
        (user("a"), user("a ")),
        (said("a"), {**said("a"), "tool_calls": [CALL]}),
        ({"role": "tool", "content": "5", "name": "x"}, {"role": "tool", "content": "5", "name": "y"}),
    ],
)
def test_messages_that_do_not(one: Message, other: Message) -> None:
    assert message_key(one) != message_key(other)


def test_why_a_conversation_begins_anew(chatml: ChatTokens) -> None:
    def reason(messages: list[Message], tools: Sequence[Message] = ()) -> str:
        rollout = Rollout(chatml)
        rollout.ask([{"role": "system", "content": "s"}, user("a")], "one")
        rollout.ask([{"role": "system", "content": "s"}, user("a"), said("one"), user("b")], "two")
        return rollout.tree.place(messages, tools).new_root

    s = {"role": "system", "content": "s"}
    path = [user("a"), said("one"), user("b"), said("two")]
    assert reason([s, *path, user("c")]) == ""
    assert reason([user("another question")]) == ""
    assert reason([s, user("for example"), said("this"), user("another")]) == ""  # examples of its own
    assert reason([s, *path, user("c")], TOOLS) == "tools"
    assert reason([{"role": "system", "content": "t"}, *path, user("c")]) == "system"
    assert reason([s, user("a"), said("One!"), user("b")]) == "edited"
    assert reason([s, user("a"), said("one"), user("b"), said("Two!"), user("c")]) == "edited"
    assert reason([s, user("a summary"), said("two"), user("c")]) == "edited"


def test_qwen3_begins_anew_where_it_drops_reasoning(qwen3: ChatTokens) -> None:
    rollout = Rollout(qwen3)
    thought = "<think>\nhm\n</think>\n\n"
    rollout.ask([user("a")], f"{thought}one")
    tool = {"role": "tool", "content": "5"}
    assert rollout.ask([user("a"), said("one"), tool], f"{thought}two").place.parent is not None
    messages = [user("a"), said("one"), tool, said("two"), user("b")]
    third = rollout.ask(messages, f"{thought}three")
    assert (third.place.parent, third.place.new_root) == (None, "rewritten")
    assert "hm" not in qwen3.tokenizer.decode(third.place.tail)
    fourth = rollout.ask([*messages, said("three"), tool], "four")
    assert fourth.place.parent is third
    assert [branch.requests for branch in rollout.tree.branches()] == [(0, 1), (2, 3)]
    rollout.check()


def test_stored_tokens_win_over_replayed_text(chatml: ChatTokens) -> None:
    rollout = Rollout(chatml)
    odd = [chatml.tokenizer.encode(letter)[0] for letter in "a text"]  # one by one, as no tokenizer would
    place = rollout.tree.place([user("a")], [])
    read = chatml.read([*odd, chatml.tokenizer.eos_token_id], False, [])
    response = Response([*odd, chatml.tokenizer.eos_token_id], [-1.0] * 7, True)
    rollout.tree.add(place, 0, response, said(read.content), read)
    second = rollout.tree.place([user("a"), said("a text"), user("b")], [])
    assert second.prompt[: len(place.tail) + 7] == [*place.tail, *response.tokens]
    assert odd != chatml.tokenizer.encode("a text")


def test_moments_go_with_their_tokens(chatml: ChatTokens) -> None:
    rollout = Rollout(chatml)
    for messages in ([user("a")], [user("a"), said("x"), user("b")]):
        place = rollout.tree.place(messages, [])
        tokens = [*chatml.tokenizer.encode("x"), chatml.tokenizer.eos_token_id]
        response = Response(tokens, [-1.0] * len(tokens), True, moments=np.full((4, len(tokens)), rollout.count))
        rollout.tree.add(place, rollout.count, response, said("x"), chatml.read(tokens, False, []))
        rollout.count += 1
    [branch] = rollout.tree.branches()
    assert branch.response.moments is not None and branch.response.moments[0].tolist() == [0, 0, 1, 1]
