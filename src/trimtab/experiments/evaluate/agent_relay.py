"""Relays an agent's requests to a server: under its model's name and with its key, which the agent does not get."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from openai import APIConnectionError, APIStatusError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trimtab.bounded_http import HttpError, for_message
from trimtab.experiments.evaluate.endpoint import FATAL_STATUS, EndpointConnection, EndpointError, open_client
from trimtab.experiments.evaluate.settings import EvalSettings

MAX_BODY = 8 << 20  # bytes of an agent's request
STOP_SECONDS = 10.0


@dataclass(eq=False)
class Relayed:
    """What went through for one rollout."""

    key: str
    seed: int
    answered: int = 0
    tokens: int | None = None
    last_message: str = ""
    error: str = ""


class AgentRelay:
    """A server on loopback, with a key for each rollout; any thread may call its methods."""

    def __init__(self, connection: EndpointConnection, name: str, settings: EvalSettings) -> None:
        self.connection, self.name, self.settings = connection, name, settings
        self.open_rollouts: dict[str, Relayed] = {}
        self.fatal: EndpointError | None = None
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=2_048)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        app = Starlette(routes=[Route("/v1/chat/completions", self._relay, methods=["POST"])])
        config = uvicorn.Config(
            app, lifespan="off", ws="none", access_log=False, log_config=None, timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._client = open_client(connection, 4 * connection.concurrency, _parsed)
        self._thread = threading.Thread(target=self._run, name="trimtab-relay", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def open(self, seed: int) -> Relayed:
        """Begin a rollout."""
        rollout = Relayed(secrets.token_urlsafe(32), seed)
        self.open_rollouts[rollout.key] = rollout
        return rollout

    def end(self, rollout: Relayed) -> None:
        """End a rollout: later requests are refused."""
        self.open_rollouts.pop(rollout.key, None)

    def check(self) -> None:
        """Raise if the server refuses every request, or there is none."""
        if self.fatal is not None:
            raise self.fatal

    def close(self) -> None:
        """Stop."""
        self._server.should_exit = True
        self._thread.join(STOP_SECONDS)
        self._socket.close()

    async def _relay(self, request: Request) -> Response:
        rollout = self.open_rollouts.get(request.headers.get("authorization", "").removeprefix("Bearer ").strip())
        if rollout is None:
            return _refusal(401, "this is not the API key of a rollout that runs")
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > MAX_BODY:
                return _refusal(413, f"the body has more than {MAX_BODY:,} bytes")
        try:
            asked = json.loads(content)
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict):
            return _refusal(400, "the body is no JSON object")
        streams = bool(asked.pop("stream", False))
        asked.pop("stream_options", None)
        return await self._ask(rollout, asked | self._imposed(rollout, asked), streams)

    def _imposed(self, rollout: Relayed, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters that the evaluation sets."""
        settings, limit = self.settings, self.settings.max_new_tokens
        wanted = asked.get("max_tokens")
        fits = isinstance(wanted, int) and not isinstance(wanted, bool) and 0 < wanted < limit
        tokens = {} if "max_completion_tokens" in asked else {"max_tokens": wanted if fits else limit}
        return {
            "model": self.name,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": (rollout.seed + rollout.answered) % (1 << 31),
            **tokens,
        }

    async def _ask(self, rollout: Relayed, asked: Mapping[str, Any], streams: bool) -> Response:
        try:
            reply: Any = await self._client.post(
                "/chat/completions", cast_to=httpx.Response, content=json.dumps(asked).encode()
            )
        except APIStatusError as error:
            status, words = error.response.status_code, for_message(error.response.text[:2000])
            rollout.error = f"(the server returned status {status}: {words})"
            if status in FATAL_STATUS:
                self.fatal = EndpointError(f"the server at {self.connection.url} returned status {status}: {words}")
            return _refusal(status, words)
        except APIConnectionError as error:
            words = for_message(str(error.__cause__))
            rollout.error = f"({words})"
            if isinstance(error.__cause__, httpx.ConnectError):
                self.fatal = EndpointError(f"no server answers at {self.connection.url} ({words})")
            return _refusal(502, words)
        answer: dict[str, Any] = reply.extensions["parsed"]
        message = answer["choices"][0]["message"]
        rollout.answered += 1
        rollout.last_message = str(message.get("content") or "")
        used = answer.get("usage")
        counted = used.get("completion_tokens") if isinstance(used, dict) else None
        if isinstance(counted, int) and 0 <= counted < 1 << 40:
            rollout.tokens = (rollout.tokens or 0) + counted
        if streams:
            return Response(_as_stream(answer), media_type="text/event-stream")
        return Response(json.dumps(answer).encode(), media_type="application/json")


def _parsed(body: bytes) -> dict[str, Any]:
    """Return a completion; garbage is a failed request, which the client repeats."""
    try:
        answer = json.loads(body)
        if isinstance(answer["choices"][0]["message"], dict):
            return answer  # type: ignore[no-any-return]
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise HttpError("not a chat completion")


def _as_stream(answer: Mapping[str, Any]) -> bytes:
    """Return a whole completion as the events of a stream."""
    choice = answer["choices"][0]
    calls = [{"index": n, **call} for n, call in enumerate(choice["message"].get("tool_calls") or [])]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    shared = {name: answer.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    ended: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": choice.get("finish_reason") or "stop"}
    chunks = [
        shared | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        shared | {"choices": [ended], "usage": answer.get("usage")},
    ]
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def _refusal(status: int, message: str) -> Response:
    error = {"error": {"message": message, "type": "invalid_request_error", "code": None}}
    return Response(json.dumps(error).encode(), status, media_type="application/json")
