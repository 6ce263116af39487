"""The sampler: prompts in, responses out, over a paged cache; on a GPU every step is one CUDA graph.

A step's work on the host is a handful of numbers every `STRIDE` steps. Between those the device runs alone: it draws,
notes where each response ends, and leaves rows that have ended out of attention and drawing. The host waits for it once
a stride, and reads what a stride drew while the next one runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.rollout.paged import torch_ops
from trimtab.rollout.paged.decode_state import HOME, LIVE, MADE, PAGE, State
from trimtab.rollout.paged.decoder import Decoder, Memory
from trimtab.rollout.paged.graphs import bucket, captured
from trimtab.rollout.paged.page_allocator import Pool
from trimtab.rollout.paged.prefill import Reader, send
from trimtab.rollout.paged.scheduler import Group, Sample, Schedule
from trimtab.rollout.rng import rng_keys
from trimtab.rollout.types import PromptTokens, Response, SamplingOptions, check_prompts

STRIDE = 16  # steps between two looks at which rows have ended
PREFILL = 32_768  # prompt tokens read in one pass
FIRST = 4096  # those of the first pass, so that the device has work while the host makes the others ready
GRAIN = 4  # pages: sequences are given room by multiples of so many, so that a longer prompt does not mean new graphs


@dataclass
class PagedSampler:
    """Samples from `model`, whose weights may change between calls.

    `dtype` is the type of its linear maps; `memory` the share of the device's memory that the cache may take.
    """

    model: Any
    end_tokens: frozenset[int]
    dtype: torch.dtype
    memory: float = 0.3
    pages: int | None = None  # how many the cache has, where that is not to be found out
    stride: int = STRIDE
    _decoder: Decoder | None = None
    _memory: Memory | None = None
    _reader: Reader | None = None
    _graphs: dict[tuple[int, bool], Any] = field(default_factory=dict)
    _embedding: int = 0

    @torch.no_grad()
    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """For every prompt, `options.samples` responses."""
        if not prompts:
            return []
        if self._decoder is None:
            self._decoder = Decoder(self.model, self.dtype)
        else:
            self._decoder.refresh()
        check_prompts(prompts, len(self._decoder.embedding))
        memory = self._room(self._decoder, prompts, options)
        sampling = np.array([options.temperature or 1.0, options.top_p, options.top_k], dtype=np.float32)
        send(sampling, memory.state.sampling)
        samples = _samples(prompts, step, options)
        schedule = Schedule(
            [Group(prompt.ids, deque(group)) for prompt, group in zip(prompts, samples, strict=True)],
            Pool(memory.cache.shape[2]),
            min(options.batch, memory.state.rows),
            memory.state.pages.shape[1],
            options.max_new_tokens,
            self.stride,
        )
        self._run(schedule, memory, options.temperature == 0)
        return [[self._response(sample) for sample in group] for group in samples]

    def _run(self, schedule: Schedule, memory: Memory, greedy: bool) -> None:
        """Draw all samples."""
        while schedule.queue or schedule.running:
            self._admit(schedule, memory)
            schedule.grow()
            count, steps = _upload(schedule, memory.state), schedule.steps()
            rows = min(bucket(count), memory.state.rows)
            for _ in range(steps):
                self._step(rows, greedy, memory)
            coming = _fetch(count, steps, memory.state)
            schedule.read()
            if memory.cache.is_cuda:
                torch.cuda.current_stream(memory.cache.device).synchronize()
            schedule.leave(schedule.look(*(part.numpy() for part in coming)))
            for home in schedule.short():
                schedule.wait_again(home)
        schedule.read()

    def _admit(self, schedule: Schedule, memory: Memory) -> None:
        assert self._reader is not None
        tokens = FIRST
        while (admission := schedule.admit(tokens)).started:
            tokens = PREFILL
            if groups := admission.groups:
                self._reader.read([g.prefix[:-1] for g in groups], [g.pages or [] for g in groups])
            if admission.copy_to:
                pages = torch.empty(2, len(admission.copy_to), dtype=torch.int64, device=memory.cache.device)
                send(np.array([admission.copy_from, admission.copy_to]), pages)
                memory.parts.copy_pages(memory.cache, *pages)
        if not schedule.running:
            raise RuntimeError(
                f"the cache's {schedule.pool.pages} pages are too few for one response: raise its memory"
            )

    def _response(self, sample: Sample) -> Response:
        finished = sample.tokens[-1] in self.end_tokens
        return Response(sample.tokens, sample.logp, finished, sample=sample.sample)

    def _step(self, rows: int, greedy: bool, memory: Memory) -> None:
        assert self._decoder is not None
        if memory.cache.device.type != "cuda":
            self._decoder.step(rows, greedy, memory)
            return
        if (rows, greedy) not in self._graphs:
            self._graphs[rows, greedy] = self._graph(rows, greedy, memory)
        self._graphs[rows, greedy].replay()

    def _graph(self, rows: int, greedy: bool, memory: Memory) -> Any:
        """The step as a graph. It is first run with no row alive, which changes nothing."""
        assert self._decoder is not None
        decoder, live = self._decoder, memory.state.numbers[LIVE].clone()
        memory.state.numbers[LIVE] = 0
        graph = captured(lambda: decoder.step(rows, greedy, memory))
        memory.state.numbers[LIVE] = live
        return graph

    def _room(self, decoder: Decoder, prompts: Sequence[PromptTokens], options: SamplingOptions) -> Memory:
        """The memory of the last call, or a larger one where this call needs it."""
        longest = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens
        each = -(-longest // (PAGE * GRAIN)) * GRAIN
        rows = bucket(min(options.batch, len(prompts) * options.samples))
        longest_response, before = options.max_new_tokens, self._memory
        if before is not None:
            state = before.state
            rows, each = max(rows, state.rows), max(each, state.pages.shape[1])
            longest_response = max(longest_response, state.tokens.shape[1])
        pages = self.pages or min(rows * each, self._most_pages(decoder))
        pages = max(pages, 2 * each + 2)
        if (
            before is None
            or (rows, each, longest_response) != (*before.state.pages.shape, before.state.tokens.shape[1])
            or self._embedding != decoder.embedding.data_ptr()
        ):
            self._memory = self._reader = before = None
            self._graphs.clear()
            state = State.empty(rows, each, longest_response, sorted(self.end_tokens), decoder.device)
            memory = Memory.of(decoder, pages, state, parts_for(decoder.device))
            self._reader, self._embedding = Reader(decoder, memory), decoder.embedding.data_ptr()
            self._memory = memory  # last: whatever stops us before, the next call begins anew
        assert self._memory is not None
        return self._memory

    def _most_pages(self, decoder: Decoder) -> int:
        if decoder.device.type != "cuda":
            return 2**31
        whole: int = torch.cuda.get_device_properties(decoder.device).total_memory
        return int(self.memory * whole) // page_bytes(len(decoder.layers), decoder.kv, decoder.d, decoder.dtype)


def page_bytes(layers: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """What a page takes in all layers."""
    return int(layers * 2 * kv_heads * PAGE * head_size * dtype.itemsize)


def parts_for(device: torch.device) -> Any:
    """The parts of a step for a device: kernels where there is a GPU and Triton."""
    if device.type != "cuda":
        return torch_ops
    from trimtab.rollout.paged import kernels

    return kernels


def _samples(prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Sample]]:
    """What is to be drawn for every prompt."""
    keys = rng_keys(options.seed, step, [prompt.number for prompt in prompts], options.samples)
    return [
        [Sample(number, k, key, prompt.ids) for k, key in enumerate(own)]
        for number, (prompt, own) in enumerate(zip(prompts, keys.view(len(prompts), -1).tolist(), strict=True))
    ]


def _upload(schedule: Schedule, state: State) -> int:
    """Tell the device who is in the batch; how many they are. Rows beyond them do not live."""
    numbers, pages = schedule.rows()
    count: int = numbers.shape[1]
    whole = np.zeros(state.numbers.shape, dtype=np.int64)
    whole[:, :count] = numbers
    send(whole, state.numbers)
    send(pages, state.pages[:count])
    return count


def _fetch(count: int, steps: int, state: State) -> list[Tensor]:
    """The numbers of the first rows and the last tokens and log-probabilities of each, on their way to the host."""
    numbers = state.numbers[:, :count]
    last = (numbers[MADE, :, None] + torch.arange(-steps, 0, device=numbers.device)).clamp(min=0)
    homes = numbers[HOME, :, None]
    parts = (numbers, state.tokens[homes, last], state.logps[homes, last])
    return [part.to("cpu", non_blocking=True, copy=True) for part in parts]  # into pinned memory
