"""Whatever a recipe or a `--set` holds, the answer is a configuration or an error in a few short lines."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trimtab.cli import app
from trimtab.text import shown
from trimtab.trainer.config import Config, load, parse

KEYS = [(s, key) for s, field in Config.model_fields.items() for key in getattr(field.annotation, "model_fields", ())]
NESTED: dict[str, Any] = {}
for _ in range(2_000):
    NESTED = {"a": NESTED}
ABSURD: list[Any] = [
    *(0, -1, 10**18, 10**30, -(10**30), 1 << 20_000, 0.0, -0.0, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf),
    *(
        "",
        " ",
        "none",
        "\0",
        "\x1b[2J",
        "\u202e",
        "../" * 2_000,
        "x" * 60_000,
        "\udcff",
        "1e400",
        "nan",
        True,
        False,
        None,
    ),
    *([], [[]], [0] * 1_000, ["wandb"] * 1_000, ["x"] * 1_000, {}, {"": 0}, {"name": {}}, {"x" * 50_000: 1}, NESTED),
]


def problem_of(table: dict[str, Any]) -> str:
    """Return the error of a table; empty where there is none."""
    try:
        parse(table)
    except ValueError as error:
        return str(error)
    return ""


def test_every_key_answers_absurd_values_in_words() -> None:
    for (section, key), value in itertools.product(KEYS, ABSURD):
        problem = problem_of({section: {key: value}})
        assert not problem or key in problem or section in problem, (key, shown(value), problem)
        assert len(problem) < 3_000, (key, shown(value), problem[:500])


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: shown(value, 20))
def test_sections_and_objectives_answer_absurd_values_in_words(value: Any) -> None:
    objective = {"name": "stapo + s2t"}
    tables = [*({section: value} for section in Config.model_fields), {shown(value, 10_000): value}]
    tables += [{"objective": {**objective, key: value}} for key in ("name", "tau_p", "s2t", "clip_low", "group", "x")]
    for table in tables:
        assert len(problem_of(table)) < 3_000


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("run.threads=1000000", "run.threads = 1000000: must be at most 1,024"),
        ("run.seed=12345678901234567890", "run.seed: 12345678901234567890 must be a whole number of at most 18 digits"),
        ("update.lr=1e300", "update.lr: 1e+300 must be a number between -1e+30 and 1e+30"),
        ("rollout.prompts=10000000", "rollout.prompts = 10000000: must be at most 1,000,000"),
        ("task.suffix=\udcff", r"task.suffix: '\udcff' must be UTF-8"),
        ("a." * 30 + "b=1", "write section.key=value"),
    ],
)
def test_a_value_that_nothing_could_run_with_is_named_with_its_key(setting: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        load("addition", [setting])


def test_a_step_of_more_responses_than_memory_holds_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"rollout\.prompts = 4000 times rollout\.samples = 4000 must be at most 1,000,000"
    ):
        load("addition", ["rollout.prompts=4000", "rollout.samples=4000"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = " + "[" * 5_000, "nested more than 20 deep"),
        ("x = " + "[" * 50 + "]" * 50, "nested more than 20 deep"),
        ("x = " + "{a=" * 5_000, "nested more than 20 deep"),
        ("a." * 30_000 + "b = 1", "a line has more than 1000 dots"),
        ("a." * 900 + "b = 1", "nested more than 20 deep"),
        ("x = " + "9" * 5_000, "digits"),
        ("x = 0x" + "f" * 5_000, "x: a huge int must be a whole number of at most 18 digits"),
        ("#" * 100_000, "is not a recipe: it has 100000 bytes"),
        ("x = 1\x1b", "is not TOML"),
    ],
)
def test_a_recipe_of_any_text_is_answered_in_words(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    done = CliRunner().invoke(app, ["train", str(tmp_path / "mine.toml"), "--dry-run"])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert words in done.stderr and len(done.stderr) < 1_000


def test_a_setting_of_any_text_is_answered_in_words() -> None:
    for text in ("[" * 5_000, "9" * 5_000, "0x" + "f" * 5_000, "{a=" * 5_000, "\x1b[2J", ""):
        done = CliRunner().invoke(app, ["train", "--dry-run", "--set", f"run.steps={text}"])
        assert (done.exit_code, type(done.exception)) == (2, SystemExit)
        assert "run.steps" in done.stderr and len(done.stderr) < 1_000
