"""How a command starts: what it imports, and completion in the shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from trimtab.cli import app
from trimtab.trainer.config import json_schema

# Not pydantic: typer itself imports it where it is installed.
HEAVY = ["httpx", "math_verify", "numpy", "pyarrow", "sympy", "tokenizers", "torch", "transformers"]
LIGHT = ["trimtab", "trimtab.cli", "trimtab.experiments", "trimtab.experiments.evaluate",
         "trimtab.experiments.evaluate.options", "trimtab.standard_streams", "trimtab.stop_signals"]  # fmt: skip
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


@pytest.mark.parametrize(
    "command", ["--help", "--version", "train --help", "eval --help", "methods", "methods stapo", "schema"]
)
def test_what_only_prints_imports_nothing_heavy(command: str) -> None:
    modules = json.loads(start(*command.split()).stderr)
    assert [name for name in HEAVY if name in modules] == []
    assert [name for name in modules if name.split(".")[0] == "trimtab" and name not in LIGHT] == []


def test_the_schema_has_the_keys_of_the_code() -> None:
    def keys(schema: dict[str, Any]) -> dict[str, list[str]]:
        sections = {**schema["$defs"], "": schema}
        return {name: sorted(section.get("properties", ())) for name, section in sections.items()}

    # The rest of it differs between versions of pydantic; `make check` compares it in ours.
    assert keys(json.loads(CliRunner().invoke(app, ["schema"]).output)) == keys(json_schema())


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
