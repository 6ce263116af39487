"""All files that try to run code, and the commands that are tried on each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from typer.testing import CliRunner

from helpers.hostile import answers, data_files, model_folders, run_folders, templates, working_directories
from helpers.hostile.commands import Request
from helpers.hostile.traps import Traps
from trimtab.cli import app

RECIPE = """
[objective]
name = "stapo"
[task]
size = 12
[rollout]
prompts = 2
samples = 2
max_new_tokens = 2
max_prompt_tokens = 4096
[reward]
overlong_buffer = 2
[run]
steps = 1
eval_every = 0
report = false
threads = 1
device = "cpu"
"""
# The last two need algebra, so a grading worker is started for them.
LINES = [
    {"response": r"\boxed{2}", "answer": "2"},
    {"response": r"\boxed{\sin 2x + \sqrt{x}}", "answer": r"2\sin x\cos x + x^{1/2}"},
    {"response": r"\boxed{\cos^2 x}", "answer": r"1 - \sin^2 x"},
]
GRADED = "".join(json.dumps(line) + "\n" for line in LINES)
RULES = ["math", "dapo", "number", "boxed", "strict-box", "choice", "exact", "countdown"]


@dataclass
class Siege:
    """A folder for all files, the working directory in it, and the files that every command needs."""

    root: Path
    thorough: bool
    traps: Traps = field(init=False)

    def __post_init__(self) -> None:
        self.here, self.traps = self.root / "here", Traps(self.root / "traps")
        self.recipe, self.sums = self.root / "tiny.toml", self.root / "sums"
        self.sums.mkdir(parents=True)
        self.traps.folder.mkdir()
        self.recipe.write_text(RECIPE)
        line = {"question": "1+1=", "answer": "Add.\n#### 2"}
        (self.sums / "gsm8k_test.jsonl").write_text(json.dumps(line) + "\n")
        self.rows = data_files.write_rows(self.root / "row.jsonl", {"a": data_files.row(prompt="1+1=")})

    def evaluation(self, model: str, out: Path | str, *more: str) -> list[str]:
        """Return the evaluation of a model on one problem with one token."""
        short = [
            "--samples",
            "1",
            "--max-new-tokens",
            "1",
            "--no-entropy",
            "--device",
            "cpu",
            "--quiet",
            "--benchmarks",
            "gsm8k",
        ]
        return ["eval", model, *short, "--data", str(self.sums), "--suffix", "", "--out", str(out), *more]

    def train(self, *settings: str, out: Path | str = "") -> list[str]:
        """Return a run of one step, or without `out` a dry run, with settings."""
        sets = [word for setting in settings for word in ("--set", setting)]
        return ["train", str(self.recipe), *sets, *(["--out", str(out)] if out else ["--dry-run"])]

    def file_task(self, path: Path | str, rule: str = "math") -> list[str]:
        """Return the settings of a task whose problems are in a file."""
        return ["task.name=file", f"task.path={path}", f"task.rule={rule}"]

    def fill_working_directory(self) -> list[str]:
        """Fill the working directory with modules and more; return their names."""
        names = working_directories.fill(self.here, self.traps, ["module", "package", "bytecode"])
        for name in ("trap_rule", "trap_module"):
            (self.here / f"{name}.py").write_text(self.traps.python(name))
        return names + working_directories.add_other_files(self.here, self.traps)

    def everything(self) -> Iterator[Request]:
        """Yield every command once, in an order in which each finds what it needs."""
        for words in (
            ["grade"],
            self.train(),
            self.train("run.report=true", out="run"),
            ["train", "--resume", "run", "--set", "run.steps=2"],
            self.train(*self.file_task(self.rows), out="file-run"),
            ["compare", "grpo", "--seeds", "1", "--recipe", str(self.recipe), "--out", "compared"],
            self.evaluation("demo", "evaluated"),
            ["eval", "--regrade", "evaluated", "--rule", "math"],
            ["replay", "run", "--objective", "gspo"],
            ["report", "run"],
            ["alarms", "run"],
            ["methods", "stapo"],
            ["schema"],
        ):
            yield Request("working directory", " ".join(words[:2]), words, GRADED)

    def models(self) -> Iterator[Request]:
        """Yield commands on model folders and chat templates."""
        base, kind = model_folders.base_model(self.root / "base"), "model folder"
        for i, (name, attack) in enumerate(model_folders.attacks().items()):
            folder = str(model_folders.build(base, self.root / f"model-{i}", self.traps, name, attack))
            yield Request(kind, name, self.evaluation(folder, self.root / f"model-evaluated-{i}"))
            if self.thorough or "unknown kind" in name or "trust" in name:
                yield Request(kind, name, self.train(f"model.path={folder}"))
            if self.thorough or name == "config.json maps every class, of an unknown kind":
                yield Request(kind, name, self.train(f"model.path={folder}", out=self.root / f"model-run-{i}"))
                yield Request(kind, name, self.train(f"model.reference={folder}", "objective.kl=0.1"))
        for i, name in enumerate(templates.TEMPLATES):
            folder = str(shutil.copytree(base, self.root / f"template-{i}"))
            place = templates.PLACES[i % len(templates.PLACES)]
            templates.use_template(Path(folder), templates.template(self.traps, name, name), place)
            yield Request("chat template", name, self.evaluation(folder, self.root / f"template-evaluated-{i}"))
            if self.thorough:
                words = self.train(f"model.path={folder}", out=self.root / f"template-run-{i}")
                yield Request("chat template", name, words)

    def runs(self) -> Iterator[Request]:
        """Yield commands on run folders."""
        base = self.root / "run"
        _prepare(*self.train(out=base))
        attacks = {**run_folders.run_attacks(), "config.toml: a Python rule": run_folders.use_python_rule}
        for i, (name, attack) in enumerate(attacks.items()):
            folder = str(run_folders.build(base, self.root / f"run-{i}", self.traps, name, attack))
            commands = [["alarms", folder], ["replay", folder, "--objective", "recorded"], ["report", folder]]
            if self.thorough or name.startswith(("checkpoint", "model", "pickles", "config.toml: a Python rule")):
                commands.append(self.evaluation(folder, self.root / f"run-evaluated-{i}"))
                commands.append(["train", "--resume", folder, "--dry-run"])
            if attack is not run_folders.use_python_rule and (self.thorough or name.startswith(("check", "pickles"))):
                commands.append(["train", "--resume", folder, "--set", "run.steps=2"])
            for words in commands:
                yield Request("run folder", name, words)

    def evaluations(self) -> Iterator[Request]:
        """Yield commands on evaluation folders."""
        base = self.root / "evaluated"
        _prepare(*self.evaluation("demo", base))
        for i, (name, attack) in enumerate(run_folders.evaluation_attacks().items()):
            folder = str(run_folders.build(base, self.root / f"evaluated-{i}", self.traps, name, attack))
            yield Request("evaluation folder", name, ["eval", "--regrade", folder])
            yield Request("evaluation folder", name, self.evaluation("demo", folder))
            if self.thorough or "rule" in name:
                against = self.evaluation("demo", self.root / f"other-{i}", "--against", folder)
                yield Request("evaluation folder", name, against)

    def data(self) -> Iterator[Request]:
        """Yield commands on data files."""
        rows = data_files.rows(self.traps, "row")
        files = {str(file): 1 for file in data_files.files(self.root / "files", self.traps)}
        files[str(data_files.write_rows(self.root / "rows.jsonl", rows))] = len(rows)
        files[data_files.dataset_folder(self.here / "dataset", self.traps, "dataset").name] = 1
        model = shutil.copytree(self.root / "base", self.root / "data-model")
        simple = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        templates.use_template(Path(model), simple, "chat_template.jinja")
        for i, (name, prompts) in enumerate(files.items()):
            task = [*self.file_task(name), f"model.path={model}", f"rollout.prompts={prompts}"]
            yield Request("data file", name, self.train(*task, out=self.root / f"data-{i}"))
            warm = [f"warm_start.path={name}", "warm_start.steps=1", "warm_start.batch_size=1"]
            yield Request("data file", name, self.train(*warm, out=self.root / f"warm-{i}"))
            others = [["train", name, "--dry-run"], ["alarms", name], ["eval", name], ["report", name]]
            for words in others if self.thorough else others[:2]:
                yield Request("data file", name, words)

    def answers(self) -> Iterator[Request]:
        """Yield one grading of answers and truths that are code."""
        lines = []
        for _, text in answers.answers(self.traps, self.thorough):
            for rule in RULES:
                response = {"dapo": f"Answer: {text}", "exact": text}.get(rule, f"\\boxed{{{text}}}")
                lines.append({"response": response, "answer": "2", "rule": rule})
                lines.append({"response": response.replace(text, "2"), "answer": text, "rule": rule})
            lines.append({"response": f"\\boxed{{{text}}}", "answer": text + " + 0", "rule": "math"})
            lines.append({"response": "2", "answer": "2", "rule": f"python:{text}:system"})
            lines.append({"response": "2", "answer": "2", "rule": f"gym:{text}"})
        for name in ("os:system", "trap_rule:grade"):
            lines.append({"response": "2", "answer": "2", "rule": f"python:{name}"})
        yield Request("answer", "all", ["grade"], "".join(json.dumps(line) + "\n" for line in lines))

    def allowed(self) -> Iterator[Request]:
        """Yield what may run code: a recipe whose rule is a Python function of the working directory."""
        words = self.train(*self.file_task(self.rows, "python:trap_rule:grade"), out=self.root / "allowed")
        yield Request("allowed", "a Python rule", words)


def _prepare(*words: str) -> None:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
