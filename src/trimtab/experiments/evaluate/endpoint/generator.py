"""Sample from any OpenAI-compatible server: chat completions, several requests at a time, with retries.

Replies are untrusted input. A request is retried with growing pauses where the server is busy, disconnects, times out
or returns garbage; a sample that never arrived is stored as failed, which is not a wrong answer.
"""

from __future__ import annotations

import asyncio
import json
import re
from asyncio import sleep
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from trimtab.agents import ToolSet
from trimtab.bounded_http import (
    HttpError,
    HttpReply,
    NoConnectionError,
    bounded_request,
    event_loop_thread,
    is_retryable,
    open_client,
    read_key,
    retry_after,
    retry_pause,
)
from trimtab.data import derive_seed
from trimtab.experiments.evaluate.endpoint.completion import MAX_BYTES, BadCompletionError, Choice, parse_completion
from trimtab.experiments.evaluate.endpoint.connection import (
    KEY_VARIABLE,
    EndpointConnection,
    EndpointError,
    for_message,
)
from trimtab.experiments.evaluate.endpoint.conversation import EndpointConversation
from trimtab.experiments.evaluate.folder import Batches, Generation, GenerationRequest, SampleKey, problem_key
from trimtab.experiments.evaluate.progress import MessageLog
from trimtab.experiments.evaluate.settings import EvalSettings

SAMPLES_PER_REQUEST = 8
TOKENS_PER_REQUEST = SAMPLES_PER_REQUEST * 20_480  # with their log-probabilities they fit into `MAX_BYTES`
OPTIONAL_FIELDS = ("logprobs", "seed", "n")  # a server may not know them; without `n` each sample is one request
FATAL_STATUS = (401, 403, 404, 405)  # neither a retry nor another prompt will help
OPENING_SECONDS = 60.0  # for an environment's `reset`
T = TypeVar("T")


class NoResponseError(Exception):
    """A request was given up; the message is why."""


class RejectedRequestError(Exception):
    """The server rejects this request, and would again."""


class RetryableError(Exception):
    """A failure that a retry may overcome; `wait` is the server's Retry-After in seconds."""

    def __init__(self, message: str, wait: float = 0.0, connected: bool = True) -> None:
        super().__init__(message)
        self.wait = wait
        self.connected = connected


@dataclass
class EndpointGenerator:
    """Generates samples by a server. `unsupported` are the optional fields that the server rejected."""

    connection: EndpointConnection
    settings: EvalSettings
    name: str
    log: MessageLog = lambda text: None
    unsupported: set[str] = field(default_factory=set)
    tools: ToolSet | None = None

    def reusable(self, requests: Sequence[GenerationRequest], done: AbstractSet[SampleKey]) -> set[SampleKey]:
        """Return all that is done: a server's samples do not depend on each other, as those of a native batch do."""
        return set(done)

    def generate(self, requests: Sequence[GenerationRequest], done: AbstractSet[SampleKey]) -> Batches:
        """Yield the missing samples by problem, as they arrive."""
        missing = ((request, [key[2] for key in request.sample_keys() if key not in done]) for request in requests)
        size = max(1, min(SAMPLES_PER_REQUEST, TOKENS_PER_REQUEST // self.settings.max_new_tokens))
        size = 1 if self.tools else size  # conversations part ways after their first message
        work = [(request, some[n : n + size]) for request, some in missing for n in range(0, len(some), size)]
        sampling = _Sampling(self.connection, self.settings, self.name, self.unsupported, self.tools)
        if self.tools is not None:
            problems = {problem_key(request): request.item.problem for request, _ in work}
            openings = self.tools.openings(list(problems.values()), OPENING_SECONDS)
            sampling.openings = dict(zip(problems, openings, strict=True))
        with event_loop_thread() as loop:
            running = asyncio.run_coroutine_threadsafe(sampling.run(work), loop)
            running.add_done_callback(lambda end: sampling.arrived.put(None if end.cancelled() else end.exception()))
            while isinstance(item := sampling.arrived.get(), tuple):
                batch, stored = item
                yield batch
                with suppress(RuntimeError):  # after an error the loop may have ended
                    loop.call_soon_threadsafe(stored.set)
        if item is not None:
            raise item
        for warning in sampling.warnings():
            self.log(f"warning: the server at {self.connection.url} {warning}")


@dataclass
class _Sampling:
    """The requests of one evaluation, all in one event loop; batches go into `arrived`, each until it is stored."""

    connection: EndpointConnection
    settings: EvalSettings
    name: str
    unsupported: set[str]
    tools: ToolSet | None = None
    openings: Mapping[SampleKey, str | None] = field(default_factory=dict)  # what an environment says of a problem
    # A batch comes with an event to be set once it is stored. At the end comes None, or the error.
    arrived: SimpleQueue[tuple[list[Generation], asyncio.Event] | BaseException | None] = field(
        default_factory=SimpleQueue
    )
    failures: Counter[str] = field(default_factory=Counter)  # failed samples by reason
    left_out: Counter[str] = field(default_factory=Counter)  # replies without their log-probabilities, by reason
    _connected: bool = False  # to the server, at any time
    _parsing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _client: Any = None

    async def run(self, work: Sequence[tuple[GenerationRequest, list[int]]]) -> None:
        """Send the requests, `concurrency` at a time."""
        waiting = iter(work)

        async def worker() -> None:
            for request, samples in waiting:
                if self.tools is None:
                    await self._sample(request, samples)
                else:
                    await self._converse(request, samples[0], self.tools)

        try:
            async with (
                open_client(self.connection.concurrency, read_key(KEY_VARIABLE)) as self._client,
                asyncio.TaskGroup() as group,  # the first error cancels the other workers
            ):
                for _ in range(min(self.connection.concurrency, len(work))):
                    group.create_task(worker())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def warnings(self) -> Iterator[str]:
        """Yield what the user should know of the replies."""
        if self.failures:
            reason = self.failures.most_common(1)[0][0]
            what = f"gave no response for {self.failures.total():,} samples, mostly because of: {reason}"
            yield f"{what}; the same command with --retry-failed requests them again"
        if self.left_out:
            reason = self.left_out.most_common(1)[0][0]
            what = f"sent unusable log-probabilities in {self.left_out.total():,} replies: {reason}"
            yield f"{what}; they are left out, the responses are kept"

    async def _sample(self, request: GenerationRequest, samples: Sequence[int]) -> None:
        """Request the samples of a problem until all have arrived; those that never do are failed."""
        while samples:
            try:
                # A reply with fewer choices than requested is progress: the attempts are counted anew.
                samples = samples[await self._retried(partial(self._request, request, samples)) :]
            except NoResponseError as error:
                await self._fail(request, samples, str(error))
                break

    async def _converse(self, request: GenerationRequest, sample: int, tools: ToolSet) -> None:
        """Request one sample message by message, and run the calls in between; without a message it is failed."""
        settings, seed = self.settings, self._seed(request, sample)
        talk = EndpointConversation(request.item.problem, tools, settings, self.openings[problem_key(request)])
        try:
            while talk.waits_for_message:
                choice = await self._retried(partial(self._message, talk, seed))
                if talk.hear(choice):
                    await asyncio.wrap_future(tools.in_thread(talk.run_calls))
            # Not in the tools' threads: it waits for one of them.
            known = await asyncio.to_thread(talk.finish)
            await self._store([request.generation(sample, settings, seed=seed, **known)])
        except NoResponseError as error:
            await self._fail(request, [sample], str(error))
        finally:
            talk.close()

    async def _message(self, talk: EndpointConversation, seed: int) -> Choice:
        tools = {"tools": talk.schemas} if talk.schemas else {}
        reply, _ = await self._complete(talk.messages, 1, seed, max_tokens=talk.tokens_left, **tools)
        with reply.body:
            async with self._parsing:
                return self._parse(reply, 1)[0]

    async def _retried(self, send: Callable[[], Awaitable[T]]) -> T:
        """Return what `send` returns, tried again where that may help; NoResponseError where it does not."""
        reason = ""
        for attempt in range(self.connection.retries + 1):
            try:
                return await send()
            except RetryableError as error:
                reason = str(error)
                if attempt < self.connection.retries:
                    await sleep(max(error.wait, retry_pause(attempt)))
                self._connected = self._connected or error.connected
            except RejectedRequestError as error:
                reason = str(error)
                break
        if not self._connected:  # nor will the other requests reach anything
            raise EndpointError(
                f"no server answers at {self.connection.url} ({reason}): start it, or check --endpoint; nothing was "
                "sampled, and the same command starts or resumes the evaluation"
            )
        raise NoResponseError(reason)

    async def _fail(self, request: GenerationRequest, samples: Sequence[int], reason: str) -> None:
        self.failures[reason] += len(samples)
        await self._store([request.generation(sample, self.settings, seed=0, failed=reason) for sample in samples])

    def _seed(self, request: GenerationRequest, sample: int) -> int:
        item = request.item
        return derive_seed("endpoint", self.settings.seed, item.benchmark, item.id, sample) % (1 << 31)

    async def _request(self, request: GenerationRequest, samples: Sequence[int]) -> int:
        """Send one request, store the samples that it gives, and return their number, at least one."""
        seed = self._seed(request, samples[0])
        prompt = [dict(message) for message in request.item.problem.prompt]
        reply, count = await self._complete(prompt, len(samples), seed)
        with reply.body:
            # One reply at a time from its parsing until it is stored, so that memory does not grow with `concurrency`.
            async with self._parsing:
                found = [
                    request.generation(sample, self.settings, seed=seed, **_fields(choice))
                    for sample, choice in zip(samples, self._parse(reply, count), strict=False)
                ]
                await self._store(found)
        return len(found)

    async def _complete(
        self, messages: Sequence[Mapping[str, Any]], count: int, seed: int, **more: Any
    ) -> tuple[HttpReply, int]:
        """Send one request; return the reply and how many choices it may have.

        Optional fields that the server does not know are left out from then on.
        """
        while True:
            count = 1 if "n" in self.unsupported else count
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
            reply = await self._post(payload)
            try:
                rejected = reply.status in (400, 422)
                named = [key for key in OPTIONAL_FIELDS if rejected and key in payload and _names(key, reply)]
                if not named:
                    self._check_status(reply)
                    return reply, count
                self.unsupported.add(named[0])
            except BaseException:
                reply.body.close()
                raise
            reply.body.close()

    async def _post(self, payload: dict[str, Any]) -> HttpReply:
        url = f"{self.connection.url.rstrip('/')}/chat/completions"
        # Escaped to ASCII: a suffix from the command line may hold bytes that are not UTF-8.
        content, headers = json.dumps(payload).encode(), {"Content-Type": "application/json"}
        limits: Any = {"seconds": self.connection.timeout, "max_bytes": MAX_BYTES}
        try:
            reply = await bounded_request(self._client, "POST", url, content=content, headers=headers, **limits)
        except HttpError as error:
            raise RetryableError(for_message(str(error)), connected=not isinstance(error, NoConnectionError)) from None
        self._connected = True
        return reply

    def _check_status(self, reply: HttpReply) -> None:
        status = reply.status
        if status < 300:
            return
        moved = f" (redirected to {reply.headers['location']})" if "location" in reply.headers else ""
        message = for_message(f"status {status}{moved}: {reply.excerpt()}").removesuffix(":")
        if status in FATAL_STATUS or status < 400:
            check = "check --endpoint, --model-name and OPENAI_API_KEY; the same command resumes the evaluation"
            raise EndpointError(f"the server at {self.connection.url} returned {message}; {check}")
        if is_retryable(status):
            raise RetryableError(message, retry_after(reply.headers.get("retry-after")))
        raise RejectedRequestError(message)

    def _parse(self, reply: HttpReply, count: int) -> list[Choice]:
        """Return at most `count` choices of a completion."""
        try:
            completion = parse_completion(reply.read(), count, self.settings.max_new_tokens)
        except BadCompletionError as error:
            raise RetryableError(for_message(f"not a chat completion ({error}): {reply.excerpt()}")) from None
        if completion.left_out:
            self.left_out[for_message(completion.left_out)] += 1
        choices = completion.choices
        return [replace(choice, tokens=completion.tokens) if choice.tokens is None else choice for choice in choices]

    async def _store(self, batch: list[Generation]) -> None:
        """Hand a batch over and wait until it is stored."""
        stored = asyncio.Event()
        self.arrived.put((batch, stored))
        await stored.wait()


def _fields(choice: Choice) -> dict[str, Any]:
    """Return a choice as fields of `Generation`."""
    return {key: value for key, value in asdict(choice).items() if key != "calls"}


def _names(key: str, reply: HttpReply) -> bool:
    """Return whether an error body names a request field."""
    return re.search(rf"(?<![\w\\]){key}(?!\w)", reply.excerpt()) is not None
