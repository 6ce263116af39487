"""A conversation with a server that speaks OpenAI's tool calls: its messages, its tools, and what is stored of it."""

from __future__ import annotations

import math
from typing import Any

from trimtab.agents import Dialogue, Message, ParsedCall, ToolSet, read_json_call
from trimtab.data import Problem
from trimtab.experiments.evaluate.conversations import conversation_row
from trimtab.experiments.evaluate.endpoint.completion import Choice, ServerCall
from trimtab.experiments.evaluate.settings import EvalSettings
from trimtab.text import cut_middle

CHARACTERS_PER_TOKEN = 4  # there is no tokenizer to count a reply's tokens with


class EndpointConversation:
    """One sample as a conversation: `hear` a message of the server, `run_calls`, send `messages`, and so on."""

    def __init__(self, problem: Problem, tools: ToolSet, settings: EvalSettings, opening: str | None = None) -> None:
        assert settings.tools is not None
        self.messages: list[dict[str, Any]] = [dict(message) for message in problem.prompt]
        if opening:
            self.messages[-1]["content"] += f"\n\n{opening}"
        self.schemas = tools.schemas(problem)
        self._dialogue = Dialogue(problem, tools, settings.tools.limits)
        self._longest = CHARACTERS_PER_TOKEN * settings.tools.max_observation_tokens
        self._budget = settings.max_new_tokens
        self._choices: list[Choice] = []
        self._calls: tuple[ServerCall, ...] = ()

    @property
    def waits_for_message(self) -> bool:
        """Whether the server is to write the next message."""
        return self._dialogue.conversation.ended is None

    @property
    def tokens_left(self) -> int:
        """How many tokens the next message may have."""
        return max(1, self._budget - math.ceil(sum(choice.tokens or 0 for choice in self._choices)))

    def hear(self, choice: Choice) -> bool:
        """Take the server's newest message; return whether its calls are to be run."""
        self._choices.append(choice)
        self._calls = choice.calls
        if not choice.finished:  # cut off; what it calls may be cut off too
            self._dialogue.conversation.messages.append(Message("assistant", choice.text))
            self._dialogue.end("tokens")
            return False
        return self._dialogue.hear(choice.text, choice.text, [_parsed(call) for call in choice.calls])

    def run_calls(self) -> None:
        """Run the calls of the newest message and append what the server is to be told; it takes as long as they do."""
        told = self._dialogue.run([_parsed(call) for call in self._calls])
        if told is None:
            return
        told = [(tool, cut_middle(text, self._longest)) for tool, text in told]
        self._dialogue.tell(told)
        called = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self._calls
        ]
        self.messages.append({"role": "assistant", "content": self._choices[-1].text, "tool_calls": called})
        # Every call needs a reply, also one that was not run.
        texts = [text for _, text in told] + ["Not run."] * (len(called) - len(told))
        self.messages += [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
            for call, text in zip(self._calls, texts, strict=True)
        ]

    def finish(self) -> dict[str, Any]:
        """Return the fields of `Generation`; waits for what the environment says."""
        conversation, known = self._dialogue.finished(), [choice.tokens for choice in self._choices]
        tokens = None if None in known else math.fsum(count or 0 for count in known)
        logps = [(choice.logp, choice.tokens or 0) for choice in self._choices if choice.logp is not None]
        measured = math.fsum(count for _, count in logps)
        return {
            "text": conversation.last_message,
            "tokens": tokens if tokens is None or tokens % 1 else int(tokens),
            "finished": self._choices[-1].finished,
            "logp": math.fsum(logp * count for logp, count in logps) / measured if measured else None,
            "conversation": conversation_row(conversation),
        }

    def close(self) -> None:
        """End the processes of its tools."""
        self._dialogue.tools.close()


def _parsed(call: ServerCall) -> ParsedCall:
    return read_json_call({"name": call.name, "arguments": call.arguments or "{}"})
