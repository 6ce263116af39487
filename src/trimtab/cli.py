"""The command line: one screen of commands, each a call into the packages."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Stable RL for reasoning LLMs."""


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method, an attachment, or a combination of them.")] = None,
) -> None:
    """The catalog of methods; with a name, that method's formula, options, defaults and paper."""
    from trimtab.objectives import handbook

    console = Console()
    if name is None:
        table = Table("name", "kind", "arXiv", "in a sentence", title="Methods", title_justify="left")
        for kind, entry, paper, title in handbook.summary():
            table.add_row(entry, kind, paper, title)
        console.print(table)
        console.print("One in full: trimtab methods stapo. Combined: trimtab methods 'sspo + s2t'.", highlight=False)
        return
    try:
        text = handbook.describe(name)
    except ValueError as error:
        typer.echo(f"trimtab: {error}", err=True)
        raise typer.Exit(2) from None
    if sys.stdout.isatty():
        console.print(Markdown(text))
    else:
        typer.echo(text)
