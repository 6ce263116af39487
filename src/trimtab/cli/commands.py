"""The command line: one screen of commands, each a call into the packages."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from trimtab import __version__
from trimtab.experiments.evaluate import EvalOptions
from trimtab.process import (
    BROKEN_PIPE,
    collect_as_usual,
    collect_rarely,
    exit_code,
    interrupt_on_stop_signals,
    interrupted_by,
    make_optional,
    open_standard_streams,
    output_is_broken,
    stop_at_input_end,
)

LONGEST_ERROR = 2_000  # characters of a line
SOURCE = Path(__file__).parents[1]

# Other packages are imported inside the commands: torch and transformers take seconds, and `--help` and the shell's
# completion should not. `tests/test_startup.py` holds what may be imported.


class Commands(TyperGroup):
    """Prints an error that a user can act on without a traceback, and exits with code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if not output_is_broken():
                print_error(f"trimtab: {error}")
            raise typer.Exit(2) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with their whole texts, which would be cut to one line each."""
        for command in self.commands.values():
            command.short_help = command.help
        super().format_commands(ctx, formatter)


class CommandLine(typer.Typer):
    """The command line of a process: stop signals do what Ctrl-C does, and standard streams may be closed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit."""
        open_standard_streams()
        collect_rarely()
        try:
            interrupt_on_stop_signals()
            stop_at_input_end()
            return super().__call__(*args, **kwargs)
        except KeyboardInterrupt as error:  # before typer has made its commands, which handle it
            raise SystemExit(exit_code(error)) from None
        except SystemExit as end:
            if output_is_broken():  # rich and typer end with code 1 then
                raise SystemExit(BROKEN_PIPE) from None
            if end.code == 128 + signal.SIGINT and interrupted_by():  # typer's code for all interrupts
                raise SystemExit(128 + interrupted_by()) from None
            raise


# Typer's own tracebacks print local variables, which here may be whole tensors.
app = CommandLine(
    cls=Commands,
    no_args_is_help=True,
    help="Stable RL for reasoning LLMs: STAPO, STARE, SSPO and their baselines.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help needs 0.1 s of imports: half of the whole start
)

Recipe = Annotated[str, typer.Option(help="A recipe that comes with trimtab, or a .toml file.")]
Jobs = Annotated[int, typer.Option(help="Number of runs at the same time.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the recipe, such as update.lr=1e-6. Repeatable."),
]


def options_from(options: type[Any]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as its parameters; typer reads them from the signature."""

    def decorate(command: Callable[[Any], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            command(options(**values))

        # The signature has annotations as strings, which typer does not evaluate.
        hints = get_type_hints(options, include_extras=True)
        parameters = [p.replace(annotation=hints[p.name]) for p in inspect.signature(options).parameters.values()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = hints
        run.__doc__ = command.__doc__
        return run

    return decorate


def print_version(wanted: bool) -> None:
    """Print the version and end, if wanted."""
    if wanted:
        typer.echo(f"trimtab {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Stable RL for reasoning LLMs."""
    # For the processes that libraries start (torch's compile workers, vLLM's engine): no module is taken from the
    # current folder, which may hold files of somebody else's.
    os.environ["PYTHONSAFEPATH"] = "1"
    warnings.formatwarning = _format_warning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning that trimtab gives as a line for the user, and any other as Python does."""
    if Path(filename).is_relative_to(SOURCE):
        from trimtab.text import printable

        return f"warning: {printable(str(message))}\n"
    return _format_as_python(message, category, filename, lineno, line)


_format_as_python = warnings.formatwarning


def print_error(text: str) -> None:
    """Print a line to stderr, with control characters escaped."""
    from trimtab.text import printable, shorten

    # A message may quote a model's response, or a command line of any length.
    typer.echo("\n".join(shorten(line, LONGEST_ERROR) for line in printable(text).split("\n")), err=True)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method, an attachment, or a combination of them.")] = None,
) -> None:
    """List the methods; with a name, show that method's formula, options, defaults and paper."""
    from rich.console import Console

    from trimtab.objectives import describe, summary

    console = Console()
    if name is None:
        from rich.table import Table

        table = Table("name", "kind", "arXiv", "summary", title="Methods", title_justify="left")
        for kind, entry, paper, title in summary():
            table.add_row(entry, kind, paper, title)
        console.print(table)
        hint = "One method: trimtab methods stapo. A combination: trimtab methods 'sspo + s2t'."
        console.print(hint, highlight=False)
        return
    text = describe(name)
    if sys.stdout.isatty():
        from rich.markdown import Markdown

        console.print(Markdown(text))
    else:
        typer.echo(text)  # a pipe gets the Markdown itself


@app.command()
def doctor(
    remove_warm_starts: Annotated[
        bool, typer.Option("--remove-warm-starts", help="Empty the cache of warm starts; check nothing.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="Check instead whether this model's chat template continues conversations exactly.")
    ] = "",
) -> None:
    """Check this machine: which features work, which need something else, and how to get it."""
    if remove_warm_starts:
        from trimtab.trainer.train import remove_warm_starts as remove

        removed = remove()
        typer.echo(f"removed {len(removed)} warm starts, {sum(each.size for each in removed) / 1e6:,.1f} MB")
        return
    from rich.console import Console

    from trimtab.cli.doctor import show_doctor, show_model

    console = Console(width=None if sys.stdout.isatty() else 160)
    if model:
        show_model(console, model)
        return
    show_doctor(console)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, for autocompletion in editors."""
    # A file made by tools/docs.py: its models take as long to build as all the rest of this command.
    typer.echo((SOURCE / "recipes/schema.json").read_text(encoding="utf-8"), nl=False)


@app.command()
def init(
    data: Annotated[str, typer.Argument(help="A .jsonl or .parquet file, or a data set on the hub.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The recipe; one that exists is not replaced.")] = Path(
        "mine.toml"
    ),
    model: Annotated[str, typer.Option(help="A folder or hub name of a causal LM.")] = "Qwen/Qwen3-1.7B-Base",
    held_out: Annotated[
        str | None, typer.Option("--held-out", metavar="DATA", help="Problems for evaluation, with the same columns.")
    ] = None,
    prompt: Annotated[str, typer.Option(metavar="COLUMN", help="The column of the prompt, if it is not found.")] = "",
    answer: Annotated[str, typer.Option(metavar="COLUMN", help="The column of the answer, if it is not found.")] = "",
) -> None:
    """Write a recipe for a file of problems: columns and rule guessed from its rows, sizes from the GPU."""
    from trimtab.cli.init_recipe import init_recipe

    init_recipe(data, out, model, held_out, {"prompt": prompt, "answer": answer}, typer.echo)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="The folder of the runs.")] = Path("runs"),
) -> None:
    """List the runs below a folder, the newest first: how far each came, and the settings that set it apart."""
    from trimtab.cli.run_list import run_lines

    for line in run_lines(folder):
        typer.echo(line)


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe that comes with trimtab, or a .toml file. Default: demo.")
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/<recipe>-<objective>-<n>.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="Resume the run in this folder.")] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@STEP]",
            help="Start a new run from a checkpoint. Without a recipe, use the recipe of that run.",
        ),
    ] = None,
    keep_optimizer: Annotated[
        bool, typer.Option("--keep-optimizer", help="With --from: also take the state of the optimizer.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show settings, objective and memory, without loading a model.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print plain lines instead of the live display.")] = False,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="Train on N GPUs of this machine.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve a page that follows the run.")] = False,
) -> None:
    """Train a model. Without a recipe, run the demo, which takes about two minutes on a CPU."""
    from trimtab.cli.launch import launch_run, resolve_request

    request = resolve_request(recipe, settings or [], out, resume, start, keep_optimizer)
    if dry_run:
        from trimtab.cli.dry_run import describe_dry_run

        typer.echo(describe_dry_run(request.config, gpus))
        return
    if gpus is not None and "RANK" not in os.environ:  # else this is one of the processes
        from trimtab.cli.processes import check_gpus, supervise

        check_gpus(gpus, request.config.run.device)
        raise typer.Exit(supervise(gpus, sys.argv[1:], print_error))
    make_optional(sys.stdout)  # metrics and checkpoints are what matters, and they are in files
    collect_as_usual()
    request = replace(request, watch=watch)
    raise typer.Exit(launch_run(request, quiet=quiet, print_line=typer.echo, print_error=print_error))


@app.command(name="watch")
def watch_runs(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Default: the newest run below runs/.")
    ] = None,
    port: Annotated[int, typer.Option(help="The port on this machine; 0 takes a free one.")] = 0,
) -> None:
    """Serve a page that follows runs while they train: curves, alarms, responses, tokens. Ctrl-C ends the page only."""
    from trimtab.insight.watch import newest_run, watch

    watch(runs or [newest_run()], port, typer.echo)


@app.command()
def export(
    model: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="A run, or a checkpoint of it.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Default: export or export-STEP in the run's folder.")
    ] = None,
    precision: Annotated[str, typer.Option(help="Precision of the weights: fp32 (as trained) or bf16.")] = "fp32",
) -> None:
    """Write a run's model to a folder that transformers, vLLM and TRL can load. LoRA adapters are merged."""
    from trimtab.cli.launch import export_run

    typer.echo(f"written: {export_run(model, out, precision)}")


@app.command()
def grade(
    rule: Annotated[
        str, typer.Option(help="The rule for lines that name none. docs/rewards.md lists all rules.")
    ] = "math",
) -> None:
    """Grade JSON lines of {"response": ..., "answer": ...} from stdin; print one verdict per line, in order."""
    from trimtab.grading import grade_lines

    bad = grade_lines(sys.stdin.buffer, sys.stdout, rule, lambda text: print_error(f"trimtab: {text}"))
    raise typer.Exit(2 if bad else 0)


@app.command()
def sandbox(
    probe: Annotated[bool, typer.Option("--probe", help="Show which protections work here; run nothing.")] = False,
    timeout: Annotated[float, typer.Option(help="Time limit in seconds.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as a JSON object.")] = False,
    level: Annotated[str, typer.Option(help="The lowest level to accept: full, namespaces, filters, limits.")] = "full",
    backend: Annotated[str, typer.Option(help="fork, bubblewrap, or http with --url.")] = "fork",
    url: Annotated[str, typer.Option(help="A server with SandboxFusion's protocol.")] = "",
) -> None:
    """Run a Python program from stdin in the sandbox. Exit code 1: an exception; 3: it was killed."""
    from trimtab.workers import probe_lines, run_input

    if probe:
        for line in probe_lines():
            typer.echo(line)
        return
    options = {"level": level, "backend": backend, "url": url, "workers": 1}
    raise typer.Exit(run_input(sys.stdin.buffer, sys.stdout, sys.stderr, timeout, as_json=as_json, **options))


@app.command()
def compare(
    objectives: Annotated[list[str], typer.Argument(help="Objectives, such as stapo grpo 'sspo + s2t'.")],
    seeds: Annotated[int, typer.Option(help="Runs per objective, each with its own seed.")] = 3,
    recipe: Recipe = "demo",
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The folder of all runs. Default: runs/compare-<recipe>.")] = None,
    jobs: Jobs = 1,
) -> None:
    """Train a recipe with several objectives and seeds; print one table, write one report. Finished runs are kept."""
    from rich.console import Console

    from trimtab.cli.launch import recipe_name
    from trimtab.experiments.grid import Grid, show_grid
    from trimtab.insight.report import try_report

    where = out or Path("runs") / f"compare-{recipe_name(recipe)}"
    make_optional(sys.stdout)  # the tables are in files too
    grid = Grid(tuple(objectives), where, recipe, seeds, tuple(settings or ()), jobs)
    page = where / "report.html"
    raise typer.Exit(show_grid(grid, Console(), lambda folders: try_report(folders, print_error, page)))


@app.command()
def stress(
    objectives: Annotated[list[str], typer.Argument(help="Objectives, such as grpo stapo 'gspo + stare'.")],
    axis: Annotated[
        list[str],
        typer.Option(help="A key and its values in the order of increasing stress: update.lr=1e-4,3e-4,1e-3."),
    ],
    seeds: Annotated[int, typer.Option(help="Runs per setting, each with its own seed.")] = 3,
    recipe: Recipe = "demo",
    search: Annotated[
        bool, typer.Option("--search", help="Use fewer runs: double until runs break, then bisect.")
    ] = False,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The folder of all runs. Default: runs/stress-<recipe>.")] = None,
    jobs: Jobs = 1,
) -> None:
    """Train a recipe under increasing stress until every objective breaks. Finished runs are kept."""
    from rich.console import Console

    from trimtab.cli.launch import recipe_name
    from trimtab.experiments.grid import Grid, parse_axis, show_grid
    from trimtab.insight.report import try_report

    where = out or Path("runs") / f"stress-{recipe_name(recipe)}"
    make_optional(sys.stdout)  # the tables are in files too
    axes = tuple(parse_axis(each) for each in axis)
    grid = Grid(tuple(objectives), where, recipe, seeds, tuple(settings or ()), jobs, axes, search)
    raise typer.Exit(show_grid(grid, Console(), lambda folders: try_report(folders, print_error)))


@app.command()
def alarms(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a jsonl file of metrics with the same names.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON objects, with the evidence.")] = False,
) -> None:
    """List the alarms of a run, with what to try. Works during a run and afterwards."""
    from trimtab.insight.alarms import alarm_lines, replay_run, unchecked_alarms

    for line in alarm_lines(replay_run(run, lambda text: print_error(f"warning: {text}")), as_json):
        typer.echo(line)
    if not as_json and (unchecked := unchecked_alarms(run)):
        print_error(f"not checked, because these metrics were not logged: {unchecked}")


@app.command(name="eval")
@options_from(EvalOptions)
def evaluate(options: EvalOptions) -> None:
    """Evaluate a model on math benchmarks, with intervals. The same command continues a stopped evaluation."""
    from trimtab.experiments.evaluate import run_eval

    make_optional(sys.stdout)  # so are samples and results
    collect_as_usual()
    raise typer.Exit(run_eval(options))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, with records under tokens/.")],
    objectives: Annotated[
        list[str] | None,
        typer.Option("--objective", metavar="NAME", help="Such as 'sspo + s2t', or 'recorded'. Repeatable."),
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="OPTION=A,B", help="Values of an option, such as tau_p=0.0005,0.002.")
    ] = None,
    steps: Annotated[str | None, typer.Option(metavar="FIRST:LAST", help="Only these steps, including both.")] = None,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results to this file.")
    ] = None,
) -> None:
    """Show what other objectives would have done with a run's recorded tokens. Needs no model and no GPU."""
    from rich.console import Console

    from trimtab.insight.replay import show_replay

    show_replay(run, objectives or [], sweep or [], steps, out, Console())


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="One run, several runs to compare, or the folder of a stress test."),
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: report.html in the run's folder.")] = None,
    objectives: Annotated[
        list[str] | None,
        typer.Option(
            "--objective",
            metavar="NAME",
            help="Compare with this objective. Can be repeated. Default: grpo, dapo, gspo, stapo, stare, sspo.",
        ),
    ] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option("--step", metavar="N", help="Include this step in the microscope. Can be repeated."),
    ] = None,
) -> None:
    """Write an HTML report of one or more runs: curves, alarms, statistics of all tokens, and single tokens."""
    from trimtab.insight.report import COMPARED_OBJECTIVES, write_report

    compared = objectives or COMPARED_OBJECTIVES
    path = write_report(runs, out, compared=compared, steps=steps or (), progress=print_error)
    typer.echo(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB)")
