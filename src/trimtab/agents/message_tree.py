"""The messages of one rollout as a tree: what a request goes on from, and the branches to train at the end.

Stored tokens win over replayed text: a request that begins with the messages of a sampled turn goes on from its tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trimtab.agents.chat_tokens import ChatMessage, ChatTokens, Shape
from trimtab.agents.sampled_message import ReadMessage, split_reasoning, written_calls
from trimtab.agents.sealed_rollout import Branch
from trimtab.agents.types import Message
from trimtab.data import KeptTokens, Request, Response


@dataclass(eq=False)
class Place:
    """Where in the tree a request stands: the context that its answer is sampled from, as token ids in `prompt`.

    `parent` is the turn that it goes on from; None at a root. `tail` are the tokens, and `messages` the messages,
    behind the parent's, or of the whole root. `new_root` is why it is a root although something that it might have
    gone on from was sampled before ("" if there is no such reason).
    """

    prompt: list[int]
    parent: Turn | None
    new_root: str
    tail: list[int]
    messages: Sequence[ChatMessage]
    path: _Path
    shape: Shape
    opened: bool


@dataclass(eq=False)
class Turn:
    """A sampled message, and its place. `received`: its client has got it.

    `request` is kept while its KV cache may be of use: until somebody has gone on from the turn.
    """

    place: Place
    response: Response
    number: int  # of its request
    read: ReadMessage
    received: bool = True
    request: Request | None = None
    children: list[Turn] = field(default_factory=list)


@dataclass(frozen=True)
class _Path:
    """Digests of a path of messages: with the tools, without them, and without the system message."""

    whole: bytes
    without_tools: bytes
    without_system: bytes

    def step(self, message: ChatMessage) -> _Path:
        key = message_key(message)
        later = self.without_system if message["role"] == "system" else _digest(self.without_system + key)
        return _Path(_digest(self.whole + key), _digest(self.without_tools + key), later)


class MessageTree:
    """The tree of one rollout. `place` may run in another thread than the rest, since it changes nothing."""

    def __init__(self, chat: ChatTokens, max_tokens: int) -> None:
        self.chat, self.max_tokens = chat, max_tokens
        self.turns: list[Turn] = []
        self.abandoned = 0  # turns that `branches` has left out
        self._turns: dict[bytes, list[Turn]] = {}  # by their path
        self._seen: set[bytes] = set()  # messages of the model, and paths without their tools or system message
        self._asked: set[bytes] = set()  # paths that messages were sampled behind

    def place(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Place:
        """Return where a request stands: behind the deepest turn whose path of messages prefixes it, or at a root."""
        paths = [_start(tools)]
        for message in messages:
            paths.append(paths[-1].step(message))
        length = next((k for k in range(len(messages), 0, -1) if paths[k].whole in self._turns), 0)
        if not length:
            return self._root(messages, tools, paths[-1], self._new_root(messages, paths))
        # Of several that said the same the newest: a retry comes after what it takes the place of.
        parent, tail = max(self._turns[paths[length].whole], key=lambda turn: turn.number), messages[length:]
        if any(message["role"] == "assistant" for message in tail):
            return self._root(messages, tools, paths[-1], "edited")
        above = parent.place
        sampled = parent.response.tokens.tolist()
        found = self.chat.go_on(above.shape, sampled, above.opened, tail, self.max_tokens)
        if isinstance(found, str):
            return self._root(messages, tools, paths[-1], found)
        prompt = [*tokens_through(parent), *found.tokens]
        return Place(prompt, parent, "", found.tokens, tail, paths[-1], found.shape, found.opened)

    def _root(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], path: _Path, reason: str
    ) -> Place:
        context = self.chat.begin(messages, tools, self.max_tokens)
        return Place(context.tokens, None, reason, context.tokens, tuple(messages), path, context.shape, context.opened)

    def _new_root(self, messages: Sequence[ChatMessage], paths: Sequence[_Path]) -> str:
        """Return why a request goes on from no turn; empty for a conversation of its own."""
        own = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for number in reversed(own):
            if paths[number + 1].without_tools in self._seen:
                return "tools"
            if paths[number + 1].without_system in self._seen:
                return "system"
        # A conversation of its own may come with examples of what the model says.
        known = any(message_key(messages[number]) in self._seen for number in own)
        return "edited" if known or (own and paths[own[0]].whole in self._asked) else ""

    def add(self, place: Place, number: int, response: Response, reply: ChatMessage, read: ReadMessage) -> Turn:
        """Add a sampled message; `reply` is what the agent gets for it, and may send back."""
        turn = Turn(place, response, number, read)
        place.prompt = []
        path = place.path.step(reply)
        self._turns.setdefault(path.whole, []).append(turn)
        self._seen |= {message_key(reply), path.without_tools, path.without_system}
        self._asked.add(place.path.whole)
        if place.parent is not None:
            place.parent.children.append(turn)
            place.parent.request = None
        self.turns.append(turn)
        return turn

    def branches(self, sample: int = 0, rewards: Mapping[int, float] | None = None) -> list[Branch]:
        """Return the branches: every sampled token in one of them, but for those of abandoned turns."""
        kept = self._kept()
        self.abandoned = len(self.turns) - len(kept)
        above = {turn.place.parent for turn in kept}
        trained: set[Turn] = set()
        found = []
        for leaf in sorted((turn for turn in kept if turn not in above), key=lambda turn: turn.number):
            path = _path(leaf)
            first = next(k for k, turn in enumerate(path) if turn not in trained)
            trained.update(path)
            found.append(_branch(path, first, sample, rewards or {}))
        return found

    def _kept(self) -> list[Turn]:
        """Return all turns but the abandoned: those that nobody received."""
        # What an agent received and made nothing of is trained too, such as one of three samples, or a call that it
        # could not read: to drop it would mean to choose samples by what they say. A turn that somebody went on from
        # was received, whatever the connection looked like.
        return [turn for turn in self.turns if turn.received or turn.children]


def message_key(message: ChatMessage) -> bytes:
    """Return what two messages have in common that say the same; neither ids of calls nor reasoning count."""
    content = message["content"]
    if message["role"] == "assistant":
        content = split_reasoning(content, False)[1].strip()
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    said = [message["role"], content, message.get("name") or "", calls]
    return _digest(json.dumps(said, sort_keys=True).encode())


def _start(tools: Sequence[Mapping[str, Any]]) -> _Path:
    # They begin differently: what was said without a system message is no sign of other tools.
    return _Path(_digest(json.dumps(list(tools), sort_keys=True).encode()), _digest(b"tools"), _digest(b"system"))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _path(turn: Turn) -> list[Turn]:
    path = [turn]
    while path[-1].place.parent is not None:
        path.append(path[-1].place.parent)
    return path[::-1]


def tokens_through(turn: Turn) -> list[int]:
    """Return the tokens of a path, to the end of this turn."""
    tokens: list[int] = []
    for each in _path(turn):
        tokens += each.place.tail
        tokens += each.response.tokens.tolist()
    return tokens


def _branch(path: Sequence[Turn], first: int, sample: int, rewards: Mapping[int, float]) -> Branch:
    """Return a path as a training sample, trained from its turn of this index on."""
    import numpy as np  # here: what only parses a recipe imports this module too

    own = path[first:]
    prompt = [*(tokens_through(path[first - 1]) if first else []), *own[0].place.tail]
    tokens = own[0].response.tokens.tolist()
    observed = []
    for _, turn in pairwise(own):
        start = len(tokens)
        tokens += turn.place.tail
        if turn.place.tail:
            observed.append((start, len(tokens)))
        tokens += turn.response.tokens.tolist()
    logp = np.concatenate([turn.response.logp for turn in own])
    parts = [turn.response.moments for turn in own if turn.response.moments is not None]
    moments = np.concatenate(parts, axis=1) if len(parts) == len(own) else None
    sets = [turn.response.kept for turn in own if turn.response.kept is not None]
    kept = KeptTokens.concat(sets) if len(sets) == len(own) else None
    response = Response(tokens, logp, own[-1].response.finished, sample, tuple(observed), moments, kept=kept)
    numbers = tuple(turn.number for turn in own)
    given = [rewards[number] for number in numbers if number in rewards]
    return Branch(prompt, response, _messages(path), numbers, sum(given) / len(given) if given else None)


def _messages(path: Sequence[Turn]) -> list[Message]:
    messages = []
    for turn in path:
        messages += [_in_words(message) for message in turn.place.messages]
        messages.append(Message("assistant", turn.read.text))
    return messages


def _in_words(message: ChatMessage) -> Message:
    text = message["content"]
    if message.get("tool_calls"):
        calls = written_calls(message["tool_calls"], "hermes")
        text = f"{text}\n{calls}" if text else calls
    return Message(message["role"], text, message.get("name") or "")
