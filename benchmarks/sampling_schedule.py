"""How long responses take to sample on a GPU, by running the paged sampler's own scheduler without one.

The scheduler admits, preempts and retires sequences as in a run; only the device is replaced, by a model of its time. A
decoding step reads all weights and the keys and values of all running sequences, at the share of the memory bandwidth
that was measured on an H200 (`sampler-h200.json`). A prefill, also of what was preempted, takes its floating-point
operations at the share of the peak measured for scoring (`mfu-h200.json`).
"""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimtab.data import PromptTokens, SamplingOptions
from trimtab.trainer.sampling.paged.buffers import PAGE_SIZE, PageAllocator, Scalar, pages_per_sequence
from trimtab.trainer.sampling.paged.scheduler import Scheduler, SequenceGroup
from trimtab.trainer.sampling.sequence import SampledSequence, new_sequences

RESULTS = Path(__file__).parent / "results"
PEAK = 989e12  # bf16 operations per second, data sheet
STEPS_PER_SYNC = 16
FIRST_PREFILL, PREFILL = 4096, 32_768  # tokens
SPREAD = 0.5  # of the logarithm of lengths: between prompts, and between the responses to one


@dataclass(frozen=True)
class Load:
    """What is sampled: responses in groups, of lengths around a mean, cut at `longest`."""

    responses: int
    samples: int
    prompt: int
    mean: int
    longest: int
    longest_prompt: int


@dataclass(frozen=True)
class Gpu:
    """What limits sampling: bytes of the KV cache and of one token in it, weights, and slots."""

    weights: int
    token_bytes: int
    cache_bytes: float
    slots: int


@dataclass
class Outcome:
    """What sampling took."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    running: int = 0  # sequences, added up over the steps
    prefilled: int = 0
    preempted: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def device_rates() -> tuple[float, float]:
    """Return bytes and operations per second, as measured."""
    measured = json.loads((RESULTS / "sampler-h200.json").read_text())
    bandwidth = measured["copy_bytes_per_second"]
    bandwidth *= measured["Qwen3-8B shape, 64 sequences, up to 4096"]["share_of_limit"]
    share = json.loads((RESULTS / "mfu-h200.json").read_text())["share_of_peak"][-1]["score_share_of_peak"]
    return bandwidth, PEAK * share


def simulate(load: Load, gpu: Gpu) -> Outcome:
    """Run the scheduler until all responses have their lengths."""
    bandwidth, operations = device_rates()
    prompts = [PromptTokens([1] * load.prompt, number) for number in range(load.responses // load.samples)]
    groups = new_sequences(prompts, 0, SamplingOptions(load.samples, load.longest))
    lengths = made_lengths(groups, load)
    scheduler = Scheduler(
        [SequenceGroup(prompt.ids, deque(group)) for prompt, group in zip(prompts, groups, strict=True)],
        PageAllocator(int(gpu.cache_bytes // (gpu.token_bytes * PAGE_SIZE))),
        slots=min(gpu.slots, load.responses),
        pages_per_slot=pages_per_sequence(load.longest_prompt + load.longest),
        max_new_tokens=load.longest,
        steps_per_sync=STEPS_PER_SYNC,
    )
    outcome = Outcome(tokens=sum(lengths.values()))
    while scheduler.queue or scheduler.running:
        outcome.prefilled += admit(scheduler)
        scheduler.allocate_pages()
        steps = scheduler.steps_until_sync()
        held, finished = decode(scheduler, steps, lengths)
        outcome.seconds += steps * (2 * gpu.weights + gpu.token_bytes * held) / bandwidth
        outcome.steps += steps
        outcome.running += steps * len(scheduler.running)
        scheduler.release(finished)
        for slot in scheduler.slots_to_preempt():
            scheduler.preempt(slot)
            outcome.preempted += 1
    outcome.seconds += 2 * gpu.weights * outcome.prefilled / operations
    return outcome


def made_lengths(groups: list[list[SampledSequence]], load: Load) -> dict[int, int]:
    """Return a length for each sequence, log-normal within and between groups."""
    rng = random.Random(0)
    median = load.mean / np.exp(SPREAD**2)
    lengths = {}
    for group in groups:
        typical = median * rng.lognormvariate(0, SPREAD)
        for sequence in group:
            lengths[id(sequence)] = max(1, min(load.longest, int(typical * rng.lognormvariate(0, SPREAD))))
    return lengths


def admit(scheduler: Scheduler) -> int:
    """Admit what there is room for; return how many tokens are prefilled."""
    tokens, limit = 0, FIRST_PREFILL
    while (admission := scheduler.admit(limit)).admitted:
        limit = PREFILL
        tokens += sum(group.num_prefilled - group.num_cached for group in admission.prefill)
    return tokens


def decode(scheduler: Scheduler, steps: int, lengths: dict[int, int]) -> tuple[int, list[int]]:
    """Take so many steps; return the tokens in the cache before them, and the slots of finished sequences."""
    scalars = scheduler.batch()[0].copy()
    held = int(scalars[Scalar.POSITION].sum())
    ends = np.array([lengths[id(sequence)] for sequence in scheduler.running.values()])
    taken = np.minimum(steps, ends - scalars[Scalar.NUM_GENERATED])
    scalars[Scalar.NUM_GENERATED] += taken
    scalars[Scalar.POSITION] += taken
    scalars[Scalar.ACTIVE] = scalars[Scalar.NUM_GENERATED] < ends
    shape = (len(ends), steps)
    scheduler.append_outputs()
    return held, scheduler.record_outputs(scalars, np.ones(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32))
