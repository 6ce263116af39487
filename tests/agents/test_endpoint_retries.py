"""Retries, clients that vanish, budgets and ends: what is sampled once, and what is not."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from helpers.agents.asking import DEMO, USER, ask, client, post, raw, serving, wait_until, when
from helpers.agents.fake_sampler import FakeSampler
from trimtab.agents import ChatTokens, Endpoint, EndpointLimits


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


def test_the_sampler_comes_and_goes() -> None:
    endpoint = Endpoint(ChatTokens(DEMO), EndpointLimits(max_tokens=100))
    sampler = FakeSampler(DEMO, lambda request: "7")
    sampler.free.set()
    with endpoint:
        for step in range(3):
            session = endpoint.open(step, 100)
            serving = threading.Thread(target=sampler.serve, args=(endpoint,))
            serving.start()
            assert post(endpoint, session).status_code == 200
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
