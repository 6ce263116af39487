"""Agents that do what agents do to their histories, and the check of each context that they are answered from."""

from __future__ import annotations

import copy
import json
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from helpers.agents.recorded_sampler import RecordedSampler, Sampled
from helpers.agents.template_oracle import TemplateOracle, composed, encodable, plain, said, stand_in
from trimtab.agents import Endpoint, SealedRollout

RETRY = "x-stainless-retry-count"


def tool(name: str, description: str = "It helps.") -> dict[str, Any]:
    """Return the schema of a tool."""
    properties = {"place": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}
    parameters = {"type": "object", "properties": properties, "required": ["place"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@dataclass
class Talk:
    """One conversation of an agent, as it sends it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of the last message."""
        return list(self.messages[-1].get("tool_calls") or ()) if self.messages else []


@dataclass(eq=False)
class Turn:
    """An answer that was received. `path` is what was said up to it, and `seen` are the messages of its context.

    In `seen` other words of the same form stand for earlier answers.
    """

    record: Sampled
    path: tuple[Any, ...]
    seen: list[dict[str, Any]]


class Rollout:
    """A session of an endpoint, and agents that use it."""

    def __init__(
        self,
        endpoint: Endpoint,
        sampler: RecordedSampler,
        oracle: TemplateOracle,
        client: httpx.Client,
        pool: ThreadPoolExecutor,
        seed: int = 0,
        budget: int = 4_000,
    ) -> None:
        self.endpoint, self.sampler, self.oracle, self.client, self.pool = endpoint, sampler, oracle, client, pool
        self.budget = budget
        self.session = endpoint.open(seed, budget, sample=3)
        self.turns: list[Turn] = []
        self.received: dict[float, Sampled] = {}  # by their first log-prob
        self.cut = 0
        self.sent: list[bytes] = []  # bodies that were answered
        self.merged = self.again = 0
        self.refused: Counter[str] = Counter()
        self.new_roots: Counter[str] = Counter()
        self.heard: list[str] = []  # all that the server has said

    @property
    def used(self) -> int:
        """How many tokens were sampled."""
        return sum(len(turn.record.tokens) for turn in self.turns)

    def body(self, talk: Talk, **parameters: Any) -> bytes:
        """Return a request for an answer to a conversation."""
        given = {"model": "policy", "messages": talk.messages, "logprobs": True, **parameters}
        if talk.tools:
            given["tools"] = talk.tools
        return json.dumps(given).encode()

    def send(self, body: bytes, retry: int | None = None) -> httpx.Response:
        """Send a request, and return the answer to it."""
        headers = {"authorization": f"Bearer {self.session.api_key}", "content-type": "application/json"}
        if retry is not None:
            headers[RETRY] = str(retry)
        response = self.client.post(f"{self.endpoint.url}/chat/completions", content=body, headers=headers)
        self.heard.append(f"{response.headers} {response.text}")
        return response

    def ask(self, talk: Talk, **parameters: Any) -> dict[str, Any] | None:
        """Let a conversation go on by an answer; return this message, or None if there is none."""
        body = self.body(talk, **parameters)
        left = self.budget - self.used
        message = self.hear(body, self.send(body))
        if message is not None:
            assert self.turns[-1].record.most <= left
            talk.messages.append(message)
        return message

    def hear(self, body: bytes, response: httpx.Response) -> dict[str, Any] | None:
        """Take an answer that was sampled for this request, and check the context that it was sampled from."""
        asked = json.loads(body)
        messages, tools = asked["messages"], encodable(asked.get("tools") or [])
        if response.status_code != 200:
            self._check_refusal(messages, tools, response)
            return None
        choice = response.json()["choices"][0]
        record = self.record(response)
        assert len(record.tokens) <= record.most <= self.budget
        assert len(record.prompt) + record.most <= self.endpoint.requests.max_tokens
        assert record.logp[0] not in self.received, "an answer was given to two requests"
        logp = tuple(each["logprob"] for each in choice["logprobs"]["content"])
        if len(logp) < len(record.logp):
            # What others sampled meanwhile had used the budget up; this is checked once all of them are known.
            self.cut += 1
            record = replace(record, tokens=record.tokens[: len(logp)], logp=record.logp[: len(logp)], finished=False)
        assert logp == record.logp
        assert response.json()["usage"]["prompt_tokens"] == len(record.prompt)
        assert choice["finish_reason"] == ("tool_calls" if choice["message"].get("tool_calls") else
                                           "stop" if record.finished else "length")  # fmt: skip
        seen = self._check_context(record, messages, tools)
        path = (json.dumps(tools, sort_keys=True), *said([*messages, choice["message"]]))
        self.turns.append(Turn(record, path, seen))
        self.received[record.logp[0]] = record
        self.sent.append(body)
        return dict(choice["message"])

    def record(self, response: httpx.Response) -> Sampled:
        """Return what was sampled for an answer."""
        first = response.json()["choices"][0]["logprobs"]["content"][0]["logprob"]
        record, index = self.sampler.found[first]
        assert index == 0
        return record

    def retry(self, body: bytes, like: httpx.Response | None = None) -> None:
        """Send a request that was answered again, as the openai package does: the recorded answer comes."""
        count = len(self.sampler.requests)
        response = self.send(body, retry=1)
        self.again += 1
        assert response.status_code == 200 and len(self.sampler.requests) == count
        # Of several alike, that of any of them.
        assert self.record(response).logp[0] in self.received
        if like is not None:
            assert response.content == like.content

    def burst(self, talks: Sequence[Talk]) -> None:
        """Ask for answers at the same time."""
        bodies = [self.body(talk) for talk in talks]
        responses = list(self.pool.map(lambda body: self.send(body, retry=0), bodies))

        def depth(answered: tuple[Talk, bytes, httpx.Response]) -> int:
            return len(self.record(answered[2]).prompt) if answered[2].status_code == 200 else 1 << 30

        # One may have gone on from another that said the same as an earlier answer: that one first.
        for talk, body, response in sorted(zip(talks, bodies, responses, strict=True), key=depth):
            message = self.hear(body, response)
            if message is not None:
                talk.messages.append(message)
        assert self.cut == 0 or self.used == self.budget

    def ask_twice_at_once(self, talk: Talk, gone: bool) -> None:
        """Send a request, and its retry while it runs; with `gone` the first connection is closed before."""
        body = self.body(talk)
        if self.used >= self.budget or self.oracle.render(plain(talk.messages), talk.tools) is None:
            return
        count = len(self.sampler.requests)
        self.sampler.free.clear()
        first: Future[httpx.Response] | None = None
        if gone:
            with self.raw(body):
                self.sampler.wait_for(count + 1)
        else:
            first = self.pool.submit(self.send, body)
            self.sampler.wait_for(count + 1)
        second = self.pool.submit(self.send, body, 1)
        self.sampler.free.set()
        self.again += 1
        response = second.result()
        assert first is None or first.result().content == response.content
        assert len(self.sampler.requests) == count + 1
        message = self.hear(body, response)
        assert message is not None
        talk.messages.append(message)

    def raw(self, body: bytes) -> socket.socket:
        """Send a request without waiting for its answer; return the connection."""
        address = urlsplit(self.endpoint.url)
        connection = socket.create_connection((address.hostname, address.port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.session.api_key}\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return connection

    def _check_refusal(self, messages: list[Any], tools: list[Any], response: httpx.Response) -> None:
        code = response.json()["error"]["code"]
        self.refused[code] += 1
        if code == "invalid_messages":
            assert self.oracle.render(plain(messages), tools) is None
        else:
            assert code == "token_budget_exceeded" and self.used == self.budget
        assert response.status_code == 400

    def _check_context(self, record: Sampled, messages: list[Any], tools: list[Any]) -> list[dict[str, Any]]:
        """Check the context of a record; return the messages that it stands for."""
        path = (json.dumps(tools, sort_keys=True), *said(messages))
        length = next((k for k in range(len(path), 1, -1) if any(turn.path == path[:k] for turn in self.turns)), 1)
        parents = [turn for turn in self.turns if turn.path == path[:length]] if length > 1 else []
        after = plain(messages)[length - 1 :]
        if not parents:
            replies = [said([message])[0] for message in messages if message["role"] == "assistant"]
            known = any(reply == turn.path[-1] for reply in replies for turn in self.turns)
            self.new_roots["must" if known else "may" if replies else "not"] += 1
            return self._check_root(record, messages, tools)
        if any(message["role"] == "assistant" for message in after):
            self.new_roots["must"] += 1
            return self._check_root(record, messages, tools)
        tails = [
            (turn, self.oracle.tail(turn.seen, self.oracle.raw(turn.record.tokens), after, tools)) for turn in parents
        ]
        for turn, tail in tails:
            stored = turn.record.prompt + turn.record.tokens
            if tail is not None and record.prompt[: len(stored)] == stored:
                rest = record.prompt[len(stored) :]
                clean = self.oracle.tail(turn.seen, self.oracle.raw(turn.record.tokens),
                                         self.oracle.without_markup(after), tools)  # fmt: skip
                assert clean is not None
                self._check_text(rest, self._behind(turn, tail), self._behind(turn, clean))
                self.merged += 1
                return [*turn.seen, stand_in(self.oracle.raw(turn.record.tokens)), *after]
        assert any(tail is None for _, tail in tails), (
            "it could have gone on from stored tokens",
            messages,
            self.oracle.decode(record.prompt),
            [self.oracle.raw(turn.record.tokens) for turn in self.turns],
            [turn.path for turn, _ in tails],
        )
        self.new_roots["must"] += 1
        self.new_roots["rewritten"] += 1
        return self._check_root(record, messages, tools)

    def _behind(self, turn: Turn, tail: str) -> str:
        """Return what is written behind a turn: not its end token a second time."""
        last = self.oracle.decode(turn.record.tokens[-1:])
        return tail.removeprefix(last) if turn.record.tokens[-1] in self.oracle.end_tokens else tail

    def _check_root(self, record: Sampled, messages: list[Any], tools: list[Any]) -> list[dict[str, Any]]:
        given = plain(messages)
        text = self.oracle.render(given, tools)
        clean = self.oracle.render(self.oracle.without_markup(given), self.oracle.without_markup(tools))
        assert text is not None and clean is not None
        self._check_text(record.prompt, text, clean)
        return given

    def _check_text(self, tokens: Sequence[int], text: str, clean: str) -> None:
        """Check that tokens are a text as the template writes it, with the markup of a text that imitates none."""
        decoded = self.oracle.decode(tokens)
        assert composed(decoded) == composed(text), (decoded, text)
        encoded = self.oracle.tokenizer.encode(clean, add_special_tokens=False)
        assert self.oracle.markup_of(tokens) == self.oracle.markup_of(encoded)
        if text == clean:
            assert list(tokens) == encoded

    def seal(self) -> SealedRollout:
        """End the rollout, check what is left of it, and that it is over."""
        rewards = {number: float(number) for number in range(0, len(self.turns), 2)}
        for number, reward in rewards.items():
            self.session.reward(number, reward)
        sealed = self.session.seal()
        self._check_branches(sealed)
        self._check_stats(sealed)
        late = self.send(self.sent[-1] if self.sent else b"{}", retry=2)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "rollout_sealed")
        words = [*self.heard, repr(sealed), repr(self.session), repr(self.endpoint), repr(self.sampler.requests[-1:])]
        assert not any(self.session.api_key in each for each in words)
        return sealed

    def _check_branches(self, sealed: SealedRollout) -> None:
        trained: Counter[float] = Counter()
        for branch in sealed.branches:
            response = branch.response
            others = {n for start, end in response.observed for n in range(start, end)}
            own = [n for n in range(len(response.tokens)) if n not in others]
            assert len(own) == len(response.logp) and own[0] == 0, "a branch begins with what was sampled"
            context = (*branch.prompt, *response.tokens.tolist())
            for logp, position in zip(response.logp.tolist(), own, strict=True):
                record, index = self.sampler.found[logp]
                assert context[len(branch.prompt) + position] == record.tokens[index]
                assert context[: len(branch.prompt) + position] == record.prompt + record.tokens[:index]
                trained[logp] += 1
            last, _ = self.sampler.found[response.logp.tolist()[-1]]
            assert response.finished == self.received[last.logp[0]].finished and response.sample == 3
            assert branch.messages[-1].role == "assistant"
        received = [logp for turn in self.turns for logp in turn.record.logp]
        assert trained == Counter(received), "each token that was sampled is trained once"

    def _check_stats(self, sealed: SealedRollout) -> None:
        stats = sealed.stats
        assert stats.error == ""
        assert (stats.requests, stats.turns, stats.merged) == (len(self.turns), len(self.turns), self.merged)
        assert stats.replayed + stats.joined == self.again
        assert (stats.abandoned, stats.cancelled) == (0, 0)
        assert stats.sampled_tokens == self.used <= self.budget and stats.branches == len(sealed.branches)
        assert dict(stats.refused) == dict(self.refused)
        assert stats.ended == ("token_budget" if self.refused["token_budget_exceeded"] else "")
        counted = sum(stats.new_roots.values())
        assert self.new_roots["must"] <= counted <= self.new_roots["must"] + self.new_roots["may"]
        assert stats.new_roots.get("rewritten", 0) + stats.new_roots.get("roles", 0) == self.new_roots["rewritten"]
        numbers = [number for branch in sealed.branches for number in branch.requests]
        assert sorted(numbers) == list(range(len(self.turns)))
        for branch in sealed.branches:
            given = [number for number in branch.requests if number % 2 == 0]
            assert branch.reward == (sum(given) / len(given) if given else None)


def reworded(messages: Sequence[dict[str, Any]], chance: int) -> list[dict[str, Any]]:
    """Return a history that says the same in another form, as clients and frameworks write it."""
    changed = []
    for given in messages:
        message = copy.deepcopy(given)
        if message["role"] == "assistant":
            message = {key: message[key] for key in sorted(message) if message[key] is not None}
            message.pop("refusal", None)
            message["content"] = message.get("content") or (None if chance % 2 else "")
            message["audio"] = message["function_call"] = None
            if chance % 7 == 0:
                message.pop("reasoning_content", None)
        for number, call in enumerate(message.get("tool_calls") or ()):
            arguments = json.loads(call["function"]["arguments"])
            turned = dict(reversed(arguments.items()))
            call["function"]["arguments"] = json.dumps(turned, indent=chance % 3, ensure_ascii=chance % 2 == 0)
            call["index"] = number
        if chance % 5 == 0 and isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        changed.append(message)
    return changed
