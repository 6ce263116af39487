"""The endpoint as agents meet it: over the openai package, over curl, and over plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from helpers.agents.fake_sampler import FakeSampler, Policy, sampling
from helpers.agents.tokenizers_of_models import CHATML, hermes, small_tokenizer
from trimtab.agents import ChatTokens, Endpoint, EndpointLimits, Session
from trimtab.data import Request
from trimtab.trainer.model.loading import demo_tokenizer

USER = [{"role": "user", "content": "3+4="}]
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [{"type": "function", "function": {"name": "echo", "description": "Says it.", "parameters": PARAMETERS}}]
DEMO = demo_tokenizer()
HTTP = httpx.Client()  # to make one takes 50 ms


@pytest.fixture(autouse=True, scope="module")
def http_is_closed() -> Iterator[None]:
    yield
    HTTP.close()


@contextlib.contextmanager
def serving(
    policy: Policy = lambda request: "7", tokenizer: Any = DEMO, **limits: Any
) -> Iterator[tuple[Endpoint, FakeSampler]]:
    endpoint = Endpoint(ChatTokens(tokenizer), EndpointLimits(**{"max_tokens": 10_000, **limits}))
    with sampling(endpoint, tokenizer, policy) as sampler:
        yield endpoint, sampler


def client(endpoint: Endpoint, session: Session, **options: Any) -> Any:
    return openai.OpenAI(base_url=endpoint.url, api_key=session.api_key, **{"max_retries": 0, "timeout": 60, **options})


def ask(client: Any, messages: Any = USER, **options: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=messages, **options)


def post(endpoint: Endpoint, session: Session, body: Any = None, **headers: str) -> httpx.Response:
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


def test_an_agent_of_several_turns_streamed_and_not() -> None:
    with serving() as (endpoint, _):
        session = endpoint.open(1, 100, sample=3)
        connection = client(endpoint, session)
        reply = ask(connection, logprobs=True)
        [choice] = reply.choices
        assert (choice.message.content, choice.finish_reason, reply.model) == ("7", "stop", "policy")
        usage = (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens)
        assert usage == (4, 2, 6)
        assert [token.logprob for token in choice.logprobs.content] == [-0.5, -0.5]
        messages = [*USER, choice.message, {"role": "user", "content": [{"type": "text", "text": "1+1="}]}]
        chunks = list(ask(connection, messages, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert (text, chunks[-2].choices[0].finish_reason) == ("7", "stop")
        assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 4 + 2 + 5 + 2
        assert session.requests == 2
        session.reward(0, 1.0)
        sealed = session.seal()
        [branch] = sealed.branches
        assert (sealed.last_message, branch.reward, branch.response.sample) == ("7", 1.0, 3)
        assert branch.response.observed == ((2, 7),) and sealed.stats.merged_share == 0.5
        assert (sealed.stats.requests, sealed.stats.turns, sealed.stats.sampled_tokens) == (2, 2, 4)


def test_the_async_client_and_three_votes_at_once() -> None:
    with serving() as (endpoint, sampler):
        session = endpoint.open(1, 100)
        sampler.free.clear()

        async def vote() -> list[Any]:
            async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=session.api_key, max_retries=0) as connection:
                votes = [asyncio.create_task(ask(connection, max_tokens=6)) for _ in range(3)]
                await asyncio.get_running_loop().run_in_executor(None, sampler.wait_for, 3)
                sampler.free.set()
                return await asyncio.gather(*votes)

        replies = asyncio.run(vote())
        assert [reply.choices[0].message.content for reply in replies] == ["7"] * 3
        assert len({request.key for request in sampler.requests}) == 3
        assert len(session.seal().branches) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_replied_to(stream: bool) -> None:
    tokenizer = small_tokenizer(CHATML)
    answers = iter([f"Well.\n{hermes('echo', text='a')}\n{hermes('echo', text='b')}", "<think>\nhm\n</think>\n\ndone"])
    with serving(lambda request: next(answers), tokenizer) as (endpoint, sampler):
        session = endpoint.open(1, 1_000)
        connection = client(endpoint, session)
        if stream:
            with connection.chat.completions.stream(model="policy", messages=USER, tools=TOOLS) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = ask(connection, tools=TOOLS).choices[0]
        calls = choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
        assert [(c.function.name, json.loads(c.function.arguments)["text"]) for c in calls] == [
            ("echo", "a"),
            ("echo", "b"),
        ]
        assert len({call.id for call in calls}) == 2
        told = [{"role": "tool", "tool_call_id": call.id, "content": "said <|im_end|>"} for call in calls]
        made = [{"id": c.id, "type": "function", "function": c.function.model_dump()} for c in calls]
        messages = [*USER, {"role": "assistant", "content": "Well.", "tool_calls": made}, *told]
        reply = ask(connection, messages, tools=TOOLS)
        assert reply.choices[0].message.content == "done"
        assert reply.choices[0].message.reasoning_content == "hm"
        sealed = session.seal()
        [branch] = sealed.branches
        assert sealed.last_message == "<think>\nhm\n</think>\n\ndone"
        assert [message.role for message in branch.messages] == ["user", "assistant", "tool", "tool", "assistant"]
        ends = branch.response.tokens.tolist().count(tokenizer.eos_token_id)
        assert ends == 4 and "said <|im_end|>" in tokenizer.decode(branch.response.tokens)
        assert sampler.requests[1].follows is None and sampler.requests[1].prompt[: len(branch.prompt)] == branch.prompt


def test_without_tools_or_with_tool_choice_none_a_call_is_text() -> None:
    tokenizer = small_tokenizer(CHATML)
    with serving(lambda request: hermes("echo", text="a"), tokenizer) as (endpoint, _):
        connection = client(endpoint, endpoint.open(1, 10_000))
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            message = ask(connection, **options).choices[0].message
            assert message.tool_calls is None and "<tool_call>" in message.content


def test_what_the_run_imposes_is_counted_by_name() -> None:
    with serving() as (endpoint, _):
        session = endpoint.open(1, 100)
        connection = client(endpoint, session)
        for _ in range(2):
            reply = connection.chat.completions.create(
                model="gpt-5", messages=USER, temperature=0.2, seed=3, top_p=1, user="me", presence_penalty=0
            )
            assert reply.model == "policy"
        ask(connection, tools=TOOLS, tool_choice="required")
        overridden = {"model": 2, "temperature": 2, "seed": 2, "tool_choice": 1}
        assert session.seal().stats.overridden == overridden


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


def test_a_lost_answer_is_replayed_to_the_packages_own_retry() -> None:
    class Lossy(httpx.HTTPTransport):
        lost = 0

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            if self.lost < 2:
                self.lost += 1
                response.read()
                raise httpx.ReadTimeout("made", request=request)
            return response

    with serving() as (endpoint, sampler):
        session = endpoint.open(1, 100)
        with httpx.Client(transport=Lossy()) as flaky:
            connection = client(endpoint, session, max_retries=3, http_client=flaky)
            assert ask(connection).choices[0].message.content == "7"
        sealed = session.seal()
        assert (len(sampler.requests), sealed.stats.replayed, sealed.stats.requests) == (1, 2, 1)
        assert len(sealed.branches) == 1


def test_a_retry_joins_what_still_runs() -> None:
    with serving() as (endpoint, sampler), ThreadPoolExecutor() as threads:
        session = endpoint.open(1, 100)
        sampler.free.clear()
        first = threads.submit(post, endpoint, session)
        sampler.wait_for(1)
        retry = threads.submit(post, endpoint, session, None, x_stainless_retry_count="1")
        unnamed = threads.submit(post, endpoint, session)  # as curl: it does not say whether it is one
        other = threads.submit(post, endpoint, session, None, x_stainless_retry_count="0")
        sampler.wait_for(2)
        assert all(not each.done() for each in (first, retry, unnamed, other))
        wait_until(lambda: session._counts["joined"] == 2)
        sampler.free.set()
        replies = [each.result().json()["id"] for each in (first, retry, unnamed, other)]
        assert replies[0] == replies[1] == replies[2] != replies[3]
        again = post(endpoint, session).json()["id"]
        assert again not in replies
        stats = session.seal().stats
        assert (stats.requests, stats.joined, stats.replayed, stats.branches) == (3, 2, 0, 3)


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for what another thread does, which tells nobody."""
    changed = threading.Event()
    for _ in range(3_000):
        if true():
            return
        changed.wait(0.01)
    raise AssertionError("it did not come about")


def test_a_vanished_client_cancels_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(rejoin_seconds=0) as (endpoint, sampler):
        session = endpoint.open(1, 100)
        sampler.free.clear()
        cancelled = when(session, "_cancel", monkeypatch)
        body = json.dumps({"messages": USER}).encode()
        with raw(endpoint, session, body):
            [request] = sampler.wait_for(1)
        assert cancelled.wait(30)
        wait_until(lambda: request.cancelled)
        # It comes again, and gets what it would have got.
        again = ThreadPoolExecutor().submit(post, endpoint, session)
        sampler.free.set()
        assert again.result().status_code == 200
        assert sampler.wait_for(2)[1].key == request.key
        stats = session.seal().stats
        assert (stats.cancelled, stats.requests, stats.abandoned) == (1, 1, 0)


def test_a_retry_joins_what_its_vanished_client_began(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(rejoin_seconds=600) as (endpoint, sampler), ThreadPoolExecutor() as threads:
        session = endpoint.open(1, 100)
        sampler.free.clear()
        left = when(session, "in_loop_leave", monkeypatch)
        with raw(endpoint, session, json.dumps({"messages": USER}).encode()):
            sampler.wait_for(1)
        assert left.wait(30)
        retry = threads.submit(post, endpoint, session, None, x_stainless_retry_count="1")
        wait_until(lambda: session._counts["joined"] == 1)
        sampler.free.set()
        assert retry.result().status_code == 200
        stats = session.seal().stats
        assert (stats.requests, stats.cancelled, stats.turns, len(sampler.requests)) == (1, 0, 1, 1)


def test_an_answer_for_a_client_that_is_gone_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(rejoin_seconds=600) as (endpoint, sampler):
        session = endpoint.open(1, 100)
        sampler.free.clear()
        left = when(session, "in_loop_leave", monkeypatch)
        with raw(endpoint, session, json.dumps({"messages": USER}).encode()):
            sampler.wait_for(1)
        assert left.wait(30)
        added = when(session._tree, "add", monkeypatch)
        sampler.free.set()
        assert added.wait(30)
        sealed = session.seal()
        assert (sealed.branches, sealed.last_message, sealed.stats.abandoned) == ((), "", 1)


def test_sealing_ends_what_waits() -> None:
    with serving() as (endpoint, sampler), ThreadPoolExecutor() as threads:
        session = endpoint.open(1, 100)
        sampler.free.clear()
        bodies = [{"messages": USER, "max_tokens": 50, "seed": number} for number in range(3)]
        waiting = [threads.submit(post, endpoint, session, body) for body in bodies]
        requests = sampler.wait_for(3)
        sealed = session.seal()
        replies = [each.result() for each in waiting]
        assert [reply.status_code for reply in replies] == [409] * 3
        assert replies[0].json()["error"]["code"] == "rollout_sealed"
        assert all(request.cancelled for request in requests)
        assert (sealed.branches, sealed.stats.cancelled, sealed.stats.sampled_tokens) == ((), 3, 0)


def test_the_budget_of_a_rollout_ends_it() -> None:
    with serving(lambda request: [4] * 50) as (endpoint, sampler):
        session = endpoint.open(1, 25)
        connection = client(endpoint, session, max_retries=2)
        lengths = [ask(connection, max_completion_tokens=most).usage.completion_tokens for most in (10, 10, 10)]
        assert lengths == [10, 10, 5]
        with pytest.raises(openai.BadRequestError) as raised:
            ask(connection)
        assert raised.value.code == "token_budget_exceeded"
        stats = session.seal().stats
        assert (stats.ended, stats.sampled_tokens, stats.refused) == ("token_budget", 25, {"token_budget_exceeded": 1})
        assert len(sampler.requests) == 3


def test_requests_at_once_keep_the_budget_together() -> None:
    with serving(lambda request: [4] * 10) as (endpoint, sampler), ThreadPoolExecutor() as threads:
        session = endpoint.open(1, 25)
        sampler.free.clear()
        running = [threads.submit(post, endpoint, session, {"messages": USER, "seed": n}) for n in range(4)]
        assert [request.max_new_tokens for request in sampler.wait_for(4)] == [25] * 4
        sampler.free.set()
        replies = [each.result() for each in running]
        assert sorted(reply.status_code for reply in replies) == [200, 200, 200, 400]
        lengths = [reply.json()["usage"]["completion_tokens"] for reply in replies if reply.status_code == 200]
        sealed = session.seal()
        assert (sealed.stats.sampled_tokens, sealed.stats.ended) == (25, "token_budget")
        assert sorted(lengths) == sorted(branch.response.num_sampled for branch in sealed.branches) == [5, 10, 10]


def test_a_prompt_that_is_too_long_ends_the_rollout() -> None:
    with serving(max_tokens=20) as (endpoint, sampler):
        session = endpoint.open(1, 100)
        connection = client(endpoint, session)
        ask(connection, [{"role": "user", "content": "1" * 18}])
        assert sampler.requests[0].max_new_tokens == 2
        for length in (20, 100_000):
            with pytest.raises(openai.BadRequestError) as raised:
                ask(connection, [{"role": "user", "content": "1" * length}])
            assert raised.value.code == "context_length_exceeded"
        assert session.seal().stats.ended == "context_length"


def test_stop_strings_end_an_answer() -> None:
    tokenizer = small_tokenizer(CHATML)
    with serving(lambda request: "one é Observation: two", tokenizer) as (endpoint, _):
        session = endpoint.open(1, 1_000)
        connection = client(endpoint, session)
        choice = ask(connection, stop=["Observation:", "never"]).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("one é ", "stop")
        messages = [*USER, {"role": "assistant", "content": "one é"}, {"role": "user", "content": "go"}]
        assert ask(connection, messages).choices[0].message.content == "one é Observation: two"
        [branch] = session.seal().branches
        assert tokenizer.decode(branch.response.tokens).startswith("one é Observation:<|im_end|>\n<|im_start|>user\ngo")


def test_tokens_do_not_depend_on_who_was_first() -> None:
    questions = [[{"role": "user", "content": f"{n}+1="}] for n in range(4)]

    def keys(order: list[int], seed: int) -> dict[tuple[int, ...], int]:
        with serving() as (endpoint, sampler):
            session = endpoint.open(seed, 1_000)
            for number in order:
                ask(client(endpoint, session), questions[number])
            return {tuple(request.prompt): request.key for request in sampler.requests}

    assert keys([0, 1, 2, 3], 5) == keys([3, 1, 0, 2], 5)
    assert not set(keys([0, 1], 5).values()) & set(keys([0, 1], -6).values())


def test_sixty_four_agents_at_once() -> None:
    def policy(request: Request) -> str:
        return str(DEMO.decode(list(request.prompt))).rstrip("=").rpartition(" ")[2][:3]

    async def solve(endpoint: Endpoint, session: Session, number: int) -> None:
        async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=session.api_key, max_retries=0) as connection:
            messages: list[Any] = []
            for turn in range(3):
                messages.append({"role": "user", "content": f" {turn}{number:02d}="})
                reply = await ask(connection, messages, stream=turn == 1)
                text = reply.choices[0].message.content if turn != 1 else ""
                if turn == 1:
                    async for chunk in reply:
                        text += chunk.choices[0].delta.content or ""
                assert text == f"{turn}{number:02d}"
                messages.append({"role": "assistant", "content": text})

    async def solve_all(endpoint: Endpoint, sessions: list[Session]) -> None:
        await asyncio.gather(*(solve(endpoint, session, number) for number, session in enumerate(sessions)))

    with serving(policy) as (endpoint, sampler):
        sessions = [endpoint.open(number, 1_000) for number in range(64)]
        asyncio.run(solve_all(endpoint, sessions))
        sealed = [session.seal() for session in sessions]
        assert all(len(each.branches) == 1 and each.stats.merged == 2 for each in sealed)
        assert sum(sampler.batches) == 192


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


def test_curl() -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    with serving() as (endpoint, _):
        session = endpoint.open(1, 100)

        def curl(body: Any, *more: str) -> str:
            headers = ["-H", f"Authorization: Bearer {session.api_key}", "-H", "Content-Type: application/json"]
            command = ["curl", "-sS", "--max-time", "60", f"{endpoint.url}/chat/completions", *headers, *more]
            given = json.dumps(body)
            return subprocess.run(
                [*command, "-d", "@-"], input=given, capture_output=True, text=True, check=True
            ).stdout

        reply = json.loads(curl({"messages": USER}))
        assert reply["choices"][0]["message"]["content"] == "7"
        events = curl({"messages": USER, "stream": True, "stream_options": {"include_usage": True}}, "-N").split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert [choice["delta"] for event in parsed for choice in event["choices"]] == [
            {"role": "assistant", "content": ""},
            {"content": "7"},
            {},
        ]
        assert parsed[-1]["usage"]["total_tokens"] == 6
        too_long = curl({"messages": [{"role": "user", "content": "x" * (9 << 20)}]}, "-w", "%{http_code}")
        assert too_long.endswith("413")
        assert session.seal().stats.branches == 2


def test_the_sampler_comes_and_goes() -> None:
    endpoint = Endpoint(ChatTokens(DEMO), EndpointLimits(max_tokens=100))
    sampler = FakeSampler(DEMO, lambda request: "7")
    sampler.free.set()
    with endpoint:
        for step in range(3):
            session = endpoint.open(step, 100)
            serving = threading.Thread(target=sampler.serve, args=(endpoint,))
            serving.start()
            ask(client(endpoint, session))
            session.seal()
            endpoint.finish()
            serving.join(30)
            assert not serving.is_alive() and endpoint.requests.take(block=True) is None
        assert len(sampler.requests) == 3


def test_closing_ends_all_waiting() -> None:
    endpoint = Endpoint(ChatTokens(DEMO), EndpointLimits(max_tokens=100))
    session = endpoint.open(1, 100)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(post, endpoint, session)
        [request] = endpoint.requests.take(block=True) or []
        endpoint.close()
        assert waiting.result().status_code == 503 and request.cancelled
    assert not endpoint._thread.is_alive()
    assert session.seal().branches == ()
    with pytest.raises(ValueError, match="closed"):
        endpoint.open(1, 100)


def test_a_failure_of_our_own_is_told_in_words_and_shown_to_the_run() -> None:
    def broken(request: Request) -> list[int]:
        request.max_new_tokens = 5
        return [4] * 5

    with serving(broken) as (endpoint, _):
        session = endpoint.open(1, 3)
        reply = post(endpoint, session)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
        assert "the sampler's answer has 5 tokens" in session.seal().stats.error


def test_a_reward_needs_its_request() -> None:
    with serving() as (endpoint, _):
        session = endpoint.open(1, 100)
        with pytest.raises(ValueError, match="there is no request 0"):
            session.reward(0, 1.0)
