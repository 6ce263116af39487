"""Environments of the package verifiers: their rows as problems, their rollout as an agent, its score as the reward.

Both forms that verifiers 0.3 has are known: a module with `load_environment`, and one that exports a `Taskset`. The
environment's own program asks the model through the client that it is given.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Protocol

from trimtab.data.problems import FixedTask, Message, Problem, Split, optional_module, split_of, user
from trimtab.own_parts import PREFIX, Option, errors_located, import_module
from trimtab.text import shown

TEST_ONE_IN = 10  # rows that are held out if an environment has no rows for evaluation
ENDLESS_ROWS = 10_000  # that are taken of a taskset without an end
MODEL = "policy"
KEY = "TRIMTAB_VERIFIERS_API_KEY"  # the programs that verifiers starts do not get variables with API_KEY in their name

# What a policy brings about by itself, so that its rollout is scored as it is: errors of verifiers, codes of a server.
EMPTY_OR_LONG = ("EmptyModelResponseError", "OverlongPromptError")
LIMITS = ("token_budget_exceeded", "context_length_exceeded")

Agent = Callable[[Problem, Any], Awaitable[float]]
Row = dict[str, Any]


class Environment(Protocol):
    """What is asked of an environment of either form."""

    def rows(self, split: Split) -> Iterator[Row] | None:
        """Return its rows for training or testing; None if it has none for testing."""
        ...

    def prompt(self, row: Row) -> Any:
        """Return the messages, or the text, with which a rollout of the row begins."""
        ...

    async def run(self, row: Row, client: Any) -> float:
        """Run a rollout with the client, and return its reward."""
        ...


def verifiers_task(
    env: str,
    split: Split,
    size: Annotated[int | None, Option("at most so many rows; none means all", 1)] = None,
    args: Annotated[
        dict[str, Any], Option("arguments of `load_environment`; of a `Taskset`, the configuration of its environment")
    ] = {},  # noqa: B006  (never changed)
) -> FixedTask:
    """Rows of an environment of the package verifiers, whose own rollout is the agent and whose rubric pays it."""
    name = f"verifiers/{env}"
    environment = _environment(env, json_arguments(env, args))
    rows = environment.rows(split)
    if rows is None or (split == "train" and environment.rows("test") is None):
        rows = (
            row for row in environment.rows("train") or () if split_of(_text(environment, row), TEST_ONE_IN) == split
        )
    problems = tuple(_problem(name, number, environment, row) for number, row in enumerate(islice(rows, size)))
    if not problems and split == "test":
        raise ValueError(
            f"{name} has no rows for evaluation, and so few for training that none is held out (one in {TEST_ONE_IN} "
            "is): set run.eval_every = 0"
        )
    if not problems:
        raise ValueError(f"{name} has no rows")
    return FixedTask(name, problems)


def verifiers_agent(env: str, args: Mapping[str, Any]) -> str:
    """Return the name, as of a part of the user's own, of the agent that runs an environment's rollouts."""
    return f"{PREFIX}{__name__}:agent_{json.dumps([env, json_arguments(env, args)]).encode().hex()}"


def json_arguments(env: str, args: Mapping[str, Any]) -> str:
    """Return an environment's arguments as JSON."""
    try:
        return json.dumps(dict(args), sort_keys=True)
    except TypeError as error:
        raise ValueError(f"verifiers:{env}: task.args must be plain values, as in TOML ({error})") from None


def __getattr__(name: str) -> Agent:
    """Return the agent of an environment: its name holds what is to be loaded, so that a worker's server can do it."""
    if not name.startswith("agent_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    env, args = json.loads(bytes.fromhex(name.removeprefix("agent_")))
    return _agent(env, args)


@lru_cache(maxsize=8)
def _agent(env: str, args: str) -> Agent:
    loaded_by, threads = os.getpid(), threading.active_count()
    environment = _environment(env, args)
    # Threads do not live on in a worker that is forked, and the environment would wait for them.
    shared = threading.active_count() == threads

    async def solve(problem: Problem, client: Any) -> float:
        """Run the environment's rollout of the problem's row."""
        mine = environment if shared or os.getpid() == loaded_by else _loaded_by(os.getpid(), env, args)
        return await mine.run(copy.deepcopy(problem.extra["row"]), client)

    return solve


@lru_cache(maxsize=1)
def _loaded_by(_: int, env: str, args: str) -> Environment:
    return _load(env, args)


@lru_cache(maxsize=8)
def _environment(env: str, args: str) -> Environment:
    return _load(env, args)


def _load(env: str, args: str) -> Environment:
    optional_module("verifiers", f"the task verifiers:{env}", "verifiers", "verifiers")
    return _load_here(f"verifiers:{env}", env, json.loads(args))


def _load_here(name: str, env: str, args: dict[str, Any]) -> Environment:
    import verifiers

    # Names of the hub are OWNER/NAME@VERSION, and the module of one has underscores.
    module_name = env.rpartition("/")[2].partition("@")[0].replace("-", "_")
    with _signals_kept(), _no_progress_bars():
        if Path(verifiers.__file__).parent.joinpath("v1", "tasksets", module_name).is_dir():  # it brings a few
            return _TasksetEnvironment(name, env, args)
        module = import_module(name, module_name)
        load = getattr(module, "load_environment", None)
        if load is None:
            return _TasksetEnvironment(name, env, args)
        with errors_located(name, load):
            environment = load(**args)
        return _ClassicEnvironment(name, environment)


class _ClassicEnvironment:
    """One that a module's `load_environment` returns."""

    def __init__(self, name: str, environment: Any) -> None:
        self.name, self.environment = name, environment
        if environment.requires_group_rollouts:
            raise ValueError(f"{name} scores the rollouts of a prompt together: here each is scored when it has ended")

    def rows(self, split: Split) -> Iterator[Row] | None:
        """Return the rows of its data set."""
        build = self.environment.build_dataset if split == "train" else self.environment.build_eval_dataset
        with _no_progress_bars():
            rows = build()
        if rows is None and split == "train":
            raise ValueError(f"{self.name} has no rows for training, only for evaluation")
        return None if rows is None else iter(rows)

    def prompt(self, row: Row) -> Any:
        """Return the row's messages; the environment has put its system prompt before them."""
        return row["prompt"]

    async def run(self, row: Row, client: Any) -> float:
        """Run a rollout in this process."""
        import verifiers

        _listen()
        errors: list[str] = []
        _heard.set(errors)
        options = copy.deepcopy(self.environment.sampling_args)
        given = verifiers.OpenAIChatCompletionsClient(client)
        state = await self.environment.rollout(row, given, MODEL, options)
        rubric = self.environment.rubric
        await rubric.score_rollout(state)
        await rubric.cleanup(state)
        error = state["error"]
        if error is None and errors:
            raise RuntimeError(f"{self.name}: {errors[0]}")
        if error is not None and not _by_the_policy(error):
            raise RuntimeError(f"{self.name}: its rollout ended with {error!r}") from error
        return float(state["reward"])


class _TasksetEnvironment:
    """One of tasks that programs solve, each in a process that asks a server of verifiers, and that asks ours."""

    def __init__(self, name: str, env: str, args: Mapping[str, Any]) -> None:
        from verifiers.v1.utils import loaders

        self.name = name
        with errors_located(name):
            known = loaders.env_config_type(env, args.get("id", "")).model_fields
            config: dict[str, Any] = copy.deepcopy(dict(args))
            config["taskset"] = {**config.get("taskset", {}), "id": env}
            if "agent" in known:
                agent = config.setdefault("agent", {})
                agent.setdefault("runtime", {"type": "subprocess"})  # verifiers' own default is a paid service
                if loaders.default_harness_id(env) == "bash":  # which runs what the model writes, on this machine
                    agent.setdefault("harness", {"id": "null"})
            self.environment = loaders.load_environment(loaders.resolve_env_config(config))

    def rows(self, split: Split) -> Iterator[Row] | None:
        """Return the data of its tasks; it has no other ones for testing."""
        if split == "test":
            return None
        tasks = self.environment.taskset
        found = tasks.head(ENDLESS_ROWS) if tasks.INFINITE else tasks
        return (task.data.model_dump(mode="json") for task in found)

    def prompt(self, row: Row) -> Any:
        """Return the messages of a task, or its name if a program begins the conversation."""
        asked = row["prompt"] or row["description"] or row["name"] or self.name
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        system = [{"role": "system", "content": row["system_prompt"]}] if row["system_prompt"] else []
        return [*system, *messages]

    async def run(self, row: Row, client: Any) -> float:
        """Run an episode, whose programs are in processes that it starts."""
        import verifiers.v1 as vf

        kind = type(self.environment.taskset).task_type()
        task = kind(kind.data_type().model_validate(row), self.environment.taskset.config.task)
        os.environ[KEY] = client.api_key
        endpoint = vf.EvalClientConfig(base_url=str(client.base_url), api_key_var=KEY)
        async with self.environment.serving():
            episode = await self.environment.run_episode(task, vf.ModelContext(MODEL, endpoint))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors and not any(code in error.message for error in errors for code in LIMITS):
            raise RuntimeError(
                f"{self.name}: its episode ended with {errors[0].type}: {shown(errors[0].message, 2_000)}"
            )
        if len(episode.traces) != 1:
            raise ValueError(
                f"{self.name} has {len(episode.traces)} agents with a reward each: only one can be trained"
            )
        return float(episode.traces[0].reward)


def _problem(name: str, number: int, environment: Environment, row: Row) -> Problem:
    """Return a row as a problem."""
    try:
        plain = json.loads(json.dumps(row))
        prompt = _messages(environment.prompt(row))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: row {number} cannot be used: {error}") from None
    answer = row.get("answer")
    return Problem(
        prompt, "" if answer is None else str(answer), "exact", name, extra={"row": plain}, location=f"{name}:{number}"
    )


def _messages(prompt: Any) -> tuple[Message, ...]:
    """Return a prompt as messages of text."""
    if isinstance(prompt, str):
        return user(prompt)
    return tuple({"role": message["role"], "content": _content(message.get("content"))} for message in prompt)


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise ValueError("its prompt has more than text")
    return "\n".join(part["text"] for part in content)


def _text(environment: Environment, row: Row) -> str:
    return json.dumps(environment.prompt(row), sort_keys=True, default=str)


def _by_the_policy(error: BaseException | None) -> bool:
    """Return whether an error, or what it came from, is one that the policy's own tokens brought about."""
    while error is not None:
        if type(error).__name__ in EMPTY_OR_LONG or getattr(error, "code", None) in LIMITS:
            return True
        error = error.__cause__
    return False


_heard: ContextVar[list[str]] = ContextVar("heard")  # of the rollout that logs; several may run in one event loop


class _Listener(logging.Handler):
    """Keeps what verifiers logs of a reward function that failed: it goes on with 0.0 for the reward."""

    def emit(self, record: logging.LogRecord) -> None:
        if "reward function" in record.getMessage() and (errors := _heard.get(None)) is not None:
            errors.append(record.getMessage())


@lru_cache(maxsize=1)
def _listen() -> None:
    logging.getLogger("verifiers").addHandler(_Listener(logging.ERROR))


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Put back what a signal does: an environment of verifiers takes SIGINT and SIGTERM for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide the progress bars of data sets, which also start a thread."""
    import datasets

    shown_before = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown_before:
            datasets.enable_progress_bars()
