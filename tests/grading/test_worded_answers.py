"""Answers with words, units and unusual signs around them, through `trimtab grade` as a user runs it: no wrong one of
data/worded_answers.toml is paid, every right one of data/unusual_notation.toml is. data/frames.toml has more that are
put around truths of every form.

data/known_faults.toml lists the lines that are not graded so: right ones that are refused on purpose. It is
checked both ways: a line that is graded rightly has to be removed from it, and no other line may fail. Each failure
lists all lines at once."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

DATA = Path(__file__).parent / "data"
REFUSED = {"wrong", "ambiguous", "no_answer", "too_costly"}
ATTEMPTS = 10  # for verdicts that depend on the load of the machine


class Line(NamedTuple):
    truth: str
    answer: str
    why: str = ""


def table(name: str) -> list[Line]:
    groups = tomllib.loads((DATA / name).read_text())["group"]
    return [Line(group["truth"], answer, group["why"]) for group in groups for answer in group["answers"]]


def framed(kind: str) -> list[Line]:
    frames = tomllib.loads((DATA / "frames.toml").read_text())
    return [Line(truth, frame.replace("@", truth), frame) for truth in frames["truths"] for frame in frames[kind]]


def pairs(by_truth: dict[str, list[str]]) -> set[tuple[str, str]]:
    return {(truth, answer) for truth, answers in by_truth.items() for answer in answers}


WRONG = table("worded_answers.toml")
RIGHT = table("unusual_notation.toml")
CHANGED, KEPT = framed("change"), framed("keep")
TRUTHS = [
    Line(truth, truth, "the truth itself") for truth in dict.fromkeys(line.truth for line in WRONG + RIGHT + KEPT)
]
FAULTS = tomllib.loads((DATA / "known_faults.toml").read_text())
PAID, NOT_PAID = pairs(FAULTS.get("paid", {})), pairs(FAULTS.get("refused", {}))


def kinds(lines: list[Line]) -> list[str]:
    asked = [
        json.dumps({"response": rf"So the answer is \boxed{{{line.answer}}}", "answer": line.truth}) for line in lines
    ]
    command = [sys.executable, "-m", "trimtab", "grade"]
    done = subprocess.run(command, input="\n".join(asked) + "\n", capture_output=True, text=True, check=True)
    return [json.loads(verdict)["kind"] for verdict in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, str], str]:
    asked, found = WRONG + CHANGED + RIGHT + KEPT + TRUTHS, dict[tuple[str, str], str]()
    for _ in range(ATTEMPTS):
        found |= {line[:2]: kind for line, kind in zip(asked, kinds(asked), strict=True)}
        # Beside busy processes a child may not get its second of processor time: right lines are asked again.
        asked = [line for line in RIGHT + KEPT + TRUTHS if found[line[:2]] == "too_costly" and line[:2] not in NOT_PAID]
        if not asked:
            break
    return found


def told(title: str, lines: list[Line], verdicts: dict[tuple[str, str], str]) -> str:
    rows = [f"  {line.answer!a} for {line.truth!a}: {verdicts[line[:2]]} ({line.why})" for line in lines]
    return "\n".join([f"{len(rows)} {title}:", *rows]) if rows else ""


def check(lines: list[Line], graded_rightly: set[str], known: set[tuple[str, str]], verdicts: dict) -> None:
    rightly = [line for line in lines if verdicts[line[:2]] in graded_rightly]
    new = [line for line in lines if line not in rightly and line[:2] not in known]
    mended = [line for line in rightly if line[:2] in known and verdicts[line[:2]] != "too_costly"]
    parts = [
        told("lines are graded wrongly", new, verdicts),
        told("lines are graded rightly now: remove them from data/known_faults.toml", mended, verdicts),
    ]
    assert not new and not mended, "\n" + "\n".join(filter(None, parts))


def test_no_wrong_answer_with_words_or_signs_around_it_is_paid(verdicts: dict[tuple[str, str], str]) -> None:
    check(WRONG, REFUSED, PAID, verdicts)


def test_no_truth_that_words_or_signs_change_is_paid(verdicts: dict[tuple[str, str], str]) -> None:
    check(CHANGED, REFUSED, PAID, verdicts)


def test_right_answers_in_unusual_notation_are_paid(verdicts: dict[tuple[str, str], str]) -> None:
    check(RIGHT, {"correct"}, NOT_PAID, verdicts)


def test_truths_in_colours_styles_and_punctuation_are_paid(verdicts: dict[tuple[str, str], str]) -> None:
    check(KEPT, {"correct"}, NOT_PAID, verdicts)


def test_every_truth_of_the_tables_is_paid_as_it_stands(verdicts: dict[tuple[str, str], str]) -> None:
    check(TRUTHS, {"correct"}, set(), verdicts)


def test_the_tables_are_large_and_say_each_thing_once() -> None:
    wrong, right = [line[:2] for line in WRONG], [line[:2] for line in RIGHT]
    assert len(wrong) >= 300
    assert len(right) >= 100
    assert len(set(wrong + right)) == len(wrong + right)
    assert {line[:2] for line in WRONG + CHANGED} >= PAID
    assert {line[:2] for line in RIGHT + KEPT} >= NOT_PAID
