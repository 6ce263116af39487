"""One rollout behind its API key: its requests, their retries, its budget of tokens, and its tree of messages.

A request is the retry of an earlier one if its body is the same and
- its header `x-stainless-retry-count`, which the openai package sends, is above 0: it gets the recorded answer, or
  waits for the running one;
- it has no such header, and the earlier one still runs: it waits for that one too.
With a count of 0, or without the header once the earlier one has ended, it is a request of its own: an agent that asks
the same thing three times gets three samples.
"""

from __future__ import annotations

import asyncio
import hashlib
import traceback
from array import array
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from trimtab.agents.chat_replies import ChatReply, reply_id, reply_message, token_logprobs
from trimtab.agents.chat_requests import ChatRequest, RequestError
from trimtab.agents.chat_tokens import ChatRenderError, ChatTokens, ChatTooLongError
from trimtab.agents.endpoint_limits import EndpointLimits
from trimtab.agents.message_tree import MessageTree, Place, Turn
from trimtab.agents.request_queue import RequestQueue
from trimtab.agents.sealed_rollout import RolloutStats, SealedRollout
from trimtab.agents.stop_strings import StopStrings
from trimtab.data import Request, Response

IN_LOOP = 4_096  # characters of messages that are tokenized in the server's event loop; more, in a thread
ENDED = {
    "context_length_exceeded": "context_length",
    "token_budget_exceeded": "token_budget",
    "request_limit_exceeded": "request_limit",
}


@dataclass(eq=False)
class Job:
    """A request on its way, or answered: `reply` is what its waiters get."""

    asked: ChatRequest
    body: bytes  # the digest of its body
    number: int
    reply: asyncio.Future[ChatReply]
    waiters: int = 0
    turn: Turn | None = None
    request: Request | None = None
    task: asyncio.Task[None] | None = None
    leaving: asyncio.TimerHandle | None = None


class Session:
    """One rollout: an API key, and the tree of what was sampled with it.

    Any thread may call its public methods; what begins with `in_loop` belongs to the server's event loop.
    """

    def __init__(
        self,
        api_key: str,
        seed: int,
        max_new_tokens: int,
        sample: int,
        chat: ChatTokens,
        limits: EndpointLimits,
        queue: RequestQueue,
        loop: asyncio.AbstractEventLoop,
        threads: Executor,
        run_in_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        self.api_key, self.sealed = api_key, False
        self._seed, self._sample = seed, sample
        self._chat, self._limits, self._queue = chat, limits, queue
        self._loop, self._threads, self._run_in_loop = loop, threads, run_in_loop
        self._tree = MessageTree(chat, limits.max_tokens)
        self._budget, self._sampled_tokens = max_new_tokens, 0
        self._jobs: dict[bytes, list[Job]] = {}
        self._running: set[Job] = set()
        self._asked: Counter[bytes] = Counter()  # requests by their prompts
        self._started = 0
        self._rewards: dict[int, float] = {}
        self._counts: Counter[str] = Counter()
        self._overridden: Counter[str] = Counter()
        self._new_roots: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._ended = self._error = ""

    def reward(self, request: int, value: float) -> None:
        """Note the reward of a request, by its number from 0 in the order in which requests were made."""
        if not 0 <= request < self.requests:
            raise ValueError(f"there is no request {request}: {self.requests} were answered")
        self._rewards[request] = value

    @property
    def requests(self) -> int:
        """How many requests were answered so far."""
        return sum(turn.received for turn in list(self._tree.turns))

    def seal(self) -> SealedRollout:
        """End the rollout: cancel what still runs, refuse what comes later, and return what there is."""
        self._run_in_loop(self.in_loop_seal)
        turns = sorted(self._tree.turns, key=lambda turn: turn.number)
        received = [turn for turn in turns if turn.received]
        for number, turn in enumerate([*received, *(turn for turn in turns if not turn.received)]):
            turn.number = number
        branches = tuple(self._tree.branches(self._sample, self._rewards))
        last = received[-1].read.text if received else ""
        return SealedRollout(branches, last, self._stats(len(branches)))

    def _stats(self, branches: int) -> RolloutStats:
        turns = self._tree.turns
        return RolloutStats(
            requests=len(turns),
            branches=branches,
            turns=len(turns) - self._tree.abandoned,
            merged=sum(turn.place.parent is not None for turn in turns),
            replayed=self._counts["replayed"],
            joined=self._counts["joined"],
            abandoned=self._tree.abandoned,
            cancelled=self._counts["cancelled"],
            sampled_tokens=self._sampled_tokens,
            overridden=dict(self._overridden),
            new_roots=dict(self._new_roots),
            refused=dict(self._refused),
            ended=self._ended,
            error=self._error,
        )

    def in_loop_seal(self) -> None:
        """Refuse what comes from now on, and everybody who waits."""
        self.sealed = True
        for job in list(self._running):
            self._cancel(job, sealed_error())

    def in_loop_fail(self, error: RequestError) -> None:
        """Refuse everybody who waits."""
        for job in list(self._running):
            self._cancel(job, error)

    def in_loop_find(self, body: bytes, retry: int | None) -> Job | None:
        """Return the job that a request is a retry of, if it is one."""
        known = self._jobs.get(body, [])
        if retry is None:
            known = [job for job in known if not job.reply.done()]
        if not known or retry == 0:
            return None
        # Of several alike, rather one that nobody waits for and nobody has got.
        alone = [job for job in known if not job.waiters and (job.turn is None or not job.turn.received)]
        job = (alone or known)[-1]
        self._counts["replayed" if job.reply.done() else "joined"] += 1
        return job

    def in_loop_start(self, asked: ChatRequest, body: bytes) -> Job:
        """Start a request."""
        if self._started >= self._limits.max_requests:
            most = self._limits.max_requests
            raise RequestError(
                f"the rollout has made {most:,} requests, the most allowed", code="request_limit_exceeded"
            )
        if len(self._running) >= self._limits.max_waiting:
            raise RequestError(
                f"{len(self._running)} requests of this rollout are waiting: send fewer at a time",
                code="too_many_requests",
                status=429,
            )
        if asked.tools and self._chat.tools_problem:
            raise RequestError(self._chat.tools_problem, "tools", "unsupported_value")
        self._overridden.update(asked.overridden)
        job = Job(asked, body, self._started, self._loop.create_future())
        job.reply.add_done_callback(_look_at)
        self._started += 1
        self._jobs.setdefault(body, []).append(job)
        self._running.add(job)
        job.task = self._loop.create_task(self._answer(job))
        return job

    def in_loop_join(self, job: Job) -> None:
        """Wait for a job, as one more."""
        job.waiters += 1
        if job.leaving is not None:
            job.leaving.cancel()
            job.leaving = None

    def in_loop_leave(self, job: Job, received: bool) -> None:
        """Stop waiting for a job. One that nobody waits for is cancelled, unless a retry comes soon."""
        job.waiters -= 1
        if received and job.turn is not None:
            job.turn.received = True
        if not job.waiters and not job.reply.done():
            gone = RequestError("the client is gone", code="client_gone", status=499)
            if self._limits.rejoin_seconds:
                job.leaving = self._loop.call_later(self._limits.rejoin_seconds, self._cancel, job, gone)
            else:
                self._cancel(job, gone)

    def in_loop_count(self, error: RequestError) -> None:
        """Take note of a request that was refused."""
        self._refused[error.code] += 1
        self._ended = self._ended or ENDED.get(error.code, "")

    def in_loop_note(self, error: BaseException) -> None:
        """Take note of a failure of the endpoint's own code."""
        self._error = self._error or "".join(traceback.format_exception(error))

    def _cancel(self, job: Job, error: RequestError) -> None:
        if job.reply.done():
            return
        self._counts["cancelled"] += 1
        job.reply.set_exception(error)
        if job.task is not None:
            job.task.cancel()
        self._over(job)  # a task that is cancelled before it has begun does nothing

    async def _answer(self, job: Job) -> None:
        """Sample the answer to a request and give it to all who wait."""
        try:
            reply = await self._sampled(job)
            if not job.reply.done():
                job.reply.set_result(reply)
        except RequestError as error:
            self._fail(job, error)
        except (ChatRenderError, ChatTooLongError) as error:
            long = isinstance(error, ChatTooLongError)
            code = "context_length_exceeded" if long else "invalid_messages"
            self._fail(job, RequestError(str(error), "messages", code))
        except Exception as error:  # ours: told in words, and shown to the run
            self.in_loop_note(error)
            self._fail(job, RequestError("the endpoint has failed", code="internal_error", status=500))
        finally:
            self._over(job)

    def _over(self, job: Job) -> None:
        """Take note that a job runs no more; one without an answer is forgotten, so that a retry tries again."""
        if job not in self._running:
            return
        self._running.remove(job)
        if job.turn is None:
            self._jobs[job.body].remove(job)

    def _fail(self, job: Job, error: RequestError) -> None:
        if not job.reply.done():
            job.reply.set_exception(error)

    async def _sampled(self, job: Job) -> ChatReply:
        place = await self._place(job.asked)
        if not place.prompt:
            raise RequestError("the messages have no text that the model has tokens for", "messages")
        room = self._limits.max_tokens - len(place.prompt)
        if room < 1:
            raise ChatTooLongError(
                f"the messages have {len(place.prompt):,} tokens, and with an answer the model takes "
                f"{self._limits.max_tokens:,}"
            )
        # Requests at once may each take all that is left: who is late with its answer gets the rest of the budget.
        most = min(room, self._left(), job.asked.max_tokens or room)
        prompt_tokens = len(place.prompt)
        response = cut(await self._response(job, place, most), self._left())
        self._sampled_tokens += len(response.tokens)
        return self._add(job, place, response, prompt_tokens)

    def _left(self) -> int:
        """Return how many tokens the rollout may still sample, if any."""
        left = self._budget - self._sampled_tokens
        if left < 1:
            raise RequestError(
                f"the rollout has sampled {self._sampled_tokens:,} tokens, and rollout.max_new_tokens allows no more",
                code="token_budget_exceeded",
            )
        return left

    async def _place(self, asked: ChatRequest) -> Place:
        size = sum(len(message["content"]) for message in asked.messages)
        if self._chat.template is None and size < IN_LOOP:
            return self._tree.place(asked.messages, asked.tools)
        return await self._loop.run_in_executor(self._threads, self._tree.place, asked.messages, asked.tools)

    async def _response(self, job: Job, place: Place, most: int) -> Response:
        prompt = hashlib.blake2b(array("q", place.prompt).tobytes()).digest()
        stop = StopStrings(job.asked.stop, self._chat.decode) if job.asked.stop else None
        follows = None if place.parent is None else place.parent.request
        request = Request(place.prompt, self._key(prompt, self._asked[prompt]), most, follows, stop)
        self._asked[prompt] += 1
        job.request = request
        try:
            response = await self._queue.submit(request)
        except asyncio.CancelledError:
            self._queue.drop(request)
            self._asked[prompt] -= 1  # if it comes again, it gets the same tokens
            raise
        request.follows = None  # or a chain of all that was asked would stay in memory
        if not 1 <= len(response.tokens) <= most:
            raise ValueError(f"the sampler's answer has {len(response.tokens)} tokens, and 1 to {most} were asked for")
        return response

    def _key(self, prompt: bytes, number: int) -> int:
        """Return the key of a request's random numbers: by its prompt, so that it does not matter who was first."""
        parts = self._seed.to_bytes(8, "little", signed=True) + prompt + number.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little", signed=True)

    def _add(self, job: Job, place: Place, response: Response, prompt_tokens: int) -> ChatReply:
        asked, request = job.asked, job.request
        assert request is not None
        tokens = response.tokens.tolist()
        read = self._chat.read(tokens, place.opened, asked.tools if asked.callable_tools else (), asked.stop)
        message = reply_message(read, request.key)
        sent_back: dict[str, Any] = {"role": "assistant", "content": read.content}
        if read.calls:
            calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in read.calls]
            sent_back["tool_calls"] = calls
        if place.new_root:
            self._new_roots[place.new_root] += 1
        job.turn = self._tree.add(place, job.number, response, sent_back, read)
        job.turn.received, job.turn.request = False, request
        finish = "tool_calls" if read.calls else "stop" if response.finished else "length"
        logprobs = None
        if asked.logprobs:
            texts = [self._chat.decode([token]) for token in tokens]
            logprobs = token_logprobs(texts, response.logp.tolist())
        identifier = reply_id(request.key)
        return ChatReply(identifier, self._limits.model, message, finish, prompt_tokens, len(tokens), logprobs)


def cut(response: Response, most: int) -> Response:
    """Return the beginning of a response; as it is, if it is no longer."""
    if len(response.tokens) <= most:
        return response
    moments = None if response.moments is None else response.moments[:, :most]
    kept = None if response.kept is None else response.kept[:most]
    return Response(response.tokens[:most], response.logp[:most], False, response.sample, moments=moments, kept=kept)


def sealed_error() -> RequestError:
    """Return what a request gets that comes too late."""
    return RequestError("the rollout has ended and takes no more requests", code="rollout_sealed", status=409)


def _look_at(future: asyncio.Future[ChatReply]) -> None:
    """Look at a future's exception: nobody may wait for it any more, which asyncio would complain about."""
    if not future.cancelled():
        future.exception()
