"""The side of users' agents that runs in a worker process, one rollout after another.

The server of these workers loads the agent's module and the openai package once. A worker keeps its connections to the
endpoint, and an event loop, from one rollout to the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import socket
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from trimtab.data import Problem
from trimtab.grading import SCORE, is_score
from trimtab.text import shown
from trimtab.workers import kill_descendants

if TYPE_CHECKING:
    import openai

MOSTLY_WAITS = True  # for the model
MAX_PRINTED = 1 << 20  # bytes of one rollout that are passed on
MAX_REWARDS = 100_000  # of one rollout; as many requests as nobody makes
HERE = "127.0.0.1,localhost"


class AgentHost:
    """An agent in its process: a function of the user's, or `run_program`, which starts a command."""

    def __init__(self, agent: Callable[..., Any]) -> None:
        self.agent = agent
        self.printed = Printed()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.sync_http: openai.DefaultHttpxClient | None = None
        self.async_http: openai.DefaultAsyncHttpxClient | None = None
        # The endpoint is on this machine, and a proxy is not the way to it.
        for name in ("no_proxy", "NO_PROXY"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), HERE)))

    def ready(self) -> None:
        """Do nothing: the process has started, and the agent is loaded."""

    def run(
        self, fields: Mapping[str, Any], base_url: str, key: str, seed: int, timeout: float, command: list[str]
    ) -> dict[str, Any]:
        """Run the agent for a problem; return its reward as `reward`, or as `text` what the task's rule is to grade."""
        self.printed.left = MAX_PRINTED
        # For whatever makes a client of its own.
        os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = base_url, key
        seed_random_numbers(seed)
        try:
            if command:
                found: dict[str, Any] = self.agent(command, fields)
                return found if "text" in found else {"reward": plain_reward(found["reward"])}
            problem = Problem(**{**fields, "prompt": tuple(fields["prompt"])})
            return {"reward": plain_reward(self.solve(problem, base_url, key, timeout))}
        finally:
            kill_descendants(os.getpid())
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def solve(self, problem: Problem, base_url: str, key: str, timeout: float) -> Any:
        """Call the user's function with a client for this rollout."""
        # A request may wait for long while others are sampled; how long a rollout takes is limited elsewhere.
        settings: dict[str, Any] = {"base_url": base_url, "api_key": key, "timeout": timeout}
        if is_async(self.agent):
            return self.in_loop(self.solve_async(problem, settings))
        import openai

        if self.sync_http is None or self.sync_http.is_closed:
            self.sync_http = openai.DefaultHttpxClient(verify=ssl_context(), trust_env=False)
        value = self.agent(problem, openai.OpenAI(http_client=self.sync_http, **settings))
        return self.in_loop(awaited(value)) if inspect.isawaitable(value) else value

    async def solve_async(self, problem: Problem, settings: dict[str, Any]) -> Any:
        """Await the user's function; end what it has left running."""
        import openai

        if self.async_http is None or self.async_http.is_closed:
            self.async_http = openai.DefaultAsyncHttpxClient(verify=ssl_context(), trust_env=False)
        try:
            return await self.agent(problem, openai.AsyncOpenAI(http_client=self.async_http, **settings))
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def in_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in this process's event loop, which its connections belong to."""
        if self.loop is None or self.loop.is_closed():
            self.loop, self.async_http = asyncio.new_event_loop(), None
            asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(work)


class Printed:
    """Passes on what this process and its children print, up to `left` bytes, and drops the rest."""

    def __init__(self) -> None:
        self.left = MAX_PRINTED
        self.target = os.dup(1)
        self.source, printed = os.pipe()
        for standard in (1, 2):
            os.dup2(printed, standard)
        os.close(printed)
        threading.Thread(target=self.pass_on, daemon=True).start()

    def pass_on(self) -> None:
        """Copy until the process ends; runs in a thread."""
        while chunk := os.read(self.source, 1 << 16):
            kept, self.left = chunk[: self.left], max(0, self.left - len(chunk))
            with contextlib.suppress(OSError):  # a full disk is not the agent's fault
                while kept:
                    kept = kept[os.write(self.target, kept) :]


def warm_up() -> None:
    """Do once what the first request of every worker would do: it imports modules, and asks what machine this is."""
    import openai

    # Nobody listens at a port that is only bound. In 64 workers on two cores the first requests took 18 s without this.
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        settings: dict[str, Any] = {"base_url": address, "api_key": "none", "max_retries": 0}
        with contextlib.suppress(openai.APIConnectionError), openai.DefaultHttpxClient(verify=ssl_context()) as http:
            openai.OpenAI(http_client=http, **settings).chat.completions.create(model="", messages=[])
        with contextlib.suppress(openai.APIConnectionError):
            asyncio.run(_ask_in_vain(settings))


async def _ask_in_vain(settings: dict[str, Any]) -> None:
    import openai

    async with openai.DefaultAsyncHttpxClient(verify=ssl_context()) as http:
        await openai.AsyncOpenAI(http_client=http, **settings).chat.completions.create(model="", messages=[])


@cache
def ssl_context() -> ssl.SSLContext:
    """Return the certificates for clients: reading them takes 15 ms, nearly all that making a client takes."""
    return ssl.create_default_context()


def is_async(agent: Callable[..., Any]) -> bool:
    """Return whether an agent is written with `async def`."""
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))  # noqa: B004


async def awaited(value: Awaitable[Any]) -> Any:
    """Await what a plain function has returned."""
    return await value


def seed_random_numbers(seed: int) -> None:
    """Seed Python's and NumPy's global generators: which worker runs a rollout depends on the clock."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def plain_reward(value: Any) -> float | bool | list[float] | None:
    """Return what an agent returned as JSON holds it, or raise TypeError if it is no reward."""
    if hasattr(value, "tolist"):  # of NumPy and torch
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if is_score(value):
        return float(value)
    if isinstance(value, list | tuple) and len(value) <= MAX_REWARDS:
        rewards = [each.item() if hasattr(each, "item") else each for each in value]
        if all(isinstance(each, bool) or is_score(each) for each in rewards):
            return [float(each) for each in rewards]
    raise TypeError(
        f"the agent returned {shown(value)}: return {SCORE}, True or False, a list of numbers (one for each request), "
        "or None, which leaves it to the task's rule"
    )
