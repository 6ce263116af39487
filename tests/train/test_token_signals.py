"""Warning signs in a step's tokens: spurious tokens, concentrated gradients, repetition, entropy quantiles."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.train.short_runs import trained
from trimtab.objectives import TokenBatch
from trimtab.objectives.theory import moments
from trimtab.trainer.train.metrics import (
    METRICS,
    NGRAM,
    TOP_GRADIENT_TOKENS,
    repetition_share,
    spurious,
    token_signals,
    top_gradient_share,
)
from trimtab.trainer.train.run_folder import RunFolder


def batch(logp: list[float], advantage: list[float], entropy: float = 0.5, sum_p2: float = 0.5) -> TokenBatch:
    n = len(logp)
    return TokenBatch(
        old_logp=torch.tensor(logp),
        advantage=torch.tensor(advantage),
        sequence=torch.arange(n),
        entropy=torch.full((n,), entropy),
        sum_p2=torch.full((n,), sum_p2),
        token=torch.arange(n),
    )


def expected_share(responses: list[list[int]]) -> float:
    grams = [[tuple(r[n : n + NGRAM]) for n in range(len(r) - NGRAM + 1)] for r in responses]
    total = sum(map(len, grams))
    return sum(len(each) - len(set(each)) for each in grams) / total if total else 0.0


def measured(responses: list[list[int]]) -> float:
    token = torch.tensor([t for r in responses for t in r], dtype=torch.int64)
    sequence = torch.tensor([n for n, r in enumerate(responses) for _ in r], dtype=torch.int64)
    return float(repetition_share(token, sequence))


# --- spurious tokens


def test_a_spurious_token_is_rewarded_and_far_more_surprising_than_its_entropy() -> None:
    given = batch(logp=[-3.6, -3.4, -3.6, -3.6], advantage=[1.0, 1.0, -1.0, 0.0], entropy=0.5)
    assert spurious(given).tolist() == [True, False, False, False]


def test_a_rare_token_among_many_rare_ones_is_not_spurious() -> None:
    """Uniform over a thousand tokens: every one is rare, and none is surprising."""
    thousand = math.log(1000)
    assert not spurious(batch([-thousand], [1.0], entropy=thousand)).any()


def test_what_is_spurious_does_not_depend_on_the_objective_or_the_vocabulary() -> None:
    for size in (17, 150_000):
        logits = torch.zeros(1, size)
        logits[0, 0] = 30.0
        logits[0, 1] = 26.0
        found = moments(logits, torch.tensor([1]))
        given = batch(found.logp.tolist(), [1.0], float(found.entropy))
        assert spurious(given).all()


# --- gradients


def test_equal_gradients_have_equal_shares() -> None:
    even = batch([-1.0] * 200, [1.0, -1.0] * 100)
    assert float(top_gradient_share(even)) == pytest.approx(TOP_GRADIENT_TOKENS / 200)


def test_one_token_with_the_whole_gradient_has_a_share_of_one() -> None:
    one = batch([-1.0] * 200, [1.0] + [0.0] * 199)
    assert float(top_gradient_share(one)) == pytest.approx(1.0)


def test_the_share_is_that_of_exact_norms() -> None:
    torch.manual_seed(0)
    logits, token, advantage = torch.randn(500, 30) * 3, torch.randint(0, 30, (500,)), torch.randn(500)
    found = moments(logits, token)
    norms = (advantage[:, None] * (torch.nn.functional.one_hot(token, 30) - logits.softmax(-1))).norm(dim=1)
    top = norms.sort(descending=True).values[:TOP_GRADIENT_TOKENS].sum() / norms.sum()
    given = TokenBatch(
        old_logp=found.logp, advantage=advantage, sequence=torch.arange(500), entropy=found.entropy, sum_p2=found.sum_p2
    )
    assert float(top_gradient_share(given)) == pytest.approx(float(top), rel=1e-5)


def test_a_step_without_advantages_has_no_gradient_share() -> None:
    assert "tokens/top_gradient_share" not in token_signals(batch([-1.0] * 20, [0.0] * 20))


def test_with_fewer_tokens_than_the_top_the_share_is_one() -> None:
    assert float(top_gradient_share(batch([-1.0] * 3, [1.0] * 3))) == pytest.approx(1.0)


# --- repetition


@pytest.mark.parametrize(
    ("responses", "share"),
    [
        ([[1, 2, 3, 4, 5, 6]], 0.0),
        ([[7] * 8], 4 / 5),
        ([[1, 2, 3, 4, 1, 2, 3, 4]], 1 / 5),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 0.0),
        ([[7] * 8, [1, 2, 3, 4, 5, 6, 7, 8]], 4 / 10),
        ([[1, 2], [3]], 0.0),
        ([[1, 2, 3], [4, 5, 6]], 0.0),
        ([], 0.0),
    ],
)
def test_repeats_are_counted_within_a_response(responses: list[list[int]], share: float) -> None:
    assert measured(responses) == pytest.approx(share)
    assert expected_share(responses) == pytest.approx(share)


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=6))
def test_repeats_agree_with_a_plain_count(responses: list[list[int]]) -> None:
    assert measured(responses) == pytest.approx(expected_share(responses))


def test_different_grams_of_a_large_vocabulary_do_not_collide() -> None:
    rng = random.Random(0)
    responses = [[rng.randrange(150_000) for _ in range(2000)] for _ in range(20)]
    assert measured(responses) == expected_share(responses) == 0.0


# --- all signals


def test_without_tokens_there_are_no_signals() -> None:
    assert token_signals(batch([], [])) == {}


def test_entropy_quantiles_are_over_the_tokens() -> None:
    given = batch([-1.0] * 11, [1.0] * 11)
    spread = torch.linspace(0, 1, 11)
    signals = token_signals(
        TokenBatch(old_logp=given.old_logp, advantage=given.advantage, sequence=given.sequence, entropy=spread)
    )
    assert float(signals["policy/entropy_median"]) == pytest.approx(0.5)
    assert float(signals["policy/entropy_p90"]) == pytest.approx(0.9)
    assert "response/repetition_share" not in signals


def test_a_run_writes_every_signal_and_the_table_describes_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("signals") / "run"
    trained(folder, {"warm_start.steps": "0", "run.steps": "2", "record.enabled": "false"})
    last = RunFolder(folder).records()[-1]
    for name in ("policy/entropy_p90", "tokens/spurious_share", "tokens/top_gradient_share"):
        assert 0 <= last[name] <= 3
    assert {"response/repetition_share", "policy/entropy_median"} <= set(last)
    assert {name for name in last if name != "step"} <= set(METRICS)
