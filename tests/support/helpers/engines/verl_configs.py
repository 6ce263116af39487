"""verl's own configuration, composed as its command line does it."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

FOLDER = Path(verl.__file__).parent / "trainer" / "config"


def composed(overrides: Sequence[str]) -> Any:
    """The configuration of a verl command; a key that verl does not have is an error."""
    with initialize_config_dir(str(FOLDER), version_base=None):
        return compose("ppo_trainer", list(overrides))


def changed(overrides: Sequence[str]) -> Any:
    """The default configuration with some keys set: as `composed`, a hundred times as fast."""
    base = _default()
    added = OmegaConf.from_dotlist([key[1:] for key in overrides if key.startswith("+")])
    with open_dict(base):
        base = OmegaConf.merge(base, added)
    OmegaConf.set_struct(base, True)
    return OmegaConf.merge(base, OmegaConf.from_dotlist([key for key in overrides if not key.startswith("+")]))


@lru_cache
def _default() -> Any:
    return composed([])
