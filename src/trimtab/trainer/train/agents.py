"""The agent of a run: its processes and its endpoint, and how what it asked for becomes samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from trimtab import failpoints
from trimtab.agents import (
    NEW_ROOTS,
    Access,
    AgentPool,
    AgentRun,
    AgentWorker,
    ChatTokens,
    Conversation,
    Endpoint,
    EndpointLimits,
    RolloutStats,
    SealedRollout,
    Session,
)
from trimtab.data import Group, Problem, Request, Requests, Response, Sample, Sampler, SamplingOptions
from trimtab.grading import RuleErrors, Verdict, verdict_of
from trimtab.trainer.config import Config
from trimtab.trainer.model import Policy
from trimtab.trainer.sampling import OwnSampler, rng_keys

Numbered = tuple[int, Problem]


def build_agent_pool(config: Config) -> AgentPool | None:
    """Start the processes of a recipe's agent; None where it has none."""
    if not config.has_agent:
        return None
    agent = config.agent
    pool = AgentPool(config.agent_function, agent.command, concurrency=agent.concurrency, timeout=agent.timeout)
    try:
        pool.check()
    except BaseException:
        pool.close()
        raise
    return pool


def build_agent_use(config: Config, policy: Policy, sampler: Sampler, pool: AgentPool | None) -> AgentUse | None:
    """Start the endpoint through which the agent asks a policy; None without an agent."""
    if pool is None:
        return None
    if isinstance(sampler, OwnSampler):
        sampler.require_serve()
    rollout = config.rollout
    options = config.sampling_options(rollout.samples)
    chat = ChatTokens(policy.tokenizer, chat=policy.chat, end_tokens=policy.eos_token_ids)
    limits = EndpointLimits(
        max_tokens=min(policy.context, rollout.max_prompt_tokens + rollout.max_new_tokens),
        temperature=options.temperature,
        top_p=options.top_p,
    )
    return AgentUse(pool, Endpoint(chat, limits), config.agent.on_timeout)


@dataclass(frozen=True)
class EndedRollout:
    """How a rollout ended, for the metrics."""

    outcome: Literal["returned", "failed", "timeout"]
    seconds: float
    stats: RolloutStats
    excluded: bool


@dataclass
class AgentUse:
    """The agent of a run, and the endpoint that it asks.

    `ended` are the rollouts since they were last taken, `errors` those of the agent.
    """

    pool: AgentPool
    endpoint: Endpoint
    on_timeout: Literal["exclude", "wrong"] = "exclude"
    ended: list[EndedRollout] = field(default_factory=list)
    errors: RuleErrors = field(default_factory=RuleErrors)
    _sampling: float = 0.0  # seconds since the times were taken
    _waiting: float = 0.0

    def sample(
        self, sampler: Sampler, problems: Sequence[Numbered], step: int, options: SamplingOptions
    ) -> list[Group]:
        """Run the agent for each problem as often as there are samples; return its branches as samples, by problem.

        Processes that share a policy's weights call this together, also one without a problem.
        """
        rollouts = [(number, problem, sample) for number, problem in problems for sample in range(options.samples)]
        found = self.run(sampler, rollouts, step, options)
        groups: list[Group] = [[] for _ in problems]
        for index, ((number, problem, sample), (run, sealed)) in enumerate(zip(rollouts, found, strict=True)):
            samples = samples_of(problem, number, sample, run, sealed, self.on_timeout)
            self.ended.append(EndedRollout(run.outcome, run.seconds, sealed.stats, samples[0].excluded))
            if samples[0].excluded:
                self.errors.add(self.pool.name, samples[0].verdict, samples[0], "agent")
            groups[index // options.samples] += samples
        return groups

    def run(
        self, sampler: Sampler, rollouts: Sequence[tuple[int, Problem, int]], step: int, options: SamplingOptions
    ) -> list[tuple[AgentRun, SealedRollout]]:
        """Run the agent for numbered problems and samples, and answer its requests in this thread until all have ended.

        All samples of a problem are behind each other.
        """
        # The key of a response that is sampled in one piece: (seed, step, prompt number, sample) and nothing else.
        numbers = [number for number, _, sample in rollouts if sample == 0]
        keys: list[int] = rng_keys(options.seed, step, numbers, options.samples).tolist()
        found: dict[int, tuple[AgentRun, SealedRollout]] = {}

        def run(index: int, worker: AgentWorker) -> None:
            _, problem, sample = rollouts[index]
            session = self.endpoint.open(keys[index], options.max_new_tokens, sample)
            ended = None
            try:
                ended = worker.run(problem, Access(self.endpoint.url, session.api_key, keys[index]))
                ended = with_request_rewards(ended, session)
            finally:
                sealed = session.seal()
            found[index] = ended, sealed
            if index == 0:
                failpoints.failpoint("agents.ended")

        requests, start = TimedRequests(self.endpoint.requests), time.perf_counter()
        running = self.pool.start(len(rollouts), run)
        finished = self._finish_after(running)
        try:
            sampler.serve(requests, options)
            if not finished.is_set():
                raise RuntimeError("the sampler's `serve` has returned while agents were still running")
            for future in sorted(running, key=lambda each: not each.done()):
                future.result()  # of those that are done first: one of them may have failed
        except BaseException:
            self.pool.stop()
            raise
        self._sampling += time.perf_counter() - start
        self._waiting += requests.waiting
        return [found[index] for index in range(len(rollouts))]

    def _finish_after(self, running: Sequence[Future[None]]) -> threading.Event:
        """Tell the sampler when all rollouts have ended, or one of them with an error of ours, and set the event."""
        finished, left, lock = threading.Event(), len(running), threading.Lock()

        def note(future: Future[None]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left and future.exception() is None:
                    return
            finished.set()
            self.endpoint.finish()

        for future in running:
            future.add_done_callback(note)
        if not running:
            finished.set()
            self.endpoint.finish()
        return finished

    def take_ended(self) -> list[EndedRollout]:
        """Return the rollouts that have ended since the last call."""
        taken, self.ended = self.ended, []
        return taken

    def take_errors(self) -> RuleErrors:
        """Return the agent's errors since the last call."""
        taken, self.errors = self.errors, RuleErrors()
        return taken

    def take_times(self) -> dict[str, float]:
        """Return the seconds and the share of sampling in which the sampler waited for agents, and start over."""
        waited, share = self._waiting, self._waiting / self._sampling if self._sampling else 0.0
        self._sampling = self._waiting = 0.0
        return {"time/agents": waited, "time/agents_wait_share": share}

    def close(self) -> None:
        """End the agents' processes and the endpoint."""
        self.pool.close()
        self.endpoint.close()


@dataclass
class TimedRequests:
    """Requests that measure how long the sampler has nothing to do."""

    requests: Requests
    waiting: float = 0.0  # seconds

    @property
    def max_tokens(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return self.requests.max_tokens

    def take(self, block: bool) -> list[Request] | None:
        """Return the requests that have come; with `block` wait for one."""
        start = time.perf_counter()
        taken = self.requests.take(block)
        self.waiting += time.perf_counter() - start if block else 0.0
        return taken

    def answer(self, request: Request, response: Response) -> None:
        """Take the answer."""
        self.requests.answer(request, response)


def with_request_rewards(run: AgentRun, session: Session) -> AgentRun:
    """Give a session the rewards of its requests if the agent returned one for each."""
    if not isinstance(run.reward, list):
        return run
    if len(run.reward) != session.requests:
        error = (
            f"the agent returned {len(run.reward)} rewards, but it made {session.requests} requests that were answered"
        )
        return AgentRun("failed", run.seconds, error=error)
    for request, reward in enumerate(run.reward):
        session.reward(request, reward)
    return run


def samples_of(
    problem: Problem,
    number: int,
    sample: int,
    run: AgentRun,
    sealed: SealedRollout,
    on_timeout: Literal["exclude", "wrong"] = "exclude",
) -> list[Sample]:
    """Return a sample for each branch of a rollout; without any, one without tokens that says why."""
    text = sealed.last_message if run.text is None else run.text
    error = error_of(run, sealed, on_timeout)
    if error:
        crashed = Verdict("crashed", error=error)
        nothing = Sample(problem, text, [], Response([], [], False, sample), number, Conversation(), 0)
        failed = [
            Sample(problem, text, branch.prompt, branch.response, number, Conversation(branch.messages), index)
            for index, branch in enumerate(sealed.branches)
        ]
        for each in failed or [nothing]:
            each.verdict, each.excluded = crashed, True
        return failed or [nothing]
    samples = []
    for index, branch in enumerate(sealed.branches):
        made = Sample(problem, text, branch.prompt, branch.response, number, Conversation(branch.messages), index)
        found = verdict_of_run(run, branch.reward)
        if found is not None:
            made.verdict = found
        samples.append(made)
    return samples


def error_of(run: AgentRun, sealed: SealedRollout, on_timeout: Literal["exclude", "wrong"]) -> str:
    """Return why a rollout is not trained on; "" if it is."""
    stats = sealed.stats
    if stats.error:
        return stats.error
    if run.outcome == "timeout" and (on_timeout == "exclude" or not sealed.branches):
        return run.error
    # An agent that a limit has refused an answer usually raises that error.
    if run.outcome == "failed" and not stats.ended:
        return run.error
    if sealed.branches:
        return ""
    refused = ", ".join(f"{count} x {code}" for code, count in stats.refused.items())
    what = f"none of its requests was answered ({refused})" if refused else "it made no request to the endpoint"
    return f"the agent ended and {what}, so that there is nothing to train on" + (f"\n{run.error}" if run.error else "")


def verdict_of_run(run: AgentRun, reward: float | None) -> Verdict | None:
    """Return the verdict on a rollout, or on a branch with a reward of its own; None leaves it to the task's rule."""
    if run.outcome == "timeout":
        return Verdict("wrong")
    if run.outcome == "failed":  # refused by a limit
        return Verdict("no_answer")
    if isinstance(run.reward, list):
        return Verdict("no_answer") if reward is None else verdict_of(reward)
    return None if run.reward is None else verdict_of(run.reward)


AGENT_METRICS: dict[str, str] = {
    "agent/abandoned": "answers that are not trained on, because a retry of the request took their place",
    "agent/branches_mean": "mean number of branches per rollout: conversations that do not go on from each other",
    "agent/context_length_share": "share of rollouts that were refused a request whose messages are too long",
    "agent/failed_share": "share of rollouts in which the agent failed: an error, a crash, or nothing to train on",
    "agent/merged_share": "share of the requests that go on from the tokens of an earlier one, whose text is not "
    "tokenized again",
    "agent/overridden": "parameters of requests that the run imposes instead, such as a temperature",
    "agent/requests_mean": "mean number of requests per rollout",
    "agent/retries": "requests that the agent's client sent again: they got the same answer",
    "time/agent_mean": "mean seconds of a rollout of an agent",
    "time/agent_max": "seconds of the longest rollout of an agent",
    "agent/timeout_share": "share of rollouts that took longer than agent.timeout",
    "agent/token_budget_share": "share of rollouts that were refused a request, because rollout.max_new_tokens were "
    "sampled already",
    "agent/turns_mean": "mean number of sampled messages per rollout that are trained on",
    **{
        f"agent/new_root/{name}": f"conversations that were tokenized anew, because {meaning}"
        for name, meaning in NEW_ROOTS.items()
    },
    "eval/requests_mean": "mean number of requests per held-out problem",
    "time/agents": "seconds in which the sampler only waited for agents",
    "time/agents_wait_share": "share of the sampling time in which the sampler only waited for agents",
}


def agent_metrics(ended: Sequence[EndedRollout]) -> dict[str, float]:
    """Return the metrics of a step's rollouts."""
    if not ended:
        return {}
    stats = [rollout.stats for rollout in ended]
    requests = sum(each.requests for each in stats)
    return {
        "agent/requests_mean": fmean(each.requests for each in stats),
        "agent/branches_mean": fmean(each.branches for each in stats),
        "agent/turns_mean": fmean(each.turns for each in stats),
        "agent/merged_share": sum(each.merged for each in stats) / max(requests, 1),
        "agent/failed_share": fmean(each.excluded and each.outcome != "timeout" for each in ended),
        "agent/timeout_share": fmean(each.outcome == "timeout" for each in ended),
        "agent/context_length_share": fmean(each.ended == "context_length" for each in stats),
        "agent/token_budget_share": fmean(each.ended == "token_budget" for each in stats),
        "agent/retries": sum(each.replayed + each.joined for each in stats),
        "agent/abandoned": sum(each.abandoned for each in stats),
        "agent/overridden": _total(each.overridden for each in stats),
        "time/agent_mean": fmean(each.seconds for each in ended),
        "time/agent_max": max(each.seconds for each in ended),
        **{f"agent/new_root/{name}": sum(each.new_roots.get(name, 0) for each in stats) for name in NEW_ROOTS},
    }


def agent_evaluation_metrics(ended: Sequence[EndedRollout]) -> dict[str, float]:
    """Return the metrics of the rollouts on held-out problems."""
    return {"eval/requests_mean": fmean(each.stats.requests for each in ended)} if ended else {}


def _total(counts: Iterable[Mapping[str, int]]) -> int:
    return sum(number for each in counts for number in each.values())
