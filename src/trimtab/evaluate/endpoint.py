"""Sampling from any OpenAI-compatible server: chat completions, several requests at a time, each tried again and again.

What comes back is hostile input. A server that is busy, breaks off, times out or talks nonsense is asked again after a
growing wait; a sample that never came is kept as failed, and is no wrong answer.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from trimtab.evaluate.folder import Generation, Key, prompt_hash
from trimtab.evaluate.jobs import Job
from trimtab.evaluate.settings import Settings
from trimtab.tasks import derive_seed
from trimtab.text import printable

AT_ONCE = 8  # samples asked for in one request
BYTES_PER_TOKEN, BYTES_BESIDES = 400, 1 << 20  # what a token with its log-probability may take in a body
OPTIONAL = ("logprobs", "seed", "n")  # what a server may not know; without `n` samples are asked for one by one
BUSY = (408, 409, 425, 429)
WRONG = (401, 403, 404, 405)  # no retry will help, nor will another question
LONGEST_WAIT = 60.0  # seconds


class EndpointError(ValueError):
    """The server refuses everything: the address, the key or the model's name is wrong."""


class RefusedError(Exception):
    """The server refuses this question for good."""


class TroubleError(Exception):
    """Something that may be over when the server is asked again; `wait` is what it asks for, in seconds."""

    def __init__(self, words: str, wait: float = 0.0) -> None:
        super().__init__(words)
        self.wait = wait


@dataclass(frozen=True)
class Connection:
    """How to reach a server. The key is read from OPENAI_API_KEY and neither kept nor shown."""

    url: str
    concurrency: int = 16
    timeout: float = 1800.0  # seconds for a whole answer
    retries: int = 6
    pause: float = 1.0  # seconds before the first retry; twice as long before each next one

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--endpoint {self.url!r} is no address: say http://host:port/v1")
        if parts.username or parts.password:
            raise ValueError("--endpoint has a password in it: put the key into OPENAI_API_KEY instead")
        if self.concurrency < 1 or self.retries < 0 or self.timeout <= 0:
            raise ValueError("--concurrency is at least 1, --retries at least 0, --timeout more than 0")


@dataclass
class EndpointSource:
    """Draws samples from a server. `ignored` are the optional fields that it turned out not to know."""

    connection: Connection
    settings: Settings
    name: str
    ignored: set[str] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event, repr=False)
    _client: Any = field(default=None, repr=False)

    def kept(self, jobs: Sequence[Job], done: AbstractSet[Key]) -> set[Key]:
        """Samples of a server do not depend on each other: all that is done stays."""
        return set(done)

    def draw(self, jobs: Sequence[Job], done: AbstractSet[Key]) -> Iterator[list[Generation]]:
        """What is missing, by question, as it comes."""
        import httpx

        waiting = []
        for job in jobs:
            missing = [key[2] for key in job.names() if key not in done]
            waiting += [(job, missing[first : first + AT_ONCE]) for first in range(0, len(missing), AT_ONCE)]
        timeout = httpx.Timeout(self.connection.timeout, connect=min(30.0, self.connection.timeout), pool=None)
        limits = httpx.Limits(max_connections=self.connection.concurrency)
        with httpx.Client(timeout=timeout, limits=limits, headers=_headers()) as self._client:
            try:
                yield from self._at_once(waiting)
            finally:
                self._stop.set()

    def _at_once(self, waiting: Sequence[tuple[Job, list[int]]]) -> Iterator[list[Generation]]:
        """The answers as they come. The threads are daemons: a server that hangs must not hold up a Ctrl-C."""
        work: SimpleQueue[tuple[Job, list[int]]] = SimpleQueue()
        come: SimpleQueue[list[Generation] | Exception] = SimpleQueue()
        for item in waiting:
            work.put(item)

        def ask() -> None:
            while not self._stop.is_set():
                try:
                    come.put(self.answers(*work.get_nowait()))
                except Empty:
                    return
                except Exception as error:  # the main thread raises it
                    come.put(error)
                    self._stop.set()

        for _ in range(min(self.connection.concurrency, len(waiting))):
            threading.Thread(target=ask, daemon=True).start()
        for _ in waiting:
            answer = come.get()
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def answers(self, job: Job, samples: Sequence[int]) -> list[Generation]:
        """The samples of a question; those that never came are failed."""
        found: list[Generation] = []
        attempt, why = 0, ""
        while len(found) < len(samples) and attempt <= self.connection.retries and not self._stop.is_set():
            try:
                found += self._request(job, samples[len(found) :])
                attempt = 0  # fewer than were asked for is not nothing
            except TroubleError as trouble:
                why = str(trouble)
                if attempt < self.connection.retries:
                    self._stop.wait(max(trouble.wait, self._pause(attempt)))
                attempt += 1
            except RefusedError as refusal:
                why = str(refusal)
                break
        if self._stop.is_set() and len(found) < len(samples):
            raise EndpointError("stopped")  # not failed: they are asked for when the evaluation goes on
        failed = [self._generation(job, sample, failed=why) for sample in samples[len(found) :]]
        return found + failed

    def _pause(self, attempt: int) -> float:
        """Twice as long each time, and at random, so that many do not come back at once."""
        longest = min(LONGEST_WAIT, self.connection.pause * 2.0**attempt)
        return longest * random.uniform(0.5, 1.0)

    def _request(self, job: Job, samples: Sequence[int]) -> list[Generation]:
        """One request; between one and all of the samples."""
        count = 1 if "n" in self.ignored else len(samples)
        seed = derive_seed("endpoint", self.settings.seed, job.question.benchmark, job.question.id, samples[0]) % (
            1 << 31
        )
        asked = {
            "model": self.name,
            "messages": [dict(message) for message in job.question.problem.prompt],
            "temperature": self.settings.temperature,
            "top_p": self.settings.top_p,
            "max_tokens": self.settings.max_new_tokens,
            **{key: value for key, value in self._optional(count, seed).items() if key not in self.ignored},
        }
        status, wait, body = self._post(asked, BYTES_BESIDES + count * self.settings.max_new_tokens * BYTES_PER_TOKEN)
        if status in (400, 422) and (unknown := [key for key in OPTIONAL if key in asked and _names(key, body)]):
            self.ignored.add(unknown[0])
            return self._request(job, samples)
        self._check_status(status, wait, body)
        choices, usage = parse(body)
        shown = choices[:count]
        used = usage / len(choices) if usage is not None else None  # the mean is all that is known of each
        return [
            self._generation(job, sample, seed=seed, **{"tokens": used, **choice})
            for sample, choice in zip(samples, shown, strict=False)
        ]

    def _optional(self, count: int, seed: int) -> dict[str, Any]:
        return {"n": count, "seed": seed, "logprobs": True}

    def _post(self, asked: dict[str, Any], most: int) -> tuple[int, float, bytes]:
        """Status, seconds the server asks to wait, and a body of at most so many bytes within the time limit."""
        import httpx

        until = time.monotonic() + self.connection.timeout
        body = bytearray()
        try:
            with self._client.stream(
                "POST", f"{self.connection.url.rstrip('/')}/chat/completions", json=asked
            ) as reply:
                for chunk in reply.iter_bytes():
                    body += chunk
                    if len(body) > most:
                        raise TroubleError(f"an answer of more than {most:,} bytes")
                    if time.monotonic() > until:
                        raise TroubleError(f"no whole answer within {self.connection.timeout:g} s")
                return reply.status_code, _seconds(reply.headers.get("retry-after")), bytes(body)
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise TroubleError(_hide_key(f"{type(error).__name__}: {error}"[:200])) from None

    def _check_status(self, status: int, wait: float, body: bytes) -> None:
        if status < 300:
            return
        words = _hide_key(f"status {status}: {_words(body)}"[:300])
        if status in WRONG or status < 400:
            raise EndpointError(f"the server at {self.connection.url} answers with {words}")
        if status in BUSY or status >= 500:
            raise TroubleError(words, wait)
        raise RefusedError(words)

    def _generation(self, job: Job, sample: int, **known: Any) -> Generation:
        question = job.question
        return Generation(
            benchmark=question.benchmark,
            problem=question.id,
            sample=sample,
            prompt_hash=prompt_hash(question),
            settings=self.settings.digest(),
            **{"seed": 0, **known},
        )


def parse(body: bytes) -> tuple[list[dict[str, Any]], int | None]:
    """The choices of a chat completion, and the tokens it used; nonsense is trouble, to be asked for again."""
    try:
        reply = json.loads(body)
        choices = [_choice(choice) for choice in reply["choices"]]
        usage = (reply.get("usage") or {}).get("completion_tokens")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TroubleError(
            f"an answer that is no chat completion ({type(error).__name__}): {_words(body)}"[:200]
        ) from None
    if not choices:
        raise TroubleError("an answer without choices")
    known = isinstance(usage, int) and not isinstance(usage, bool) and usage >= 0
    return choices, usage if known else None


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    text = choice["message"].get("content")
    if text is None:  # cut off before it said anything
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
    """Some servers repeat the key that they refuse."""
    key = os.environ.get("OPENAI_API_KEY")
    return text.replace(key, "(the key)") if key else text


def _names(key: str, body: bytes) -> bool:
    """Whether a refusal speaks of a field."""
    return re.search(rf"(?<![\w\\]){key}(?!\w)", _words(body)) is not None


def _words(body: bytes) -> str:
    return " ".join(printable(body[:2000].decode("utf-8", "replace")).split())


def _seconds(header: str | None) -> float:
    try:
        return min(max(float(header or 0), 0.0), LONGEST_WAIT)
    except ValueError:
        return 0.0
