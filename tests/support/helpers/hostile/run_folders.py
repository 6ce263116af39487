"""Run folders and evaluation folders that try to run code when something reads them, resealed where sums are kept."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.hostile.traps import Traps, change_json, words, write_json

Attack = Callable[[Path, Traps, str], None]
BESIDE = words("""optimizer.pt optimizer.pkl state.pkl rng.pkl model.bin model.pt model.pkl model.npy optimizer.npz
step.pkl manifest.pkl tokens.pkl metrics.pkl config.pkl report.pkl alarms.pkl vocabulary.pkl trainer_state.pt""")
PLACES = [".", "checkpoints", "checkpoints/step-00000001", "tokens", "tokens/step-00000001", "model"]


def build(base: Path, folder: Path, traps: Traps, name: str, attack: Attack) -> Path:
    """Copy a run or evaluation and add an attack under a name."""
    shutil.copytree(base, folder)
    attack(folder, traps, name)
    return folder


def reseal_checkpoint(checkpoint: Path) -> None:
    """Make the sums of a checkpoint agree with its files."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = {name: _sum(checkpoint / name) for name in manifest["files"]}
    write_json(checkpoint / "manifest.json", manifest)


def reseal_record(step: Path) -> None:
    """Make the sums of a recorded step agree with its files."""
    table = json.loads((step / "step.json").read_text())
    table["files"] = {name: _sum(step / name) for name in table["files"]}
    write_json(step / "step.json", table)
    reseal_table(step / "step.json")


def reseal_table(path: Path) -> None:
    """Make the sum of a record's JSON file agree with it."""
    table = json.loads(path.read_text())
    table.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
    write_json(path, {**table, "sha256": digest})


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_attacks() -> dict[str, Attack]:
    """Return attacks on a run's folder by name. None names a Python rule: that is the next function's."""
    made: dict[str, Attack] = {}

    def beside(folder: Path, traps: Traps, name: str) -> None:
        for i, place in enumerate(PLACES):
            for file in BESIDE:
                data = (
                    traps.numpy_file if file.endswith(("npy", "npz")) else traps.torch_file if i % 2 else traps.pickled
                )
                (folder / place / file).write_bytes(data(f"{name}: {place} {file}"))
            for file in ("conftest.py", "__init__.py", "sitecustomize.py", "trimtab.py", "torch.py", "json.py"):
                (folder / place / file).write_text(traps.python(f"{name}: {place} {file}"))

    made["pickles and modules beside"] = beside

    def replaced(file: str, form: str) -> Attack:
        def attack(folder: Path, traps: Traps, name: str) -> None:
            path = folder / file
            path.write_bytes(traps.pickled(name) if form == "pickle" else traps.torch_file(name, form))
            if "checkpoints" in file:
                reseal_checkpoint(path.parent)
            elif "step-" in file:
                reseal_record(path.parent)

        return attack

    for file in ("model.safetensors", "optimizer.safetensors", "state.json"):
        for form in ("pickle", "zip", "legacy"):
            made[f"checkpoint: {file} is a {form}"] = replaced(f"checkpoints/step-00000001/{file}", form)
    for file in ("tokens.parquet", "responses.parquet"):
        for form in ("pickle", "zip"):
            made[f"record: {file} is a {form}"] = replaced(f"tokens/step-00000001/{file}", form)
    for file in (
        "metrics.jsonl",
        "config.toml",
        "tokens/manifest.json",
        "tokens/vocabulary.parquet",
        "model/config.json",
    ):
        made[f"{file} is a pickle"] = replaced(file, "pickle")

    def columns(file: str) -> Attack:
        def attack(folder: Path, traps: Traps, name: str) -> None:
            from pyarrow import parquet

            path = folder / "tokens" / file
            parquet.write_table(with_classes(parquet.read_table(path), traps, name), path)
            if "step-" in file:
                reseal_record(path.parent)
            else:
                change_json(path.with_name("manifest.json"), vocabulary_sha256=_sum(path))
                reseal_table(path.with_name("manifest.json"))

        return attack

    for file in ("step-00000001/tokens.parquet", "step-00000001/responses.parquet", "vocabulary.parquet"):
        made[f"record: columns of {file} name classes"] = columns(file)

    return {**made, **_named_objects()}


def _named_objects() -> dict[str, Attack]:
    made: dict[str, Attack] = {}

    def objects(file: str) -> Attack:
        def attack(folder: Path, traps: Traps, name: str) -> None:
            path = folder / file
            change_json(path, **json_objects(traps, name))
            if file.endswith("state.json"):
                reseal_checkpoint(path.parent)
            elif "tokens" in file:
                reseal_table(path)

        return attack

    for file in ("checkpoints/step-00000001/state.json", "tokens/manifest.json", "model/config.json"):
        made[f"{file} names classes"] = objects(file)

    def lines(folder: Path, traps: Traps, name: str) -> None:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        changed = [json.dumps({**json.loads(line), **json_objects(traps, name)}) for line in lines]
        (folder / "metrics.jsonl").write_text("\n".join(changed) + "\n")
        (folder / "alarms.jsonl").write_text("\n".join(changed) + "\n")

    made["metrics.jsonl names classes"] = lines

    def text(file: str, old: str, new: str) -> Attack:
        def attack(folder: Path, traps: Traps, name: str) -> None:
            (folder / "trap_module.py").write_text(traps.python(name))
            path = folder / file
            before = path.read_text()
            assert old in before, f"{file} has no {old}"
            path.write_text(before.replace(old, new.replace("CODE", traps.expression(name))))
            if "tokens" in file:
                reseal_table(path)

        return attack

    for value in ("stapo(tau_p=CODE)", "CODE", "python:trap_module:grade", "stapo + CODE", "stapo(**{'x': CODE})"):
        made[f"config.toml: objective {value}"] = text("config.toml", 'name = "stapo"', f'name = "{value}"')
        made[f"manifest: objective {value}"] = text("tokens/manifest.json", '"stapo"', f'"{value}"')
    for old, new in {
        'name = "arithmetic"': 'name = "python:trap_module:load"',
        'engine = "native"': 'engine = "python:trap_module:load"',
        'device = "cpu"': 'device = "CODE"',
        "loggers = []": 'loggers = ["python:trap_module:load"]',
        'path = "demo"': 'path = "python:trap_module:load"',
        'family = "addition"': 'family = "CODE"',
        "vllm_options]": "vllm_options]\nworker_extension_cls = 'trap_module.load'\ntrust_remote_code = true",
    }.items():
        made[f"config.toml: {new[:30]}"] = text("config.toml", old, new)
    return made


def use_python_rule(folder: Path, traps: Traps, name: str) -> None:
    """Have a run's configuration grade by a function of the run's folder."""
    (folder / "trap_rule.py").write_text(traps.python(name))
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('rule = "boxed"', 'rule = "python:trap_rule:grade"'))


def evaluation_attacks() -> dict[str, Attack]:
    """Return attacks on an evaluation's folder by name."""
    made: dict[str, Attack] = {}

    def named(file: str, key: str, value: str) -> Attack:
        def attack(folder: Path, traps: Traps, name: str) -> None:
            (folder / "trap_rule.py").write_text(traps.python(name))
            path, filled = folder / file, {key: value.replace("CODE", traps.expression(name))}
            if file.endswith(".jsonl"):
                lines = [json.dumps({**json.loads(line), **filled}) for line in path.read_text().splitlines()]
                path.write_text("\n".join(lines) + "\n")
            else:
                change_json(path, **filled)

        return attack

    for value in ("python:trap_rule:grade", "python:os:system", "CODE", "gym:CODE"):
        made[f"settings.json: rule {value}"] = named("settings.json", "rule", value)
        made[f"problems.jsonl: rule {value}"] = named("problems.jsonl", "rule", value)
        made[f"generations.jsonl: rule {value}"] = named("generations.jsonl", "rule", value)
        made[f"verdicts.jsonl: rule {value}"] = named("verdicts.jsonl", "rule", value)
    for key in ("model", "sampler", "device", "precision", "suffix", "endpoint"):
        made[f"settings.json: {key}"] = named("settings.json", key, "python:trap_rule:grade")
    for key in ("answer", "benchmark", "id"):
        made[f"problems.jsonl: {key}"] = named("problems.jsonl", key, "CODE")
    made["generations.jsonl: text"] = named("generations.jsonl", "text", r"\boxed{CODE}")

    def beside(folder: Path, traps: Traps, name: str) -> None:
        for file in ("generations.pkl", "verdicts.pkl", "settings.pkl", "result.pkl", "problems.npy"):
            (folder / file).write_bytes(traps.pickled(f"{name}: {file}"))

    made["pickles beside"] = beside
    return made


def json_objects(traps: Traps, name: str) -> dict[str, Any]:
    """Return JSON as jsonpickle, pydantic, PyYAML and others write objects."""
    shell, code = traps.shell(name), traps.expression(name)
    return {
        "__class__": "os.system",
        "__reduce__": ["os.system", [shell]],
        "__init__": code,
        "py/object": "trap.Thing",
        "py/reduce": [{"py/type": "os.system"}, {"py/tuple": [shell]}],
        "py/repr": f"os/os.system('{shell}')",
        "$type": "System.Diagnostics.Process",
        "!!python/object/apply:os.system": [shell],
        "_target_": "os.system",
        "@type": "os.system",
        "lc": 1,
        "pickle": traps.pickled(name).hex(),
    }


def with_classes(table: Any, traps: Traps, name: str) -> Any:
    """Return an Arrow table whose metadata names Python classes: extension types and pandas' metadata."""
    import pyarrow as pa

    extension = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": traps.pickled(name),
    }
    fields = [field.with_metadata(extension) for field in table.schema]
    pandas = {
        "index_columns": [],
        "columns": [
            {
                "name": field.name,
                "field_name": field.name,
                "pandas_type": "object",
                "numpy_type": f"open:{traps.marker(name)}",
            }
            for field in fields
        ],
        "creator": {"library": "pyarrow", "version": "0.1"},
        "pandas_version": "0.1",
    }
    metadata = {b"pandas": json.dumps(pandas).encode(), b"pickle": traps.pickled(name), b"huggingface": b'{"info": {}}'}
    return pa.table(table.columns, schema=pa.schema(fields, metadata=metadata))
