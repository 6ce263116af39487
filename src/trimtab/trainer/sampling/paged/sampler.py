"""The paged sampler: continuous batching over a paged KV cache, each decoding step one CUDA graph.

Host and device sync once every `STEPS_PER_SYNC` steps (multi-step scheduling). In between the device runs alone: it
samples, checks for end tokens, and skips finished rows in attention and sampling. The host appends the tokens of one
interval to their sequences while the device runs the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimtab.data import PromptTokens, Requests, Response, SamplingOptions, Turns, check_prompts
from trimtab.trainer.sampling.paged import torch_ops
from trimtab.trainer.sampling.paged.buffers import (
    PAGE_SIZE,
    CachedKeys,
    DecodeState,
    DeviceBuffers,
    PageAllocator,
    PrefillBatch,
    Scalar,
    num_cache_pages,
    page_bytes,
    pages_per_sequence,
)
from trimtab.trainer.sampling.paged.decoder import Decoder, capture_graph, graph_size, next_power_of_2
from trimtab.trainer.sampling.paged.scheduler import Scheduler, SequenceGroup
from trimtab.trainer.sampling.paged.sides import OtherSide, RequestSide, Side
from trimtab.trainer.sampling.request_queue import RequestQueue
from trimtab.trainer.sampling.sequence import new_sequences

STEPS_PER_SYNC = 16
MAX_PREFILL_TOKENS = 32_768  # prompt tokens in one prefill
FIRST_PREFILL_TOKENS = 4096  # fewer in the first, so that the device has work while the host packs the next


@dataclass
class PagedSampler:
    """Samples from `model`, whose weights may change between calls, with a forward of its own.

    - Continuous batching: finished sequences leave the batch, waiting ones take their slots.
    - Paged KV cache with prefix sharing: a prompt is prefilled once for all of its samples.
    - Preemption by recompute where pages run out.
    - Conversations give up their slot while they wait for a reply, and keep their pages while there is room.
    - Decoding steps and small prefills are CUDA graphs.

    `dtype` is that of the linear maps, `kv_cache_memory` the share of the device's memory that the KV cache may take;
    `max_pages` limits its pages directly. On a CPU it runs in plain torch and samples the native sampler's tokens.
    """

    model: Any
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    kv_cache_memory: float = 0.3
    max_pages: int | None = None
    steps_per_sync: int = STEPS_PER_SYNC
    _decoder: Decoder | None = None
    _buffers: DeviceBuffers | None = None
    _prefill: Prefill | None = None
    _graphs: dict[tuple[int, bool], Any] = field(default_factory=dict)
    _embedding_address: int = 0

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, turns: Turns | None = None
    ) -> list[list[Response]]:
        """Return `options.samples` responses for each prompt, in order."""
        decoder = self._refreshed()
        if not prompts:  # not before: several processes gather the weights of sharded layers together
            return []
        vocab_size = len(decoder.embedding)
        check_prompts(prompts, vocab_size)
        longest = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens
        longest += turns.max_observed_tokens if turns is not None else 0
        rows = min(options.batch_size, len(prompts) * options.samples)
        buffers = self._ensure_buffers(decoder, rows, longest, options.max_new_tokens)
        sequences = new_sequences(prompts, step, options)
        groups = [SequenceGroup(prompt.ids, deque(group)) for prompt, group in zip(prompts, sequences, strict=True)]
        scheduler = self._scheduler(groups, buffers, options, options.max_new_tokens, conversing=turns is not None)
        other_side = None if turns is None else OtherSide(turns, scheduler, self.eos_token_ids, vocab_size)
        self._generate(scheduler, buffers, options, other_side)
        return [[sequence.response(self.eos_token_ids) for sequence in group] for group in sequences]

    @torch.no_grad()
    def serve(self, requests: Requests, options: SamplingOptions) -> None:
        """Answer requests until there are no more; the processes of a sharded policy call it together.

        It has room for `options.batch_size` requests of `requests.max_tokens` tokens, as far as memory goes.
        """
        decoder = self._refreshed()
        buffers = self._ensure_buffers(decoder, options.batch_size, requests.max_tokens, requests.max_tokens)
        scheduler = self._scheduler([], buffers, options, requests.max_tokens, serving=True)
        queue = RequestQueue(requests, self.eos_token_ids, len(decoder.embedding))
        self._generate(scheduler, buffers, options, RequestSide(queue, scheduler))

    def _refreshed(self) -> Decoder:
        """Return the decoder with the policy's current weights."""
        if self._decoder is None:
            self._decoder = Decoder(self.model, self.dtype)
        else:
            self._decoder.refresh()
        return self._decoder

    def _scheduler(
        self,
        groups: Sequence[SequenceGroup],
        buffers: DeviceBuffers,
        options: SamplingOptions,
        max_new_tokens: int,
        **mode: bool,
    ) -> Scheduler:
        return Scheduler(
            groups,
            PageAllocator(buffers.num_pages),
            slots=min(options.batch_size, buffers.state.rows),
            pages_per_slot=buffers.state.page_table.shape[1],
            max_new_tokens=max_new_tokens,
            steps_per_sync=self.steps_per_sync,
            **mode,
        )

    def _generate(
        self, scheduler: Scheduler, buffers: DeviceBuffers, options: SamplingOptions, side: Side | None
    ) -> None:
        """Decode until all sequences have finished, and `side` brings no more."""
        greedy = options.temperature == 0  # from all tokens, with their log-probs at temperature 1
        params = [1.0, 1.0, 0.0] if greedy else [options.temperature, options.top_p, options.top_k]
        copy_to_device(np.array(params, dtype=np.float32), buffers.state.sampling_params)
        while scheduler.queue or scheduler.running or (side is not None and side.is_open):
            if side is not None:
                side.take()
                if not (scheduler.queue or scheduler.running):
                    continue
            self._admit(scheduler, buffers)
            scheduler.allocate_pages()
            count, steps = _upload(scheduler, buffers.state), scheduler.steps_until_sync()
            rows = min(graph_size(count), buffers.state.rows)
            for _ in range(steps):
                self._decode_step(rows, greedy, buffers)
            outputs = _download(count, steps, buffers.state)
            scheduler.append_outputs()  # those of the last interval: the device is busy with this one
            if side is not None:
                side.submit()
            if buffers.kv_cache.is_cuda:
                torch.cuda.current_stream(buffers.kv_cache.device).synchronize()
            finished = scheduler.record_outputs(*(output.numpy() for output in outputs))
            if side is not None:
                finished = side.retire(finished)
            scheduler.release(finished)
            for slot in scheduler.slots_to_preempt():
                scheduler.preempt(slot)
        scheduler.append_outputs()

    def _admit(self, scheduler: Scheduler, buffers: DeviceBuffers) -> None:
        """Admit what there is room for: prefill prompts and copy their partly filled pages."""
        assert self._prefill is not None
        max_tokens = FIRST_PREFILL_TOKENS
        while (admission := scheduler.admit(max_tokens)).admitted:
            max_tokens = MAX_PREFILL_TOKENS
            # Apart: those that continue what is in the cache attend to it, and run without a CUDA graph.
            for continued in (False, True):
                if groups := [group for group in admission.prefill if bool(group.num_cached) == continued]:
                    cached = [group.num_cached for group in groups] if continued else None
                    self._prefill.run([g.prefix[:-1] for g in groups], [g.pages or [] for g in groups], cached)
            if admission.copy_to:
                pages = torch.empty(2, len(admission.copy_to), dtype=torch.int64, device=buffers.kv_cache.device)
                copy_to_device(np.array([admission.copy_from, admission.copy_to]), pages)
                buffers.ops.copy_pages(buffers.kv_cache, *pages)
        if not scheduler.running:
            raise RuntimeError(
                f"the KV cache's {buffers.num_pages} pages are too few for one response: raise rollout.kv_cache_memory"
            )

    def _decode_step(self, rows: int, greedy: bool, buffers: DeviceBuffers) -> None:
        assert self._decoder is not None
        if buffers.kv_cache.device.type != "cuda":
            self._decoder.decode_step(rows, greedy, buffers)
            return
        if (rows, greedy) not in self._graphs:
            self._graphs[rows, greedy] = self._capture(self._decoder, rows, greedy, buffers)
        self._graphs[rows, greedy].replay()

    def _capture(self, decoder: Decoder, rows: int, greedy: bool, buffers: DeviceBuffers) -> Any:
        # No row is active during the warm-up run, which then changes nothing.
        active = buffers.state.scalars[Scalar.ACTIVE].clone()
        buffers.state.scalars[Scalar.ACTIVE] = 0
        graph = capture_graph(lambda: decoder.decode_step(rows, greedy, buffers))
        buffers.state.scalars[Scalar.ACTIVE] = active
        return graph

    def _ensure_buffers(self, decoder: Decoder, rows: int, longest: int, max_new_tokens: int) -> DeviceBuffers:
        """Return the buffers of the last call, or larger ones where this call needs them."""
        shape = graph_size(rows), pages_per_sequence(longest), max_new_tokens
        address = decoder.embedding.data_ptr()  # graphs hold it too, and loading weights may move it
        if self._buffers is not None:
            current = self._buffers.state.shape
            rows, pages_each, max_new_tokens = map(max, shape, current)  # never smaller than before
            if (rows, pages_each, max_new_tokens) == current and address == self._embedding_address:
                return self._buffers
            shape = rows, pages_each, max_new_tokens
        # The old ones go first: there is not room for both.
        self._buffers = self._prefill = None
        self._graphs.clear()
        state = DecodeState.allocate(*shape, sorted(self.eos_token_ids), decoder.device)
        num_pages = num_cache_pages(*shape[:2], self.max_pages or self._page_budget(decoder))
        buffers = decoder.allocate(num_pages, state, _ops_for(decoder.device))
        self._prefill, self._embedding_address = Prefill(decoder, buffers), address
        self._buffers = buffers  # last: after an interruption before this line, the next call allocates anew
        return buffers

    def _page_budget(self, decoder: Decoder) -> int:
        """Return how many pages fit into the KV cache's share of the device's memory."""
        if decoder.device.type != "cuda":
            return 2**31
        memory: int = torch.cuda.get_device_properties(decoder.device).total_memory
        itemsize = decoder.dtype.itemsize
        page = page_bytes(len(decoder.layers), decoder.num_kv_heads, decoder.head_dim, itemsize)
        return int(self.kv_cache_memory * memory) // page


def _ops_for(device: torch.device) -> Any:
    """Return the module with a step's operations: Triton kernels on a GPU, plain torch elsewhere."""
    if device.type != "cuda":
        return torch_ops
    from trimtab.trainer.sampling.paged import kernels

    return kernels


def _upload(scheduler: Scheduler, state: DecodeState) -> int:
    """Copy the batch to the device, with the rows beyond it inactive; return how many sequences it has."""
    scalars, page_table = scheduler.batch()
    count: int = scalars.shape[1]
    padded = np.zeros(state.scalars.shape, dtype=np.int64)
    padded[:, :count] = scalars
    copy_to_device(padded, state.scalars)
    copy_to_device(page_table, state.page_table[:count])
    return count


def _download(count: int, steps: int, state: DecodeState) -> list[Tensor]:
    """Start copying the first rows' scalars and last `steps` tokens and log-probabilities to the host."""
    scalars = state.scalars[:, :count]
    last = (scalars[Scalar.NUM_GENERATED, :, None] + torch.arange(-steps, 0, device=scalars.device)).clamp(min=0)
    slots = scalars[Scalar.SLOT, :, None]
    outputs = (scalars, state.tokens[slots, last], state.logps[slots, last])
    return [output.to("cpu", non_blocking=True, copy=True) for output in outputs]  # into pinned memory


# Tokens x weights of a layer. Below, a GPU runs a layer faster than the host launches its kernels: use a CUDA graph.
LAUNCH_BOUND = 3e10
MIN_GRAPH_TOKENS = 256
MAX_GRAPHS = 32  # all graphs are dropped when there would be more

Array = npt.NDArray[Any]


@dataclass
class Prefill:
    """Runs prefills into the KV cache; small ones as CUDA graphs, padded to a few sizes."""

    decoder: Decoder
    buffers: DeviceBuffers
    _graphs: dict[tuple[int, int, int], tuple[PrefillBatch, Any]] = field(default_factory=dict)
    _pool: Any = None  # the memory that all graphs share, since they run one at a time

    def run(
        self, prefixes: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], cached: Sequence[int] | None = None
    ) -> None:
        """Write the keys and values of prefixes into their pages; those of the first `cached` tokens are there."""
        if cached is not None:
            self._continue(prefixes, pages, cached)
            return
        arrays, max_seqlen = pack_prefixes(prefixes, pages), max(len(prefix) for prefix in prefixes)
        tokens, padded = len(arrays[0]), max(MIN_GRAPH_TOKENS, graph_size(len(arrays[0])))
        if is_launch_bound(self.decoder, padded):
            batch, graph = self._captured(padded, next_power_of_2(len(prefixes)), next_power_of_2(max_seqlen))
        else:
            batch, graph = PrefillBatch.padding(tokens, len(prefixes), max_seqlen, self.decoder.device), None
        # Padding belongs to no sequence (those beyond the last are empty) and to no page (-1).
        for array, target, fill in zip(arrays, batch.tensors, (0, 0, -1, tokens), strict=True):
            copy_to_device(np.pad(array, (0, len(target) - len(array)), constant_values=fill), target)
        if graph is None:
            self.decoder.prefill(batch, self.buffers)
        else:
            graph.replay()

    def _continue(
        self, prefixes: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], cached: Sequence[int]
    ) -> None:
        """Prefill the tokens after the first `cached` ones, which attend to those in the cache."""
        # Not as a CUDA graph: the lengths of the cached tokens would be one more dimension of its size.
        device, added = self.decoder.device, [prefix[n:] for prefix, n in zip(prefixes, cached, strict=True)]
        arrays = pack_prefixes(added, pages, cached)
        lengths = [len(prefix) for prefix in prefixes]
        position, page, cu_seqlens = locate_tokens(lengths, pages)
        # At least 2: for 1 the flash kernel takes another path.
        max_seqlen = max(2, *map(len, added))
        batch = PrefillBatch.padding(len(arrays[0]), len(added), max_seqlen, device)
        keys = CachedKeys.empty(len(page), len(prefixes), max(lengths), device)
        pairs = zip((*arrays, page, position % PAGE_SIZE, cu_seqlens), (*batch.tensors, *keys.tensors), strict=True)
        for array, target in pairs:
            copy_to_device(array, target)
        self.decoder.prefill(batch, self.buffers, keys)

    def _captured(self, tokens: int, prefixes: int, max_seqlen: int) -> tuple[PrefillBatch, Any]:
        """Return the input and the graph of a prefill of this size."""
        key = tokens, prefixes, max_seqlen
        if key not in self._graphs:
            if len(self._graphs) == MAX_GRAPHS:
                self._graphs.clear()
                self._pool = None
            # Nothing but padding: the warm-up run before the capture writes no keys and values.
            batch = PrefillBatch.padding(*key, self.decoder.device)
            graph = capture_graph(lambda: self.decoder.prefill(batch, self.buffers), self._pool)
            self._pool = graph.pool()
            self._graphs[key] = batch, graph
        return self._graphs[key]


def is_launch_bound(decoder: Decoder, tokens: int) -> bool:
    """Return whether launching the kernels of a prefill takes longer than running them."""
    layer = decoder.layers[0]
    linears = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
    weights = sum(linear.weight.numel() for linear in linears)
    # In fp32 attention is not the flash kernel but a loop with a host sync, which cannot be captured.
    return decoder.device.type == "cuda" and decoder.dtype != torch.float32 and tokens * weights <= LAUNCH_BOUND


def pack_prefixes(
    prefixes: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], starts: Sequence[int] | None = None
) -> tuple[Array, Array, Array, Array]:
    """Return the tokens of all prefixes end to end, each one's position and page, and cu_seqlens.

    `starts` are the positions of the prefixes' first tokens; 0 unless given.
    """
    position, page, cu_seqlens = locate_tokens([len(prefix) for prefix in prefixes], pages, starts)
    return np.fromiter(chain.from_iterable(prefixes), np.int64, len(position)), position, page, cu_seqlens


def locate_tokens(
    counts: Sequence[int], pages: Sequence[Sequence[int]], starts: Sequence[int] | None = None
) -> tuple[Array, Array, Array]:
    """Return position and page of every token of sequences of so many tokens, end to end, and cu_seqlens."""
    lengths = np.array(counts)
    cu_seqlens = np.concatenate([[0], lengths.cumsum()])
    position = np.arange(cu_seqlens[-1]) - cu_seqlens[:-1].repeat(lengths)
    if starts is not None:
        position += np.repeat(starts, lengths)
    page_counts = np.array([len(held) for held in pages])
    first_page = page_counts.cumsum() - page_counts
    flat = np.fromiter(chain.from_iterable(pages), np.int64, page_counts.sum())
    return position, flat[first_page.repeat(lengths) + position // PAGE_SIZE], cu_seqlens.astype(np.int32)


def copy_to_device(array: Array, target: Tensor) -> None:
    """Copy an array into a tensor, from pinned memory where it is on a GPU: the host need not wait then."""
    tensor = torch.from_numpy(array)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)
