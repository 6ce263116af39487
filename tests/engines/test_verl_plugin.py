"""verl's plug-in: what it imports, when, and what is printed where that fails."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from trimtab.engines.verl.plugin import AFTER

PROCESS = """
import json, sys
import verl
light = sorted(name for name in sys.modules if name.startswith("trimtab"))
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
print(json.dumps([light, get_trainer_cls("trimtab").__name__, _agent_loop_registry["trimtab_tool_agent"]["_target_"]]))
"""


def test_our_modules_are_imported_where_verl_imports_its_trainers() -> None:
    """Most processes of a run need neither, and the imports took as long as those of verl itself."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROCESS], capture_output=True, text=True, check=True)
    light, trainer, agent_loop = json.loads(done.stdout.splitlines()[-1])
    engines, verl = "trimtab.engines", "trimtab.engines.verl"
    ours = [engines, verl, f"{verl}.plugin"]
    assert light == ["trimtab", *ours, "trimtab.text"]
    assert (trainer, agent_loop) == ("TrimtabRayTrainer", f"{verl}.agent_loop.TrimtabToolAgentLoop")


@pytest.mark.parametrize(
    ("verls", "ours", "unknown"),
    [
        ("verl.trainer.ppo.v1", "trimtab.engines.verl.trainer", "trainer.v1.trainer_mode=trimtab"),
        ("verl.experimental.agent_loop", "trimtab.engines.verl.agent_loop", "trimtab_tool_agent"),
    ],
)
def test_a_module_that_cannot_be_imported_is_reported_and_verl_goes_on(
    verls: str, ours: str, unknown: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, ours, None)
    AFTER[verls](None)
    said = capfd.readouterr().err
    assert f"{ours} did not load, so verl does not know {unknown}" in said and "tested with verl" in said


def test_verl_does_not_patch_the_value_head_of_a_trl_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(places: list[str] | None) -> bool:
        spec = None if places is None else SimpleNamespace(submodule_search_locations=places)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
        module = SimpleNamespace(is_trl_available=lambda: True)
        AFTER["verl.models.transformers.monkey_patch"](module)
        return module.is_trl_available()

    assert not asked(["/no/such/folder"])
    assert asked(None)
