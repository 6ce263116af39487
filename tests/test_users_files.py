"""No command changes a byte of a file that it did not write, wherever the user keeps it.

A folder with files of the user's, and no run or evaluation of ours, is refused before anything is written or loaded.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.train.short_runs import SETTINGS, trained
from trimtab.cli import app
from trimtab.engines.common import require_unused
from trimtab.experiments.grid import Grid
from trimtab.experiments.grid.pool import ProcessPool
from trimtab.trainer.model.pretrained import convert_gguf
from trimtab.trainer.train.run_folder import RunFolder

# Everything that a command may write below its --out, and some names that none writes.
IN_A_RUN = (
    "notes.txt", ".hidden", ".writing-notes", "inputs.json", "metrics.jsonl", "nonfinite.jsonl", "rule_errors.jsonl",
    "alarms.jsonl", "report.html", "tokens/corpus.txt", "tokens/step-00000001/tokens.parquet", "tokens/manifest.json",
    "model/model.safetensors", "model/config.json", "checkpoints/mine.pt", "checkpoints/step-00000001/state.json",
    "alarms/step-00000003/model.safetensors", "reference/step-00000000/model.safetensors", "tensorboard/events",
    "wandb/run.txt", "export-3/config.json",
)  # fmt: skip
IN_AN_EVALUATION = (
    "notes.txt", "problems.jsonl", "generations.jsonl", "verdicts.jsonl", "settings.json", "result.md", "result.json",
    "against/result.md", "against/problems.jsonl", ".hidden",
)  # fmt: skip
IN_A_COMPARISON = (
    "notes.txt", "compare.json", "compare.md", "report.html", "logs/grpo-seed0.log", "grpo-seed0/notes.txt",
    "grpo-seed0/metrics.jsonl", ".warm_start/weights.pt",
)  # fmt: skip
IN_A_STRESS_TEST = (
    "notes.txt", "stress.json", "stress.md", "report.html", "logs/grpo.log", "grpo-update.lr=0.1-seed0/model/weights",
    "grpo-update.lr=0.1-seed0/ended.json", "grpo-update.lr=0.1-seed0/checkpoints/mine.pt",
)  # fmt: skip

STRESS = ["stress", "grpo", "--axis", "update.lr=0.1", "--seeds", "1"]
REFUSED = [
    *(("train", ["train", "addition"], place) for place in IN_A_RUN),
    *(("eval", ["eval", "demo"], place) for place in IN_AN_EVALUATION),
    *(("compare", ["compare", "grpo", "--seeds", "1"], place) for place in IN_A_COMPARISON),
    *(("stress", STRESS, place) for place in IN_A_STRESS_TEST),
]


def put(path: Path, text: str = "of the user") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the bytes and the time of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def trimtab(*words: str | Path, text: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words], input=text)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(("name", "words", "place"), REFUSED, ids=[f"{name} {place}" for name, _, place in REFUSED])
def test_a_folder_with_files_of_the_user_is_refused_and_stays_as_it_is(
    name: str, words: list[str], place: str, tmp_path: Path
) -> None:
    put(tmp_path / "out" / place)
    before = everything(tmp_path)
    code, output = trimtab(*words, "--out", tmp_path / "out")
    assert code == 2 and "choose another --out" in output and str(tmp_path / "out") in output, output
    assert everything(tmp_path) == before


def test_eval_does_not_overwrite_the_problems_that_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "problems.jsonl", '{"prompt": "1 + 1", "answer": "2"}\n')
    before = everything(tmp_path)
    code, output = trimtab("eval", "demo", "--benchmarks", "problems.jsonl", "--columns", "prompt=prompt", "--out", ".")
    assert code == 2 and "problems.jsonl" in output
    assert everything(tmp_path) == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one step."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    trained(folder, ONE_STEP)
    return folder


ONE_STEP = {"run.steps": "1", "run.checkpoint_every": "1", "run.eval_every": "0"}


def resume(run: Path, steps: int) -> tuple[int, str]:
    settings = {**SETTINGS, **ONE_STEP, "run.steps": str(steps)}
    return trimtab("train", "--resume", run, "--quiet", *(f"--set={key}={value}" for key, value in settings.items()))


IN_A_RESUMED_RUN = (
    "notes.txt", "tokens/notes.txt", "checkpoints/notes.txt", "checkpoints/mine/model.safetensors", "alarms/notes.txt",
    "checkpoints/step-00000000/notes.txt", "reference/notes.txt", "export-1/config.json", "report.html", "logs/mine",
)  # fmt: skip


def test_a_resumed_run_leaves_the_files_that_somebody_put_into_its_folder(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for place in IN_A_RESUMED_RUN:
        put(run / place)
    code, output = resume(run, 3)
    assert code == 0, output
    assert [(run / place).read_text() for place in IN_A_RESUMED_RUN] == ["of the user"] * len(IN_A_RESUMED_RUN)
    assert "is not a report of trimtab" in output


def test_steps_that_are_repeated_leave_the_files_that_somebody_put_beside_them(finished: Path, tmp_path: Path) -> None:
    """A resumed run removes the records of later steps."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / "step-00000001")
    shutil.rmtree(run / "model")
    put(run / "tokens" / "step-00000001" / "notes.txt")
    code, output = resume(run, 1)
    assert code == 0 and "notes.txt is not one of the files that would replace it" in output, output
    assert [path.name for path in (run / "tokens" / "step-00000001").iterdir()] == ["notes.txt"]


def test_what_a_stress_test_removes_is_a_runs_own(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.copytree(run / "checkpoints", run / "best")
    mine = ("checkpoints/step-00000001/notes.txt", "checkpoints/mine.pt", "best/step-00000000/mine.safetensors")
    for place in mine:
        put(run / place)
    for name in ("notes.txt", "scores.json", "mine.safetensors", "old.model"):
        put(run / "model" / name)
        RunFolder(run).remove_weights()
        assert all((run / place).read_text() == "of the user" for place in (*mine, f"model/{name}"))
        (run / "model" / name).unlink()
    for place in mine:
        (run / place).unlink()
    RunFolder(run).remove_weights()
    assert not any((run / name).exists() for name in ("best", "checkpoints", "model"))


@pytest.mark.parametrize("place", ["metrics.jsonl", "tokens/step-00000001/notes", "model/weights", "data/rows.jsonl"])
def test_a_folder_with_a_recipe_is_not_resumed_as_if_it_were_a_run(place: str, tmp_path: Path) -> None:
    put(tmp_path / "mine" / "config.toml", "[run]\nsteps = 3\n")
    put(tmp_path / "mine" / place)
    before = everything(tmp_path)
    code, output = trimtab("train", "--resume", tmp_path / "mine", "--quiet")
    assert (code, everything(tmp_path)) == (2, before), output


def test_a_recipe_alone_is_not_resumed(tmp_path: Path) -> None:
    put(tmp_path / "my recipes" / "config.toml", "[run]\nsteps = 3\n")
    code, output = trimtab("train", "--resume", tmp_path / "my recipes", "--quiet")
    assert code == 2 and "config.toml' --out FOLDER" in " ".join(output.split()), output


@pytest.mark.parametrize("place", ["compare.md", "compare.json", "report.html", "logs/grpo-seed0.log"])
def test_a_comparison_with_a_run_of_the_users_own_replaces_nothing_beside_it(place: str, tmp_path: Path) -> None:
    settings = [f"--set={key}={value}" for key, value in ONE_STEP.items()]
    words = ["compare", "grpo", "--seeds", "1", "--recipe", "addition", *settings]
    given = tuple(f"{key}={value}" for key, value in ONE_STEP.items())
    (run,) = Grid(("grpo",), tmp_path / "out", "addition", 1, given).plan()
    run.folder.create(run.config)
    put(tmp_path / "out" / place)
    before = everything(tmp_path)
    code, output = trimtab(*words, "--out", tmp_path / "out")
    assert code == 2 and "choose another --out" in output, output
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", ["logs", "logs/grpo-seed0.log"])
def test_the_log_of_a_run_is_not_written_through_a_link(name: str, tmp_path: Path) -> None:
    (run,) = Grid(("grpo",), tmp_path / "out", "addition", 1).plan()
    put(tmp_path / "mine" / "grpo-seed0.log")
    link = run.out / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "mine" / ("" if name == "logs" else "grpo-seed0.log"))
    with pytest.raises(ValueError, match=f"{link} is a link, and the output of runs is written there: remove it"):
        ProcessPool([run], 1, print).run()
    assert (tmp_path / "mine" / "grpo-seed0.log").read_text() == "of the user"


@pytest.mark.parametrize("name", ["tokens", "checkpoints", "alarms", "best", "reference", "model"])
def test_a_run_is_not_resumed_through_a_link_to_another_folder(name: str, finished: Path, tmp_path: Path) -> None:
    """It would remove the later steps and older checkpoints there."""
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(finished, run)
    shutil.copytree(finished / "checkpoints", other / name)
    before = everything(other)
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(other / name)
    code, output = resume(run, 3)
    assert code == 2, output
    assert f"{name} is a link" in " ".join(output.replace("│", "").split())
    assert everything(other) == before


@pytest.mark.parametrize("name", ["rule_output.txt", "metrics.jsonl", "alarms.jsonl", "rule_errors.jsonl"])
@pytest.mark.parametrize("there", [True, False])
def test_a_run_is_not_resumed_through_a_link_to_a_file(name: str, there: bool, finished: Path, tmp_path: Path) -> None:
    """What rules print may be the words of a model: they do not go into a file of the user's."""
    run, other = tmp_path / "run", tmp_path / "profile"
    shutil.copytree(finished, run)
    if there:
        put(other)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(other)
    code, output = resume(run, 3)
    assert code == 2 and f"{name} is a link" in " ".join(output.split()), output
    assert other.exists() is there and (not there or other.read_text() == "of the user")


def test_a_file_beside_the_trained_model_is_not_replaced_with_it(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    put(run / "model" / "notes.txt")
    code, output = resume(run, 2)
    assert code != 0 and "notes.txt is not one of the files that would replace it" in output
    assert (run / "model" / "notes.txt").read_text() == "of the user"
    (run / "model" / "notes.txt").unlink()
    assert resume(run, 2)[0] == 0, "the way out that the error names"


@pytest.mark.parametrize("words", [["report"], ["replay", "--json"], ["report", "--out"], ["export", "--out"]])
def test_a_file_of_the_user_is_not_overwritten_by_what_is_made_of_a_run(
    words: list[str], finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    put(run / "report.html")
    put(tmp_path / "mine.html", "<html>of the user</html>")
    before = everything(tmp_path)
    command, *option = words
    code, output = trimtab(command, run, *option, *([tmp_path / "mine.html"] if option else []))
    assert code == 2 and "choose another" in output
    assert everything(tmp_path) == before


def test_what_a_command_has_written_it_writes_again(finished: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert trimtab("report", finished, "--out", tmp_path / "page.html")[0] == 0
        assert trimtab("replay", finished, "--json", tmp_path / "replay.json")[0] == 0


@pytest.mark.parametrize("words", [["alarms"], ["alarms", "--json"], ["replay"]])
def test_commands_that_show_a_run_write_nothing(
    words: list[str], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "metrics.jsonl")
    before, run_before = everything(tmp_path), everything(finished)
    assert trimtab(words[0], finished, *words[1:])[0] == 0
    assert (everything(tmp_path), everything(finished)) == (before, run_before)


@pytest.mark.parametrize("words", [["methods"], ["schema"], ["doctor"], ["grade"], ["train", "--dry-run"]])
def test_other_commands_write_nothing_where_they_are_called(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("runs/notes.txt", "config.toml", "verdicts.jsonl"):
        put(tmp_path / place)
    before = everything(tmp_path)
    assert trimtab(*words, text='{"response": "2", "answer": "2"}\n')[0] == 0
    assert everything(tmp_path) == before


@pytest.mark.parametrize("place", ["metrics.jsonl", "alarms.jsonl", "tokens/corpus.txt"])
def test_the_records_of_an_engine_go_into_no_folder_that_is_in_use(place: str, tmp_path: Path) -> None:
    put(tmp_path / place)
    for step in (0, 1):
        with pytest.raises(ValueError, match="choose another folder"):
            require_unused(tmp_path, step, "record")
    put(tmp_path / "tokens" / "manifest.json")
    require_unused(tmp_path, 1, "record")  # a resumed run continues its own


def test_a_folder_of_the_user_is_not_replaced_by_the_packaged_model(tmp_path: Path) -> None:
    put(tmp_path / "smollm2-135m-instruct" / "notes.txt")
    with pytest.raises(ValueError, match="choose another TRIMTAB_CACHE"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "smollm2-135m-instruct")
    assert [path.name for path in tmp_path.rglob("*.txt")] == ["notes.txt"]
