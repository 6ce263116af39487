"""The benchmarks beside vLLM: processes take turns, failures are results, and figures are compared with the best."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import long_step
import vllm_sampling
from helpers.turn_worker import worker
from made_models import made_tokenizer
from turns import in_turns

H200 = 150.1e9  # bytes of its memory


def test_workers_measure_one_after_the_other_and_failures_end_nothing() -> None:
    taken: list[tuple[str, str, Any]] = []

    def taker(what: str) -> Callable[[str, Any], None]:
        return lambda name, figures: taken.append((what, name, figures))

    names = ["one", "fails early", "fails late", "two"]
    in_turns(worker, names, taker, lambda what: len(taken), start_limit=300, turn_limit=300)
    seen = {(what, name): figures for what, name, figures in taken}
    assert [seen[name, "started"] for name in names] == names
    assert seen["fails early", "failed"] == {"error": "RuntimeError: no room"}
    assert seen["fails late", "failed"] == {"error": "RuntimeError: too slow"}
    # What is known when a turn comes: all started, one failed, and what those before measured.
    assert [seen[name, "measured"][1] for name in ("one", "fails late", "two")] == [5, 6, 8]


def test_trimtab_is_compared_with_the_best_setting_of_vllm() -> None:
    row: dict[str, Any] = {
        "trimtab": {"tokens_per_second": 3000, "seconds": 2.0},
        "lengths": "2 4",
        "vLLM, in process": {"with log-probs": {"tokens_per_second": 1000}, "without log-probs": {"error": "no"}},
        "vLLM, own process": {"with log-probs": {"tokens_per_second": 2000}},
    }
    figures = {"64 sequences": row, "start_seconds": {"in process": 3.0}}
    vllm_sampling.summarise(figures, vllm_sampling.config_of("1.7B", small=True), speed=1e9)
    assert row["best with log-probs"] == {"setting": "own process", "tokens_per_second": 2000, "times_faster": 1.5}
    assert "best without log-probs" not in row
    assert row["new_tokens"] == {"mean": 3.0, "longest": 4}
    assert row["share_of_limit"] == pytest.approx(row["limit_seconds"] / 2, abs=1e-3)


def test_the_limit_counts_products_where_they_take_longer_than_reading() -> None:
    config = vllm_sampling.config_of("1.7B", small=False)
    few = vllm_sampling.limit_seconds(config, [100] * 8, speed=4e12)
    assert vllm_sampling.limit_seconds(config, [100] * 64, speed=4e12) < 1.5 * few
    assert vllm_sampling.limit_seconds(config, [100] * 1024, speed=4e12) > 4 * few


def test_the_kv_cache_holds_the_longest_load() -> None:
    config, loads = vllm_sampling.config_of("1.7B", small=False), vllm_sampling.loads_of("1.7B", 4096, 1, False)
    token = 28 * 2 * 8 * 128 * 2
    assert vllm_sampling.kv_cache_bytes(config, loads, H200) == int(1.1 * token * 512 * (64 + 512))


def test_two_kv_caches_of_a_large_model_fit_beside_its_weights() -> None:
    config, loads = vllm_sampling.config_of("8B", small=False), vllm_sampling.loads_of("8B", 4096, 1, False)
    weights = 2 * 8.19e9
    each = vllm_sampling.kv_cache_bytes(config, loads, H200)
    assert 3 * weights + 2 * each + vllm_sampling.ACTIVATIONS == pytest.approx(H200, rel=0.01)


def test_a_load_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vllm_sampling.main(["--out", str(tmp_path / "out.json"), "--shapes", "8B", "--loads", "ragged"])
    assert "there are ['64 sequences of 4096', '512 sequences, up to 4096']" in capsys.readouterr().err


def test_a_made_tokenizer_has_every_id() -> None:
    tokenizer = made_tokenizer(40)
    assert len(tokenizer) == 40
    assert tokenizer.decode([39, 4]) and tokenizer.encode("w0 nothing") == [4, 2]


def test_the_long_step_script_runs(tmp_path: Path) -> None:
    out = tmp_path / "long.json"
    long_step.main(["--small", "--longest", "24", "--out", str(out)])
    result = json.loads(out.read_text())
    assert "error" not in result and result["measured"]["lengths"]["longest"] <= 24
    assert set(result["limits"]) == {"sample", "score", "forward and backward"}
    assert result["ratios"]["peak"] > 0
