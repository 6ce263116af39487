"""The plug-in that verl loads in every process: the entry point `trimtab` of the group `verl.plugins`.

A run has about ten processes, and the trainer is needed in two of them. So our modules are imported right after those
of verl that they add to, wherever verl imports these. verl ignores a plug-in that fails, so this one prints the reason.
It also stops a command that has trimtab's options but not its trainer, which verl would run without them and without a
warning.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from trimtab.engines import AGENT_LOOP, missing_engine

MODE = "trainer.v1.trainer_mode"


def _load() -> None:
    problem = command_problem(sys.argv[1:])
    if problem:
        raise SystemExit(f"trimtab: {problem}")  # verl catches every Exception, and SystemExit is none
    for name in AFTER.keys() & sys.modules.keys():  # another plug-in has imported it
        AFTER[name](sys.modules[name])
    sys.meta_path.insert(0, _AfterVerl())


def _register(name: str, registered: str, _: Any) -> None:
    """Import one of our modules, which registers itself with verl."""
    try:
        importlib.import_module(name)
    except Exception as error:
        error = missing_engine("verl", error) if isinstance(error, ImportError) else error
        sys.stderr.write(f"trimtab: {name} did not load, so verl does not know {registered}: {error!r:.500}\n")


def _pass_over_trl(patches: Any) -> None:
    """Let verl's workers start beside a TRL that no longer has the value head that verl patches; only PPO uses it."""
    trl = importlib.util.find_spec("trl")
    places = trl.submodule_search_locations if trl is not None else None
    if places and not (Path(places[0]) / "experimental/ppo").exists():
        patches.is_trl_available = lambda: False


# What to do after the import of a module of verl, by its name.
AFTER: dict[str, Callable[[Any], None]] = {
    "verl.trainer.ppo.v1": partial(_register, "trimtab.engines.verl.trainer", f"{MODE}=trimtab"),
    "verl.experimental.agent_loop": partial(_register, "trimtab.engines.verl.agent_loop", AGENT_LOOP),
    "verl.models.transformers.monkey_patch": _pass_over_trl,
}


class _AfterVerl:
    """A finder that lets Python find a module of `AFTER`, and adds what to do when it has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module of `AFTER`; None for any other."""
        spec = PathFinder.find_spec(name, path) if name in AFTER else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                AFTER[name](module)

            loader.exec_module = exec_module
        return spec


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
