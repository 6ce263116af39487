"""Sample from a model in this process, with the native sampler or with vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property

from trimtab.data import BenchmarkProblem, PromptTokens, Sample, Sampler, derive_seed
from trimtab.experiments.evaluate.folder import Batches, Generation, conversation_row, new_generation
from trimtab.experiments.evaluate.settings import EvalSettings, SampleKey
from trimtab.trainer.config import RolloutConfig
from trimtab.trainer.model import LongPromptError, Policy, score
from trimtab.trainer.train import (
    ToolUse,
    build_sampler,
    check_prompts,
    encode_problems,
    open_policy,
    sample_responses,
    transcripts_of,
)

PROMPTS_DECODED = 8  # to see that they survive the tokenizer
SCORE_BUDGET, SCORE_CHUNK = 32_768, 4_096  # tokens in a forward pass; rows of logits at a time


@dataclass
class NativeGenerator:
    """Generates samples by a policy. With `entropy` every response is scored by one more forward pass.

    The batches are the same whatever is done already, and a batch is generated whole or not at all: rounding depends on
    what shares a batch, so a resumed evaluation gives exactly the texts of an uninterrupted one.
    """

    policy: Policy
    settings: EvalSettings
    entropy: bool = True
    tool_use: ToolUse | None = None
    _encoded: dict[tuple[str, str], list[int]] = field(default_factory=dict, repr=False)  # by benchmark and problem

    @cached_property
    def sampler(self) -> Sampler:
        """The sampler of `settings.sampler`; vLLM's is built for the longest of the prompts tokenized so far."""
        settings = self.settings
        if settings.sampler != "vllm":
            return build_sampler(self.policy)
        tools = settings.tools
        rollout = RolloutConfig(
            engine="vllm",
            max_prompt_tokens=max(map(len, self._encoded.values()), default=1),
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch,
            max_turns=tools.max_turns if tools else 1,
            max_observation_tokens=tools.max_observation_tokens if tools else 512,
        )
        return build_sampler(self.policy, rollout)

    def reusable(self, problems: Sequence[BenchmarkProblem], done: AbstractSet[SampleKey]) -> set[SampleKey]:
        """Return the samples of complete batches."""
        keys = map(self.settings.sample_keys, self.batches(problems))
        return set().union(*(batch for batch in keys if batch <= done))

    def generate(self, problems: Sequence[BenchmarkProblem], done: AbstractSet[SampleKey]) -> Batches:
        """Yield the batches that are not complete."""
        for batch in self.batches(problems):
            if not self.settings.sample_keys(batch) <= done:
                yield self._generate_batch(batch)

    def batches(self, problems: Sequence[BenchmarkProblem]) -> list[list[BenchmarkProblem]]:
        """Split the problems into batches: of one benchmark, whose responses are about as long, by prompt length."""
        self._encode(problems)
        groups: dict[str, list[BenchmarkProblem]] = {}
        for item in problems:
            groups.setdefault(item.benchmark, []).append(item)
        batches = []
        for benchmark, group in groups.items():
            size = max(1, self.settings.batch // self.settings.samples[benchmark])
            # The longest first, so that running out of memory happens at once.
            ordered = sorted(group, key=lambda item: -len(self._prompt(item)))
            batches += [ordered[first : first + size] for first in range(0, len(ordered), size)]
        return batches

    def check_lengths(self, problems: Sequence[BenchmarkProblem]) -> None:
        """Raise where prompt and response would exceed the model's context."""
        self._encode(problems)
        some = problems[:: max(len(problems) // PROMPTS_DECODED, 1)][:PROMPTS_DECODED]
        check_prompts(self.policy, [item.problem for item in some], self.tool_use)
        context = getattr(self.policy.causal_lm.config, "max_position_embeddings", None)
        longest = max(len(self._prompt(item)) for item in problems)
        replies = self.tool_use.max_observed_tokens if self.tool_use else 0
        room = math.inf if context is None else context - longest - replies
        besides = f" and replies of tools up to {replies} (--max-turns, --max-observation-tokens)" if replies else ""
        if room < 1:
            raise ValueError(
                f"the model's context is {context} tokens, and the longest prompt alone has {longest}{besides}"
            )
        if self.settings.max_new_tokens > room:
            raise ValueError(
                f"--max-new-tokens {self.settings.max_new_tokens}: the model's context is {context} tokens and the "
                f"longest prompt has {longest}{besides}; use --max-new-tokens {room:g} or less"
            )

    def _prompt(self, item: BenchmarkProblem) -> list[int]:
        return self._encoded[item.benchmark, item.id]

    def _encode(self, problems: Sequence[BenchmarkProblem]) -> None:
        """Tokenize the prompts that are not tokenized yet, together."""
        missing = [item for item in problems if (item.benchmark, item.id) not in self._encoded]
        try:
            encoded = encode_problems(self.policy, [item.problem for item in missing], self.tool_use)
        except LongPromptError as error:
            item = missing[error.number]
            raise ValueError(
                f"the prompt of {item.benchmark} {item.id} does not fit the model's context: {error}"
            ) from None
        self._encoded |= {(item.benchmark, item.id): ids for item, ids in zip(missing, encoded, strict=True)}

    def _generate_batch(self, batch: list[BenchmarkProblem]) -> list[Generation]:
        settings = self.settings
        options = settings.sampling_options(batch[0].benchmark)
        # The samples of a problem stay together.
        options = replace(options, batch_size=max(settings.batch, options.samples))
        # Seeds go by the problem's id, not its position in the benchmark, so that `--problems` changes no sample.
        prompts = [PromptTokens(self._prompt(p), derive_seed("evaluate", p.benchmark, p.id)) for p in batch]
        problems = [(number, item.problem) for number, item in enumerate(batch)]
        step = 0  # always: seeds differ by prompt
        groups = sample_responses(self.policy, self.sampler, problems, prompts, step, options, self.tool_use)
        entropies = iter(self._entropies([sample for group in groups for sample in group]))
        return [
            self._generation(item, number, sample, next(entropies))
            for item, group in zip(batch, groups, strict=True)
            for number, sample in enumerate(group)
        ]

    def _entropies(self, samples: Sequence[Sample]) -> list[float | None]:
        """Return the mean entropy of the next-token distribution over each response, at the sampling temperature."""
        if not self.entropy:
            return [None] * len(samples)
        transcripts = transcripts_of(samples)
        temperature = self.settings.temperature or 1.0  # greedy sampling has no entropy of its own
        # Similar lengths share a forward pass.
        order = sorted(range(len(transcripts)), key=lambda n: len(transcripts[n]))
        measured = score(self.policy, [transcripts[n] for n in order], temperature, SCORE_BUDGET, SCORE_CHUNK)
        means: list[float | None] = [None] * len(transcripts)
        lengths = [transcripts[n].num_sampled for n in order]
        for number, values in zip(order, measured.entropy.split(lengths), strict=True):
            mean = float(values.double().mean())
            means[number] = mean if math.isfinite(mean) else None
        return means

    def _generation(self, item: BenchmarkProblem, number: int, sample: Sample, entropy: float | None) -> Generation:
        response, conversation = sample.response, sample.conversation
        logp = math.fsum(response.logp) / len(response.logp)
        if math.isnan(logp):
            raise ValueError(
                f"the model's logits are NaN for {item.benchmark} {item.id}: its weights overflow; use "
                "another checkpoint, or --precision fp32"
            )
        return new_generation(
            item,
            number,
            self.settings,
            seed=self.settings.seed,
            text=sample.text,
            tokens=response.num_sampled,
            finished=response.finished,
            logp=logp if math.isfinite(logp) else None,
            entropy=entropy,
            conversation=conversation_row(conversation) if conversation else None,
        )


def open_model(model: str, device: str, precision: str, chat: bool) -> Policy:
    """Load a policy by path, `demo`, `smollm2`, hub name, or a run of trimtab's (its folder or a checkpoint)."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"--precision {precision}: it must be fp32 or bf16")
    return open_policy(model, device=device, precision=precision, chat=chat)
