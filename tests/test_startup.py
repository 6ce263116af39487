"""How a command starts: what it imports, and completion in the shell."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
import typer

from trimtab.cli import app

# Not pydantic: typer itself imports it where it is installed.
HEAVY = ["httpx", "math_verify", "numpy", "openai", "pyarrow", "sympy", "tokenizers", "torch", "transformers"]
LIGHT = ["trimtab", "trimtab.cli", "trimtab.cli.commands", "trimtab.experiments", "trimtab.experiments.evaluate",
         "trimtab.process"]  # fmt: skip
MAIN = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from trimtab.cli import app
app(prog_name="trimtab")
"""


def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )


@pytest.mark.parametrize("command", ["--help", "--version", "train --help", "eval --help"])
def test_help_imports_nothing_heavy(command: str) -> None:
    modules = json.loads(start(*command.split()).stderr)
    assert [name for name in HEAVY if name in modules] == []
    assert [name for name in modules if name.split(".")[0] == "trimtab" and name not in LIGHT] == []


@pytest.mark.parametrize("command", ["methods", "methods stapo", "methods 'sspo + s2t'", "schema"])
def test_methods_and_the_schema_are_shown_without_torch(command: str) -> None:
    assert not set(HEAVY) & set(json.loads(start(*shlex.split(command)).stderr))


def test_a_recipe_is_checked_without_torch() -> None:
    code = """
import json, sys
from trimtab.trainer.config import load, packaged_recipes, parse
for recipe in packaged_recipes():
    assert load(recipe, ["objective.name=sspo + s2t + stare"]).build_objective().needs
try:
    parse({"objective": {"name": "stapo", "tau_p": 2}, "update": {"lr": -1}})
except ValueError as error:
    assert len(str(error).splitlines()) == 2
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert not set(HEAVY) & set(json.loads(done.stdout))


def test_a_shell_completes_commands_and_options_without_heavy_imports() -> None:
    done = start(_TRIMTAB_COMPLETE="complete_bash", COMP_WORDS="trimtab train --re", COMP_CWORD="2")
    assert done.stdout.split() == ["--resume"]
    assert not set(HEAVY) & set(json.loads(done.stderr))
    done = start(_TRIMTAB_COMPLETE="complete_bash", COMP_WORDS="trimtab st", COMP_CWORD="1")
    assert done.stdout.split() == ["stress"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_every_shell(shell: str) -> None:
    # What `--install-completion` writes for the shell that it runs in.
    assert f"_TRIMTAB_COMPLETE=complete_{shell}" in start(_TRIMTAB_COMPLETE=f"source_{shell}").stdout


def test_help_is_quick_and_has_the_whole_text_of_every_command() -> None:
    done = start("--help")
    assert "rich" not in json.loads(done.stderr)  # 0.1 s, as much as all the rest of it
    assert "--install-completion" in done.stdout
    shown = " ".join(done.stdout.split())
    commands = typer.main.get_command(app).commands
    assert [name for name, command in commands.items() if " ".join(command.help.split()) not in shown] == []
