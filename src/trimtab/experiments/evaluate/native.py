"""Sample from a model in this process, with the native sampler or with vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

from trimtab.agents import Conversation
from trimtab.data import BenchmarkProblem, PromptTokens, Response, Sampler, SamplingOptions, derive_seed
from trimtab.experiments.evaluate.folder import Batches, Generation, conversation_row, new_generation
from trimtab.experiments.evaluate.settings import EvalSettings, SampleKey
from trimtab.trainer.config import RolloutConfig
from trimtab.trainer.model import LongPromptError, Policy, Transcript, score
from trimtab.trainer.train import ToolUse, build_sampler, check_prompts, encode_problems, open_policy

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
        samples = settings.samples[batch[0].benchmark]
        # Seeds go by the problem's id, not its position in the benchmark, so that `--problems` changes no sample.
        prompts = [PromptTokens(self._prompt(p), derive_seed("evaluate", p.benchmark, p.id)) for p in batch]
        options = SamplingOptions(
            samples=samples,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
            batch_size=max(settings.batch, samples),  # the samples of a problem stay together
        )
        conversations: list[Conversation] = []
        step = 0  # always: seeds differ by prompt
        if self.tool_use is None:
            groups = self.sampler.sample(prompts, step, options)
        else:
            problems = [item.problem for item in batch]
            groups, conversations = self.tool_use.sample(self.sampler, problems, prompts, step, options)
        entropies = iter(self._entropies(prompts, groups))
        held = iter(conversations)
        return [
            self._generation(item, sample, response, next(entropies), next(held, None))
            for item, responses in zip(batch, groups, strict=True)
            for sample, response in enumerate(responses)
        ]

    def _entropies(self, prompts: Sequence[PromptTokens], groups: Sequence[Sequence[Response]]) -> list[float | None]:
        """Return the mean entropy of the next-token distribution over each response, at the sampling temperature."""
        transcripts = [
            Transcript(prompt.ids, response.tokens, response.observed)
            for prompt, group in zip(prompts, groups, strict=True)
            for response in group
        ]
        if not self.entropy:
            return [None] * len(transcripts)
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

    def _generation(
        self,
        item: BenchmarkProblem,
        sample: int,
        response: Response,
        entropy: float | None,
        conversation: Conversation | None,
    ) -> Generation:
        logp = math.fsum(response.logp) / len(response.logp)
        if math.isnan(logp):
            raise ValueError(
                f"the model's logits are NaN for {item.benchmark} {item.id}: its weights overflow; use "
                "another checkpoint, or --precision fp32"
            )
        return new_generation(
            item,
            sample,
            self.settings,
            seed=self.settings.seed,
            text=conversation.last_message if conversation else self.policy.decode(response.tokens.tolist()),
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
