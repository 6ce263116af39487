"""The held-out problems of a run as a benchmark, `held-out:RUN`: what `trimtab eval RUN` evaluates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trimtab.data import DEFAULT_BENCHMARKS, HELD_OUT, BenchmarkProblem
from trimtab.experiments.evaluate.options import EvalOptions
from trimtab.trainer.config import Config, find_run_model, load, load_stored, own_code
from trimtab.trainer.train import build_task


def with_benchmarks(options: EvalOptions) -> EvalOptions:
    """Return the options with benchmarks: without any, a run has its held-out problems, decoded as in training.

    That is one greedy response to each, with the run's tools, and as long as the run's may be.
    """
    if options.benchmarks is not None:
        return options
    # With a folder of benchmarks they are what is asked for.
    found = None if options.endpoint or options.data else find_run_model(options.name)
    if found is None:
        return replace(options, benchmarks=",".join(DEFAULT_BENCHMARKS))
    config = _config(found.run, options.own_code)
    greedy = options.preset == EvalOptions.preset and options.temperature is None
    filled = replace(
        options,
        benchmarks=f"{HELD_OUT}{found.run}",
        temperature=0.0 if greedy else options.temperature,
        samples=1 if greedy and options.samples is None else options.samples,
        max_new_tokens=options.max_new_tokens or config.rollout.max_new_tokens,
    )
    if not config.has_tools or options.tools is not None or options.environment is not None:
        return filled
    return replace(
        filled,
        tools=",".join(config.tools.use),
        environment=config.task.environment,
        tool_format=config.tools.format,
        max_turns=config.rollout.max_turns,
        max_observation_tokens=config.rollout.max_observation_tokens,
        tool_timeout=config.tools.timeout,
    )


def load_held_out(name: str, count: int | None, own_code: bool) -> list[BenchmarkProblem]:
    """Load the held-out problems of a run; of a generated task as many as asked for, or as the run evaluates."""
    run = Path(name.removeprefix(HELD_OUT))
    config = _config(run, own_code)
    if count is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"eval_problems": count})})
    task = build_task(config, "test")
    if task is None:
        raise ValueError(
            f"{run} has no held-out problems (task.eval_path): name what to evaluate with --benchmarks, for example "
            "--benchmarks problems.jsonl"
        )
    problems = [task[number] for number in range(len(task))]
    return [
        # Rules get `extra` as JSON, and so it is stored; a task of the user's own may put anything into it.
        BenchmarkProblem(name, str(n), p.location, replace(p, extra=json.loads(json.dumps(dict(p.extra), default=str))))
        for n, p in enumerate(problems)
    ]


def common_rule(problems: Sequence[BenchmarkProblem]) -> str:
    """Return the rule that grades all problems; if they have several, one must be named."""
    rules = list(dict.fromkeys(item.problem.rule for item in problems))
    if len(rules) > 1:
        raise ValueError(f"the problems are graded by several rules ({', '.join(rules)}): name one with --rule")
    return rules[0]


def _config(run: Path, trusted: bool) -> Config:
    """Load the configuration of a run; code that its problems need is run only if it is trusted."""
    path = run / "config.toml"
    if not path.is_file():
        raise ValueError(f"{run} is not a run (a folder with config.toml)")
    names = own_code(path)
    # The folder may come from somebody else, and must not choose what code runs here.
    if names and not trusted:
        raise ValueError(
            f"the held-out problems of {run} need code of its own ({', '.join(names[:3])}): to run it, add --own-code; "
            "or name what to evaluate with --benchmarks"
        )
    return load(path) if names else load_stored(path)
