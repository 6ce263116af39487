"""Sample from any OpenAI-compatible server: chat completions, several requests at a time, with retries.

Responses are untrusted input. A request is retried with growing pauses where the server is busy, disconnects, times out
or returns garbage; a sample that never arrived is stored as failed, which is not a wrong answer.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import threading
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from trimtab.evaluate.folder import Batches, Generation, GenerationRequest, SampleKey
from trimtab.evaluate.settings import EvalSettings
from trimtab.tasks import derive_seed
from trimtab.text import printable

# httpx alone is not enough: its transport retries failed connections only, and its timeouts bound single reads. A
# server's 429 and 5xx, garbage in its body, endless or trickling bodies and fewer choices than requested all occur with
# real servers over hours of sampling, and are handled here.
SAMPLES_PER_REQUEST = 8
BYTES_PER_TOKEN, BYTES_BESIDES = 400, 1 << 20  # what a token with its log-probability may take in a body
OPTIONAL_FIELDS = ("logprobs", "seed", "n")  # a server may not know them; without `n` each sample is one request
RETRY_STATUS = (408, 409, 425, 429)  # and all from 500 on
FATAL_STATUS = (401, 403, 404, 405)  # neither a retry nor another prompt will help
FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0  # seconds before the first retry, doubled before each next one


class EndpointError(ValueError):
    """The server refuses every request: the address, the key or the model's name is wrong."""


class RejectedRequestError(Exception):
    """The server rejects this request, and would again."""


class RetryableError(Exception):
    """A failure that a retry may overcome; `wait` is the server's Retry-After in seconds."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(frozen=True)
class EndpointConnection:
    """How to reach a server. The key is read from OPENAI_API_KEY and neither stored nor shown."""

    url: str
    concurrency: int = 16
    timeout: float = 1800.0  # seconds for a complete response
    retries: int = 6

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--endpoint {self.url!r} is not a URL: give one like http://host:port/v1")
        if parts.username or parts.password:
            raise ValueError("--endpoint contains a password: put the key into OPENAI_API_KEY instead")
        if self.concurrency < 1 or self.retries < 0 or self.timeout <= 0:
            raise ValueError("--concurrency must be at least 1, --retries at least 0, --timeout more than 0")


@dataclass
class EndpointGenerator:
    """Generates samples by a server. `unsupported` are the optional fields that the server rejected."""

    connection: EndpointConnection
    settings: EvalSettings
    name: str
    unsupported: set[str] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event, repr=False)
    _client: Any = field(default=None, repr=False)

    def reusable(self, requests: Sequence[GenerationRequest], done: AbstractSet[SampleKey]) -> set[SampleKey]:
        """Return all that is done: a server's samples do not depend on each other, as those of a native batch do."""
        return set(done)

    def generate(self, requests: Sequence[GenerationRequest], done: AbstractSet[SampleKey]) -> Batches:
        """Yield the missing samples by problem, as they arrive."""
        import httpx

        missing = ((request, [key[2] for key in request.sample_keys() if key not in done]) for request in requests)
        size = SAMPLES_PER_REQUEST
        work = [(request, some[n : n + size]) for request, some in missing for n in range(0, len(some), size)]
        timeout = httpx.Timeout(self.connection.timeout, connect=min(30.0, self.connection.timeout), pool=None)
        limits = httpx.Limits(max_connections=self.connection.concurrency)
        with httpx.Client(timeout=timeout, limits=limits, headers=_headers()) as self._client:
            try:
                yield from self._in_threads(work)
            finally:
                self._stop.set()

    def _in_threads(self, work: Sequence[tuple[GenerationRequest, list[int]]]) -> Batches:
        """Send the requests from several threads and yield the samples as they arrive."""
        queue: SimpleQueue[tuple[GenerationRequest, list[int]]] = SimpleQueue()
        results: SimpleQueue[list[Generation] | Exception] = SimpleQueue()
        for item in work:
            queue.put(item)

        def run() -> None:
            while not self._stop.is_set():
                try:
                    results.put(self.samples(*queue.get_nowait()))
                except Empty:
                    return
                except Exception as error:  # the main thread raises it
                    results.put(error)
                    self._stop.set()

        # Daemon threads instead of an executor, which joins its threads at exit: a server that hangs would delay a
        # Ctrl-C by up to half an hour.
        for _ in range(min(self.connection.concurrency, len(work))):
            threading.Thread(target=run, daemon=True).start()
        for _ in work:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            yield result

    def samples(self, request: GenerationRequest, samples: Sequence[int]) -> list[Generation]:
        """Return the samples of a problem; those that never arrived are failed."""
        received: list[Generation] = []
        attempt, reason = 0, ""
        while len(received) < len(samples) and attempt <= self.connection.retries and not self._stop.is_set():
            try:
                received += self._request(request, samples[len(received) :])
                attempt = 0  # a response with fewer choices than requested is progress
            except RetryableError as error:
                reason = str(error)
                if attempt < self.connection.retries:
                    self._stop.wait(max(error.wait, retry_pause(attempt)))
                attempt += 1
            except RejectedRequestError as error:
                reason = str(error)
                break
        if self._stop.is_set() and len(received) < len(samples):
            raise EndpointError("stopped")  # not failed: they are requested when the evaluation is resumed
        missing = samples[len(received) :]
        return received + [request.generation(sample, self.settings, seed=0, failed=reason) for sample in missing]

    def _request(self, request: GenerationRequest, samples: Sequence[int]) -> list[Generation]:
        """Send one request; return between one and all of the samples."""
        item, settings = request.item, self.settings
        count = 1 if "n" in self.unsupported else len(samples)
        seed = derive_seed("endpoint", settings.seed, item.benchmark, item.id, samples[0]) % (1 << 31)
        optional = {"n": count, "seed": seed, "logprobs": True}
        payload = {
            "model": self.name,
            "messages": [dict(message) for message in item.problem.prompt],
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_new_tokens,
            **{key: value for key, value in optional.items() if key not in self.unsupported},
        }
        status, wait, body = self._post(payload, BYTES_BESIDES + count * settings.max_new_tokens * BYTES_PER_TOKEN)
        if status in (400, 422) and (named := [key for key in OPTIONAL_FIELDS if key in payload and _names(key, body)]):
            self.unsupported.add(named[0])
            return self._request(request, samples)
        self._check_status(status, wait, body)
        choices, usage = parse_completion(body)
        tokens = usage / len(choices) if usage is not None else None  # usage is a sum: each gets the mean
        return [
            request.generation(sample, settings, seed=seed, **{"tokens": tokens, **choice})
            for sample, choice in zip(samples, choices[:count], strict=False)
        ]

    def _post(self, payload: dict[str, Any], max_bytes: int) -> tuple[int, float, bytes]:
        """Return status, Retry-After in seconds, and the body, bounded in bytes and in total time."""
        import httpx

        late = RetryableError(f"no complete response within {self.connection.timeout:g} s")
        until = time.monotonic() + self.connection.timeout
        body = bytearray()
        url = f"{self.connection.url.rstrip('/')}/chat/completions"
        try:
            with self._client.stream("POST", url, json=payload) as reply:
                for chunk in reply.iter_bytes():
                    body += chunk
                    if len(body) > max_bytes:
                        raise RetryableError(f"a response of more than {max_bytes:,} bytes")
                    if time.monotonic() > until:
                        raise late
                return reply.status_code, _retry_after(reply.headers.get("retry-after")), bytes(body)
        except httpx.ReadTimeout:
            raise late from None
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise RetryableError(_hide_key(f"{type(error).__name__}: {error}"[:200])) from None

    def _check_status(self, status: int, wait: float, body: bytes) -> None:
        if status < 300:
            return
        message = _hide_key(f"status {status}: {_excerpt(body)}"[:300])
        if status in FATAL_STATUS or status < 400:
            raise EndpointError(f"the server at {self.connection.url} returned {message}")
        if status in RETRY_STATUS or status >= 500:
            raise RetryableError(message, wait)
        raise RejectedRequestError(message)


def retry_pause(attempt: int) -> float:
    """Return the seconds before a retry: doubled each time, and jittered, so that clients do not retry in step."""
    return min(MAX_PAUSE, FIRST_PAUSE * 2.0**attempt) * random.uniform(0.5, 1.0)


def parse_completion(body: bytes) -> tuple[list[dict[str, Any]], int | None]:
    """Return the choices of a chat completion and its completion tokens; raise `RetryableError` for garbage."""
    try:
        reply = json.loads(body)
        choices = [_parse_choice(choice) for choice in reply["choices"]]
        usage = (reply.get("usage") or {}).get("completion_tokens")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        message = f"not a chat completion ({type(error).__name__}): {_excerpt(body)}"
        raise RetryableError(message[:200]) from None
    if not choices:
        raise RetryableError("a response without choices")
    known = isinstance(usage, int) and not isinstance(usage, bool) and usage >= 0
    return choices, usage if known else None


def _parse_choice(choice: dict[str, Any]) -> dict[str, Any]:
    text = choice["message"].get("content")
    if text is None:  # cut off while reasoning, before any content
        text = ""
    if not isinstance(text, str):
        raise TypeError("content is not text")
    tokens = (choice.get("logprobs") or {}).get("content") or []
    logps = [float(token["logprob"]) for token in tokens]
    found: dict[str, Any] = {"text": text, "finished": choice.get("finish_reason") != "length"}
    if logps:
        mean = math.fsum(logps) / len(logps) if all(map(math.isfinite, logps)) else math.nan
        found |= {"tokens": len(logps), "logp": mean if math.isfinite(mean) else None}
    return found


def _headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _hide_key(text: str) -> str:
    """Remove the key from a message: some servers repeat the key that they refuse."""
    key = os.environ.get("OPENAI_API_KEY")
    return text.replace(key, "(the key)") if key else text


def _names(key: str, body: bytes) -> bool:
    """Return whether an error body names a request field."""
    return re.search(rf"(?<![\w\\]){key}(?!\w)", _excerpt(body)) is not None


def _excerpt(body: bytes) -> str:
    return " ".join(printable(body[:2000].decode("utf-8", "replace")).split())


def _retry_after(header: str | None) -> float:
    try:
        return min(MAX_PAUSE, max(0.0, float(header or 0)))  # in this order NaN becomes 0
    except ValueError:
        return 0.0
