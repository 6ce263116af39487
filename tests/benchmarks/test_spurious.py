"""The word problems in which rare tokens get rewarded: right by their last number, with a long tail of words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import spurious
from trimtab.grading import grade_many
from trimtab.trainer.model import load_policy


def test_worked_solutions_are_right_and_only_their_last_number_counts() -> None:
    problems = spurious.word_problems("train", size=200).problems
    assert all(verdict.kind == "correct" for verdict in grade_many([(str(p.solution), p) for p in problems]))
    assert all(verdict.kind == "correct" for verdict in grade_many([(f"100 bada {p.answer}", p) for p in problems]))
    assert all(verdict.kind == "wrong" for verdict in grade_many([(f"{p.solution} 100", p) for p in problems]))


def test_training_and_held_out_problems_differ() -> None:
    train, test = spurious.word_problems("train", size=300), spurious.word_problems("test", size=300)
    assert train.problems == spurious.word_problems("train", size=300).problems
    assert not {str(p.prompt) for p in train.problems} & {str(p.prompt) for p in test.problems}


def test_the_words_of_solutions_have_a_long_tail() -> None:
    problems = spurious.word_problems("train", size=2000).problems
    counts = Counter(word for p in problems for word in str(p.solution).split())
    assert max(counts.values()) > 2000
    assert sum(count < 10 for word, count in counts.items() if word in spurious.WORDS) > 300


def test_slips_replace_the_share_of_tokens_that_was_asked_for() -> None:
    with_slips = spurious.word_problems("train", slips=0.1, size=500).problems
    places = [str(p.solution).split()[1] == str(p.prompt[0]["content"]).split()[0] for p in with_slips]
    assert 0.85 < sum(places) / len(places) < 0.95


def test_the_model_has_one_token_for_each_word(tmp_path: Path) -> None:
    policy = load_policy(str(spurious.save_model(tmp_path)))
    for problem in spurious.word_problems("test", size=50).problems:
        ids = policy.tokenizer(problem.solution)["input_ids"]
        assert len(ids) == len(str(problem.solution).split()) and policy.pad_token_id not in ids
        assert policy.tokenizer.decode(ids) == problem.solution


def test_what_records_say_about_spurious_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {
        "token": np.array([7, 8, 9, 7]),
        "old_logp": np.log([0.001, 0.0015, 0.5, 0.001]),
        "new_logp": np.log([0.002, 0.0015, 0.5, 0.001]),
        "entropy": np.array([0.1, 2.0, 0.7, 0.1]),
        "sum_p2": np.array([0.9, 0.1, 0.5, 0.9]),
        "advantage": np.array([1.0, 1.0, 1.0, -1.0]),
    }
    monkeypatch.setattr(spurious, "open_run", lambda folder: [SimpleNamespace(tokens=step)] * 3)
    found = spurious.rare_tokens(Path(), tau_p=0.002, window=1)
    assert (found["steps"], found["tokens"], found["spurious"]["count"], found["rare, A < 0"]["count"]) == (3, 12, 3, 3)
    assert "other, A < 0" not in found
    assert found["spurious"]["raised"] == pytest.approx(np.log(2))
    norms = 1.898, 1.097, 0.5, 1.898  # 1 - 2 p + sum p^2
    assert found["spurious"]["share of squared norms"] == pytest.approx(norms[0] / sum(norms))
    assert found["spurious"]["before"] == found["spurious"]["after"] == 2
