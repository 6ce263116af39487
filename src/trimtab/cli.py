"""The command line: one screen of commands, each a call into the packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of the recipe, as update.lr=1e-6. Can be repeated."),
]


@app.callback()
def main() -> None:
    """Stable RL for reasoning LLMs."""


@contextmanager
def errors_in_words() -> Iterator[None]:
    """What was wrong goes to stderr in words, and the exit code is 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        complain(f"trimtab: {error}")
        raise typer.Exit(2) from None


def complain(text: str) -> None:
    """Say something on stderr that cannot steer the terminal."""
    from trimtab.train.reporters import printable

    typer.echo(printable(text), err=True)


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
    with errors_in_words():
        text = handbook.describe(name)
    if sys.stdout.isatty():
        console.print(Markdown(text))
    else:
        typer.echo(text)


@app.command()
def schema() -> None:
    """The JSON schema of recipes, for editors."""
    from trimtab.train import config

    typer.echo(json.dumps(config.schema(), indent=2))


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe that comes with trimtab, or a .toml file. Default: demo.")
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/<recipe>-<objective>-<n>.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="Go on with the run in this folder.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show configuration, objective and batch arithmetic; load no model.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Plain lines instead of the live display.")] = False,
) -> None:
    """Train; with no recipe the demo, which learns on a CPU in about two minutes."""
    with errors_in_words():
        from trimtab.train.launch import launch, resolve

        wanted = resolve(recipe, settings or [], out, resume)
        if dry_run:
            from trimtab.train.dry_run import describe

            typer.echo(describe(wanted.config))
            return
        code = launch(wanted, quiet, typer.echo, complain)
    raise typer.Exit(code)


@app.command()
def compare(
    objectives: Annotated[list[str], typer.Argument(help="Two or more, as stapo grpo 'sspo + s2t'.")],
    seeds: Annotated[int, typer.Option(help="Runs of each objective.")] = 3,
    recipe: Annotated[str, typer.Option(help="A recipe that comes with trimtab, or a .toml file.")] = "demo",
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Where the runs go. Default: runs/compare-<recipe>.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time.")] = 1,
) -> None:
    """The same run under several objectives and seeds, in one table. What is finished already is not run again."""
    with errors_in_words():
        from trimtab.train.compare import Comparison, plan_jobs
        from trimtab.train.compare_report import show
        from trimtab.train.launch import recipe_name

        where = out or Path("runs") / f"compare-{recipe_name(recipe)}"
        comparison = Comparison(tuple(objectives), where, recipe, seeds, tuple(settings or ()), jobs)
        code = show(comparison, plan_jobs(comparison), Console())
    raise typer.Exit(code)
