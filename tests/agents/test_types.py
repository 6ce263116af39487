"""What a conversation says about itself, and limits that make no sense."""

from __future__ import annotations

import pytest

from trimtab.agents import Call, Conversation, Limits, Message


def test_graded_is_the_last_message_of_the_model() -> None:
    conversation = Conversation([Message("assistant", "ask"), Message("tool", "\\boxed{42}", "python")])
    conversation.calls += [Call("python", {}, "ok", 0.5, "42"), Call("python", {}, "timeout", 2.0, "too slow")]
    assert (conversation.last_message, conversation.turns) == ("ask", 1)
    assert Conversation().last_message == ""


@pytest.mark.parametrize(
    "wrong", [{"max_turns": 0}, {"max_observation_tokens": 15}, {"timeout": 0.0}, {"deadline": float("nan")}]
)
def test_a_limit_without_sense_is_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Limits(**wrong)  # type: ignore[arg-type]
