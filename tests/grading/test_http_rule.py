"""A rule over HTTP: what is posted, what is read, timeouts, retries, and replies that are no verdicts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from trimtab.data import Problem, Sample
from trimtab.grading import Verdict, grade, grade_samples

ITEMS = [
    Sample(Problem(({"role": "user", "content": "2+2?"},), "4", "", "s", extra={"n": n}), f"response {n}")
    for n in range(5)
]
Answer = Callable[[dict[str, Any]], tuple[int, object]]


class Service:
    """A server on this machine: `answer` gets each request's body; `requests` are those that came."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Answer = lambda body: (200, {"verdicts": [True] * len(body["responses"])})
        self.released = threading.Event()  # of an answer that waits
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append(body)
                service.headers.append(dict(self.headers))
                status, reply = service.answer(body)
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/grade"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def grade(self, **options: Any) -> list[Verdict]:
        return grade_samples(ITEMS, self.url, options)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr("trimtab.grading.http_rule.FIRST_PAUSE", 0.001)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    made = Service()
    yield made
    made.released.set()
    made.server.shutdown()
    made.server.server_close()


def test_responses_are_posted_in_batches_and_graded_in_order(service: Service) -> None:
    service.answer = lambda body: (200, {"verdicts": [item["extra"]["n"] / 10 for item in body["responses"]]})
    assert [verdict.score for verdict in service.grade(batch=2)] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert sorted(len(body["responses"]) for body in service.requests) == [1, 2, 2]
    first = next(item for body in service.requests for item in body["responses"] if item["extra"]["n"] == 0)
    assert first == {
        "response": "response 0", "answer": "4", "extra": {"n": 0}, "prompt": [{"role": "user", "content": "2+2?"}],
        "source": "s", "tokens": None, "finished": None,
    }  # fmt: skip


def test_a_reply_may_be_a_bare_list_of_anything_that_a_rule_returns(service: Service) -> None:
    service.answer = lambda body: (200, [True, 0.5, "no_answer", {"kind": "correct", "score": 2}, 0])
    kinds = [(verdict.kind, verdict.score) for verdict in service.grade()]
    assert kinds == [("correct", None), ("wrong", 0.5), ("no_answer", None), ("correct", 2), ("wrong", 0.0)]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_service_is_asked_again(service: Service, status: int) -> None:
    replies = iter([(status, "busy"), (200, b"{not json"), (200, [1.0] * 5)])
    service.answer = lambda body: next(replies)
    assert [verdict.score for verdict in service.grade()] == [1.0] * 5
    assert len(service.requests) == 3


def test_after_the_last_retry_the_grader_has_failed(service: Service) -> None:
    service.answer = lambda body: (503, "come back later")
    verdicts = service.grade(retries=2)
    assert [verdict.kind for verdict in verdicts] == ["crashed"] * 5
    assert verdicts[0].error == f'{service.url} gave no verdicts: status 503: "come back later"'
    assert len(service.requests) == 3


def test_a_refusal_is_not_asked_again(service: Service) -> None:
    service.answer = lambda body: (401, "who are you")
    assert {verdict.kind for verdict in service.grade()} == {"crashed"}
    assert len(service.requests) == 1


def test_a_service_that_does_not_answer_is_given_up_after_its_seconds(service: Service) -> None:
    def wait(body: dict[str, Any]) -> tuple[int, object]:
        service.released.wait(60)
        return 200, [True] * 5

    service.answer = wait
    verdicts = service.grade(seconds=0.2, retries=0)
    assert verdicts[0].kind == "crashed" and "no complete response within 0.2 s" in verdicts[0].error


def test_no_server_at_all_is_a_failure_of_the_grader(service: Service) -> None:
    service.server.shutdown()
    service.server.server_close()
    verdict = grade_samples(ITEMS[:1], service.url, {"retries": 1})[0]
    assert verdict.kind == "crashed" and "gave no verdicts" in verdict.error


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ([True] * 4, "4 verdicts for 5 responses"),
        ({"verdicts": "good"}, "'good'"),
        ({"result": []}, "{'result': []} for 5 responses"),
        ("fine", "'fine' for 5 responses"),
    ],
)
def test_a_reply_of_another_shape_says_what_came(service: Service, reply: object, message: str) -> None:
    service.answer = lambda body: (200, reply)
    (error,) = {verdict.error for verdict in service.grade()}
    assert service.url in error and message in error
    assert len(service.requests) == 1, "the same again would not help"


def test_a_value_that_is_no_verdict_fails_for_its_row_alone(service: Service) -> None:
    service.answer = lambda body: (200, b'[1, NaN, "good", null, 1e999]')
    good, *bad = service.grade()
    assert (good.score, [verdict.kind for verdict in bad]) == (1.0, ["crashed"] * 4)
    for row, value, verdict in zip((2, 3, 4, 5), ("nan", "'good'", "None", "inf"), bad, strict=True):
        assert (
            f"{service.url} for row {row} of 5, the response 'response {row - 1}': {value} is no verdict"
            in verdict.error
        )


def test_the_key_is_sent_and_never_shown(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame-open")
    service.answer = lambda body: (403, "the key sesame-open is not known")
    verdicts = service.grade(key_variable="JUDGE_KEY")
    assert service.headers[0]["Authorization"] == "Bearer sesame-open"
    assert "sesame" not in verdicts[0].error and "(the key)" in verdicts[0].error


@pytest.mark.parametrize(
    "reply",
    [
        ["sesame-open", {"kind": "sesame-open"}, {"kind": "wrong", "extracted": "sesame-open"}, {"sesame-open": 1}, 1],
        {"verdicts": "sesame-open"},
        b'["\\u0073esame\\u002Dopen", "sesame%2dopen", "\\\\u0073esame-open", "QmVhcmVyIHNlc2FtZS1vcGVu", 1]',
        b'{"verdicts": sesame-open}',
        '["sesame-open", 1, 1, 1, 1]'.encode("utf-16"),
    ],
)
def test_no_verdict_has_the_key(service: Service, monkeypatch: pytest.MonkeyPatch, reply: object) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame-open")
    service.answer = lambda body: (200, reply)
    told = repr(service.grade(key_variable="JUDGE_KEY", retries=0))
    assert "esame" not in told and "c2FtZS" not in told
    assert "crashed" in told and ("(the key)" in told or isinstance(reply, bytes))


def test_a_key_that_no_header_can_hold_is_refused_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame-\u00e4")
    with pytest.raises(ValueError, match="JUDGE_KEY contains a character that no HTTP header can hold") as error:
        grade_samples(ITEMS, "http://localhost/grade", {"key_variable": "JUDGE_KEY"})
    assert "sesame" not in str(error.value)


def test_a_url_is_a_rule_like_any_other(service: Service) -> None:
    assert grade("r", "a", service.url).kind == "correct"
