"""Cases that compare each kernel of the paged sampler with its reference in torch, for any device and dtype.

Run as a script in Triton's interpreter, it prints a JSON object of the errors by case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from helpers.triton_interpreter import run_cases
from trimtab.trainer.sampling.paged import torch_ops
from trimtab.trainer.sampling.paged.buffers import PAGE_SIZE, DecodeState, Scalar

Case = Callable[[torch.device, torch.dtype], None]
SamplingParams = tuple[float, float, int]  # temperature, top-p, top-k
HOST = torch.device("cpu")
INACTIVE = 2  # the row of a state that is not active


def close(actual: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    """Equal up to the rounding of a dtype, with NaN in the same places; a GPU's order of addition varies."""
    tolerance = 3e-2 if dtype != torch.float32 else 1e-4 if actual.is_cuda else 1e-5
    torch.testing.assert_close(actual.float(), reference.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def normal(seed: int, *shape: int) -> Tensor:
    """Return normal random numbers, the same for every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def copy_state(state: DecodeState, device: torch.device) -> DecodeState:
    """Copy a state to a device."""
    return DecodeState(*(getattr(state, part.name).clone().to(device) for part in fields(DecodeState)))


@contextmanager
def constants(where: Any, **values: int) -> Iterator[None]:
    """Set constants of a module for a while."""
    before = {name: getattr(where, name) for name in values}
    for name, value in values.items():
        setattr(where, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(where, name, value)


def fused_add_rms_norm(width: int, added: bool, device: torch.device, dtype: torch.dtype) -> None:
    from trimtab.trainer.sampling.paged import kernels

    residual, delta = normal(0, 5, width).to(device), normal(1, 5, width).to(device, dtype)
    residual[3] = 0  # eps alone keeps this row finite
    delta[3] = 0
    weight = normal(2, width).to(device)
    actual, reference = (torch.zeros(5, width, dtype=dtype, device=device) for _ in range(2))
    updated = residual.clone()
    kernels.fused_add_rms_norm(updated, delta if added else None, weight, 1e-5, actual)
    torch_ops.fused_add_rms_norm(residual, delta if added else None, weight, 1e-5, reference)
    assert torch.equal(updated, residual), "the residual stream"
    close(actual, reference, dtype)


def swiglu(width: int, device: torch.device, dtype: torch.dtype) -> None:
    from trimtab.trainer.sampling.paged import kernels

    gate_up = (normal(0, 3, 2 * width) * 4).to(device, dtype)
    gate_up[0, 0], gate_up[1, 0] = 90.0, -90.0  # where exp overflows and underflows fp32
    actual, reference = (torch.zeros(3, width, dtype=dtype, device=device) for _ in range(2))
    kernels.swiglu(gate_up, actual)
    torch_ops.swiglu(gate_up, reference)
    close(actual, reference, dtype)


def paged_attention(
    heads: int, kv: int, d: int, normed: bool, split: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """With or without split-KV and small tiles. What no row may read is NaN."""
    from trimtab.trainer.sampling.paged import kernels
    from trimtab.trainer.sampling.paged.kernels import attention

    rows, pages = 7, 5
    state = DecodeState.allocate(rows + 2, pages, 1, [1], HOST)  # a graph of fewer rows than the state has
    state.scalars[Scalar.ACTIVE, :rows] = 1
    state.scalars[Scalar.ACTIVE, INACTIVE] = 0
    state.scalars[Scalar.POSITION, :rows] = torch.tensor([0, 1, 77, 63, 64, 130, pages * PAGE_SIZE - 1])
    order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(0))
    state.page_table[:rows] = order.view(rows, pages).int()
    cache = torch.full((2, rows * pages, kv, PAGE_SIZE, d), torch.nan)
    for row in range(rows):
        for position in range(int(state.scalars[Scalar.POSITION, row])):
            page = int(state.page_table[row, position // PAGE_SIZE])
            cache[:, page, :, position % PAGE_SIZE] = normal(row * 1000 + position, 2, kv, d)
    cache = cache.to(device, dtype)
    qkv = normal(7, rows, (heads + 2 * kv) * d).to(device, dtype)
    angle = (normal(8, pages * PAGE_SIZE, d // 2) * 3).repeat(1, 2).to(device)  # equal halves, as in the model's table
    cos, sin = angle.cos(), angle.sin()
    qk_norm = (normal(10, d).to(device), normal(11, d).to(device)) if normed else None
    state, actual_cache = copy_state(state, device), cache.clone()
    actual, reference = (torch.full((rows, heads * d), 7.0, dtype=dtype, device=device) for _ in range(2))
    few_programs = {} if split else {"TARGET_PROGRAMS": 1, "SMALL_TILE_PROGRAMS": 1}
    with constants(attention, **few_programs):
        kernels.paged_attention(qkv, qk_norm, 1e-6, (cos, sin), actual_cache, state, actual)
    torch_ops.paged_attention(qkv, qk_norm, 1e-6, (cos, sin), cache, state, reference)
    active = state.scalars[Scalar.ACTIVE, :rows].bool()
    assert actual[active].isfinite().all(), "a row has read what is not its own"
    close(actual[active], reference[active], dtype)
    close(actual_cache, cache, dtype)
    assert actual[INACTIVE].eq(7).all(), "an inactive row was written"


def rope_and_write_kv(heads: int, kv: int, d: int, normed: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Two prefixes end to end, of which one continues in a second page, and a token of padding."""
    from trimtab.trainer.sampling.paged import kernels

    position = torch.cat([torch.arange(5), torch.arange(PAGE_SIZE - 3, PAGE_SIZE + 2), torch.zeros(1).long()]).to(
        device
    )
    page = torch.tensor([3] * 5 + [0] * 3 + [2] * 2 + [-1], device=device)
    qkv = normal(7, 11, (heads + 2 * kv) * d).to(device, dtype)
    angle = (normal(8, 2 * PAGE_SIZE, d // 2) * 3).repeat(1, 2).to(device)
    qk_norm = (normal(10, d).to(device), normal(11, d).to(device)) if normed else None
    reference = torch.full((2, 4, kv, PAGE_SIZE, d), 7.0, dtype=dtype, device=device)
    actual = reference.clone()
    cos_sin = angle.cos(), angle.sin()
    found = kernels.rope_and_write_kv(qkv, qk_norm, 1e-6, cos_sin, actual, position, page)
    expected = torch_ops.rope_and_write_kv(qkv, qk_norm, 1e-6, cos_sin, reference, position, page)
    for ours, others in zip((*found, actual), (*expected, reference), strict=True):
        assert ours.shape == others.shape
        assert ours.dtype == others.dtype
        close(ours, others, dtype)


def copy_pages(kv: int, d: int, device: torch.device, dtype: torch.dtype) -> None:
    """One page may be copied to many, in all layers."""
    from trimtab.trainer.sampling.paged import kernels

    reference = normal(0, 3, 2, 6, kv, PAGE_SIZE, d).to(device, dtype)
    actual = reference.clone()
    source, target = torch.tensor([4, 4, 1], device=device), torch.tensor([0, 5, 2], device=device)
    kernels.copy_pages(actual, source, target)
    torch_ops.copy_pages(reference, source, target)
    assert torch.equal(actual, reference)
    assert torch.equal(actual[:, :, 0], actual[:, :, 5])


def sampling_state(rows: int, eos_token_ids: list[int], params: SamplingParams) -> DecodeState:
    """Rows anywhere in their responses, one of them inactive, with slots in another order than rows."""
    generator = torch.Generator().manual_seed(5)
    state = DecodeState.allocate(rows + 3, 1, 6, eos_token_ids, HOST)
    scalars = state.scalars[:, :rows]
    scalars[Scalar.ACTIVE] = 1
    scalars[Scalar.ACTIVE, INACTIVE] = 0
    scalars[Scalar.RNG_KEY] = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    scalars[Scalar.NUM_GENERATED] = torch.arange(rows) % 6
    scalars[Scalar.POSITION] = scalars[Scalar.NUM_GENERATED] + 3
    scalars[Scalar.LAST_TOKEN] = 3
    scalars[Scalar.MAX_NEW_TOKENS] = 6
    scalars[Scalar.SLOT] = torch.randperm(rows, generator=generator)
    state.tokens.fill_(-1)
    state.logps.fill_(-1)
    state.sampling_params.copy_(torch.tensor(params, dtype=torch.float))
    return state


def sample_both(
    logits: Tensor,
    params: SamplingParams | None,
    eos_token_ids: list[int] | None = None,
    skip: tuple[int, ...] = (),
    differing: int = 0,
) -> DecodeState:
    """Sample with the kernel, and check against the reference, but for the rows to `skip` and `differing` others.

    A row may differ where the random number falls on the border of two tokens, which is rounded differently.
    """
    from trimtab.trainer.sampling.paged import kernels

    rows = len(logits)
    state = sampling_state(rows, [1, 3, 7] if eos_token_ids is None else eos_token_ids, params or (1.0, 1.0, 0))
    actual, reference = copy_state(state, logits.device), copy_state(state, logits.device)
    kernels.sample_tokens(logits, actual, params is None)
    torch_ops.sample_tokens(logits, reference, params is None)
    same = torch.ones(rows, dtype=torch.bool, device=logits.device)
    same[list(skip)] = False
    same &= (actual.scalars[:, :rows] == reference.scalars[:, :rows]).all(0)
    off = rows - int(same.sum()) - len(skip)
    assert off <= differing, f"{off} rows of {rows} differ: {actual.scalars[:, :rows][:, ~same].tolist()}"
    slots = actual.scalars[Scalar.SLOT, :rows][same]
    assert torch.equal(actual.tokens[slots], reference.tokens[slots])
    torch.testing.assert_close(actual.logps[slots], reference.logps[slots], rtol=1e-5, atol=1e-5)
    assert torch.equal(actual.scalars[:, rows:], reference.scalars[:, rows:]), "rows that are not in the batch"
    return actual


def sample_tokens(
    vocab_size: int, params: SamplingParams | None, rows: int, device: torch.device, dtype: torch.dtype
) -> None:
    logits = (normal(vocab_size, rows, vocab_size) * 2).to(device, dtype)
    sample_both(logits, params, differing=rows // 20 if rows > 100 else 0)


def sample_from_ties(params: SamplingParams | None, device: torch.device, dtype: torch.dtype) -> None:
    """Logits of few values: equal ones at the threshold are kept or dropped together, and -0 is 0."""
    logits = normal(3, 6, 150).round().to(device, dtype)
    logits[:4] = (logits[:4] > 1).to(dtype) * 0.5  # halves and zeros
    logits[:4, ::2] *= -1  # of both signs
    sample_both(logits, params)


def sample_possible_tokens(params: SamplingParams | None, device: torch.device, dtype: torch.dtype) -> None:
    """-inf is never sampled, be it first, last, or all of a block; nor is a logit whose exponential is 0."""
    logits = torch.full((7, 150), -torch.inf)
    logits[:, 130:140] = normal(4, 7, 10)
    logits[3:, 5], logits[4:, 149] = 1.0, -500.0
    logits[5] = -3e4
    logits[5, 77] = 2.0
    logits[6, :] = -torch.inf
    logits[6, 64] = -1e4
    logits = logits.to(device, dtype)
    state = sample_both(logits, params)
    for row in (row for row in range(7) if row != INACTIVE):
        token = int(state.scalars[Scalar.LAST_TOKEN, row])
        assert logits[row, token] > -600 or token == 64
        slot, last = int(state.scalars[Scalar.SLOT, row]), int(state.scalars[Scalar.NUM_GENERATED, row]) - 1
        assert state.tokens[slot, last] == token
        assert state.logps[slot, last].isfinite()


def sample_beside_nan(params: SamplingParams | None, device: torch.device, dtype: torch.dtype) -> None:
    """A row of NaN does not affect others, samples a token in range, and has NaN as its log-probability."""
    logits = normal(6, 6, 150).to(device, dtype)
    logits[3], logits[4, 70] = torch.nan, torch.nan
    state = sample_both(logits, params, skip=(3, 4))
    for row in (3, 4):
        assert 0 <= state.scalars[Scalar.LAST_TOKEN, row] < 150
        slot = int(state.scalars[Scalar.SLOT, row])
        assert state.logps[slot, row].isnan()
        assert state.tokens[slot].ge(0).nonzero().tolist() == [[row]]


def sample_to_the_end(device: torch.device, dtype: torch.dtype) -> None:
    """A row becomes inactive at an end token or at its token limit, and not before."""
    logits = torch.full((13, 70), -torch.inf)
    logits[torch.arange(13), torch.arange(13)] = 0.0
    for params in (None, (1.0, 1.0, 0)):
        for eos_token_ids in ([5], [7, 11, 1], [69, 2, 0, 4, 9], []):
            state = sample_both(logits.to(device, dtype), params, eos_token_ids)
            active = [row not in eos_token_ids and row % 6 != 5 and row != INACTIVE for row in range(13)]
            assert state.scalars[Scalar.ACTIVE, :13].tolist() == active
            assert state.tokens[int(state.scalars[Scalar.SLOT, INACTIVE])].eq(-1).all()


def sample_what_is_kept(rows: int, device: torch.device, dtype: torch.dtype) -> None:
    """Over many rows all of the tokens that top-k and top-p keep are sampled, and no others."""
    logits = torch.tensor([0.0, 3.0, -1.0, 2.0, 1.0, -2.0]).expand(rows, 6).contiguous().to(device, dtype)
    for params, kept in (((1.0, 0.85, 0), {1, 3}), ((2.0, 0.9, 3), {1, 3, 4})):
        state = sample_both(logits, params)
        sampled = state.scalars[Scalar.LAST_TOKEN, :rows].tolist()
        assert {token for row, token in enumerate(sampled) if row != INACTIVE} == kept


PARAMS: dict[str, SamplingParams | None] = {
    "greedy": None,
    "unfiltered": (1.0, 1.0, 0),
    "hot": (1.7, 1.0, 0),
    "top-k": (0.7, 1.0, 20),
    "top-p": (1.3, 0.8, 0),
    "both": (1.0, 0.6, 50),
    "one": (1.0, 1e-9, 0),
    "top-k above the vocabulary": (1.0, 1.0, 100_000),
}
HARD = ("greedy", "unfiltered", "both")
SHAPES = [(6, 2, 32), (4, 4, 32), (8, 1, 32), (24, 1, 32)]  # query heads, kv heads, width: groups of 3, 1, 8, 24
GPU_SHAPES = [(group * kv, kv, d) for group, kv, d in product((1, 3, 4, 8, 32), (2,), (64, 128))]


def cases(shapes: list[tuple[int, int, int]], vocab_sizes: list[int], rows: int) -> dict[str, Case]:
    """Return every case by its name."""
    made: dict[str, Case] = {}
    for width, added in product((1, 64, 72), (False, True)):
        made[f"fused_add_rms_norm {width}{' added' if added else ''}"] = partial(fused_add_rms_norm, width, added)
    for width in (100, 1024, 1500):
        made[f"swiglu {width}"] = partial(swiglu, width)
    for (heads, kv, d), (normed, split) in product(shapes, ((False, False), (True, True))):
        name = f"paged_attention {heads}/{kv}x{d}{' normed' if normed else ''}{' split' if split else ''}"
        made[name] = partial(paged_attention, heads, kv, d, normed, split)
    for heads, kv, d in shapes:
        made[f"rope_and_write_kv {heads}/{kv}x{d}"] = partial(rope_and_write_kv, heads, kv, d, False)
        made[f"rope_and_write_kv {heads}/{kv}x{d} normed"] = partial(rope_and_write_kv, heads, kv, d, True)
    for kv, d in ((1, 32), (3, 64)):
        made[f"copy_pages {kv}x{d}"] = partial(copy_pages, kv, d)
    for (name, params), vocab_size in product(PARAMS.items(), vocab_sizes):
        made[f"sample {name} of {vocab_size}"] = partial(sample_tokens, vocab_size, params, rows)
    for name, params in ((name, PARAMS[name]) for name in HARD):
        made[f"sample {name} from ties"] = partial(sample_from_ties, params)
        made[f"sample {name} of possible tokens"] = partial(sample_possible_tokens, params)
        made[f"sample {name} beside nan"] = partial(sample_beside_nan, params)
    return made | {
        "sample to the end": sample_to_the_end,
        "sample what is kept": partial(sample_what_is_kept, 4 * rows),
    }


BLOCK = 64  # logits per block in the interpreter: several blocks even of a small vocabulary
INTERPRETED = cases(SHAPES, [BLOCK, 150], 4)
# Each takes seconds in the interpreter, and another case runs the same lines.
SLOW = (
    "paged_attention 4/4x32 normed split", "paged_attention 24/1x32 normed split",
    "paged_attention 4/4x32", "sample both beside nan", "sample both from ties", "sample both of possible tokens",
    "sample both of 64", "sample one of 150", "sample top-k of 150", "sample top-p of 150", "sample top-k of 64",
)  # fmt: skip


def main() -> None:
    from trimtab.trainer.sampling.paged.kernels import sampling

    sampling.BLOCK = BLOCK
    run_cases(INTERPRETED, SLOW)


if __name__ == "__main__":
    main()
