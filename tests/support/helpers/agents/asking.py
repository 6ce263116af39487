"""An endpoint with a fake sampler, and clients of several kinds that ask it."""

from __future__ import annotations

import atexit
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from helpers.agents.fake_sampler import FakeSampler, Policy, sampling
from trimtab.agents import ChatTokens, Endpoint, EndpointLimits, Session
from trimtab.trainer.model.loading import demo_tokenizer

USER = [{"role": "user", "content": "3+4="}]
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [{"type": "function", "function": {"name": "echo", "description": "Says it.", "parameters": PARAMETERS}}]
DEMO = demo_tokenizer()
CLIENTS = contextlib.ExitStack()  # of the openai package, until the endpoint they ask is closed
HTTP = httpx.Client()  # to make one takes 50 ms
atexit.register(HTTP.close)


@contextlib.contextmanager
def serving(
    policy: Policy = lambda request: "7", tokenizer: Any = DEMO, **limits: Any
) -> Iterator[tuple[Endpoint, FakeSampler]]:
    """Run an endpoint with a fake sampler."""
    endpoint = Endpoint(ChatTokens(tokenizer), EndpointLimits(**{"max_tokens": 10_000, **limits}))
    with sampling(endpoint, tokenizer, policy) as sampler, contextlib.closing(CLIENTS):
        yield endpoint, sampler


def client(endpoint: Endpoint, session: Session, **options: Any) -> Any:
    """Return a client of the openai package."""
    given = {"max_retries": 0, "timeout": 60, **options}
    return CLIENTS.enter_context(openai.OpenAI(base_url=endpoint.url, api_key=session.api_key, **given))


def ask(client: Any, messages: Any = USER, **options: Any) -> Any:
    """Ask over the openai package."""
    return client.chat.completions.create(model="policy", messages=messages, **options)


def post(endpoint: Endpoint, session: Session, body: Any = None, **headers: str) -> httpx.Response:
    """Ask over plain HTTP."""
    given = body if isinstance(body, bytes) else json.dumps({"messages": USER} if body is None else body).encode()
    headers = {"authorization": f"Bearer {session.api_key}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    return HTTP.post(f"{endpoint.url}/chat/completions", content=given, headers=headers, timeout=60)


def raw(endpoint: Endpoint, session: Session, body: bytes, length: int | None = None, headers: str = "") -> Any:
    """Send a request over a socket, and return the socket."""
    address = endpoint.url.removeprefix("http://").removesuffix("/v1").split(":")
    connection = socket.create_connection((address[0], int(address[1])), timeout=60)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.api_key}\r\n{headers}"
    connection.sendall(f"{head}content-length: {len(body) if length is None else length}\r\n\r\n".encode() + body)
    return connection


def when(thing: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set once a method of an object has run."""
    happened, method = threading.Event(), getattr(thing, name)

    def run(*given: Any) -> Any:
        result = method(*given)
        happened.set()
        return result

    monkeypatch.setattr(thing, name, run)
    return happened


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for what another thread does, which tells nobody."""
    changed = threading.Event()
    for _ in range(3_000):
        if true():
            return
        changed.wait(0.01)
    raise AssertionError("it did not come about")
