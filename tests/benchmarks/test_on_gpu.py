"""The command that measures the figures of a GPU: in which order, for how long, and what a failure leaves."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import on_gpu
from on_gpu import PARTS, Part, due, main

HERE = Path(on_gpu.__file__).parent
DAY = "2026-02-01"
# Writes its figure, and then does what its second argument says.
SCRIPT = """
import json, sys, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
result = json.loads(out.read_text()) if out.exists() else {}
out.write_text(json.dumps(result | {"date": "2026-02-01", sys.argv[1]: 1}))
if sys.argv[2] == "hangs":
    time.sleep(60)
sys.exit(3 if sys.argv[2] == "fails" else 0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(on_gpu, "HERE", tmp_path)
    return tmp_path


def measure(folder: Path, *words: str, **parts: Part) -> int:
    return main(["--results", str(folder), "--since", DAY, *words], parts)


def written(folder: Path, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / name).read_text())
    return found


def test_what_was_never_measured_comes_first_and_what_is_new_not_at_all(tmp_path: Path) -> None:
    for name, day in (("old", "2026-01-02"), ("older", "2026-01-01T10:18:09+00:00"), ("new", DAY)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": day}))
    parts = {name: Part("script.py", f"{name}.json", 1) for name in ("new", "old", "older", "never")}
    assert due(parts, tmp_path, DAY) == ["never", "older", "old"]


def test_a_measurement_is_not_repeated_on_the_same_day(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    part = Part("script.py speed well", "speed.json", 30)
    assert measure(folder, speed=part) == 0
    assert written(folder, "speed.json") == {"date": DAY, "speed": 1}
    assert "speed: measured" in capfd.readouterr().out
    assert measure(folder, speed=part) == 0
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("end", "limit", "said"), [("fails", 30, "exit code 3"), ("hangs", 2, "cut after 2 s")])
def test_a_failure_keeps_the_earlier_result_and_the_next_part_runs(
    folder: Path, capfd: pytest.CaptureFixture[str], end: str, limit: float, said: str
) -> None:
    earlier = {"date": "2026-01-01", "kept": 1}
    (folder / "bad.json").write_text(json.dumps(earlier))
    start = time.monotonic()
    bad, good = Part(f"script.py speed {end}", "bad.json", limit), Part("script.py speed well", "good.json", 30)
    (folder / "good.json").write_text(json.dumps({"date": "2026-01-02"}))
    assert measure(folder, bad=bad, good=good) == 1
    assert time.monotonic() - start < 40
    assert f"bad: {said}" in capfd.readouterr().out
    assert written(folder, "bad.json") == earlier
    assert written(folder, "bad.partial.json") == {"date": DAY, "speed": 1}
    assert written(folder, "good.json") == {"date": DAY, "speed": 1}


def test_a_part_that_adds_keeps_the_figures_of_earlier_calls(folder: Path) -> None:
    (folder / "both.json").write_text(json.dumps({"date": "2026-01-01", "first": 1}))
    assert measure(folder, both=Part("script.py second well", "both.json", 30, adds=True)) == 0
    assert written(folder, "both.json") == {"date": DAY, "first": 1, "second": 1}


def test_what_does_not_fit_or_cannot_run_is_passed_over(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    long = Part("script.py speed well", "long.json", 90)
    alien = Part("script.py speed well", "alien.json", 1, ("no_such_package",))
    assert measure(folder, "--minutes", "1", long=long, alien=alien) == 0
    said = capfd.readouterr().out
    assert "long: passed over: up to 90 s do not fit into the 60 s left" in said
    assert "alien: passed over: no_such_package not installed" in said
    assert not list(folder.glob("*.json"))


def test_a_wrong_name_is_an_error_that_lists_the_parts(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["mfuu"])
    assert "no part 'mfuu'; there are verl, " in capfd.readouterr().err


@pytest.mark.parametrize("name", list(PARTS))
def test_every_part_is_a_script_with_arguments_that_it_has(name: str) -> None:
    script, *words = PARTS[name].command.split()
    text = (HERE / script).read_text()
    options = [word for word in words if word.startswith("--")]
    assert all(f'"{option}"' in text for option in [*options, "--out"])
    assert PARTS[name].limit <= 580 and PARTS[name].result.endswith("-h200.json")
