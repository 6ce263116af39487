"""The plug-in that verl loads in every process: the entry point `trimtab` of the group `verl.plugins`.

verl ignores a plug-in that cannot be imported, so this one prints the reason. It also stops a command that has
trimtab's options but not its trainer, which verl would run without them and without a warning.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.engines.common import missing_engine

MODE = "trainer.v1.trainer_mode"


def _load() -> None:
    problem = command_problem(sys.argv[1:])
    if problem:
        raise SystemExit(f"trimtab: {problem}")  # verl catches every Exception, and SystemExit is none
    try:
        importlib.import_module("trimtab.engines.verl.trainer")
    except Exception as error:
        error = missing_engine("verl", error) if isinstance(error, ImportError) else error
        sys.stderr.write(f"trimtab: the trainer for verl did not load, so {MODE}=trimtab is unknown: {error!r:.500}\n")
        raise
    _pass_over_trl()


def _pass_over_trl() -> None:
    """Let verl's workers start beside a TRL that no longer has the value head that verl patches; only PPO uses it."""
    trl = importlib.util.find_spec("trl")
    places = trl.submodule_search_locations if trl is not None else None
    if places and not (Path(places[0]) / "experimental/ppo").exists():
        patches: Any = importlib.import_module("verl.models.transformers.monkey_patch")
        patches.is_trl_available = lambda: False


def command_problem(arguments: Sequence[str]) -> str:
    """Return why verl would ignore the trimtab options of a command line; empty if it would not."""
    pairs = [argument.lstrip("+").partition("=") for argument in arguments if "=" in argument]
    given = {key: value.strip("'\"") for key, _, value in pairs}
    ours = [key for key in given if key == "trimtab" or key.startswith("trimtab.")]
    # With a config file of the user's own the mode may be set there.
    own_config = any(argument.startswith(("--config", "-cn", "-cp", "-cd")) for argument in arguments)
    if ours and given.get(MODE, "trimtab" if own_config else "") != "trimtab":
        return f"{ours[0]} is set, but {MODE}=trimtab is not, and verl would train without it: add that"
    if given.get(MODE) == "trimtab" and given.get("trainer.use_v1", "true").lower() == "false":
        return f"{MODE}=trimtab needs verl's v1 trainer: leave out trainer.use_v1=False"
    return ""


_load()
