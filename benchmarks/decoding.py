"""Where the time of a decoding step goes, for a batch of so many sequences of so many tokens: kernel by kernel.

Qwen3's shapes with random weights. For each batch, the time of a step (one CUDA graph), the time of its kernels by
kind, and the least time that reading the weights, the KV cache and the matrix products at the data sheet's peak take.
`--programs` also times the step with other numbers of attention programs, from which on rows are not split.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kernel_times import kernel_times
from result_file import about, save
from sampler import PEAK, PROMPT, copy_speed, min_bytes_read, qwen3, random_model
from stopwatch import seconds_of
from trimtab.trainer.sampling import PagedSampler
from trimtab.trainer.sampling.paged.buffers import PAGE_SIZE, Scalar
from trimtab.trainer.sampling.paged.decoder import Decoder

STEPS = 16
BATCHES = [(1, 3500), (8, 2500), (32, 1500), (64, 4000), (64, 1100), (128, 750), (192, 500), (256, 400), (384, 200)]
BATCHES += [(512, 100), (512, 4000)]
KINDS = {"attention": "attention", "combine": "attention", "rms_norm": "norm", "swiglu": "swiglu"}
KINDS |= {"sample": "sampling", "block_softmax": "sampling"}


def fill(sampler: PagedSampler, rows: int, length: int) -> None:
    """Make a batch of active rows at one position, each with its own pages as far as there are enough."""
    buffers = sampler._buffers
    assert buffers is not None
    state = buffers.state
    state.scalars.zero_()
    state.sampling_params.copy_(torch.tensor([1.0, 1.0, 0.0]))  # temperature 1, no top-p, no top-k
    state.scalars[Scalar.ACTIVE, :rows] = 1
    state.scalars[Scalar.POSITION, :rows] = length
    state.scalars[Scalar.MAX_NEW_TOKENS] = state.tokens.shape[1]
    state.scalars[Scalar.SLOT] = torch.arange(state.rows, device=state.scalars.device)
    pages = -(-(length + 2 * STEPS) // PAGE_SIZE)
    own = torch.arange(rows * pages, device=state.scalars.device) % buffers.num_pages
    state.page_table[:rows, :pages] = own.view(rows, pages).int()


def step_seconds(sampler: PagedSampler, rows: int, length: int, device: torch.device) -> tuple[float, Any]:
    """Return the seconds of a decoding step, and its graph."""
    buffers, decoder = sampler._buffers, sampler._decoder
    assert buffers is not None and decoder is not None
    fill(sampler, rows, length)
    if device.type != "cuda":
        return seconds_of(lambda: decoder.decode_step(rows, False, buffers), device), None
    graph = sampler._capture(decoder, rows, False, buffers)

    def steps() -> None:
        for _ in range(STEPS):
            graph.replay()

    seconds_of(steps, device)
    times = []
    for _ in range(3):
        fill(sampler, rows, length)
        times.append(seconds_of(steps, device) / STEPS)
    return min(times), graph


def measure(name: str, device: torch.device, small: bool, programs: list[int]) -> list[dict[str, Any]]:
    """Time the batches of one shape."""
    config = qwen3(name, small)
    sampler = PagedSampler(random_model(config, device), frozenset({config.vocab_size}), torch.bfloat16, 0.5)
    rows = 8 if small else 512
    sampler._decoder = Decoder(sampler.model, sampler.dtype)
    sampler._ensure_buffers(sampler._decoder, rows, PROMPT + 4096, 4096)
    speed = copy_speed(device, 2**24 if small else 2**32)
    weights, _ = min_bytes_read(config, [1])
    token = 4.0 * config.num_hidden_layers * int(config.num_key_value_heads or 0) * config.head_dim
    result = []
    for rows, length in [(8, 100)] if small else BATCHES:
        seconds, graph = step_seconds(sampler, rows, length, device)
        limit = max(weights / speed, weights * rows / PEAK) + rows * length * token / speed
        row: dict[str, Any] = {"rows": rows, "length": length, "ms": round(1000 * seconds, 3)}
        row |= {"limit_ms": round(1000 * limit, 3), "of_limit": round(limit / seconds, 3)}
        if graph is not None:
            row["kernels_ms"] = kernel_times(graph.replay, KINDS)
            for number in programs:
                with patch("trimtab.trainer.sampling.paged.kernels.attention.TARGET_PROGRAMS", number):
                    row[f"ms at {number} programs"] = round(1000 * step_seconds(sampler, rows, length, device)[0], 3)
        print(name, row, flush=True)
        result.append(row)
    return result


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["1.7B", "8B"])
    parser.add_argument("--programs", nargs="*", type=int, default=[])
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script on a CPU")
    args = parser.parse_args()
    device = torch.device("cpu" if args.small else "cuda")
    result = about("where the time of a decoding step goes", device)
    for name in args.shapes:
        result[f"Qwen3-{name} shape"] = measure(name, device, args.small, args.programs)
        if not args.small:
            torch.cuda.empty_cache()
        save(result, args.out)


if __name__ == "__main__":
    main()
