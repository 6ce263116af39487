"""Data files that try to run code: rows that name functions, formats that hold objects, prompts that are templates."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.hostile.run_folders import json_objects, with_classes
from helpers.hostile.templates import TEMPLATES, template
from helpers.hostile.traps import Traps

YAML = "!!python/object/apply:os.system ['SHELL']"


def row(**changes: Any) -> dict[str, Any]:
    """Return a row in verl's columns."""
    plain = {
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"ground_truth": "2"},
        "data_source": "sums",
    }
    return {**plain, **changes}


def rows(traps: Traps, start: str) -> dict[str, Mapping[str, Any]]:
    """Return rows that a task of chat messages can hold, by name; each tries to run a trap called by `start` and it."""
    made: dict[str, Mapping[str, Any]] = {}
    keys = ["rule", "data_source", "grader", "ability", "reward_fn", "env", "tools", "agent_name", "_target_", "task"]
    for key in keys:
        for value in ("python:trap_rule:grade", "python:os:system"):
            made[f"{key} {value}"] = row(**{key: value})
    for key in ("style", "rule", "function", "grader"):
        for value in ("python:trap_rule:grade", "gym:trap_rule"):
            made[f"reward_model.{key} {value}"] = row(reward_model={"ground_truth": "2", key: value})
    for key in ("rule", "python", "entry", "options", "tools_kwargs", "interaction_kwargs"):
        made[f"extra_info.{key}"] = row(extra_info={key: "python:trap_rule:grade"})
    objects = json_objects(traps, f"{start} objects")
    made["objects"] = row(**objects)
    made["objects in extra_info"] = row(extra_info=objects)
    made["objects in reward_model"] = row(reward_model={"ground_truth": "2", **objects})
    made["yaml"] = row(data_source=YAML.replace("SHELL", traps.shell(f"{start} yaml")))
    for name in TEMPLATES:
        text = template(traps, name, f"{start} prompt {name}")
        made[f"prompt {name}"] = row(prompt=[{"role": "user", "content": text}])
    for name in ("cycler", "lipsum"):
        text = template(traps, name, f"{start} role {name}")
        made[f"role {name}"] = row(prompt=[{"role": text, "content": "1+1"}])
    return made


def write_rows(path: Path, rows: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows.values()))
    return path


def files(folder: Path, traps: Traps) -> list[Path]:
    """Write files in formats of all kinds and return them; each is named after its trap."""
    import pyarrow as pa
    from pyarrow import feather, parquet

    folder.mkdir()
    table = pa.Table.from_pylist([row()])
    made = []

    def path(name: str) -> Path:
        made.append(folder / name)
        return folder / name

    parquet.write_table(with_classes(table, traps, "classes.parquet"), path("classes.parquet"))
    pickled = pa.table({"prompt": [traps.pickled("bytes.parquet")], "reward_model": [{"ground_truth": "2"}]})
    parquet.write_table(pickled, path("bytes.parquet"))
    truths = pa.table({"prompt": ["1+1"], "reward_model": [{"ground_truth": traps.pickled("truths.parquet")}]})
    parquet.write_table(truths, path("truths.parquet"))
    feather.write_feather(with_classes(table, traps, "classes.feather"), path("classes.feather"))
    with pa.OSFile(str(path("classes.arrow")), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    parquet.write_table(with_classes(table, traps, "table.jsonl"), path("table.jsonl"))
    for name in (
        "pickle.jsonl",
        "pickle.parquet",
        "pickle.pkl",
        "pickle.json",
        "pickle.csv",
        "pickle.pt",
        "pickle.npy",
    ):
        path(name).write_bytes(traps.pickled(name))
    for name in ("torch.pt", "torch.bin", "torch.jsonl", "torch.parquet"):
        path(name).write_bytes(traps.torch_file(name))
    for name in ("numpy.npy", "numpy.jsonl", "numpy.parquet"):
        path(name).write_bytes(traps.numpy_file(name))
    for name in ("yaml.yaml", "yaml.yml", "yaml.jsonl", "yaml.json"):
        path(name).write_text(YAML.replace("SHELL", traps.shell(name)))
    for name in ("code.py", "code.jsonl", "code.json", "code.parquet", "code.ipynb"):
        path(name).write_text(traps.python(name))
    for name in ("formula.csv", "formula.tsv"):
        path(name).write_text(f"prompt,answer\n=cmd|'/C {traps.shell(name)}'!A0,2\n")
    path("gzip.jsonl.gz").write_bytes(gzip.compress(traps.pickled("gzip.jsonl.gz")))
    with zipfile.ZipFile(path("zip.zip"), "w") as archive:
        archive.writestr("__main__.py", traps.python("zip.zip"))
        archive.writestr("sitecustomize.py", traps.python("zip.zip"))
    return made


def dataset_folder(folder: Path, traps: Traps, name: str) -> Path:
    """Make a folder as a dataset on the hub with a loading script is, and return it."""
    folder.mkdir(parents=True)
    (folder / f"{folder.name}.py").write_text(traps.python(name))
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: train.pkl\n---\n")
    (folder / "train.pkl").write_bytes(traps.pickled(f"{name} train.pkl"))
    (folder / "dataset_infos.json").write_text('{"default": {"builder_name": "pandas"}}')
    (folder / "dataset_info.json").write_text('{"builder_name": "pandas"}')
    return folder
