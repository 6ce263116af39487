"""What a training run leaves in its records, and that recording leaves the run alone."""

from __future__ import annotations

import errno
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.train.short_runs import RunProcess, contents, recipe, trained
from trimtab.record import Records, open_run
from trimtab.record import writer as writer_module
from trimtab.record.layout import RECORDS_FOLDER
from trimtab.record.recorder import encodable
from trimtab.trainer.model import Policy
from trimtab.trainer.train import checkpoints, tokenizer_vocabulary
from trimtab.trainer.train import run as run_module
from trimtab.trainer.train.build import build_policy
from trimtab.trainer.train.run_folder import RunFolder

QUICK = {"run.steps": "3", "run.eval_every": "0", "warm_start.steps": "0", "update.token_budget": "40"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with two updates each, STAPO and STARE together."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trained(folder)
    return folder


@pytest.fixture(scope="module")
def records(whole: Path) -> Records:
    return open_run(whole)


def means(values: np.ndarray[Any, Any], sizes: list[int]) -> float:
    """The mean over updates of the mean over an update's tokens."""
    return float(np.mean([part.mean() for part in np.split(values, np.cumsum(sizes)[:-1])]))


# --- the records are of the run


def test_every_step_is_recorded_with_its_number(records: Records) -> None:
    assert records.steps == [1, 2, 3, 4, 5, 6]
    assert records.manifest.objective == {"name": "stapo + stare(adaptive=true)"}
    assert records.manifest.vocabulary == len(records.vocabulary) == 17
    assert set(records.manifest.versions) >= {"torch", "trimtab"}


def test_the_records_agree_with_the_metrics(whole: Path, records: Records) -> None:
    for metrics in RunFolder(whole).records()[1:]:
        step = records.step(metrics["step"])
        sizes = [update.info.tokens for update in step.updates]
        reason = step.tokens["reason"]
        assert step.info.tokens == metrics["tokens/count"] == sum(sizes)
        assert step.responses["reward"].mean() == pytest.approx(metrics["reward/mean"])
        assert step.tokens["entropy"].mean() == pytest.approx(metrics["policy/entropy"], rel=1e-5)
        assert step.info.observed_entropy == pytest.approx(metrics["policy/entropy"], rel=1e-6)
        assert means(step.tokens["clipped"], sizes) == pytest.approx(metrics["update/clip_share"])
        assert means((reason & 2) > 0, sizes) == pytest.approx(metrics["tokens/silenced_share"])
        ratio = np.exp(step.tokens["new_logp"] - step.tokens["old_logp"])
        assert means(ratio, sizes) == pytest.approx(metrics["update/ratio_mean"], rel=1e-5)


def test_a_response_is_its_tokens_its_text_and_its_grade(records: Records) -> None:
    policy = build_policy(recipe())
    for step in records:
        for n, (verdict, extracted) in enumerate(
            zip(step.responses["verdict"], step.responses["extracted"], strict=True)
        ):
            ids = step.tokens["token"][step.offsets[n] : step.offsets[n + 1]].tolist()
            assert step.text(n) == policy.decode(ids) == "".join(p for p in step.pieces(n) if not p.startswith("<"))
            assert step.responses["finished"][n] == (ids[-1] in policy.eos_token_ids)
            assert verdict in {"correct", "wrong", "no_answer"} and (extracted == "") == (verdict == "no_answer")
            prompt, answer = step.responses["prompt"][n], step.responses["answer"][n]
            first, second = prompt.removesuffix("=").split("+")
            assert int(first) + int(second) == int(answer)


def test_responses_of_a_group_share_their_prompt(records: Records) -> None:
    for step in records:
        pairs = set(zip(step.responses["group"].tolist(), step.responses["prompt"], strict=True))
        assert len(pairs) == len(set(step.responses["group"].tolist())) == 4
        assert sorted(step.responses["sample"].tolist()) == sorted([0, 1, 2, 3] * 4)


def test_the_new_log_probabilities_are_those_of_the_updates_own_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: dict[str, int] = {}
    forward = Policy.hidden_states

    def counted(policy: Policy, *args: Any) -> Any:
        passes[where] = passes.get(where, 0) + 1
        return forward(policy, *args)

    monkeypatch.setattr(Policy, "hidden_states", counted)
    for where in ("true", "false"):
        trained(tmp_path / where, {**QUICK, "record.enabled": where})
    assert passes["true"] == passes["false"] > 0
    for step in open_run(tmp_path / "true"):
        first, second = step.updates
        assert np.allclose(first.column("new_logp"), first.column("old_logp"), atol=1e-5), "nothing was learnt yet"
        assert not np.allclose(second.column("new_logp"), second.column("old_logp"), atol=1e-5)


def test_recording_changes_nothing_but_the_records(tmp_path: Path) -> None:
    found = []
    for enabled in ("true", "false"):
        trained(tmp_path / enabled, {**QUICK, "record.enabled": enabled})
        files = contents(tmp_path / enabled)
        found.append({n: d for n, d in files.items() if not n.startswith("tokens/") and n != "config.toml"})
    assert not (tmp_path / "false" / RECORDS_FOLDER).exists()
    states = [{n for n in files if n.endswith("state.json") or n.endswith("manifest.json")} for files in found]
    for files, state in zip(found, states, strict=True):
        for name in state:
            del files[name]  # the checkpoint notes its recipe
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        ({"objective": '"grpo + kl"', "model.reference": '"start"'}, {"ref_logp"}),
        ({"update.token_stats": "current"}, {"current_logp"}),
        ({"objective": '"entropy_advantage"'}, {"planned_advantage"}),
        ({"objective": '"kl_cov"'}, {"penalty"}),
        ({"objective": '"sspo"'}, set()),
    ],
)
def test_columns_that_an_objective_has_are_recorded(tmp_path: Path, changes: dict[str, str], columns: set[str]) -> None:
    trained(tmp_path / "run", {**QUICK, "run.steps": "1", **changes})
    tokens = open_run(tmp_path / "run").step(1).tokens
    optional = {"ref_logp", "current_logp", "planned_advantage", "penalty", "proxy_logp"}
    assert optional & set(tokens) == columns
    assert "segment" in tokens, "subsentences are found whatever the objective"


def test_a_method_without_a_clip_has_nothing_clipped_to_record(tmp_path: Path) -> None:
    trained(tmp_path / "run", {**QUICK, "run.steps": "1", "objective": '"sapo"'})
    assert "clipped" not in open_run(tmp_path / "run").step(1).tokens


def test_an_update_that_was_not_taken_is_recorded_as_such(tmp_path: Path) -> None:
    process = RunProcess(tmp_path / "run", {**QUICK, "run.steps": "2"}, nan_update=(2, 1))
    assert process.run() == 0, process.messages
    taken = [[update.info.taken for update in step.updates] for step in open_run(process.folder)]
    assert taken == [[True, True], [False, True]]


# --- settings


def test_one_step_in_every_and_a_share_of_the_groups_are_recorded(tmp_path: Path) -> None:
    trained(tmp_path / "run", {**QUICK, "run.steps": "5", "record.every": "2", "record.group_share": "0.5"})
    records = open_run(tmp_path / "run")
    assert records.steps == [1, 3, 5]
    for step in records:
        groups = step.responses["group"].tolist()
        assert 4 <= len(groups) < 16 and not step.info.complete and step.info.sampled == 16
        assert all(groups.count(group) == 4 for group in groups), "groups are recorded whole"
        assert sum(update.info.tokens for update in step.updates) == step.info.tokens == len(step.tokens["token"])
        assert len(step.offsets) == len(groups) + 1 and step.offsets[-1] == step.info.tokens


def test_a_tiny_share_still_records_a_group(tmp_path: Path) -> None:
    trained(tmp_path / "run", {**QUICK, "record.group_share": "0.000001"})
    assert all(len(set(step.responses["group"].tolist())) == 1 for step in open_run(tmp_path / "run"))


def test_a_share_is_part_of_the_whole(tmp_path: Path) -> None:
    trained(tmp_path / "whole", QUICK)
    trained(tmp_path / "part", {**QUICK, "record.group_share": "0.5"})
    for part, step in zip(open_run(tmp_path / "part"), open_run(tmp_path / "whole"), strict=True):
        kept = np.isin(step.responses["group"], part.responses["group"])
        tokens = np.repeat(kept, step.responses["tokens"])
        for name in ("old_logp", "new_logp", "weight", "scale", "reason", "token"):
            assert np.array_equal(part.tokens[name], step.tokens[name][tokens]), name


def test_the_record_settings_may_change_when_a_run_is_resumed(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    trained(folder, {"record.enabled": "false"}, resume=True)
    assert open_run(folder).steps == [1, 2, 3, 4], "what was recorded after the checkpoint is of another course"
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    trained(folder, {"record.every": "5"}, resume=True)
    assert open_run(folder).steps == [1, 6]


# --- whatever happens


def test_a_resumed_run_has_the_records_of_one_that_was_not_stopped(whole: Path, tmp_path: Path) -> None:
    trained(tmp_path / "run", {"run.steps": "3"})
    trained(tmp_path / "run", resume=True)
    now, then = contents(tmp_path / "run"), contents(whole)
    recorded = [name for name in then if name.startswith("tokens/")]
    assert len(recorded) == 6 * 3 + 2
    assert {name: now.get(name) for name in recorded} == {name: then[name] for name in recorded}


@pytest.mark.parametrize("moment", ["update.done:7", "step.done:4", "checkpoint.published:5", "folder.rename:8"])
def test_what_a_killed_run_has_recorded_can_be_read(whole: Path, tmp_path: Path, moment: str) -> None:
    process = RunProcess(tmp_path / "run", failpoint=moment)
    assert process.run() == -signal.SIGKILL
    saved = int(checkpoints.list_checkpoints(process.folder / "checkpoints")[-1].name.removeprefix("step-"))
    assert saved in (0, 2, 4)  # checkpoints and recorded steps are folders that are renamed
    then = {step.number: step for step in open_run(whole)}
    found = list(open_run(process.folder))  # a warning would be an error
    assert [step.number for step in found][:saved] == list(range(1, saved + 1)), "what is saved is recorded"
    for step in found:
        assert step.info == then[step.number].info
        assert np.array_equal(step.tokens["new_logp"], then[step.number].tokens["new_logp"])


def test_a_full_disk_costs_the_records_and_nothing_else(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = writer_module.write_step

    def full(folder: Path, step: int, files: Any) -> int:
        if step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return publish(folder, step, files)

    monkeypatch.setattr(writer_module, "write_step", full)
    run, log = trained(tmp_path / "run")
    warned = [text for text in log.messages if "recorded" in text]
    assert len(warned) == 1 and "No space left" in warned[0]
    assert run.progress.step == 6 and open_run(tmp_path / "run").steps == [1, 2]
    now, then = contents(tmp_path / "run"), contents(whole)
    assert all(now[name] == then[name] for name in then if not name.startswith("tokens/"))


def test_a_folder_that_cannot_be_written_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = run_module.start_recording

    def start_blocked(*args: Any, **options: Any) -> Any:
        (tmp_path / "run" / RECORDS_FOLDER).write_text("in the way")
        return start(*args, **options)

    monkeypatch.setattr(run_module, "start_recording", start_blocked)
    run, log = trained(tmp_path / "run", QUICK)
    monkeypatch.undo()
    assert run.progress.step == 3 and log.has("warning: nothing more is recorded")
    _, log = trained(tmp_path / "run", {**QUICK, "record.enabled": "false"}, resume=True)
    assert (tmp_path / "run" / RECORDS_FOLDER).read_text() == "in the way"


def test_a_step_without_anything_to_plan_is_not_recorded(tmp_path: Path) -> None:
    changes = {**QUICK, "reward.overlong_buffer": "0", "task.digits": "9", "rollout.dynamic_sampling": "true"}
    trained(tmp_path / "run", {**changes, "rollout.dynamic_max_rounds": "1"})
    assert open_run(tmp_path / "run").steps == []


# --- the vocabulary


class Slow:
    """A tokenizer that only knows how to decode."""

    all_special_ids = (0,)

    def __len__(self) -> int:
        return 5

    def decode(self, ids: list[int]) -> str:
        return {1: "a", 2: "\udc00", 3: " b", 4: ""}[ids[0]]

    def convert_ids_to_tokens(self, ids: range) -> list[str | None]:
        return ["<s>", "a", "?", "b", None][: len(ids)]


def test_a_tokenizer_without_bytes_gives_its_texts() -> None:
    vocabulary = tokenizer_vocabulary(Slow(), 7)
    assert list(vocabulary.text) == [b"<s>", b"a", b"?", b" b", b"", b"<5>", b"<6>"]
    assert list(vocabulary.special) == [True, False, False, False, False, True, True]


def test_lone_surrogates_are_replaced() -> None:
    assert encodable(["a\udc80", "b", "a\udc80"]) == ["a?", "b", "a?"]
