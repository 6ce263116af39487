"""Requests that an endpoint refuses, in words, without harm to others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from helpers.agents.asking import TOOLS, USER, ask, client, post, raw, serving, wait_until
from helpers.agents.fake_sampler import FakeSampler
from helpers.agents.tokenizers_of_models import CHATML, small_tokenizer
from trimtab.agents import Endpoint, Session
from trimtab.data import Request


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": {"type": "function", "function": {"name": "echo"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"colour": 1}, "'colour'"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop": "x" * 1000}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": [1]}}}]},
            "tools[0].function.parameters",
        ),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": USER * 3_000}, "messages"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "messages[0].role"),
        ({"messages": [[]]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str, shared: Any) -> None:
    endpoint, session, sampler = shared
    reply = post(endpoint, session, {"messages": USER, **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"] and error["code"] and len(error["message"]) < 400
    assert sampler.requests == []


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Endpoint, Session, FakeSampler]]:
    with serving() as (endpoint, sampler):
        yield endpoint, endpoint.open(1, 100_000), sampler


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e999}',
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": ' + b'[{"a":' * 100 + b"1" + b"}]" * 100 + b"}",
        b'{"max_tokens": ' + b"1" * 5_000 + b"}",
    ],
)
def test_bodies_that_are_no_requests(body: bytes, shared: Any) -> None:
    endpoint, session, _ = shared
    reply = post(endpoint, session, body)
    assert reply.status_code == 400 and reply.json()["error"]["message"]


def test_messages_without_a_token(shared: Any) -> None:
    endpoint, session, sampler = shared
    for content in ("", None, []):
        reply = post(endpoint, session, {"messages": [{"role": "user", "content": content}]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert sampler.requests == []


def test_halves_of_surrogate_pairs_are_no_harm() -> None:
    with serving(tokenizer=small_tokenizer(CHATML)) as (endpoint, _):
        session = endpoint.open(1, 100)
        half = rb'{"messages": [{"role": "user", "content": "a\ud800", "name": "\udfff"}]}'
        assert post(endpoint, session, half).status_code == 200
        assert "a?" in session.seal().branches[0].messages[0].text


def test_keys() -> None:
    with serving() as (endpoint, _):
        session, other = endpoint.open(1, 100), endpoint.open(1, 100)
        assert session.api_key != other.api_key and session.api_key not in repr(session) + repr(endpoint)
        for header in ("", "Bearer", f"Basic {session.api_key}", f"Bearer {session.api_key}x", "Bearer \xff"):
            reply = httpx.get(f"{endpoint.url}/models", headers={"authorization": header.encode("latin-1")})
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert [model.id for model in client(endpoint, session).models.list()] == ["policy"]
        assert client(endpoint, session).models.retrieve("policy").id == "policy"
        with pytest.raises(openai.NotFoundError):
            client(endpoint, session).models.retrieve("gpt")
        session.seal()
        for connection in (client(endpoint, session), client(endpoint, session, max_retries=2)):
            with pytest.raises(openai.ConflictError) as raised:
                ask(connection)
            assert raised.value.code == "rollout_sealed"
        assert ask(client(endpoint, other)).choices[0].message.content == "7"


def test_other_addresses_are_named(shared: Any) -> None:
    endpoint, session, _ = shared
    reply = httpx.post(f"{endpoint.url}/responses", headers={"authorization": f"Bearer {session.api_key}"})
    assert reply.status_code == 404 and "/v1/chat/completions" in reply.json()["error"]["message"]
    assert httpx.get(f"{endpoint.url}/chat/completions").status_code == 405


def test_nothing_of_a_key_is_logged_or_told(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    told = []
    with serving() as (endpoint, _):
        session = endpoint.open(1, 100)
        told += [post(endpoint, session, body).text for body in (None, b"{", {"n": 5}, {"messages": 1})]
        told.append(httpx.get(f"{endpoint.url}/{session.api_key}").text.replace(f"/v1/{session.api_key}", ""))
        with raw(endpoint, session, b"", headers="bad header\r\n") as connection:
            told.append(connection.recv(4096).decode())
        told.append(str(session.seal()))
        told.append(post(endpoint, session).text)
    secret = session.api_key.removeprefix("sk-trimtab-")
    seen = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpcore", "httpx"))]
    captured = capfd.readouterr()
    assert secret not in "".join([*told, *seen, captured.out, captured.err])


def test_fifty_megabytes_are_refused_and_not_kept() -> None:
    import resource

    with serving() as (endpoint, sampler):
        session = endpoint.open(1, 100)
        chunk, pieces = b"x" * (1 << 20), 50
        post(endpoint, session)  # all that a first request loads
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for length in ({"content-length": str(len(chunk) * pieces)}, {}):  # {}: in chunks, of unknown length
            headers = {**length, "authorization": f"Bearer {session.api_key}"}
            body = (chunk for _ in range(pieces))
            reply = httpx.post(f"{endpoint.url}/chat/completions", content=body, headers=headers, timeout=60)
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 32 << 10  # KB: the largest body allowed, a few times
        assert len(sampler.requests) == 1


def test_a_body_that_never_comes_is_given_up() -> None:
    with serving(body_seconds=0.05) as (endpoint, _), raw(endpoint, endpoint.open(1, 9), b"{", 100) as connection:
        assert b"408" in connection.recv(4096)


def test_a_flood_is_refused_and_the_rest_goes_on() -> None:
    with serving(max_waiting=4, max_requests=30) as (endpoint, sampler), ThreadPoolExecutor(16) as threads:
        session, other = endpoint.open(1, 1_000), endpoint.open(2, 1_000)
        sampler.free.clear()
        body = {"messages": USER, "max_tokens": 2}
        flood = [threads.submit(post, endpoint, session, body, x_stainless_retry_count="0") for _ in range(12)]
        wait_until(lambda: sum(each.done() for each in flood) == 8)
        assert {each.result().status_code for each in flood if each.done()} == {429}
        sampler.free.set()
        assert sorted(each.result().status_code for each in flood) == [200] * 4 + [429] * 8
        garbage = [threads.submit(post, endpoint, session, b"{" * 1_000) for _ in range(200)]
        assert ask(client(endpoint, other)).choices[0].message.content == "7"
        assert {each.result().status_code for each in garbage} == {400}
        for _ in range(27):
            last = post(endpoint, session, body)
            if last.status_code != 200:
                break
        assert last.json()["error"]["code"] == "request_limit_exceeded"
        stats = session.seal().stats
        assert (stats.ended, stats.requests) == ("request_limit", 30) and stats.refused["too_many_requests"] == 8


def test_a_failure_of_our_own_is_told_in_words_and_shown_to_the_run() -> None:
    def broken(request: Request) -> list[int]:
        request.max_new_tokens = 5
        return [4] * 5

    with serving(broken) as (endpoint, _):
        session = endpoint.open(1, 3)
        reply = post(endpoint, session)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
        assert "the sampler's answer has 5 tokens" in session.seal().stats.error
