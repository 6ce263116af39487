"""Generate docs/commands.md from the command line itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from trimtab.cli import app

_COMMANDS = """\
# Commands

Made from the command line by `make docs`; `trimtab COMMAND --help` prints the same. An error that you can act on is one
line on stderr, and the exit code is 2. [Stopping](stopping.md) lists all exit codes."""

_VALUES = {int: "N", float: "N", Path: "PATH"}  # what stands for a value of a type


def commands_page() -> str:
    """Return docs/commands.md: every command with its arguments and options."""
    group = typer.main.get_command(app)
    commands: dict[str, Any] = group.commands  # type: ignore[attr-defined]
    parts = [_COMMANDS]
    parts.append("\n".join(["| command | |", "|---|---|", *(_row(name, each) for name, each in commands.items())]))
    for name, command in commands.items():
        context = typer.Context(command, info_name=f"trimtab {name}")
        usage = command.get_usage(context).removeprefix("Usage: ").strip()
        parts += [f"## `trimtab {name}`", _text(command.help), f"```text\n{' '.join(usage.split())}\n```"]
        rows = [_parameter(each) for each in command.params if not getattr(each, "hidden", False)]
        if rows:
            parts.append("\n".join(["| argument or option | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _row(name: str, command: Any) -> str:
    return f"| [`{name}`](#trimtab-{name}) | {_text(command.help)} |"


def _parameter(parameter: Any) -> str:
    is_option = hasattr(parameter, "is_flag")
    name = ", ".join(parameter.opts) if is_option else parameter.metavar or parameter.name.upper()
    if is_option and not parameter.is_flag:
        name += f" {parameter.metavar or _VALUES.get(parameter.type_descriptor.annotation, 'TEXT')}"
    default = parameter.default
    shown = "" if callable(default) or default in (None, False, "", []) else f"`{default}`"
    return f"| `{name}` | {'required' if parameter.required else shown} | {_text(parameter.help)} |"


def _text(text: str | None) -> str:
    """Return a help text as one line of Markdown; what looks like a tag or a column is escaped."""
    line = " ".join((text or "").split()).replace("|", "\\|")
    return re.sub(r"<(?=\w)", "&lt;", line)
