"""A user's own agent in TRL and verl: its processes, and the rows for training that one run of it becomes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.agents import AgentPool, AgentRun, Branch, RolloutStats, SealedRollout
from trimtab.data import Problem
from trimtab.engines.options import EngineOptions
from trimtab.grading import verdict_of
from trimtab.own_parts import look_beside
from trimtab.text import printable
from trimtab.trainer.train import EndedRollout, agent_metrics, error_of

_log = logging.getLogger(__name__)
_said: set[str] = set()  # agents whose first error has been logged


@dataclass(frozen=True)
class AgentRollout:
    """A run of the agent for one problem: its branches, and its reward; None leaves that to the engine's rewards.

    `text` is what a reward function is to grade. With an `error` the rollout is not trained on. `left_out` is the
    number of branches that `agent_branches="longest"` leaves out.
    """

    branches: tuple[Branch, ...]
    reward: float | None
    text: str
    ended: EndedRollout
    error: str = ""
    left_out: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """Return what the metrics need of it as plain data, for other processes."""
        return {**asdict(self.ended), "left_out": self.left_out}


def start_agents(options: EngineOptions) -> AgentPool:
    """Start the processes of the agent in this one; raise if the agent cannot be loaded."""
    for folder in reversed(options.tool_folders):
        look_beside(folder)
    pool = AgentPool(
        options.agent, options.agent_command, concurrency=options.agent_concurrency, timeout=options.agent_timeout
    )
    try:
        pool.check()
    except BaseException:
        pool.close()
        raise
    return pool


def agent_rollout(run: AgentRun, sealed: SealedRollout, options: EngineOptions) -> AgentRollout:
    """Return what an engine trains of a run of the agent."""
    error = error_of(run, sealed, options.agent_on_timeout)
    if not error and isinstance(run.reward, list):
        error = (
            "the agent returned a list of rewards, one for each request: in TRL and verl a rollout has one reward, so "
            "return a number, or train with trimtab's own trainer"
        )
    ended = EndedRollout(run.outcome, run.seconds, sealed.stats, bool(error))
    text = sealed.last_message if run.text is None else run.text
    if error:
        _log_once(options, error)
        return AgentRollout((), None, text, ended, error)
    branches = sealed.branches
    if options.agent_branches == "longest":
        branches = (max(branches, key=lambda branch: branch.response.num_sampled),)
    return AgentRollout(branches, _reward(run), text, ended, left_out=len(sealed.branches) - len(branches))


def _reward(run: AgentRun) -> float | None:
    """Return the reward of a run that is trained on; one that a limit has ended has answered nothing, and gets 0."""
    if run.outcome != "returned":
        return 0.0
    return None if run.reward is None else float(verdict_of(run.reward).value)


def sampled_mask(branch: Branch) -> list[int]:
    """Return 1 for each token of a branch that the policy sampled, and 0 for what others wrote."""
    mask = [1] * len(branch.response.tokens)
    for start, end in branch.response.observed:
        mask[start:end] = [0] * (end - start)
    return mask


def spread_logp(branch: Branch) -> list[float]:
    """Return a log-probability for each token of a branch, 0 for what others wrote."""
    sampled = iter(branch.response.logp.tolist())
    return [next(sampled) if mine else 0.0 for mine in sampled_mask(branch)]


def rollout_metrics(rollouts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of rollouts from their `fields`."""
    ended = [
        EndedRollout(one["outcome"], one["seconds"], RolloutStats(**one["stats"]), one["excluded"]) for one in rollouts
    ]
    left_out = sum(one["left_out"] for one in rollouts)
    return {**agent_metrics(ended), "agent/branches_left_out": float(left_out)}


def most_have_failed(failed: int, rollouts: int, why: str) -> RuntimeError:
    """Return the error of a step in which most rollouts have nothing to train on."""
    return RuntimeError(
        f"trimtab: in {failed} of {rollouts} rollouts of this step the agent failed, so that there is too little to "
        f"train on. {why}"
    )


def problem_of(prompt: Any, answer: Any, rule: str, source: str, extra: Mapping[str, Any]) -> Problem:
    """Return a row of an engine's data as the problem that the agent gets."""
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
    plain = tuple({"role": str(message["role"]), "content": message["content"]} for message in messages)
    return Problem(plain, str(answer), rule, source, extra=dict(extra))


def _log_once(options: EngineOptions, error: str) -> None:
    """Log the agent's first error in this process in full; later ones are counted."""
    name = options.agent or " ".join(options.agent_command)
    if name not in _said:
        _said.add(name)
        _log.error("the agent %s failed, and its rollout is not trained on:\n%s", name, printable(error))
