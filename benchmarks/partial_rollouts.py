"""The decoding passes that partial rollouts save on responses of very different lengths, counted without a GPU.

The groups of a run are begun, halted and gone on with by the trainer's own code, and scheduled by the paged sampler's;
only the device is replaced, by lengths that are drawn beforehand and by `sampling_schedule`'s model of its time.
`partial_rollouts.py` writes `results/partial-rollouts.json`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from result_file import about, save
from sampling_schedule import STEPS_PER_SYNC, Gpu, Outcome, admit, device_rates
from trimtab.data import PromptTokens, Requests, SamplingOptions
from trimtab.trainer.sampling.paged.buffers import PAGE_SIZE, PageAllocator, Scalar, pages_per_sequence
from trimtab.trainer.sampling.paged.scheduler import Scheduler
from trimtab.trainer.sampling.paged.sides import RequestSide
from trimtab.trainer.sampling.request_queue import RequestQueue
from trimtab.trainer.train.partial_rollouts import PartialRollouts, finish_groups, lag_metrics, token_lags

OUT = Path(__file__).parent / "results/partial-rollouts.json"
END, WORD = 0, 1  # the end token, and any other
PROMPT, MEDIAN, LONGEST = 200, 600, 8192  # tokens
SPREAD = 0.7  # of the logarithm of lengths: between prompts, and between the responses to one
PROMPTS, SAMPLES = 64, 8
STEPS, FIRST = 14, 4  # steps of a run, and the first that counts: before it the groups begun ahead are still new
LAGS = (0, 1, 2, 4)
# Qwen3-8B in bf16, with a third of an H200's memory for keys and values.
WEIGHTS, TOKEN_BYTES, CACHE_BYTES = 8_200_000_000, 147_456, 46e9


@dataclass
class LengthsOnly:
    """A sampler whose device knows how long each response will be, and nothing else."""

    gpu: Gpu
    outcome: Outcome = field(default_factory=Outcome)
    lengths: dict[int, int] = field(default_factory=dict)  # of responses, by random key

    def serve(self, requests: Requests, options: SamplingOptions) -> None:
        """Answer requests as the paged sampler does."""
        bandwidth, operations = device_rates()
        scheduler = Scheduler(
            [],
            PageAllocator(int(self.gpu.cache_bytes // (self.gpu.token_bytes * PAGE_SIZE))),
            slots=min(self.gpu.slots, options.batch_size),
            pages_per_slot=pages_per_sequence(requests.max_tokens),
            max_new_tokens=options.max_new_tokens,
            steps_per_sync=STEPS_PER_SYNC,
            serving=True,
        )
        side, outcome = RequestSide(RequestQueue(requests, frozenset({END}), 10**9), scheduler), self.outcome
        while scheduler.queue or scheduler.running or side.is_open:
            side.take()
            if not (scheduler.queue or scheduler.running):
                continue
            prefilled = admit(scheduler)
            outcome.prefilled += prefilled
            outcome.seconds += 2 * self.gpu.weights * prefilled / operations
            scheduler.allocate_pages()
            steps = scheduler.steps_until_sync()
            held = int(scheduler.batch()[0][Scalar.POSITION].sum())
            outcome.seconds += steps * (2 * self.gpu.weights + self.gpu.token_bytes * held) / bandwidth
            outcome.steps += steps
            outcome.running += steps * len(scheduler.running)
            scheduler.release(side.retire(self.decode(scheduler, steps)))
            for slot in scheduler.slots_to_preempt():
                scheduler.preempt(slot)
                outcome.preempted += 1

    def decode(self, scheduler: Scheduler, steps: int) -> list[int]:
        """Take so many steps; return the slots of finished sequences."""
        scalars = scheduler.batch()[0].copy()
        ends = np.array([self.lengths[sequence.key] for sequence in scheduler.running.values()])
        taken = np.minimum(steps, np.minimum(ends, LONGEST) - scalars[Scalar.NUM_GENERATED])
        scalars[Scalar.NUM_GENERATED] += taken
        scalars[Scalar.POSITION] += taken
        scalars[Scalar.ACTIVE] = scalars[Scalar.NUM_GENERATED] < np.minimum(ends, LONGEST)
        tokens = np.full((len(ends), steps), WORD, dtype=np.int32)
        tokens[scalars[Scalar.NUM_GENERATED] == ends, -1] = END
        self.outcome.tokens += int(taken.sum())
        scheduler.append_outputs()
        return scheduler.record_outputs(scalars, tokens, np.zeros(tokens.shape, dtype=np.float32))


def length(number: int, key: int) -> int:
    """Return the length of a response to this prompt with this random key."""
    typical = MEDIAN * random.Random(number).lognormvariate(0, SPREAD)
    return max(1, min(LONGEST + 1, int(typical * random.Random(key).lognormvariate(0, SPREAD))))


def run(max_lag: int, slots: int) -> dict[str, Any]:
    """Return what the steps of a run take, on average."""
    sampler = LengthsOnly(Gpu(WEIGHTS, TOKEN_BYTES, CACHE_BYTES, slots))
    options = SamplingOptions(SAMPLES, LONGEST, batch_size=slots)
    partial, position = PartialRollouts((1 + max_lag) * PROMPTS), 0
    means, longest_lag, spans = list[float](), 0.0, list[float]()
    for step in range(STEPS):
        if step == FIRST:
            sampler.outcome = Outcome()
        numbers = range(position, position + partial.room(0))
        partial.begin(numbers, numbers, step, SAMPLES)
        position = numbers.stop
        finished, unfinished = partial.split(options)
        if (count := PROMPTS - len(finished)) > 0:
            sampler.lengths |= {key: length(group.number, key) for group in unfinished for key in group.keys(options)}
            prompts = [PromptTokens([WORD] * (PROMPT - 1) + [group.number], group.number) for group in unfinished]
            finish_groups(sampler, unfinished, prompts, count, step, options)  # type: ignore[arg-type]
        responses = [each for group in partial.take(PROMPTS, options) for each in group.responses]
        lags = token_lags(responses, step)
        if step >= FIRST and lags is not None:
            metrics = lag_metrics(responses, lags)
            means.append(metrics["lag/mean"])
            spans.append(metrics["lag/spans_mean"])
            longest_lag = max(longest_lag, metrics["lag/max"])
    counted, outcome = STEPS - FIRST, sampler.outcome
    return {
        "max_lag": max_lag,
        "slots": slots,
        "passes": round(outcome.steps / counted),
        "running": round(outcome.running / outcome.steps),
        "tokens": round(outcome.tokens / counted),
        "prefilled": round(outcome.prefilled / counted),
        "preempted": round(outcome.preempted / counted, 1),
        "seconds": round(outcome.seconds / counted, 2),
        "lag_mean": round(sum(means) / len(means), 2),
        "lag_max": longest_lag,
        "spans_mean": round(sum(spans) / len(spans), 2),
    }


def main() -> None:
    """Write the result."""
    assumed: dict[str, float] = {
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "prompt_tokens": PROMPT,
        "median_tokens": MEDIAN,
    }
    assumed |= {"longest": LONGEST, "spread": SPREAD, "steps": STEPS - FIRST, "weights": WEIGHTS}
    one_step = PROMPTS * SAMPLES
    pairs = [(0, one_step), *((lag, slots) for slots in (one_step, one_step * (1 + LAGS[-1])) for lag in LAGS[1:])]
    runs = []
    for max_lag, slots in pairs:
        runs.append(run(max_lag, slots))
        print(runs[-1], flush=True)
        save(about("decoding passes by rollout.max_lag, counted") | {"assumed": assumed, "runs": runs}, OUT)


if __name__ == "__main__":
    main()
