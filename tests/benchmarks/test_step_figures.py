"""The benchmarks of a whole step: their arithmetic, and that each script runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

import mfu
import overhead
import step
import stopwatch
from stopwatch import REST, Stopwatch
from trimtab.data import PromptTokens, SamplingOptions
from trimtab.trainer.config import load
from trimtab.trainer.sampling import NativeSampler
from trimtab.trainer.train import rollouts
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer

CPU = torch.device("cpu")
SHAPE = mfu.Shape(
    layers=2, width=8, heads=4, kv_heads=2, head_size=3, inner=10, vocabulary=100, lengths=(4,), budgets=(64,), tokens=8
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by one second whenever it is looked at."""
    seconds = count()
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: float(next(seconds)))


def small_trainer(*settings: str) -> Trainer:
    return build_trainer(load("addition", [*step.SMALL, *settings]))


@pytest.mark.usefixtures("ticking")
def test_a_phase_within_another_stops_the_outer_clock() -> None:
    watch = Stopwatch(CPU)
    with watch.phase("outer"):
        with watch.phase("inner"):
            pass
        with watch.phase("inner"):
            pass
    assert watch.seconds == {"outer": 3.0, "inner": 2.0}


@pytest.mark.usefixtures("ticking")
def test_a_stopwatch_that_is_off_counts_nothing() -> None:
    watch = Stopwatch(CPU, on=False)
    assert watch.around(lambda x: x + 1, "phase")(1) == 2
    assert watch.seconds == {}


@pytest.mark.usefixtures("ticking")
def test_a_phase_ends_with_an_exception_too() -> None:
    watch = Stopwatch(CPU)
    with pytest.raises(ValueError, match="no"), watch.phase("outer"), watch.phase("inner"):
        raise ValueError("no")
    with watch.phase("later"):
        pass
    assert watch.seconds == {"inner": 1.0, "outer": 2.0, "later": 1.0}


def test_shares_are_of_all_phases_and_in_order() -> None:
    table = stopwatch.shares({"b": 3.0, "unforeseen": 1.0}, steps=2, order=("a", "b"))
    assert list(table) == ["a", "b", "unforeseen"]
    assert table["a"] == {"ms": 0.0, "share": 0.0}
    assert table["b"] == {"ms": 1500.0, "share": 0.75}
    assert table["unforeseen"] == {"ms": 500.0, "share": 0.25}


def test_shares_of_nothing_are_nothing() -> None:
    assert stopwatch.shares({}, steps=1, order=("a",)) == {"a": {"ms": 0.0, "share": 0.0}}


def test_a_step_is_the_median_of_steps() -> None:
    figures = stopwatch.per_step([2.0, 1.0, 9.0], [1000, 1000, 3000])
    assert (figures["steps"], figures["seconds"], figures["tokens"]) == (3, 2.0, 1000)
    assert figures["seconds_per_1000_tokens"] == 2.0  # of 2, 1 and 3
    assert figures["tokens_per_second"] == 500
    assert figures["spread"] == 0.5  # distances 0, 1, 7 from 2


def test_how_many_times_faster_by_the_step_and_by_the_token() -> None:
    mine, peer = stopwatch.per_step([2.0], [1000]), stopwatch.per_step([16.0], [2000])
    assert stopwatch.times_faster(mine, peer) == {"step": 8.0, "token": 4.0}


def test_the_weights_outside_the_embedding_by_hand() -> None:
    attention = 8 * 12 + 8 * 6 + 8 * 6 + 12 * 8  # q, k, v, o
    assert SHAPE.weights == 2 * (attention + 3 * 8 * 10)


def test_the_weights_are_those_of_the_real_model() -> None:
    policy = mfu.made_policy(mfu.TINY, CPU, "fp32")
    backbone = sum(p.numel() for p in policy.backbone.parameters() if p.dim() == 2)
    assert mfu.TINY.weights == backbone - mfu.TINY.vocabulary * mfu.TINY.width


def test_qwen3_has_its_weights() -> None:
    assert mfu.QWEN.weights == 1_409_286_144
    assert mfu.QWEN.vocabulary * mfu.QWEN.width == 311_164_928


def test_flops_of_two_sequences_by_hand() -> None:
    work = mfu.flops(SHAPE, prompts=[1, 2], responses=[3, 4])
    assert work["layers"] == 6 * SHAPE.weights * (4 + 6)
    assert work["head"] == 6 * 100 * 8 * 7
    assert work["attention"] == 12 * 2 * 4 * 3 * (16 + 36) / 2


def test_flops_add_up_over_sequences() -> None:
    together = mfu.flops(SHAPE, [5, 5], [7, 7])
    assert together == {name: 2 * work for name, work in mfu.flops(SHAPE, [5], [7]).items()}


def test_a_line_is_found_again() -> None:
    found = mfu.fit_line([1, 2, 4, 8], [3, 5, 9, 17])
    assert (found["slope"], found["start"]) == (pytest.approx(2), pytest.approx(1))
    assert found["largest_deviation"] == 0


def test_the_exponent_tells_growth_in_proportion_from_a_square() -> None:
    assert mfu.fit_line([1, 2, 4, 8], [3, 6, 12, 24])["exponent"] == 1
    square = mfu.fit_line([1, 2, 4, 8], [1, 4, 16, 64])
    assert square["exponent"] == 2
    assert square["largest_deviation"] > 0.5


def test_a_rate_is_a_share_of_the_peak_and_of_a_matrix_product() -> None:
    row = {"update_seconds": 2.0, "score_seconds": 1.0, "tokens": 5}
    row |= {"update_flops_per_second": mfu.PEAK / 4, "score_flops_per_second": mfu.PEAK / 2}
    shown = mfu.rated(row, gemm=mfu.PEAK / 2)
    assert (shown["update_share_of_peak"], shown["update_share_of_gemm"]) == (0.25, 0.5)
    assert (shown["score_share_of_peak"], shown["score_share_of_gemm"]) == (0.5, 1.0)
    assert shown["tokens"] == 5


def test_what_does_not_fit_is_part_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(mfu.Case, "measure", full)
    case = mfu.Case(small_trainer(), mfu.TINY, 16, 32, 640)
    assert mfu.attempt(case, 1, 1.0) == {"response": 16, "budget": 640, "error": "out of memory"}


def test_a_case_counts_prompts_and_scoring_is_a_third() -> None:
    trainer = mfu.made_trainer(
        mfu.made_policy(mfu.TINY, CPU, "fp32"), load("addition", ["objective.name=grpo", "update.per_step=1"])
    )
    row = mfu.Case(trainer, mfu.TINY, length=16, tokens=128, budget=640).measure(rounds=1)
    assert (row["responses"], row["tokens"]) == (8, 8 * (mfu.PROMPT + 16))
    update = row["update_flops_per_second"] * row["update_seconds"]
    assert update == pytest.approx(3 * row["score_flops_per_second"] * row["score_seconds"])
    assert update == pytest.approx(sum(mfu.flops(mfu.TINY, [mfu.PROMPT] * 8, [16] * 8).values()))


def test_what_is_added_is_taken_round_by_round() -> None:
    spent = {"grpo": [1.0, 2.0, 3.0], "grpo again": [1.0, 2.0, 3.0], "other": [1.1, 2.2, 3.1]}
    added = overhead.added(spent, whole=10.0)
    assert added["grpo again"]["share_of_step"] == 0
    assert added["other"]["ms_added"] == 100.0  # of 100, 200, 100
    assert added["other"]["share_of_step"] == 0.01
    assert added["other"]["ms_without_sampling"] == 2200.0


def test_every_objective_comes_first_once() -> None:
    names = ["a", "b", "c"]
    assert [overhead.rotated(names, n)[0] for n in range(4)] == ["a", "b", "c", "a"]
    assert overhead.rotated(names, 1) == ["b", "c", "a"]


def test_the_recorder_is_measured_in_pairs() -> None:
    figures = overhead.recorded(on=[1.1, 2.1, 3.3], off=[1.0, 2.0, 3.0], flushed=[0.2, 0.4])
    assert (figures["ms_added"], figures["share_of_step"]) == (100.0, 0.05)
    assert figures["seconds_to_finish_writing"] == pytest.approx(0.3)


def test_the_objectives_are_those_of_the_recipes() -> None:
    tables = overhead.objective_tables()
    assert list(tables) == ["grpo", "grpo again", "stapo", "stare", "sspo"]
    assert tables["stapo"] == {"name": "stapo", "tau_p": 0.002, "quantile": 0.75}


def test_what_was_drawn_is_drawn_again() -> None:
    trainer = small_trainer()
    keeping = overhead.KeepingSampler(trainer.sampler, CPU)
    drawn = keeping.sample([PromptTokens([2, 3], 0)], 0, SamplingOptions(2, 4))
    assert overhead.ReplayingSampler(keeping.responses).sample([], 1, SamplingOptions(2, 4)) is drawn
    assert keeping.seconds > 0


def test_a_still_trainer_changes_no_weight() -> None:
    trainer = overhead.frozen_trainer(load("addition", overhead.SMALL))
    before = [p.clone() for p in trainer.policy.model.parameters()]
    metrics = train_step(trainer, RunProgress()).metrics
    assert metrics["update/grad_norm"] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.model.parameters(), strict=True))


def test_only_timed_steps_count() -> None:
    measured = step.Measurements(step.Steps(warmup=1, timed=2, watched=1, fixed=False))
    measured.seconds, measured.tokens, measured.rewards = [9.0, 1.0, 2.0, 7.0], [90, 10, 20, 70], [9.0, 0.0, 1.0, 7.0]
    watch = Stopwatch(CPU, seconds={"sample": 4.0, REST: 4.0})
    figures = measured.figures(watch)
    assert (figures["all_seconds"], figures["tokens"], figures["mean_reward"]) == ([1.0, 2.0], 15, 0.5)
    assert list(figures["where"]) == list(step.PHASES)
    assert figures["where"]["sample"] == {"ms": 4000.0, "share": 0.5}


def test_no_response_ends_before_its_limit_when_it_must_not() -> None:
    trainer = small_trainer("rollout.max_new_tokens=20")
    assert train_step(trainer, RunProgress()).metrics["response/length_mean"] < 20
    step.never_end(trainer)
    assert isinstance(trainer.sampler, NativeSampler)
    metrics = train_step(trainer, RunProgress()).metrics
    assert (metrics["response/length_mean"], metrics["response/truncated_share"]) == (20, 1)


def test_the_stopwatch_sees_every_phase_and_leaves_nothing_behind() -> None:
    trainer, watch = small_trainer(), Stopwatch(CPU)
    before = rollouts.set_verdicts, trainer.sampler
    with step.watching(trainer, watch):
        train_step(trainer, RunProgress())
    assert set(watch.seconds) == set(step.PHASES)
    assert all(seconds > 0 for seconds in watch.seconds.values())
    assert (rollouts.set_verdicts, trainer.sampler) == before


def test_the_peer_gets_the_problems_that_our_steps_meet() -> None:
    trainer = small_trainer()
    answers = rollouts.sample_groups(trainer, RunProgress()).admitted
    ours = [group[0].problem for group in answers]
    assert step.problems_of(trainer.config, steps=2)[: len(ours)] == ours


def test_the_peer_updates_once_on_all_responses_of_a_step() -> None:
    config = load("smollm2", step.FULL)
    options = step.peer_options(config, step.Steps(1, 2, 1, fixed=True), rows=128)
    assert options["per_device_train_batch_size"] * options["gradient_accumulation_steps"] == 64 * 8
    assert (options["max_steps"], options["generation_kwargs"]) == (4, {"min_new_tokens": 256})
    assert options["bf16"] is True


def test_the_peer_is_graded_by_our_grader() -> None:
    config = load("addition", step.SMALL)
    problems, measured = step.problems_of(config, steps=1), step.Measurements(step.Steps(0, 1, 0, False))
    said = [problems[1].answer, [{"role": "assistant", "content": "no idea"}]]
    assert step.grader(config, problems, measured)(said, [[1, 2], [3]], number=[1, 0], trainer_state=None) == [1.0, 0.0]
    assert (measured.tokens, measured.rewards) == ([3], [0.5])


def test_a_peer_that_cannot_be_run_is_part_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def theirs(_: object, __: object, rows: int, ___: object) -> None:
        tried.append(rows)
        raise torch.OutOfMemoryError if rows > 1 else RuntimeError("broken")

    monkeypatch.setattr(step, "theirs", theirs)
    config, steps = load("addition", step.SMALL), step.Steps(0, 1, 0, False)
    assert step.try_peer(config, steps, [4, 1]) == {"error": "RuntimeError: broken"}
    assert step.try_peer(config, steps, [4, 2])["error"] == "out of memory at 2 rows at once"
    assert tried == [4, 1, 4, 2]


def test_the_step_script_runs(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    step.main(["--small", "--peer", "none", "--steps", "2", "--warmup", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["fixed"]["trimtab"]["tokens"] == 8 * 4 * 12
    assert 0 < result["free"]["trimtab"]["tokens"] < 8 * 4 * 12
    assert sum(phase["share"] for phase in result["free"]["trimtab"]["where"].values()) == pytest.approx(1, abs=0.01)


def test_the_overhead_script_runs(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    overhead.main(["--small", "--rounds", "1", "--blocks", "1", "--length", "2", "--out", str(out)])
    result = json.loads(out.read_text())
    assert set(result["objectives"]["added"]) == set(overhead.objective_tables())
    assert result["objectives"]["whole_step_seconds"] > result["objectives"]["sampling_seconds"] > 0
    assert result["recorder"]["steps_written"] == 2 * 2  # the first block does not count, and is written
    assert result["recorder"]["steps"] == 1


def test_the_mfu_script_runs(tmp_path: Path) -> None:
    out = tmp_path / "mfu.json"
    mfu.main(["--small", "--rounds", "1", "--budgets", "640", "--out", str(out)])
    result = json.loads(out.read_text())
    assert [row["response"] for row in result["share_of_peak"]] == list(mfu.TINY.lengths)
    assert [row["responses"] for row in result["growth"]["rows"]] == [4, 8, 16, 32]
    assert result["growth"]["update_line"]["slope"] > 0
