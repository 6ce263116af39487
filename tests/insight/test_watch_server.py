"""The server of `trimtab watch`: who may ask it, what it reads, and what it sends while a run grows."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import httpx
import numpy as np
import pytest

from helpers.insight.report_runs import Made, data_of, decode_array, make_run
from helpers.insight.watching import TOKEN, GrowingRun, Watching, step_line, watching
from trimtab.files import locked
from trimtab.insight.report import write_report
from trimtab.insight.watch import newest_run
from trimtab.insight.watch.launch import check_run
from trimtab.insight.watch.live_data import growth_json, run_json, step_json
from trimtab.insight.watch.watched_run import WatchedRun
from trimtab.record import RecordError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("watched") / "run", Made(steps=4))


@pytest.fixture(scope="module")
def served(run: Path) -> Iterator[Watching]:
    with watching(run) as served:
        yield served


PATHS = (
    "/", "/data", "/events", "/groups", "/runs/0/overview", "/runs/0/curves?first=1&last=2", "/runs/0/tokens",
    "/runs/0/samples", "/runs/0/responses", "/runs/0/export", "/runs/0/steps/1", "/runs/0/steps/1/0",
)  # fmt: skip


@pytest.mark.parametrize("token", [None, b"", b" a-token-of-a-tesT", b" " + TOKEN[:-1].encode(), b" \xc3\xa4"])
def test_without_the_token_nothing_is_answered(served: Watching, token: bytes | None) -> None:
    headers = {} if token is None else {"Authorization": b"Bearer" + token}
    with httpx.Client(base_url=served.root, timeout=60) as client:
        for path in PATHS:
            answer = client.get(path, headers=headers)
            assert answer.status_code == 403 and answer.text.startswith("Refused"), path


def test_only_the_page_takes_the_token_in_its_address(served: Watching) -> None:
    assert served.get(f"/?token={TOKEN}", token=None).status_code == 200
    assert served.get(f"/data?token={TOKEN}", token=None).status_code == 403
    assert served.get(f"/?token={TOKEN[:-1]}", token=None).status_code == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:80", "10.0.0.1", "", "[::2]:1"]
)
@pytest.mark.parametrize("path", ["/data", f"/?token={TOKEN}"])
def test_another_host_is_refused(served: Watching, host: str, path: str) -> None:
    assert served.get(path, Host=host).status_code == 403


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:8080", "LOCALHOST"])
def test_a_port_that_ssh_forwards_is_answered(served: Watching, host: str) -> None:
    assert served.get("/data", Host=host).status_code == 200


def raw(served: Watching, text: str) -> bytes:
    """Send a request as it is, which no client would write."""
    with socket.create_connection(("127.0.0.1", int(served.root.rsplit(":", 1)[1])), timeout=60) as connection:
        connection.sendall(text.encode())
        return connection.recv(1 << 16)


def test_two_hosts_or_none_are_refused(served: Watching) -> None:
    for hosts in ("", "Host: localhost\r\nHost: evil.example\r\n"):
        answer = raw(served, f"GET /data HTTP/1.1\r\n{hosts}Authorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n")
        assert answer.split()[1] in (b"400", b"403")


def test_another_page_of_the_browser_is_refused(served: Watching) -> None:
    for site in ("cross-site", "same-site"):  # a server on another port of this machine is the same site
        assert served.get("/data", **{"Sec-Fetch-Site": site}).status_code == 403
    opened = served.get(
        f"/?token={TOKEN}", token=None, **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    )
    assert opened.status_code == 200  # a link to the page itself
    assert "access-control-allow-origin" not in served.get("/data", Origin="http://evil.example").headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(served: Watching, method: str) -> None:
    answer = httpx.request(method, served.root + "/data", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
    assert answer.status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/runs/0/../../config.toml", "/runs/%2e%2e/config.toml", "/config.toml", "//etc/passwd",
        "/runs/0/metrics.jsonl", "/runs/1/samples", "/runs/-1/samples", "/runs/0/steps/..%2f..%2fx",
        "/runs/0/steps/99999999999999",
    ],
)  # fmt: skip
def test_there_are_no_files(served: Watching, path: str) -> None:
    answer = raw(
        served, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
    )
    assert answer.split()[1] == b"404"


def test_answers_are_kept_by_nobody_and_shown_nowhere_else(served: Watching) -> None:
    answer = served.get(f"/?token={TOKEN}", token=None)
    assert answer.headers["cache-control"] == "no-store" and answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-frame-options"] == "DENY" and "server" not in answer.headers
    policy = answer.headers["content-security-policy"]
    assert "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy and "unsafe-eval" not in policy
    assert TOKEN not in answer.text and "set-cookie" not in answer.headers


def test_the_page_has_the_data_of_the_report(served: Watching, run: Path, tmp_path: Path) -> None:
    live = data_of(served.get(f"/?token={TOKEN}", token=None).text)
    report = data_of(write_report([run], tmp_path / "report.html").read_text())
    assert live["runs"][0]["curves"] == report["runs"][0]["curves"]
    for name in ("summary", "tiles", "alarms", "config", "label", "title", "facts", "reason_text", "entropy_target"):
        assert live["runs"][0][name] == report["runs"][0][name], name
    tokens = served.json("/runs/0/tokens")
    assert tokens["token_statistics"] == report["runs"][0]["token_statistics"]
    assert tokens["replay"] == report["runs"][0]["replay"]


def test_a_step_has_the_blocks_of_the_report(served: Watching, run: Path, tmp_path: Path) -> None:
    report = write_report([run], tmp_path / "report.html", steps=[3]).read_text()
    entries = {(e["step"], e["response"]): e["block"] for e in data_of(report)["runs"][0]["responses"]}
    found = served.json("/runs/0/steps/3")
    assert found["step"] == 3 and [entry["response"] for entry in found["entries"]] == [0, 1, 2, 3]
    for entry in found["entries"]:
        mark = f'id="response-{entries[3, entry["response"]]}">'
        start = report.index(mark) + len(mark)
        assert found["blocks"][entry["block"]] == json.loads(report[start : report.index("</script>", start)])
    assert served.json("/runs/0/steps/3/2")["entries"] == [found["entries"][2]]
    assert served.json("/runs/0/steps/999")["step"] == 4  # the nearest


def test_long_responses_come_when_they_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.insight.watch.live_data.STEP_BYTES", 1_400)
    run = WatchedRun(make_run(tmp_path / "run", Made(steps=1, lengths=(9, 5, 40, 7))))
    run.poll()
    found = json.loads(step_json(run, 1, "0"))
    assert [entry["response"] for entry in found["entries"]] == [0]
    assert "3 of the step's 4 responses are long" in found["notes"][0]
    assert json.loads(step_json(run, 1, "0", 2))["entries"][0]["tokens"] == 40


def rows(served: Watching, query: str) -> list[tuple[int, int]]:
    return [(row["step"], row["response"]) for row in served.json(f"/runs/0/responses?{query}")["rows"]]


def test_responses_are_filtered_and_sorted(served: Watching) -> None:
    every = served.json("/runs/0/responses")
    assert every["found"] == 16 and every["read"] == [1, 4, 4] and every["before"] is None
    assert [row["step"] for row in every["rows"]] == sorted((row["step"] for row in every["rows"]), reverse=True)
    assert rows(served, "first=2&last=2") == [(2, 0), (2, 1), (2, 2), (2, 3)]
    assert {row["verdict"] for row in served.json("/runs/0/responses?verdict=wrong")["rows"]} == {"wrong"}
    assert all(row["reward"] == 1 for row in served.json("/runs/0/responses?min_reward=0.5")["rows"])
    assert all(row["length"] <= 7 for row in served.json("/runs/0/responses?max_length=7")["rows"])
    lengths = [row["length"] for row in served.json("/runs/0/responses?sort=longest")["rows"]]
    assert lengths == sorted(lengths, reverse=True)
    assert rows(served, "text=ANSWER") and rows(served, "text=nowhere") == []
    assert rows(served, "outcome=timeout") == []


def test_the_table_goes_on_below_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.insight.watch.responses.STEPS_AT_ONCE", 3)
    with watching(make_run(tmp_path / "run", Made(steps=7))) as served:
        served.get("/data")
        seen, before = list[tuple[int, int]](), ""
        while before is not None:
            found = served.json(f"/runs/0/responses?before={before}")
            seen += [(row["step"], row["response"]) for row in found["rows"]]
            before = found["before"]
        assert sorted(seen) == [(step, response) for step in range(1, 8) for response in range(4)]


@pytest.mark.parametrize("query", ["sort=backwards", "min_reward=much", "path=/etc/passwd"])
def test_a_filter_that_cannot_be_is_named(served: Watching, query: str) -> None:
    answer = served.get(f"/runs/0/responses?{query}")
    assert answer.status_code == 400 and query.split("=", maxsplit=1)[0] in answer.text


def test_the_export_has_a_line_for_every_response(served: Watching) -> None:
    lines = [json.loads(line) for line in served.get("/runs/0/export?verdict=correct").text.splitlines()]
    assert lines and {line["verdict"] for line in lines} == {"correct"}
    assert {"step", "response", "reward", "prompt", "text", "length"} <= lines[0].keys()


def test_samples_stand_side_by_side_by_prompt(served: Watching) -> None:
    found = served.json("/runs/0/samples")
    assert found["step"] == 4
    for group in found["groups"]:
        rewards = [row["reward"] for row in group["rows"]]
        assert rewards == sorted(rewards) and len({row["group"] for row in group["rows"]}) == 1


def test_a_part_of_a_long_run_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.insight.watch.watched_run.MOST_VALUES", 30_000)  # of 70,000: thinned in memory
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(step_line(step) for step in range(1, 5_001)))
    with watching(folder) as served:
        served.get("/data")
        assert served.server.runs[0].curves.thinned
        assert served.server.runs[0].curves.count <= 30_000
        curve = served.json("/runs/0/curves?first=2000&last=2999")["curves"]["policy/entropy"]
    steps = decode_array(curve["steps"])
    assert steps.tolist() == list(range(2_000, 3_000))
    np.testing.assert_array_equal(decode_array(curve["values"]), (1 / steps).astype(np.float32))


def test_what_is_new_comes_as_events(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run")
    run.take(2)
    with watching(run.folder) as served:
        position = data_of(served.get(f"/?token={TOKEN}", token=None).text)["runs"][0]["live"]["position"]
        events = served.events([position])
        next(events)  # the status, which the page has
        run.take(1, **{"eval/accuracy": 0.5})
        name, grown = next(each for each in events if "lines" in each[1])
        assert name == "growth" and [line["step"] for line in grown["lines"]] == [3]
        assert grown["lines"][0]["eval/accuracy"] == 0.5 and grown["position"] == [0, 3, 0]
        run.alarm(alarm="entropy collapse", message="It fell.", suggestion="lower update.lr")
        grown = next(event for _, event in events if "alarms" in event)
        assert grown["alarms"][0]["suggestion"] == "lower update.lr"
        # Killed and resumed: the file is shorter, and another.
        (run.folder / "metrics.jsonl").unlink()
        run.add(step_line(1) + step_line(2))
        assert next(event for _, event in events if event.get("reset"))["position"][0] == 1
        served.stop()
        assert [name for name, _ in events][-1] == "end"
    run.close()


@pytest.mark.parametrize("known", ["[" * 5_000, "[[1e999, 0, 0]]", "[[NaN, 0, 0]]", "null", '{"a": 1}', "[[1]]"])
def test_a_page_that_says_nonsense_about_what_it_has_loads_the_run_again(served: Watching, known: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.stream("GET", f"{served.root}/events", params={"known": known}, headers=headers, timeout=60) as answer:
        assert next(line for line in answer.iter_lines() if line) == "event: growth"


def test_a_page_that_is_far_behind_loads_the_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(step_line(step) for step in range(1, 1_001)))
    with watching(folder) as served:
        for known in ([[0, 10, 0]], [[0, 5_000, 0]], [[7, 1_000, 0]], [], [["x"]], [[0, 1_000, 0]] * 2):
            _, grown = next(served.events(known))
            assert grown["reset"] and grown["position"] == [0, 1_000, 0]
        _, grown = next(served.events([[0, 998, 0]]))
        assert [line["step"] for line in grown["lines"]] == [999, 1_000]


def test_links_out_of_the_run_are_not_followed(tmp_path: Path) -> None:
    secret = make_run(tmp_path / "secret", Made(steps=2, texts={"prompt": ["SECRET"] * 4}))
    run = make_run(tmp_path / "run", Made(steps=2))
    step = run / "tokens/step-00000001"
    for name in ("tokens.parquet", "responses.parquet", "step.json"):
        (step / name).unlink()
        (step / name).symlink_to(secret / "tokens/step-00000001" / name)
    for name in ("metrics.jsonl", "config.toml"):
        (run / name).unlink()
        (run / name).symlink_to(secret / name)
    with watching(run) as served:
        data = served.json("/data")["runs"][0]
        assert data["curves"] == {} and data["config"] == ""
        assert any("link" in note or "cannot be read" in note for note in data["notes"])
        for path in ("/runs/0/steps/1", "/runs/0/responses", "/runs/0/export", "/runs/0/samples", "/runs/0/tokens"):
            assert "SECRET" not in served.get(path).text
        assert served.get("/runs/0/steps/1").status_code == 400
        assert served.get("/runs/0/steps/2").status_code == 200
    whole = make_run(tmp_path / "whole", Made(steps=1))
    (whole / "tokens").rename(tmp_path / "away")
    (whole / "tokens").symlink_to(secret / "tokens")
    watched = WatchedRun(whole)
    watched.poll()
    with pytest.raises(RecordError, match="link that leads out of the run"):
        watched.open_records()
    assert watched.steps == []


def test_a_run_that_is_a_link_itself_is_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(make_run(tmp_path / "run", Made(steps=2)))
    watched = WatchedRun(tmp_path / "link")
    watched.poll()
    assert watched.last_step == 2 and watched.steps == [1, 2] and watched.nearest_step(9) == 2


def test_a_folder_that_comes_later_is_followed(tmp_path: Path) -> None:
    watched = WatchedRun(tmp_path / "run")
    watched.poll()
    assert watched.state() == "loading"
    make_run(tmp_path / "run", Made(steps=2))
    watched.poll()
    assert watched.last_step == 2 and watched.steps == [1, 2]


def test_a_step_that_comes_in_the_tick_of_the_clock_of_the_last_listing_is_seen(tmp_path: Path) -> None:
    run = WatchedRun(make_run(tmp_path / "run", Made(steps=1)))
    run.poll()
    tokens = tmp_path / "run" / "tokens"
    time = tokens.stat().st_mtime_ns
    (tokens / "step-00000002").mkdir()
    os.utime(tokens, ns=(time, time))
    for _ in range(200):  # it is not listed at every look
        if 2 in run.steps:
            break
        sleep(0.05)
        run.poll()
    assert run.steps == [1, 2]


def test_a_page_is_told_of_the_steps_that_it_can_read(tmp_path: Path) -> None:
    run = WatchedRun(make_run(tmp_path / "run", Made(steps=1)))
    run.poll()
    (tmp_path / "run" / "tokens" / "step-00000002").mkdir()  # after the look
    assert run_json(run, 10)["recorded_steps"] == growth_json(run)["recorded_steps"] == len(run.steps) == 1


def test_states(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=8))
    watched = WatchedRun(run)
    watched.poll()
    assert watched.state() == "failed"  # without a checkpoint of its last step
    with locked(run):
        assert watched.state() == "running"
    (run / "checkpoints/step-00000008").mkdir(parents=True)
    assert watched.state() in ("stopped", "failed")
    (run / "model").mkdir()
    assert watched.state() == "finished"
    os.remove(run / "config.toml")
    assert WatchedRun(run).state() == "loading"
    other = WatchedRun(run)
    other.poll()
    assert other.state() == "quiet"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(step_line(9))
    other.poll()
    assert other.state() == "running"  # of TRL or verl: it writes


def test_the_newest_run_is_found(tmp_path: Path) -> None:
    old, new = make_run(tmp_path / "a/old", Made(steps=1)), make_run(tmp_path / "new", Made(steps=1))
    for n, run in enumerate((old, new)):
        for path in run.iterdir():
            os.utime(path, (1e9 + n, 1e9 + n))
    assert newest_run(tmp_path) == new
    os.utime(old / "metrics.jsonl", (2e9, 2e9))
    assert newest_run(tmp_path) == old
    with pytest.raises(ValueError, match="has no runs"):
        newest_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match="there is no such folder"):
        check_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match="has none of"):
        check_run(tmp_path)
