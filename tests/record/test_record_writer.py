"""The writer: which steps it writes, within which size, and that no error of it stops a run."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from helpers.record.made_records import VOCABULARY, budget, made_run, made_step, manifest, readable, record, same
from trimtab.record import RecordError, RecordSettings, RecordWriter, StepData, layout, open_run, rewind
from trimtab.record import writer as writer_module
from trimtab.record.layout import RECORDS_FOLDER, read_manifest, recorded_steps, step_folder
from trimtab.record.writer import encode_step, write_step

BIG = [60] * 16  # tokens of a step that takes some 25 kB


def steps_of(run: Path) -> list[int]:
    return recorded_steps(run / RECORDS_FOLDER)


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def taken(run: Path) -> int:
    """What the disk has given to the records, folders and unfinished files included."""
    folder = run / RECORDS_FOLDER
    return sum(512 * path.lstat().st_blocks for path in (folder, *folder.rglob("*")))


# --- which steps


@pytest.mark.parametrize(("every", "kept"), [(1, [1, 2, 3, 4, 5, 6, 7]), (2, [1, 3, 5, 7]), (3, [1, 4, 7]), (9, [1])])
def test_one_step_in_every_is_recorded_starting_with_the_first(tmp_path: Path, every: int, kept: list[int]) -> None:
    record(tmp_path, [made_step(step) for step in range(1, 8)], settings=RecordSettings(every=every))
    assert steps_of(tmp_path) == kept


def test_a_step_that_is_not_wanted_is_not_even_built(tmp_path: Path) -> None:
    writer = RecordWriter(
        tmp_path / RECORDS_FOLDER, manifest(settings=RecordSettings(every=2)), VOCABULARY, pytest.fail
    )
    writer.start(0)
    writer.write(2, lambda: pytest.fail("step 2 is not wanted"))
    writer.close()
    assert not writer.wants(2) and writer.wants(3)


def test_a_step_that_is_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    made_run(tmp_path, 2)
    write_step(tmp_path / RECORDS_FOLDER, 2, encode_step(made_step(2, seed=99)))
    assert same(open_run(tmp_path).step(2), made_step(2, seed=99))
    assert sorted(path.name for path in (tmp_path / RECORDS_FOLDER).glob("*step*")) == [
        "step-00000001",
        "step-00000002",
    ]


# --- resumed runs


def test_what_was_recorded_after_the_checkpoint_is_deleted_and_written_again(tmp_path: Path) -> None:
    made_run(tmp_path / "whole", 6)
    made_run(tmp_path / "cut", 5)
    record(tmp_path / "cut", [made_step(step) for step in range(3, 7)], after=2)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_rewinding_deletes_what_a_kill_left_half_written(tmp_path: Path) -> None:
    made_run(tmp_path, 3)
    folder = tmp_path / RECORDS_FOLDER
    dead = 999_999_999  # above the largest process number of Linux
    (folder / f".writing-step-00000004-{dead}").mkdir()
    (folder / f".writing-step-00000004-{dead}" / "tokens.parquet").write_bytes(b"PAR1")
    (folder / f".writing-manifest.json-{dead}").write_text("{")
    (folder / f".writing-gone-step-00000001-{dead}").mkdir()
    rewind(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "step-00000001",
        "step-00000002",
        "vocabulary.parquet",
    ]


def test_starting_from_the_beginning_deletes_everything(tmp_path: Path) -> None:
    record(tmp_path, [made_step(step, BIG) for step in range(1, 9)], settings=budget(0.15))
    assert read_manifest(tmp_path / RECORDS_FOLDER).stride > 1
    made_run(tmp_path, 4)
    assert steps_of(tmp_path) == [1, 2, 3, 4] and read_manifest(tmp_path / RECORDS_FOLDER).stride == 1
    for _ in range(2):
        rewind(tmp_path / RECORDS_FOLDER, 0)
        assert not (tmp_path / RECORDS_FOLDER).exists()


# --- the size budget


def test_the_size_limit_is_kept_by_thinning_evenly(tmp_path: Path) -> None:
    limit = 0.4
    messages = record(tmp_path, [made_step(step, BIG) for step in range(1, 41)], settings=budget(limit))
    kept = steps_of(tmp_path)
    assert messages == []
    assert taken(tmp_path) <= limit * 1e6
    stride = read_manifest(tmp_path / RECORDS_FOLDER).stride
    assert stride > 1 and kept == list(range(1, 41, stride))
    assert len(kept) >= 4, "as much is kept as fits"
    assert all(same(step, made_step(number, BIG)) for number, step in readable(tmp_path).items())


def test_many_tiny_steps_take_no_more_of_the_disk_than_they_may(tmp_path: Path) -> None:
    limit, most = 0.3e6, 0
    writer = RecordWriter(tmp_path / RECORDS_FOLDER, manifest(settings=budget(limit / 1e6)), VOCABULARY, pytest.fail)
    writer.start(0)
    for step in range(1, 101):
        writer.write(step, lambda step=step: made_step(step, [2]))  # type: ignore[misc]
        writer.flush()
        most = max(most, taken(tmp_path))
    writer.close()
    assert limit / 2 < most <= limit, "whole blocks are counted, of a file of 500 bytes too"
    assert len(steps_of(tmp_path)) > 5 and sorted(readable(tmp_path)) == steps_of(tmp_path)


def test_room_is_made_before_a_step_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[int] = []

    def measured(folder: Path, step: int, files: dict[str, bytes]) -> int:
        before.append(taken(tmp_path) + sum(layout.on_disk(len(data)) for data in files.values()))
        return write_step(folder, step, files)

    monkeypatch.setattr(writer_module, "write_step", measured)
    record(tmp_path, [made_step(step, BIG) for step in range(1, 30)], settings=budget(0.3))
    assert len(before) > 8 and max(before) <= 0.3e6


def test_thinning_multiplies_the_recording_interval(tmp_path: Path) -> None:
    record(tmp_path, [made_step(step, BIG) for step in range(1, 41)], settings=budget(0.1, every=3))
    stride = read_manifest(tmp_path / RECORDS_FOLDER).stride
    assert stride > 1 and steps_of(tmp_path) == list(range(1, 41, 3 * stride))


@pytest.mark.parametrize("cut", [3, 6, 9, 17])
def test_a_resumed_run_is_thinned_like_one_that_was_not_stopped(tmp_path: Path, cut: int) -> None:
    steps = [made_step(step, BIG) for step in range(1, 25)]
    record(tmp_path / "whole", steps, settings=budget(0.15))
    record(tmp_path / "cut", steps[: cut + 4], settings=budget(0.15))
    record(tmp_path / "cut", steps[cut:], after=cut, settings=budget(0.15))
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


@pytest.mark.parametrize("kept", [(), (42, 43), tuple(range(40, 60))])
def test_a_record_that_begins_late_is_thinned_too_and_kept_steps_go_last(tmp_path: Path, kept: tuple[int, ...]) -> None:
    messages: list[str] = []
    writer = RecordWriter(tmp_path / RECORDS_FOLDER, manifest(settings=budget(0.15)), VOCABULARY, messages.append)
    writer.keep(kept)
    writer.start(39)
    for step in range(40, 60):
        writer.write(step, lambda step=step: made_step(step, BIG))  # type: ignore[misc]
    writer.close()
    found = steps_of(tmp_path)
    assert messages == [] and taken(tmp_path) <= 0.15e6
    assert len(kept) > 2 or set(kept) <= set(found)


def test_a_kill_between_the_manifest_and_the_thinning_is_repaired_at_the_next_start(tmp_path: Path) -> None:
    from trimtab.record.layout import manifest_text

    made_run(tmp_path, 6)
    halved = manifest_text(manifest(stride=2, vocabulary_sha256="x"))
    (tmp_path / RECORDS_FOLDER / "manifest.json").write_text(halved)
    record(tmp_path, [], after=6)
    assert steps_of(tmp_path) == [1, 3, 5] and read_manifest(tmp_path / RECORDS_FOLDER).stride == 2


def test_a_step_that_is_too_large_by_itself_ends_the_recording_with_advice(tmp_path: Path) -> None:
    messages = record(tmp_path, [made_step(step, BIG) for step in (1, 2, 3)], settings=budget(0.001))
    assert len(messages) == 1
    assert "record.max_megabytes = 0.001" in messages[0] and "record.group_share" in messages[0]
    assert steps_of(tmp_path) == []


# --- no error here stops a run


def test_a_full_disk_ends_the_recording_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, left = Path.write_bytes, [7]

    def until_full(path: Path, data: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(path, data)

    monkeypatch.setattr(Path, "write_bytes", until_full)
    messages = record(tmp_path, [made_step(step) for step in range(1, 6)])
    assert len(messages) == 1 and "No space left" in messages[0] and "nothing more is recorded" in messages[0]
    assert sorted(readable(tmp_path)) == steps_of(tmp_path) == [1, 2]


def test_a_folder_that_cannot_be_written_ends_the_recording_too(tmp_path: Path) -> None:
    (tmp_path / RECORDS_FOLDER).write_text("a file where a folder should be")
    messages = record(tmp_path, [made_step(step) for step in (1, 2, 3)])
    assert len(messages) == 1 and str(tmp_path / RECORDS_FOLDER) in messages[0]


def test_an_error_while_a_step_is_built_ends_the_recording_too(tmp_path: Path) -> None:
    def broken() -> StepData:
        raise ZeroDivisionError("a bug")

    messages: list[str] = []
    writer = RecordWriter(tmp_path / RECORDS_FOLDER, manifest(), VOCABULARY, messages.append)
    writer.start(0)
    writer.write(1, lambda: made_step(1))
    writer.write(2, broken)
    writer.flush()
    assert len(messages) == 1 and "a bug" in messages[0]
    writer.write(3, lambda: pytest.fail("nothing is recorded any more"))
    writer.close()
    assert len(messages) == 1 and sorted(readable(tmp_path)) == [1]


# --- the thread


def test_training_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    written = threading.Event()

    def slow() -> StepData:
        written.wait()
        return made_step(1)

    writer = RecordWriter(tmp_path / RECORDS_FOLDER, manifest(), VOCABULARY, pytest.fail)
    writer.start(0)
    writer.write(1, slow)  # returns although the step cannot be built yet
    assert steps_of(tmp_path) == []
    written.set()
    writer.flush()
    assert steps_of(tmp_path) == [1], "after flush it is on disk"
    writer.close()


def test_training_waits_when_the_queue_is_full(tmp_path: Path) -> None:
    released, built = threading.Event(), []

    def slow(step: int) -> StepData:
        built.append(step)
        released.wait()
        return made_step(step)

    writer = RecordWriter(tmp_path / RECORDS_FOLDER, manifest(), VOCABULARY, pytest.fail)
    writer.start(0)
    training = threading.Thread(target=lambda: [writer.write(n, lambda n=n: slow(n)) for n in range(1, 9)])  # type: ignore[misc]
    training.start()
    training.join(0.3)
    assert training.is_alive() and len(built) <= 1, "a few steps may wait in memory, not those of a whole run"
    released.set()
    training.join()
    writer.close()
    assert steps_of(tmp_path) == list(range(1, 9))


def test_closing_ends_the_thread_and_may_be_done_twice(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / RECORDS_FOLDER, manifest(), VOCABULARY, pytest.fail)
    writer.start(0)
    writer.write(1, lambda: made_step(1))
    writer.close()
    writer.close()
    writer.flush()
    assert writer._thread is None and steps_of(tmp_path) == [1]


def test_a_recorder_that_was_never_used_leaves_nothing(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / RECORDS_FOLDER, manifest(), VOCABULARY, pytest.fail)
    writer.flush()
    writer.close()
    assert not (tmp_path / RECORDS_FOLDER).exists()


def test_a_step_of_another_number_is_refused_when_it_is_read(tmp_path: Path) -> None:
    made_run(tmp_path, 2)
    step_folder(tmp_path / RECORDS_FOLDER, 2).rename(step_folder(tmp_path / RECORDS_FOLDER, 5))
    with pytest.raises(RecordError, match="is of step 2"):
        open_run(tmp_path).step(5)
