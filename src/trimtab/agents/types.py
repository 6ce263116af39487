"""What a conversation is made of: messages, calls and their outcomes, limits, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.text import shown

Outcome = Literal[
    "ok", "exception", "timeout", "memory", "output", "killed", "malformed", "unknown_tool", "bad_arguments"
]
OUTCOMES: dict[Outcome, str] = {
    "ok": "the tool returned",
    "exception": "the tool raised an exception, or its result cannot be written as text",
    "timeout": "it took longer than its time limit and was killed",
    "memory": "it needed more memory than allowed",
    "output": "it printed or returned more than allowed; the beginning is kept",
    "killed": "its process crashed or ended itself",
    "malformed": "the message contains a call that cannot be parsed",
    "unknown_tool": "there is no tool with this name",
    "bad_arguments": "arguments are missing, unknown, or of the wrong type",
}

Ended = Literal["answer", "void", "turns", "tokens", "deadline", "environment"]
ENDED: dict[Ended, str] = {
    "answer": "the last message has no call: it is the answer",
    "void": "the last message has neither a call nor an answer",
    "turns": "the last allowed message contains a call, which was not run",
    "tokens": "the budget of sampled tokens ran out",
    "deadline": "its tools took more seconds than a conversation is allowed",
    "environment": "the environment's process is gone: a call hung or crashed, or `reset` failed",
}


@dataclass(frozen=True)
class Limits:
    """What one conversation may take.

    `max_turns` counts messages of the model. `max_observation_tokens` holds for the text of one reply, beside what
    the chat template puts around it. `timeout` is that of one call in seconds, `deadline` that of all calls of a
    conversation together: how long the sampler takes counts for neither.
    """

    max_turns: int = 8
    max_observation_tokens: int = 512
    timeout: float = 10.0
    deadline: float = 120.0

    def __post_init__(self) -> None:
        for name, least in (("max_turns", 1), ("max_observation_tokens", 16)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: it must be {least} or more")
        for name in ("timeout", "deadline"):
            if not 0 < getattr(self, name) <= 86_400:
                raise ValueError(f"{name}={shown(getattr(self, name))}: it must be above 0 and at most 86400 seconds")


@dataclass(frozen=True)
class Message:
    """A message as the model saw it: its own, a tool's reply, or in an agent's rollout what the agent wrote."""

    role: Literal["assistant", "tool", "user", "system"]
    text: str
    name: str = ""


@dataclass(frozen=True)
class Call:
    """A call that the model made: `text` is the beginning of what came of it; what the model saw is in the messages.

    `turn` is which of the model's messages has the call, from 0.
    """

    tool: str
    arguments: Mapping[str, Any]
    outcome: Outcome
    seconds: float
    text: str
    turn: int = 0


@dataclass
class Conversation:
    """A conversation after its prompt. Graded is `last_message`, never what a tool wrote.

    `reward` is what the environment's `reward` returned, if it has one. `error` is the first failure of code of the
    user's own, with its traceback, for the run's messages; a model never sees it.
    """

    messages: list[Message] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ended: Ended | None = None
    void_turns: int = 0
    reward: float | None = None
    observation_tokens: int = 0
    error: str = ""

    @property
    def last_message(self) -> str:
        """The text of the last message of the model; empty if there is none."""
        texts = [message.text for message in self.messages if message.role == "assistant"]
        return texts[-1] if texts else ""

    @property
    def turns(self) -> int:
        """The number of messages of the model."""
        return sum(message.role == "assistant" for message in self.messages)
