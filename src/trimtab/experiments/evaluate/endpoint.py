"""Sample from any OpenAI-compatible server: single responses, or conversations with tools.

Replies are untrusted input, read within the limits of `BoundedClient`. The openai client repeats a request with growing
pauses where the server is busy, disconnects, times out or returns garbage; a sample that never arrived is stored as
failed, which is not a wrong answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import httpx
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from trimtab.agents import Dialogue, Message, ParsedCall, ToolSet, read_json_call
from trimtab.bounded_http import (
    BoundedClient,
    HttpError,
    event_loop_thread,
    for_message,
    hide_key,
    read_key,
    url_problem,
)
from trimtab.data import BenchmarkProblem, Problem
from trimtab.experiments.evaluate.completion import (
    MAX_BYTES,
    BadCompletionError,
    Choice,
    Completion,
    parse_completion,
)
from trimtab.experiments.evaluate.folder import Batches, Generation, conversation_row, new_generation
from trimtab.experiments.evaluate.settings import EvalSettings, SampleKey
from trimtab.text import PrintLine, cut_middle

KEY_VARIABLE = "OPENAI_API_KEY"
SAMPLES_PER_REQUEST = 8
TOKENS_PER_REQUEST = SAMPLES_PER_REQUEST * 20_480  # with their log-probabilities they fit into `MAX_BYTES`
OPTIONAL_FIELDS = ("logprobs", "seed", "n")  # a server may not know them; without `n` each sample is one request
FATAL_STATUS = (401, 403, 404, 405)  # neither a retry nor another prompt will help
OPENING_SECONDS = 60.0  # for an environment's `reset`
CHARACTERS_PER_TOKEN = 4  # there is no tokenizer to count a tool's reply with


class EndpointError(ValueError):
    """There is no server, or it refuses every request: the address, the key or the model's name is wrong."""


class NoResponseError(Exception):
    """A request was given up; the message is why."""


@dataclass(frozen=True)
class EndpointConnection:
    """How to reach a server. The key is read from OPENAI_API_KEY and neither stored nor shown."""

    url: str
    concurrency: int = 16
    timeout: float = 1800.0  # seconds for a complete reply
    retries: int = 6

    def __post_init__(self) -> None:
        wrong = url_problem(self.url, query=False)
        if wrong == "password":  # before any message shows the address
            raise ValueError("--endpoint contains a password: put the key into OPENAI_API_KEY instead")
        key = read_key(KEY_VARIABLE)
        if wrong:
            shown = for_message(hide_key(self.url, key))
            raise ValueError(f"--endpoint {shown} {wrong}: give one like http://host:port/v1")
        if self.concurrency < 1 or self.retries < 0 or not 0 < self.timeout < math.inf:
            raise ValueError("--concurrency must be at least 1, --retries at least 0, --timeout more than 0 and finite")


def open_client(connection: EndpointConnection, requests: int, parse: Callable[[bytes], Any]) -> AsyncOpenAI:
    """Return a client of the server for so many requests at the same time; `parse` reads the body of a reply."""
    key = read_key(KEY_VARIABLE)
    http: Any = BoundedClient(requests, seconds=connection.timeout, max_bytes=MAX_BYTES, key=key, parse=parse)
    # It is the HTTP client that sends the key; openai's own wants one all the same.
    return AsyncOpenAI(api_key=key or "none", base_url=connection.url, max_retries=connection.retries, http_client=http)


@dataclass
class EndpointGenerator:
    """Generates samples by a server, all requests in one event loop. `unsupported` are optional fields it rejected."""

    connection: EndpointConnection
    settings: EvalSettings
    name: str
    log: PrintLine = lambda text: None
    tools: ToolSet | None = None
    unsupported: set[str] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)  # failed samples by reason
    left_out: Counter[str] = field(default_factory=Counter)  # replies without their log-probabilities, by reason
    _openings: Mapping[tuple[str, str], str | None] = field(default_factory=dict)  # what an environment says
    # A batch comes with an event to be set once it is stored. At the end comes None, or the error.
    _arrived: SimpleQueue[tuple[list[Generation], asyncio.Event] | BaseException | None] = field(
        default_factory=SimpleQueue
    )
    _connected: bool = False  # to the server, at any time

    def reusable(self, problems: Sequence[BenchmarkProblem], done: AbstractSet[SampleKey]) -> set[SampleKey]:
        """Return all that is done: a server's samples do not depend on each other, as those of a native batch do."""
        return set(done)

    def generate(self, problems: Sequence[BenchmarkProblem], done: AbstractSet[SampleKey]) -> Batches:
        """Yield the missing samples by problem, as they arrive."""
        missing = ((item, sorted(key[2] for key in self.settings.sample_keys([item]) - done)) for item in problems)
        size = max(1, min(SAMPLES_PER_REQUEST, TOKENS_PER_REQUEST // self.settings.max_new_tokens))
        size = 1 if self.tools else size  # conversations part ways after their first message
        work = [(item, some[n : n + size]) for item, some in missing for n in range(0, len(some), size)]
        if self.tools is not None:
            asked = {(item.benchmark, item.id): item.problem for item, _ in work}
            openings = self.tools.openings(list(asked.values()), OPENING_SECONDS)
            self._openings = dict(zip(asked, openings, strict=True))
        with event_loop_thread() as loop:
            running = asyncio.run_coroutine_threadsafe(self._run(work), loop)
            running.add_done_callback(lambda end: self._arrived.put(None if end.cancelled() else end.exception()))
            while isinstance(item := self._arrived.get(), tuple):
                batch, stored = item
                yield batch
                with suppress(RuntimeError):  # after an error the loop may have ended
                    loop.call_soon_threadsafe(stored.set)
        if item is not None:
            raise item
        for warning in self._warnings():
            self.log(f"warning: the server at {self.connection.url} {warning}")

    def _warnings(self) -> Iterator[str]:
        """Yield what the user should know of the replies."""
        if self.failures:
            reason = self.failures.most_common(1)[0][0]
            what = f"gave no response for {self.failures.total():,} samples, mostly because of: {reason}"
            yield f"{what}; the same command with --retry-failed requests them again"
        if self.left_out:
            reason = self.left_out.most_common(1)[0][0]
            what = f"sent unusable log-probabilities in {self.left_out.total():,} replies: {reason}"
            yield f"{what}; they are left out, the responses are kept"

    async def _run(self, work: Sequence[tuple[BenchmarkProblem, list[int]]]) -> None:
        """Send the requests, `concurrency` at a time."""
        waiting = iter(work)

        async def worker(client: AsyncOpenAI) -> None:
            for item, samples in waiting:
                if self.tools is None:
                    await self._sample(client, item, samples)
                else:
                    await self._converse(client, item, samples[0], self.tools)

        try:
            async with (
                open_client(self.connection, self.connection.concurrency, self._parse) as client,
                asyncio.TaskGroup() as group,  # the first error cancels the other workers
            ):
                for _ in range(min(self.connection.concurrency, len(work))):
                    group.create_task(worker(client))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _sample(self, client: AsyncOpenAI, item: BenchmarkProblem, samples: Sequence[int]) -> None:
        """Request the samples of a problem until all have arrived; those that never do are failed."""
        prompt = [dict(message) for message in item.problem.prompt]
        while samples:
            seed = self.settings.request_seed(item, samples[0])
            try:
                choices = await self._complete(client, prompt, len(samples), seed)
            except NoResponseError as error:
                return await self._fail(item, samples, str(error))
            batch = [
                new_generation(
                    item, sample, self.settings, seed=seed,
                    text=choice.text, finished=choice.finished, tokens=choice.tokens, logp=choice.logp,
                )
                for sample, choice in zip(samples, choices, strict=False)
            ]  # fmt: skip
            await self._store(batch)
            samples = samples[len(batch) :]

    async def _converse(self, client: AsyncOpenAI, item: BenchmarkProblem, sample: int, tools: ToolSet) -> None:
        """Request one sample message by message, and run the calls in between; without a message it is failed."""
        settings, seed = self.settings, self.settings.request_seed(item, sample)
        talk = EndpointConversation(item.problem, tools, settings, self._openings[item.benchmark, item.id])
        schemas = {"tools": talk.schemas} if talk.schemas else {}
        try:
            while talk.waits_for_message:
                more = {"max_tokens": talk.tokens_left, **schemas}
                choices = await self._complete(client, talk.messages, 1, seed, **more)
                if talk.hear(choices[0]):
                    await asyncio.wrap_future(tools.in_thread(talk.run_calls))
            # Not in the tools' threads: it waits for one of them.
            known = await asyncio.to_thread(talk.finish)
            await self._store([new_generation(item, sample, settings, seed=seed, **known)])
        except NoResponseError as error:
            await self._fail(item, [sample], str(error))
        finally:
            talk.close()

    async def _complete(
        self, client: AsyncOpenAI, messages: Sequence[Mapping[str, Any]], count: int, seed: int, **more: Any
    ) -> list[Choice]:
        """Request up to `count` choices; optional fields that the server does not know are left out from then on."""
        while True:
            optional = {"n": count, "seed": seed, "logprobs": True}
            payload = {
                "model": self.name,
                "messages": messages,
                "temperature": self.settings.temperature,
                "top_p": self.settings.top_p,
                "max_tokens": self.settings.max_new_tokens,
                **{key: value for key, value in optional.items() if key not in self.unsupported},
                **more,
            }
            # Escaped to ASCII: a suffix from the command line may hold bytes that are not UTF-8.
            content = json.dumps(payload).encode()
            try:
                reply: Any = await client.post("/chat/completions", cast_to=httpx.Response, content=content)
            except APIStatusError as error:
                self._connected = True
                field = self._unknown_field(payload, error.response)
                if field is None:
                    raise self._refusal(error.response) from None
                self.unsupported.add(field)
            except APIConnectionError as error:
                reason = for_message(str(error.__cause__))
                if self._connected or not isinstance(error.__cause__, httpx.ConnectError):
                    raise NoResponseError(reason) from None
                raise EndpointError(  # nor will the other requests reach anything
                    f"no server answers at {self.connection.url} ({reason}): start it, or check --endpoint; nothing "
                    "was sampled, and the same command starts or resumes the evaluation"
                ) from None
            else:
                parsed: Completion = reply.extensions["parsed"]
                return [replace(c, tokens=parsed.tokens) if c.tokens is None else c for c in parsed.choices]

    def _parse(self, body: bytes) -> Completion:
        """Parse a completion; garbage is a failed request, which the client repeats."""
        self._connected = True
        try:
            completion = parse_completion(body, SAMPLES_PER_REQUEST, self.settings.max_new_tokens)
        except BadCompletionError as error:
            excerpt = hide_key(body[:2000].decode("utf-8", "replace"), read_key(KEY_VARIABLE))
            raise HttpError(f"not a chat completion ({error}): {excerpt}") from None
        if completion.left_out:
            self.left_out[for_message(completion.left_out)] += 1
        return completion

    def _unknown_field(self, payload: Mapping[str, Any], reply: Any) -> str | None:
        """Return the optional field of a request that the server rejects by its name."""
        rejected = reply.status_code in (400, 422)
        fields = (key for key in OPTIONAL_FIELDS if rejected and key in payload)
        return next((key for key in fields if re.search(rf"(?<![\w\\]){key}(?!\w)", reply.text[:2000])), None)

    def _refusal(self, reply: Any) -> Exception:
        """Return the error of a reply that was refused: of this request, or of all."""
        status = reply.status_code
        moved = f" (redirected to {reply.headers['location']})" if "location" in reply.headers else ""
        message = for_message(f"status {status}{moved}: {reply.text[:2000]}").removesuffix(":")
        if status in FATAL_STATUS or status < 400:
            check = "check --endpoint, --model-name and OPENAI_API_KEY; the same command resumes the evaluation"
            return EndpointError(f"the server at {self.connection.url} returned {message}; {check}")
        return NoResponseError(message)

    async def _fail(self, item: BenchmarkProblem, samples: Sequence[int], reason: str) -> None:
        self.failures[reason] += len(samples)
        await self._store([new_generation(item, sample, self.settings, seed=0, failed=reason) for sample in samples])

    async def _store(self, batch: list[Generation]) -> None:
        """Hand a batch over and wait until it is stored."""
        stored = asyncio.Event()
        self._arrived.put((batch, stored))
        await stored.wait()


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
        if not choice.finished:  # cut off; what it calls may be cut off too
            self._dialogue.conversation.messages.append(Message("assistant", choice.text))
            self._dialogue.end("tokens")
            return False
        return self._dialogue.hear(choice.text, choice.text, _parsed_calls(choice))

    def run_calls(self) -> None:
        """Run the calls of the newest message and append what the server is to be told; it takes as long as they do."""
        told = self._dialogue.run(_parsed_calls(self._choices[-1]))
        if told is None:
            return
        told = [(tool, cut_middle(text, self._longest)) for tool, text in told]
        self._dialogue.tell(told)
        calls = self._choices[-1].calls
        self.messages.append({"role": "assistant", "content": self._choices[-1].text, "tool_calls": list(calls)})
        # Every call needs a reply, also one that was not run.
        texts = [text for _, text in told] + ["Not run."] * (len(calls) - len(told))
        self.messages += [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
            for call, text in zip(calls, texts, strict=True)
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


def _parsed_calls(choice: Choice) -> list[ParsedCall]:
    functions = [call["function"] for call in choice.calls]
    return [read_json_call({"name": each["name"], "arguments": each["arguments"] or "{}"}) for each in functions]
