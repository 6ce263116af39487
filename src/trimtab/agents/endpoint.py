"""An OpenAI-compatible server on loopback, through which agents sample from the policy of a run."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trimtab.agents.chat_replies import models, one_model
from trimtab.agents.chat_requests import RequestError, parse_request
from trimtab.agents.chat_tokens import ChatTokens
from trimtab.agents.connections import bounded_protocol, connections_allowed
from trimtab.agents.endpoint_limits import EndpointLimits
from trimtab.agents.request_queue import RequestQueue
from trimtab.agents.session import Job, Session, sealed_error
from trimtab.loopback import BACKLOG, LOOPBACK, listen, quiet_server

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response as HttpResponse

RETRY = "x-stainless-retry-count"  # sent by the openai packages of all languages
MAX_SEALED = 100_000  # keys that are known as those of sealed rollouts
MAX_DISCARDED = 256 << 20  # bytes of a body that are read and dropped, so that its client gets to read the refusal
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that none is closed as it is used again
STOP_SECONDS = 10.0
THREADS = 4  # that render and tokenize

Handler = Callable[["HttpRequest", Session], Awaitable["HttpResponse"]]


class Endpoint:
    """The server of a run, in a thread of its own; `requests` is what samplers serve. A context manager."""

    def __init__(self, chat: ChatTokens, limits: EndpointLimits) -> None:
        self.chat, self.limits = chat, limits
        self._loop = asyncio.new_event_loop()
        self.requests = RequestQueue(limits.max_tokens, self._loop)
        self._sessions: dict[bytes, Session] = {}
        self._sealed: dict[bytes, None] = {}
        self._sealed_order: deque[bytes] = deque()
        self._closed = False
        self._threads = ThreadPoolExecutor(THREADS, "trimtab-chat")
        most = connections_allowed(self.limits.max_connections)
        self._socket = listen()
        self.url = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}/v1"
        bounds = {"http": bounded_protocol(most), "backlog": min(most, BACKLOG)}
        self._server = quiet_server(self._app(), timeout_keep_alive=KEEP_ALIVE_SECONDS, **bounds)
        self._thread = threading.Thread(target=self._run, name="trimtab-endpoint", daemon=True)
        self._thread.start()

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.routing import Route

        routes = [
            Route("/v1/chat/completions", self._handled(self._chat), methods=["POST"]),
            Route("/v1/models", self._handled(self._models), methods=["GET"]),
            Route("/v1/models/{model}", self._handled(self._models), methods=["GET"]),
        ]

        async def unknown(request: HttpRequest, error: Exception) -> HttpResponse:
            assert isinstance(error, HTTPException)
            words = f"{request.method} {request.url.path[:200]}: there are POST /v1/chat/completions and GET /v1/models"
            code = "unknown_url" if error.status_code == 404 else "method_not_allowed"
            return _refusal(RequestError(words, code=code, status=error.status_code))

        return Starlette(routes=routes, exception_handlers={HTTPException: unknown})

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[self._socket]))
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks))
            self._loop.close()

    def open(self, seed: int, max_new_tokens: int, sample: int = 0) -> Session:
        """Start a rollout, with a fresh random API key.

        `seed` is that of its random numbers, a signed 64-bit integer; `max_new_tokens` is how many tokens it may
        sample over all of its requests; `sample` is its number within its group.
        """
        if self._closed:
            raise ValueError("the endpoint is closed")
        api_key = f"sk-trimtab-{secrets.token_urlsafe(32)}"
        digest = _digest(api_key)
        session = Session(
            api_key, seed, max_new_tokens, sample, self.chat, self.limits, self.requests, self._loop, self._threads,
            lambda work: self._in_loop(lambda: self._seal(digest, work)),
        )  # fmt: skip
        self._sessions[digest] = session
        self.requests.begin()
        return session

    def _seal(self, digest: bytes, work: Callable[[], None]) -> None:
        work()
        if self._sessions.pop(digest, None) is None:
            return
        self._sealed[digest] = None
        self._sealed_order.append(digest)
        if len(self._sealed_order) > MAX_SEALED:
            del self._sealed[self._sealed_order.popleft()]

    def _in_loop(self, work: Callable[[], None]) -> None:
        """Run a function in the server's thread, and wait for it."""
        if not self._thread.is_alive():
            work()
            return
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        done.result(STOP_SECONDS)

    @property
    def thread_ident(self) -> int:
        """The thread of the server, for those who measure its time."""
        assert self._thread.ident is not None
        return self._thread.ident

    def finish(self) -> None:
        """Say that all rollouts of this call have ended: `requests.take` returns None until the next `open`."""
        self.requests.finish()

    def close(self) -> None:
        """Stop the server; whoever still waits gets an error."""
        if self._closed:
            return
        self._closed = True
        self.requests.finish()
        stopping = RequestError("the run is ending", code="endpoint_closed", status=503)

        def stop() -> None:
            for session in self._sessions.values():
                session.sealed = True
                session.in_loop_fail(stopping)
            self._server.should_exit = True

        with suppress(RuntimeError):  # the loop has ended by itself
            self._in_loop(stop)
        self._thread.join(STOP_SECONDS)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._socket.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _handled(self, handler: Handler) -> Callable[[HttpRequest], Awaitable[HttpResponse]]:
        """Return a handler that knows its session, and answers every error in OpenAI's form."""

        @wraps(handler)
        async def handle(request: HttpRequest) -> HttpResponse:
            from starlette.requests import ClientDisconnect

            session: Session | None = None
            try:
                session = self._session(request)
                return await handler(request, session)
            except RequestError as error:
                if session is not None:
                    session.in_loop_count(error)
                if error.status != 408:
                    await self._discard(request)
                return _refusal(error)
            except ClientDisconnect:
                return _refusal(RequestError("the client is gone", status=499))
            except Exception as error:  # ours
                if session is not None:
                    session.in_loop_note(error)
                return _refusal(RequestError("the endpoint has failed", code="internal_error", status=500))

        return handle

    def _session(self, request: HttpRequest) -> Session:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip()
        digest = _digest(key)
        session = self._sessions.get(digest)
        # Found by a digest, which tells nobody how much of a key was right; compared in constant time nevertheless.
        if (
            session is not None
            and scheme.lower() == "bearer"
            and hmac.compare_digest(session.api_key.encode(), key.encode("utf-8", "replace"))
        ):
            return session
        if session is None and digest in self._sealed:
            raise sealed_error()
        raise RequestError("this is not the API key of a rollout", code="invalid_api_key", status=401)

    async def _models(self, request: HttpRequest, session: Session) -> HttpResponse:
        model = request.path_params.get("model")
        if model is None:
            return _json(models(self.limits.model))
        if model != self.limits.model:
            raise RequestError(f"there is one model: {self.limits.model}", "model", "model_not_found", 404)
        return _json(json.dumps(one_model(model)).encode())

    async def _chat(self, request: HttpRequest, session: Session) -> HttpResponse:
        body = await self._body(request)
        if session.sealed:
            raise sealed_error()
        digest = hashlib.blake2b(body).digest()
        job = session.in_loop_find(digest, _retry(request))
        if job is None:
            limits = self.limits
            asked = parse_request(
                body,
                model=limits.model,
                temperature=limits.temperature,
                top_p=limits.top_p,
                max_messages=limits.max_messages,
                max_depth=limits.max_depth,
            )
            job = session.in_loop_start(asked, digest)
        del body
        return await self._wait(request, session, job)

    async def _wait(self, request: HttpRequest, session: Session, job: Job) -> HttpResponse:
        """Wait for a job's reply, or for the client to go."""
        session.in_loop_join(job)
        gone: asyncio.Future[Any] = asyncio.ensure_future(
            request.receive()
        )  # what comes behind a body is the end of the connection
        received = False
        try:
            either: set[asyncio.Future[Any]] = {job.reply, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            received = job.reply.done() and not gone.done()
            if not job.reply.done():
                return _refusal(RequestError("the client is gone", status=499))
            reply = job.reply.result()
            if job.asked.stream:
                return _json(reply.chunks(job.asked.include_usage), "text/event-stream")
            return _json(reply.whole())
        finally:
            gone.cancel()
            session.in_loop_leave(job, received)

    async def _body(self, request: HttpRequest) -> bytes:
        """Return the body of a request, if it is not too long and comes in time."""
        too_long = RequestError(
            f"the body has more than {self.limits.max_body:,} bytes", code="request_too_large", status=413
        )
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.limits.max_body:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self.limits.max_body:
                        raise too_long
        except TimeoutError:
            raise RequestError("the body came too slowly", code="request_timeout", status=408) from None
        return bytes(body)

    async def _discard(self, request: HttpRequest) -> None:
        """Read the rest of a refused body and drop it: a client that still writes would not read why."""
        if "100-continue" in request.headers.get("expect", ""):
            return
        left = MAX_DISCARDED
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.body_seconds):
                while left > 0 and not _is_read(request):
                    message = await request.receive()
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return
                    left -= len(message.get("body", b""))


def _is_read(request: HttpRequest) -> bool:
    return bool(getattr(request, "_stream_consumed", False))


def _retry(request: HttpRequest) -> int | None:
    """Return how often a request was tried before, as its client says; None if it says nothing."""
    count = request.headers.get(RETRY, "")
    return int(count[:9]) if count.isdecimal() else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _json(body: bytes, media_type: str = "application/json") -> HttpResponse:
    from starlette.responses import Response

    return Response(body, media_type=media_type)


def _refusal(error: RequestError) -> HttpResponse:
    from starlette.responses import Response

    # What cannot succeed is not to be tried again: the openai package repeats 409 and 429 by itself.
    headers = {"x-should-retry": "false"} if error.status in (400, 401, 409, 413, 503) else None
    return Response(json.dumps(error.body()).encode(), error.status, headers, "application/json")
