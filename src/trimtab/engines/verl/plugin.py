"""What verl loads by itself, in every process: the entry point `trimtab` of its group `verl.plugins`.

verl passes over a plug-in that cannot be imported, so this one says so itself. It also stops a command that has
trimtab's options but not its trainer, which verl would run without them and without a word.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from trimtab.engines.common import missing_engine

MODE = "trainer.v1.trainer_mode"


def _load() -> None:
    stray = misused(sys.argv[1:])
    if stray:
        raise SystemExit(f"trimtab: {stray}")  # no Exception, which verl would swallow
    try:
        importlib.import_module("trimtab.engines.verl.trainer")
    except Exception as error:
        error = missing_engine("verl", error) if isinstance(error, ImportError) else error
        sys.stderr.write(f"trimtab: its trainer for verl did not load, {MODE}=trimtab is unknown: {error!r:.500}\n")
        raise


def misused(arguments: Sequence[str]) -> str:
    """Why a verl command with trimtab's options would run without them; empty where it would not."""
    parts = [argument.lstrip("+").partition("=") for argument in arguments if "=" in argument]
    given = {key: value.strip("'\"") for key, _, value in parts}
    ours = [key for key in given if key == "trimtab" or key.startswith("trimtab.")]
    elsewhere = any(argument.startswith(("--config", "-cn", "-cp", "-cd")) for argument in arguments)
    if ours and given.get(MODE, "trimtab" if elsewhere else "") != "trimtab":
        return f"{ours[0]} is given, but {MODE}=trimtab is not, and verl would train without it: add that"
    if given.get(MODE) == "trimtab" and given.get("trainer.use_v1", "true").lower() == "false":
        return f"{MODE}=trimtab needs verl's v1 trainer: leave out trainer.use_v1=False"
    return ""


_load()
