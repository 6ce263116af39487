"""Evaluation through an OpenAI-compatible server: a real one on this machine, which misbehaves in every way.

Whatever it does, every sample is there, or is stored as failed with the reason; none becomes a wrong answer.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.evaluate.raw_server import GOOD, raw_serving
from helpers.evaluate.small_evals import (
    RecordedProgress,
    Reply,
    answer,
    body,
    completion,
    hang,
    hang_up,
    served,
    serving,
    small,
    status,
    trickle,
)
from trimtab.bounded_http import BoundedClient
from trimtab.experiments.evaluate.endpoint import EndpointConnection, EndpointError
from trimtab.experiments.evaluate.folder import EvalFolder
from trimtab.experiments.evaluate.run import EvalResult, evaluate

KEY = "sk-secret-4242"


def run(folder: Path, *script: Reply, otherwise: Reply | None = None, **changes: Any) -> tuple[EvalResult, list[Any]]:
    """An evaluation against a server that begins with a script, and the requests that the server received."""
    with serving(*script, otherwise=otherwise) as server:
        return evaluate(served(folder, server, **changes), RecordedProgress()), server.requests


def counts(done: EvalResult) -> tuple[float | None, int]:
    """Accuracy, and samples that were not drawn."""
    found = done.metrics["gsm8k"]
    return None if found.average is None else found.average.mean, found.failed_samples


def test_all_samples_are_requested_with_the_settings(tmp_path: Path) -> None:
    done, requests = run(tmp_path, preset="justrl", max_new_tokens=77)
    assert counts(done) == (1.0, 0)
    assert len(requests) == 6, "one request for the three samples of a problem"
    first = requests[0]
    assert {key: first[key] for key in ("model", "n", "temperature", "top_p", "max_tokens", "logprobs")} == {
        "model": "tiny",
        "n": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 77,
        "logprobs": True,
    }
    assert len({request["seed"] for request in requests}) == 6, "every problem has a seed of its own"


def test_seeds_depend_on_the_evaluations_seed_alone(tmp_path: Path) -> None:
    _, one = run(tmp_path / "one")
    _, two = run(tmp_path / "two")
    _, other = run(tmp_path / "other", seed=5)
    seeds = [sorted(request["seed"] for request in requests) for requests in (one, two, other)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_many_samples_are_requested_a_few_at_a_time(tmp_path: Path) -> None:
    done, requests = run(tmp_path, samples=20, problems=1)
    assert sorted(request["n"] for request in requests) == [4, 8, 8]
    assert len(done.folder.read()) == 20
    assert len({request["seed"] for request in requests}) == 3


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(status(429), id="too many requests"),
        pytest.param(status(500), id="internal error"),
        pytest.param(status(503, b""), id="unavailable, no body"),
        pytest.param(status(408), id="request timeout"),
        pytest.param(hang_up, id="closes the connection"),
        pytest.param(body(b"<html>gateway</html>"), id="not JSON"),
        pytest.param(body(b""), id="an empty body"),
        pytest.param(body(b"[]"), id="a list"),
        pytest.param(body(b"null"), id="null"),
        pytest.param(body(b"{}"), id="an empty object"),
        pytest.param(body(b'{"choices": []}'), id="no choices"),
        pytest.param(body(b'{"choices": {"0": 1}}'), id="choices that are no list"),
        pytest.param(body(b'{"choices": [{"message": null}]}'), id="a choice without a message"),
        pytest.param(body(b'{"choices": [{"message": {"content": 42}}]}'), id="content that is no text"),
        pytest.param(body(b'{"choices": [{"message": {"content": ["a"]}}]}'), id="content that is a list"),
        pytest.param(body(b"[" * 100_000), id="a tower of brackets"),
        pytest.param(body(b'{"choices"', length=5_000), id="half a body"),
        pytest.param(body(b"\xff\xfe\x00 nonsense"), id="bytes that are no text"),
        pytest.param(body(b" " * 2_000_000), id="a huge body"),
    ],
)
def test_trouble_that_passes_leaves_no_trace(trouble: Reply, tmp_path: Path) -> None:
    done, requests = run(tmp_path, trouble, trouble, problems=2)
    assert counts(done) == (1.0, 0)
    assert len(requests) == 4


def test_trouble_that_stays_fails_the_samples_and_says_why(tmp_path: Path) -> None:
    done, requests = run(tmp_path, otherwise=status(500, b'{"error": "out of \x1b[31mmemory"}'), problems=2, retries=2)
    assert counts(done) == (None, 6), "nothing is known, and that is not zero"
    assert len(requests) == 2 * 3
    failed = done.folder.read()
    assert all("status 500" in str(generation.failed) for generation in failed)
    assert all("\x1b" not in str(generation.failed) for generation in failed)
    assert done.metrics["gsm8k"].average_if_failures_wrong == 0.0


def test_one_problem_that_always_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    def picky(request: dict[str, Any]) -> list[str]:
        if request["messages"][-1]["content"] == "4+4=":
            raise OSError  # hang up
        return ["0"] * request["n"]

    done, _ = run(tmp_path, otherwise=answer(picky), retries=1)
    found = done.metrics["gsm8k"]
    assert (found.failed_samples, found.problems_without_samples) == (3, 1)
    assert found.average is not None
    assert (found.average.mean, found.average.problems) == (0.0, 5)


def test_a_rejected_request_is_not_sent_again(tmp_path: Path) -> None:
    done, requests = run(tmp_path, status(400, b'{"error": "the prompt is too long"}'), problems=2)
    assert len(requests) == 2
    assert counts(done) == (1.0, 3)
    reasons = {generation.failed for generation in done.folder.read()} - {None}
    assert reasons == {'status 400: {"error": "the prompt is too long"}'}


@pytest.mark.parametrize("code", [401, 403, 404, 301])
def test_a_server_that_refuses_everything_stops_the_evaluation(code: int, tmp_path: Path) -> None:
    with serving(otherwise=status(code, b'{"error": "no such model"}')) as server:
        with pytest.raises(EndpointError, match=f"status {code}: .*no such model"):
            evaluate(served(tmp_path, server), RecordedProgress())
        assert len(server.requests) <= 2, "it is not sent again"
    assert not (tmp_path / "out/result.json").exists()


def test_a_silent_server_is_given_up_on(tmp_path: Path) -> None:
    done, _ = run(tmp_path, otherwise=hang, timeout=0.1, retries=1, problems=1)
    assert counts(done) == (None, 3)
    assert {generation.failed for generation in done.folder.read()} == {"no complete response within 0.1 s"}


def test_a_server_that_trickles_is_given_up_on(tmp_path: Path) -> None:
    done, _ = run(tmp_path, otherwise=trickle, timeout=0.2, retries=0, problems=1)
    assert {generation.failed for generation in done.folder.read()} == {"no complete response within 0.2 s"}


@contextmanager
def nobody() -> Iterator[str]:
    """The address of a port that nobody listens on, and that no other process can be given."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/v1"


def test_a_server_that_is_not_there_ends_the_evaluation(tmp_path: Path) -> None:
    with nobody() as url, serving() as server:
        with pytest.raises(EndpointError, match=f"no server answers at {url} .ConnectError.*start it, or check --end"):
            evaluate(served(tmp_path, server, endpoint=url, retries=1), RecordedProgress())
        assert not EvalFolder(tmp_path / "out").read(), "nothing is kept as failed"
        done = evaluate(served(tmp_path, server), RecordedProgress())  # the same command, once there is a server
    assert counts(done) == (1.0, 0)


def test_a_server_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    send = BoundedClient.send

    async def late(client: BoundedClient, *args: Any, **options: Any) -> Any:
        tried.append("")
        if len(tried) < 3:
            raise httpx.ConnectError("ConnectError: refused")
        return await send(client, *args, **options)

    monkeypatch.setattr(BoundedClient, "send", late)
    done, _ = run(tmp_path)
    assert counts(done) == (1.0, 0)


def test_a_server_that_goes_away_fails_the_samples_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[str] = []
    send = BoundedClient.send

    async def gone(client: BoundedClient, *args: Any, **options: Any) -> Any:
        if answered:
            raise httpx.ConnectError("ConnectError: refused")
        answered.append("")
        return await send(client, *args, **options)

    monkeypatch.setattr(BoundedClient, "send", gone)
    done, _ = run(tmp_path, retries=0, concurrency=1)
    assert counts(done) == (1.0, 15)


def test_retry_after_is_respected(tmp_path: Path) -> None:
    began = time.monotonic()
    busy = [status(429, retry_after=wish) for wish in ("0.7", "soon", "nan", "inf", "-1")]
    done, _ = run(tmp_path, *busy, problems=1, retries=5)
    assert counts(done) == (1.0, 0)
    assert time.monotonic() - began >= 0.7


def test_fewer_choices_than_requested_are_taken_and_the_rest_requested(tmp_path: Path) -> None:
    done, requests = run(tmp_path, otherwise=answer(lambda request: ["0"]), problems=2, retries=0)
    assert counts(done) == (0.0, 0)
    assert [request["n"] for request in requests if request["messages"] == requests[0]["messages"]] == [3, 2, 1]
    assert len({request["seed"] for request in requests}) == 6, "each request has a seed of its own"


def test_more_choices_than_requested_are_not_taken(tmp_path: Path) -> None:
    done, _ = run(tmp_path, otherwise=answer(lambda request: ["2"] * 9), problems=1)
    assert len(done.folder.read()) == 3


@pytest.mark.parametrize("field", ["seed", "logprobs", "n"])
def test_a_field_that_a_server_does_not_know_is_left_out(field: str, tmp_path: Path) -> None:
    def old(handler: Any, request: dict[str, Any]) -> None:
        if field in request:
            handler.send(422, json.dumps({"detail": f"Extra inputs are not permitted: '{field}'"}).encode())
        else:
            answer()(handler, request)

    done, requests = run(tmp_path, otherwise=old, concurrency=1)
    assert counts(done) == (1.0, 0)
    assert sum(field in request for request in requests) == 1, "it is tried once"


def test_log_probabilities_give_lengths_and_surprisal(tmp_path: Path) -> None:
    def reply(handler: Any, request: dict[str, Any]) -> None:
        made = completion(["2", "2", "2"])
        for n, choice in enumerate(made["choices"]):
            choice["logprobs"] = {"content": [{"token": "2", "logprob": -0.5}] * (n + 1)}
        handler.send(200, json.dumps(made).encode())

    done, _ = run(tmp_path, otherwise=reply, problems=1)
    assert [(g.tokens, g.logp) for g in done.folder.read()] == [(1, -0.5), (2, -0.5), (3, -0.5)]
    found = done.metrics["gsm8k"]
    assert found.surprisal is not None and found.length is not None
    assert (found.surprisal.mean, found.length.mean, found.entropy) == (0.5, 2.0, None)


def test_without_them_the_mean_length_comes_from_the_usage(tmp_path: Path) -> None:
    done, _ = run(tmp_path, problems=1)
    found = done.metrics["gsm8k"]
    assert found.length is not None
    assert (found.length.mean, found.surprisal, found.entropy) == (7.0, None, None)


def test_without_usage_there_is_no_length(tmp_path: Path) -> None:
    done, _ = run(tmp_path, otherwise=answer(usage=None), problems=1)
    assert done.metrics["gsm8k"].length is None


def test_a_response_that_was_cut_off_is_truncated(tmp_path: Path) -> None:
    def reply(handler: Any, request: dict[str, Any]) -> None:
        made = completion(["2", "", "2"])
        made["choices"][1] |= {"finish_reason": "length", "message": {"content": None, "reasoning_content": "Hm"}}
        handler.send(200, json.dumps(made).encode())

    done, _ = run(tmp_path, otherwise=reply, problems=1)
    found = done.metrics["gsm8k"]
    assert found.truncated is not None and found.no_answer is not None
    assert found.truncated.mean == pytest.approx(1 / 3)
    assert found.no_answer.mean == pytest.approx(1 / 3)


def test_text_with_anything_in_it_is_kept_as_it_is(tmp_path: Path) -> None:
    odd = ["\ud800 half", "\x00\x1b[2J\u2028", "line\nline\r\n\\boxed{2}"]
    done, _ = run(tmp_path, otherwise=answer(lambda request: odd), problems=1)
    assert [generation.text for generation in done.folder.read()] == odd


def test_the_key_is_sent_and_neither_kept_nor_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    log = RecordedProgress()
    with serving(otherwise=status(400, f'{{"error": "bad request by {KEY}"}}'.encode())) as server:
        evaluate(served(tmp_path, server, problems=1), log)
        assert server.keys == [f"Bearer {KEY}"]
    refusal = status(401, f'{{"error": "wrong key {KEY}"}}'.encode())
    with serving(otherwise=refusal) as server, pytest.raises(EndpointError) as error:
        evaluate(served(tmp_path / "two", server, problems=1), log)
    kept = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY not in kept + str(error.value) + "".join(log.lines)
    assert "bad request by (the key)" in kept


def test_without_a_key_none_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving() as server:
        evaluate(served(tmp_path, server, problems=1), RecordedProgress())
        assert server.keys == [None]


def test_no_more_is_told_than_a_request_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY", "OPENAI_BASE_URL"):
        monkeypatch.setenv(name, "http://elsewhere.invalid")
    with raw_serving(lambda: [GOOD]) as server:
        evaluate(small(tmp_path, model=None, endpoint=server.url, model_name="m", problems=1), RecordedProgress())
    head = server.requests[0].lower().partition(b"\r\n\r\n")[0]
    assert b"elsewhere" not in head
    assert {line.partition(b":")[0] for line in head.splitlines()[1:]} == {
        b"host", b"accept", b"accept-encoding", b"connection", b"content-length", b"content-type", b"user-agent",
    }  # fmt: skip


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/v1", "http://", "", "file:///etc/passwd"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not a URL"):
        EndpointConnection(url)


@pytest.mark.parametrize("url", ["http://me:hunter2@host/v1", "ftp://hunter2@host", "http://me:hunter2/x@host:port/v1"])
def test_a_password_in_the_address_is_refused_unseen(url: str) -> None:
    with pytest.raises(ValueError, match="OPENAI_API_KEY") as error:
        EndpointConnection(url)
    assert "hunter2" not in str(error.value)


def test_an_address_may_have_an_at_sign_in_its_path() -> None:
    assert EndpointConnection("http://host/@me/v1").url == "http://host/@me/v1"


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"retries": -1}, {"timeout": 0.0}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--concurrency must be at least 1"):
        EndpointConnection("http://host/v1", **wrong)


def test_what_was_sampled_before_an_interruption_is_not_requested_again(tmp_path: Path) -> None:
    with serving(answer(), answer(), otherwise=status(401)) as server:
        with pytest.raises(EndpointError):
            evaluate(served(tmp_path, server, concurrency=1), RecordedProgress())
        server.otherwise, server.requests = answer(), []
        done = evaluate(served(tmp_path, server), RecordedProgress())
        assert len(server.requests) == 4
    assert counts(done) == (1.0, 0)
    assert len(done.folder.read()) == 18


def test_only_missing_samples_are_requested(tmp_path: Path) -> None:
    with serving() as server:
        done = evaluate(served(tmp_path, server), RecordedProgress())
        done.folder.keep_only(g for g in done.folder.read() if g.key != ("gsm8k", "gsm8k-2", 1))
        server.requests = []
        again = evaluate(served(tmp_path, server), RecordedProgress())
        assert [request["n"] for request in server.requests] == [1]
    assert len(again.folder.read()) == 18


def test_failed_samples_stay_failed_until_they_are_to_be_retried(tmp_path: Path) -> None:
    with serving(status(400)) as server:
        wanted = served(tmp_path, server, concurrency=1)
        assert counts(evaluate(wanted, RecordedProgress())) == (1.0, 3)
        server.requests = []
        assert counts(evaluate(wanted, RecordedProgress())) == (1.0, 3)
        assert server.requests == []
        retried = evaluate(served(tmp_path, server, retry_failed=True), RecordedProgress())
        assert counts(retried) == (1.0, 0)
        assert len(server.requests) == 1


def test_the_same_model_at_another_address_goes_on(tmp_path: Path) -> None:
    with serving(answer(), otherwise=status(401)) as server, pytest.raises(EndpointError):
        evaluate(served(tmp_path, server, concurrency=1), RecordedProgress())
    with serving() as server:
        done = evaluate(served(tmp_path, server), RecordedProgress())
        assert len(server.requests) == 5
    assert done.settings.endpoint == server.url


def test_so_many_requests_run_at_a_time_and_no_more(tmp_path: Path) -> None:
    """The server replies when three requests have arrived, and never sees a fourth before that."""
    lock, running, most = threading.Lock(), 0, 0
    three = threading.Barrier(3, timeout=120)

    def counted(handler: Any, request: dict[str, Any]) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait()
        with lock:
            running -= 1
        answer()(handler, request)

    done, _ = run(tmp_path, otherwise=counted, concurrency=3)
    assert counts(done) == (1.0, 0)
    assert most == 3


def test_a_server_that_hangs_does_not_hold_up_an_interruption(tmp_path: Path) -> None:
    """The first reply comes, the second never does, and the user presses Ctrl-C."""

    class Interrupting(RecordedProgress):
        @contextmanager
        def samples(self, total: int, done: int) -> Iterator[Any]:
            def stop(batch: Any) -> None:
                raise KeyboardInterrupt

            yield stop

    began = time.monotonic()
    with serving(answer(), otherwise=hang) as server, pytest.raises(KeyboardInterrupt):
        evaluate(served(tmp_path, server, concurrency=2, timeout=240.0), Interrupting())
    assert time.monotonic() - began < 120.0, "the timeout was not waited for"
    assert len(EvalFolder(tmp_path / "out").read()) == 3, "what had come is kept"


def test_samples_that_were_interrupted_are_not_kept_as_failed(tmp_path: Path) -> None:
    with serving(answer(), status(500), otherwise=status(401)) as server, pytest.raises(EndpointError):
        evaluate(served(tmp_path, server, concurrency=1, retries=5), RecordedProgress())
    assert [generation.failed for generation in EvalFolder(tmp_path / "out").read()] == [None] * 3
