"""A rule over HTTP, for judges and services: the rule's name is the URL that responses are posted to.

The request is `{"responses": [{"response", "answer", "prompt", "source", "extra", "tokens", "finished"}, ...]}`, the
reply `{"verdicts": [...]}` with one entry for each: true or false, a number, a kind of verdict, or an object with
`kind` and `score`. The service's failures are the grader's, never the response's: verdicts are then `crashed`.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.data import Sample
from trimtab.grading.verdicts import Verdict, facts, verdict_or_crash
from trimtab.text import shown

MAX_REPLY_BYTES = 1 << 22
RETRY_STATUS = (408, 409, 425, 429)  # and all from 500 on
FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0  # seconds before the first retry, doubled before each next one

# httpx takes a tenth of a second to import, which commands without a request should not pay.
if TYPE_CHECKING:
    from trimtab.bounded_http import BoundedClient


class ServiceError(Exception):
    """A request that got no verdicts; `wait` is the server's Retry-After, None if a retry cannot help."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(frozen=True)
class HttpRule:
    """A service that grades: `seconds` for a whole exchange, `batch` responses per request, `concurrency` requests.

    `key_variable` names an environment variable; its value is sent as a bearer token, and neither stored nor shown.
    """

    url: str
    seconds: float = 60.0
    retries: int = 4
    batch: int = 32
    concurrency: int = 8
    key_variable: str = ""

    def __post_init__(self) -> None:
        from trimtab.bounded_http import read_key, url_problem

        wrong = url_problem(self.url)
        if wrong == "password":
            raise ValueError("the URL contains a password: put a key into an environment variable (key_variable)")
        if wrong:
            raise ValueError(f"{shown(self.url)} is not a URL of a server, as http://localhost:8000/grade")
        for name, least in (("retries", 0), ("batch", 1), ("concurrency", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= 10_000:
                raise ValueError(f"{name} = {shown(value)} must be a whole number from {least} to 10,000")
        if type(self.seconds) not in (int, float) or not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds = {shown(self.seconds)} must be a number of seconds")
        if self.key_variable and not read_key(self.key_variable):
            raise ValueError(f"key_variable = {shown(self.key_variable)}: there is no such environment variable")

    def grade_here(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Post the responses and return their verdicts; one that never got one has crashed."""
        from trimtab.bounded_http import event_loop_thread

        batches = [samples[start : start + self.batch] for start in range(0, len(samples), self.batch)]
        with event_loop_thread() as loop:
            graded = asyncio.run_coroutine_threadsafe(self._grade_batches(batches), loop).result()
        return [verdict for verdicts in graded for verdict in verdicts]

    async def _grade_batches(self, batches: Sequence[Sequence[Sample]]) -> list[list[Verdict]]:
        from trimtab.bounded_http import BoundedClient, read_key

        turns = asyncio.Semaphore(self.concurrency)
        async with BoundedClient(
            self.concurrency, seconds=self.seconds, max_bytes=MAX_REPLY_BYTES, key=read_key(self.key_variable)
        ) as client:

            async def grade(batch: Sequence[Sample]) -> list[Verdict]:
                async with turns:
                    return await self._grade(client, batch)

            return await asyncio.gather(*map(grade, batches))

    async def _grade(self, client: BoundedClient, batch: Sequence[Sample]) -> list[Verdict]:
        """Grade a batch, with retries and growing pauses between them."""
        from trimtab.bounded_http import for_message

        reason = ""
        for attempt in range(self.retries + 1):
            try:
                values = await self._request(client, batch)
                return [
                    verdict_or_crash(value, f"{self.url} for row {row} of {len(batch)}, ", sample)
                    for row, (value, sample) in enumerate(zip(values, batch, strict=True), start=1)
                ]
            except ServiceError as error:
                reason = for_message(str(error))
                if error.wait is None:
                    break
                if attempt < self.retries:
                    # Jittered, so that clients do not retry in step.
                    pause = min(MAX_PAUSE, FIRST_PAUSE * 2.0**attempt) * random.uniform(0.5, 1.0)
                    await asyncio.sleep(max(error.wait, pause))
        return [Verdict("crashed", error=f"{self.url} gave no verdicts: {reason}")] * len(batch)

    async def _request(self, client: BoundedClient, batch: Sequence[Sample]) -> list[Any]:
        from trimtab.bounded_http import HttpError, hide_key, read_key

        content = json.dumps({"responses": [facts(sample) for sample in batch]}, default=str).encode()
        try:
            reply = await client.post(self.url, content=content, headers={"Content-Type": "application/json"})
        except HttpError as error:
            raise ServiceError(str(error), wait=0.0) from None
        if reply.status_code != 200:
            repeat = reply.status_code in RETRY_STATUS or reply.status_code >= 500
            wait = retry_after(reply.headers.get("retry-after")) if repeat else None
            raise ServiceError(f"status {reply.status_code}: {reply.text[:2000]}", wait)
        try:
            found = json.loads(reply.content.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            excerpt = hide_key(reply.text[:200], read_key(self.key_variable))
            raise ServiceError(f"not JSON: {excerpt}", wait=0.0) from None
        values = found.get("verdicts") if isinstance(found, dict) else found
        if not isinstance(values, list) or len(values) != len(batch):
            got = f"{len(values)} verdicts" if isinstance(values, list) else shown(found)
            raise ServiceError(f"it returned {got} for {len(batch)} responses; a list of one each is needed")
        return values


def retry_after(header: str | None) -> float:
    """Return the seconds of a Retry-After header, within bounds."""
    try:
        return min(MAX_PAUSE, max(0.0, float(header or 0)))  # in this order NaN becomes 0
    except ValueError:
        return 0.0
