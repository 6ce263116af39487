"""The names of TRL's and verl's options in docs/coming-from.md are those of the installed versions."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/coming-from.md"
LINK = re.compile(r"\(\[table\].*?\)\)")


def names(column: int) -> list[str]:
    rows = [LINK.sub("", line).split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [row[column] for row in rows if "of the trainer" not in row[column]]
    return [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]


def test_trls() -> None:
    trl = pytest.importorskip("trl")
    assert len(names(2)) > 20
    assert set(names(2)) - {field.name for field in fields(trl.GRPOConfig)} == set()


def test_verls() -> None:
    pytest.importorskip("verl")
    import importlib.util

    from omegaconf import OmegaConf

    (folder,) = importlib.util.find_spec("verl").submodule_search_locations  # type: ignore[union-attr]
    config = OmegaConf.load(Path(folder) / "trainer/config/_generated_ppo_trainer.yaml")
    assert len(names(3)) > 20
    for name in names(3):
        section, _, key = name.rpartition(".")
        assert key in list(OmegaConf.select(config, section)), name  # `in` is false for a mandatory value
