"""Answers of the endpoint, as OpenAI's interface has them: whole, or as the chunks of a stream."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.agents.sampled_message import ReadMessage

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class ChatReply:
    """A sampled message with what a client is told about it."""

    id: str
    model: str
    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: dict[str, Any] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def usage(self) -> dict[str, int]:
        """The numbers of tokens."""
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}

    def whole(self) -> bytes:
        """Return the body of an answer that is not streamed."""
        choice = {"index": 0, "message": self.message, "logprobs": self.logprobs, "finish_reason": self.finish_reason}
        return _json({**self._head("chat.completion"), "choices": [choice], "usage": self.usage})

    def chunks(self, include_usage: bool) -> bytes:
        """Return all events of a streamed answer."""
        usage = {"usage": None} if include_usage else {}
        deltas = self._deltas()
        events = []
        for number, delta in enumerate([*deltas, {}]):
            last = number == len(deltas)
            choice = {
                "index": 0,
                "delta": delta,
                "logprobs": self.logprobs if number == 1 or (last and len(deltas) == 1) else None,
                "finish_reason": self.finish_reason if last else None,
            }
            events.append({**self._head("chat.completion.chunk"), "choices": [choice], **usage})
        if include_usage:
            events.append({**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage})
        return b"".join(b"data: " + _json(event) + b"\n\n" for event in events) + DONE

    def _deltas(self) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        for part in ("reasoning_content", "content"):
            if self.message.get(part):
                deltas.append({part: self.message[part]})
        for index, call in enumerate(self.message.get("tool_calls", ())):
            begun = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}
            deltas.append({"tool_calls": [begun]})
            rest = {"index": index, "function": {"arguments": call["function"]["arguments"]}}
            deltas.append({"tool_calls": [rest]})
        return deltas

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def reply_message(read: ReadMessage, key: int) -> dict[str, Any]:
    """Return a sampled message as the agent gets it; `key` makes the ids of its calls the same in each run."""
    message: dict[str, Any] = {"role": "assistant", "content": read.content, "refusal": None}
    if read.reasoning is not None:
        message["reasoning_content"] = read.reasoning
    if read.calls:
        message["content"] = read.content or None
        message["tool_calls"] = [
            {
                "id": f"call_{_name(f'{key} {number}')}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for number, (name, arguments) in enumerate(read.calls)
        ]
    return message


def reply_id(key: int) -> str:
    """Return the id of an answer."""
    return f"chatcmpl-{_name(str(key))}"


def token_logprobs(texts: Sequence[str], logp: Sequence[float]) -> dict[str, Any]:
    """Return the log-probabilities of the sampled tokens."""
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
        for text, value in zip(texts, logp, strict=True)
    ]
    return {"content": content, "refusal": None}


def models(model: str) -> bytes:
    """Return the list of models: the policy."""
    return _json({"object": "list", "data": [one_model(model)]})


def one_model(model: str) -> dict[str, Any]:
    """Return what is told about the policy."""
    return {"id": model, "object": "model", "created": 0, "owned_by": "trimtab"}


def _name(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
