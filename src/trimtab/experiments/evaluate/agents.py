"""Evaluate an agent: it asks a model in this process through an endpoint, or a server through a relay."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, closing
from dataclasses import dataclass
from queue import SimpleQueue
from statistics import fmean
from typing import TYPE_CHECKING

from trimtab.agents import (
    Access,
    AgentPool,
    AgentRun,
    AgentWorker,
    ChatTokens,
    Conversation,
    Endpoint,
    EndpointLimits,
    Message,
    SealedRollout,
)
from trimtab.data import BenchmarkProblem, Sampler, derive_seed
from trimtab.experiments.evaluate import EvalOptions
from trimtab.experiments.evaluate.folder import Batches, Generation, conversation_row, new_generation
from trimtab.experiments.evaluate.native import open_model
from trimtab.experiments.evaluate.settings import EvalSettings, SampleKey
from trimtab.own_parts import is_own
from trimtab.trainer.config import RolloutConfig
from trimtab.trainer.train import AgentUse, build_sampler, error_of

if TYPE_CHECKING:
    from trimtab.experiments.evaluate.agent_relay import AgentRelay, Relayed

BATCHES = 4  # so many times --concurrency rollouts are stored together
CONTEXT = 1 << 17  # tokens of a model that has no limit of its own


def open_agent_generator(
    options: EvalOptions, settings: EvalSettings, started: ExitStack
) -> ModelAgentGenerator | ServerAgentGenerator:
    """Return what runs the agent; what it starts ends with `started`."""
    own = is_own(settings.agent)
    pool = AgentPool(
        settings.agent if own else None,
        () if own else shlex.split(settings.agent),
        concurrency=options.concurrency,
        timeout=options.timeout,
    )
    started.callback(pool.close)
    pool.check()
    if options.connection is not None:
        from trimtab.experiments.evaluate.agent_relay import AgentRelay  # the openai package takes half a second

        relay = started.enter_context(closing(AgentRelay(options.connection, options.name, settings)))
        return ServerAgentGenerator(settings, pool, relay)
    policy = open_model(options.name, settings.device, options.precision, options.chat)
    context = int(min(policy.context, CONTEXT))
    rollout = RolloutConfig(
        engine=settings.sampler,
        max_prompt_tokens=max(context - settings.max_new_tokens, 1),
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch,
    )
    limits = EndpointLimits(context, temperature=settings.temperature, top_p=settings.top_p)
    chat = ChatTokens(policy.tokenizer, chat=policy.chat, end_tokens=policy.eos_token_ids)
    endpoint = started.enter_context(closing(Endpoint(chat, limits)))
    return ModelAgentGenerator(settings, build_sampler(policy, rollout), AgentUse(pool, endpoint))


@dataclass
class ModelAgentGenerator:
    """Runs an agent on a model in this process, some problems at a time."""

    settings: EvalSettings
    sampler: Sampler
    use: AgentUse

    def reusable(self, problems: Sequence[BenchmarkProblem], done: AbstractSet[SampleKey]) -> set[SampleKey]:
        """Return the samples of problems that have all of theirs."""
        keys = (self.settings.sample_keys([item]) for item in problems)
        return set().union(*(each for each in keys if each <= done))

    def generate(self, problems: Sequence[BenchmarkProblem], done: AbstractSet[SampleKey]) -> Batches:
        """Yield the samples of the other problems."""
        missing = [item for item in problems if not self.settings.sample_keys([item]) <= done]
        for batch in self._batches(missing):
            yield self._generate(batch)

    def _batches(self, problems: Sequence[BenchmarkProblem]) -> Iterator[list[BenchmarkProblem]]:
        """Split problems into batches of one benchmark, so that all have as many samples."""
        groups: dict[str, list[BenchmarkProblem]] = {}
        for item in problems:
            groups.setdefault(item.benchmark, []).append(item)
        for benchmark, group in groups.items():
            size = max(1, BATCHES * self.use.pool.concurrency // self.settings.samples[benchmark])
            yield from (group[first : first + size] for first in range(0, len(group), size))

    def _generate(self, batch: Sequence[BenchmarkProblem]) -> list[Generation]:
        options = self.settings.sampling_options(batch[0].benchmark)
        rollouts = [(item, sample) for item in batch for sample in range(options.samples)]
        numbered = [(derive_seed("evaluate", p.benchmark, p.id), p.problem, sample) for p, sample in rollouts]
        ended = self.use.run(self.sampler, numbered, 0, options)
        return [
            self._generation(item, sample, run, sealed)
            for (item, sample), (run, sealed) in zip(rollouts, ended, strict=True)
        ]

    def _generation(self, item: BenchmarkProblem, sample: int, run: AgentRun, sealed: SealedRollout) -> Generation:
        seed = self.settings.seed
        if error := error_of(run, sealed, "exclude"):
            return new_generation(item, sample, self.settings, seed=seed, failed=error)
        logps = [float(value) for branch in sealed.branches for value in branch.response.logp]
        mean = math.fsum(logps) / len(logps)
        return new_generation(
            item,
            sample,
            self.settings,
            seed=seed,
            text=sealed.last_message if run.text is None else run.text,
            tokens=sealed.stats.sampled_tokens,
            finished=not sealed.stats.ended,
            logp=mean if math.isfinite(mean) else None,
            conversation=_conversation_row(run, list(sealed.branches[-1].messages)),
        )


@dataclass
class ServerAgentGenerator:
    """Runs an agent on a server; samples are stored as they come."""

    settings: EvalSettings
    pool: AgentPool
    relay: AgentRelay

    def reusable(self, problems: Sequence[BenchmarkProblem], done: AbstractSet[SampleKey]) -> set[SampleKey]:
        """Return all that is done: samples do not depend on each other."""
        return set(done)

    def generate(self, problems: Sequence[BenchmarkProblem], done: AbstractSet[SampleKey]) -> Batches:
        """Yield the missing samples one by one, as the agents end."""
        keys = {(item.benchmark, item.id): item for item in problems}
        missing = sorted(self.settings.sample_keys(problems) - done)
        ended: SimpleQueue[Generation | BaseException] = SimpleQueue()

        def run(index: int, worker: AgentWorker) -> None:
            benchmark, problem, sample = missing[index]
            try:
                ended.put(self._run(keys[benchmark, problem], sample, worker))
            except BaseException as error:
                ended.put(error)
                raise

        self.pool.start(len(missing), run)
        try:
            for _ in missing:
                found = ended.get()
                if isinstance(found, BaseException):
                    raise found
                self.relay.check()
                yield [found]
        finally:
            self.pool.stop()

    def _run(self, item: BenchmarkProblem, sample: int, worker: AgentWorker) -> Generation:
        seed = self.settings.request_seed(item, sample)
        relayed = self.relay.open(seed)
        run = worker.run(item.problem, Access(self.relay.url, relayed.key, seed))
        self.relay.end(relayed)
        if failed := _relay_error(run, relayed):
            return new_generation(item, sample, self.settings, seed=seed, failed=failed)
        return new_generation(
            item,
            sample,
            self.settings,
            seed=seed,
            text=relayed.last_message if run.text is None else run.text,
            tokens=relayed.tokens,
            conversation=_conversation_row(run, [Message("assistant", relayed.last_message)]),
        )


def _relay_error(run: AgentRun, relayed: Relayed) -> str:
    """Return why a rollout on a server has no result; "" if it has one."""
    if run.outcome != "returned":
        return run.error
    return "" if relayed.answered else f"the agent made no request that was answered {relayed.error}".strip()


def _conversation_row(run: AgentRun, messages: list[Message]) -> object:
    """Return what is stored of a rollout; one that a limit has ended has no reward."""
    reward = 0.0 if run.outcome == "failed" else run.reward
    if isinstance(reward, list):
        reward = fmean(reward or [0.0])
    return conversation_row(
        Conversation(messages=messages, reward=None if reward is None else float(reward), error=run.error)
    )
