"""Benchmarks: avg@k, pass@k and maj@k with confidence intervals by problem, every response kept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

# The command line needs this package to print its help: nothing that takes long to import may be imported here.
if TYPE_CHECKING:
    from trimtab.experiments.evaluate.endpoint import EndpointConnection
    from trimtab.experiments.evaluate.folder import EvalFolder

__all__ = ["EvalOptions", "run_eval"]

MAX_NEW_TOKENS = 20_480


@dataclass(frozen=True)
class EvalOptions:
    """The options of `trimtab eval`, from which the command line is built.

    None stands for the default of the preset, the benchmark or the run.
    """

    model: Annotated[
        str | None,
        typer.Argument(help="A folder or hub name of a model, smollm2, a run of trimtab, or a checkpoint (RUN@STEP)."),
    ] = None
    benchmarks: Annotated[
        str | None,
        typer.Option(
            help="Any of aime24, aime25, amc23, math500, minerva, olympiadbench, gsm8k, your own files "
            "(.jsonl, .parquet), and held-out:RUN, separated by commas. Default: the held-out problems of a run; of "
            "other models, and with --data, the first six."
        ),
    ] = None
    columns: Annotated[
        str | None, typer.Option(help="Column names of your own files: prompt=question,answer=result. Default: verl's.")
    ] = None
    data: Annotated[
        Path | None, typer.Option(help="The folder with the benchmark files. Default: download from the hub.")
    ] = None
    preset: Annotated[str, typer.Option(help="train (T 1.0, top-p 1.0) or justrl (T 0.7, top-p 0.9).")] = "train"
    samples: Annotated[
        int | None, typer.Option(help="Samples per problem. Default: 32, and 4 for the large benchmarks.")
    ] = None
    max_new_tokens: Annotated[
        int | None, typer.Option(help=f"Maximum response length. Default: {MAX_NEW_TOKENS}, or the run's.")
    ] = None
    temperature: Annotated[float | None, typer.Option(help="Overrides the preset.")] = None
    top_p: Annotated[float | None, typer.Option(help="Overrides the preset.")] = None
    suffix: Annotated[
        str | None, typer.Option(help="Text after every problem. Default: asks for step-by-step reasoning and a box.")
    ] = None
    problems: Annotated[int | None, typer.Option(help="Use only the first N problems of each benchmark.")] = None
    seed: Annotated[int, typer.Option(help="Seed of all sampling.")] = 0
    rule: Annotated[
        str | None, typer.Option(help="The rule that grades the responses. Default: the run's, else math.")
    ] = None
    own_code: Annotated[
        bool, typer.Option("--own-code", help="Run the code that the problems of a run need (python: rules, tasks).")
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(help="The folder. Default: runs/eval-<model>-<preset>, with --benchmarks also their names."),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue; an error if there is nothing to continue.")] = (
        False
    )
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Sample again where sampling failed.")] = False
    regrade: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Grade the responses of this folder again.")
    ] = None
    against: Annotated[
        str | None, typer.Option(help="Compare with another model, or with the folder of its evaluation.")
    ] = None
    papers: Annotated[bool, typer.Option("--papers", help="Also show published results.")] = False
    endpoint: Annotated[str | None, typer.Option(help="An OpenAI-compatible server: http://host:port/v1.")] = None
    model_name: Annotated[str | None, typer.Option(help="Name of the model on the server.")] = None
    concurrency: Annotated[int, typer.Option(help="Number of requests at the same time.")] = 16
    timeout: Annotated[float, typer.Option(help="Seconds for a whole request to the server.")] = 1800.0
    retries: Annotated[int, typer.Option(help="How often a failed request is repeated.")] = 6
    engine: Annotated[str, typer.Option(help="The sampler, without a server: native or vllm.")] = "native"
    batch: Annotated[int, typer.Option(help="Responses sampled at the same time, without a server.")] = 256
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32"
    chat: Annotated[bool, typer.Option(help="Use the chat template if there is one.")] = True
    tools: Annotated[
        str | None,
        typer.Option(help="Tools that the model may call: python, python_session, calculator, python:MODULE:NAME."),
    ] = None
    environment: Annotated[str | None, typer.Option(help="A class whose methods are tools: python:MODULE:NAME.")] = None
    agent: Annotated[
        str | None,
        typer.Option(
            help="An agent that asks the model, or the server: python:MODULE:NAME, or a command. --concurrency of them "
            "run at the same time, for --timeout seconds each."
        ),
    ] = None
    tool_format: Annotated[
        str, typer.Option(help="Format of calls: auto, hermes, llama, fenced or plain. Not with a server.")
    ] = "auto"
    max_turns: Annotated[int, typer.Option(help="With tools: maximum number of model messages per conversation.")] = 8
    max_observation_tokens: Annotated[int, typer.Option(help="Maximum length of a tool's reply.")] = 512
    tool_timeout: Annotated[float, typer.Option(help="Time limit of a tool call in seconds.")] = 10.0
    tool_workers: Annotated[int, typer.Option(help="Number of tool calls at the same time.")] = 4
    entropy: Annotated[bool, typer.Option(help="Measure the entropy, with one more forward pass per response.")] = True
    quiet: Annotated[bool, typer.Option("--quiet", help="Print plain lines instead of a progress bar.")] = False

    @property
    def name(self) -> str:
        """Return the model's name in the evaluation."""
        name = self.model_name or self.model if self.endpoint else self.model
        if not name:
            raise ValueError("no model given: use trimtab eval MODEL, or --endpoint URL --model-name NAME")
        return name

    @property
    def prompt_suffix(self) -> str:
        """Return the text that is appended to every problem."""
        from trimtab.data import PROMPT_SUFFIX

        return PROMPT_SUFFIX if self.suffix is None else self.suffix

    @property
    def folder(self) -> EvalFolder:
        """Return the evaluation's folder.

        Its default is named by model, preset and benchmarks (unless they are the default ones), so the same command
        resumes it.
        """
        from trimtab.data import DEFAULT_BENCHMARKS, HELD_OUT
        from trimtab.experiments.evaluate.folder import EvalFolder
        from trimtab.experiments.evaluate.settings import parse_benchmarks

        if self.out:
            return EvalFolder(self.out)
        named = parse_benchmarks(self.benchmarks)
        usual = named == DEFAULT_BENCHMARKS
        parts = [_for_folder(self.name)[-80:] or "model", self.preset]
        names = [f"{'held-out-' * name.startswith(HELD_OUT)}{Path(name).stem}" for name in named]
        parts += [] if usual else [_for_folder("+".join(names))[:80]]
        return EvalFolder(Path("runs") / "-".join(["eval", *parts]))

    @cached_property
    def connection(self) -> EndpointConnection | None:
        """Return how to reach the server; None where the model runs in this process."""
        if self.endpoint is None:
            return None
        from trimtab.experiments.evaluate.endpoint import EndpointConnection

        return EndpointConnection(self.endpoint, self.concurrency, self.timeout, self.retries)


def run_eval(options: EvalOptions) -> int:
    """Run `trimtab eval`: evaluate or regrade, show and store the result; return the exit code."""
    from trimtab.experiments.evaluate.launch import evaluate_and_show, regrade_and_show

    return evaluate_and_show(options) if options.regrade is None else regrade_and_show(options.regrade, options)


def _for_folder(name: str) -> str:
    """Return a name without characters that a folder's name should not have."""
    return re.sub(r"[^\w.+=-]+", "-", name).strip("-.")
