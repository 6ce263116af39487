"""Attention over packed sequences is attention over each by itself."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from trimtab.trainer import attention
from trimtab.trainer.attention import causal_attention

LENGTHS = (5, 1, 12, 3)


def packed(
    lengths: tuple[int, ...] = LENGTHS,
    heads: int = 6,
    kv_heads: int = 2,
    width: int = 16,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(0)

    def normal(count: int) -> Tensor:
        values = torch.randn(sum(lengths), count, width, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_()

    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return normal(heads), normal(kv_heads), normal(kv_heads), cu_seqlens, max(lengths, default=0)


def by_formula(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float | None = None) -> Tensor:
    """The formula, one sequence and one head at a time."""
    groups = query.shape[1] // key.shape[1]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    rows = []
    bounds = cu_seqlens.tolist()
    for first, last in pairwise(bounds):
        heads = []
        for head in range(query.shape[1]):
            q, k, v = query[first:last, head], key[first:last, head // groups], value[first:last, head // groups]
            later = torch.ones(last - first, last - first, dtype=torch.bool, device=q.device).triu(1)
            heads.append((q @ k.T * scale).masked_fill(later, -torch.inf).softmax(-1) @ v)
        rows.append(torch.stack(heads, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_every_sequence_attends_to_itself_alone(kv_heads: int, scale: float | None) -> None:
    query, key, value, cu_seqlens, max_seqlen = packed(kv_heads=kv_heads)
    out = causal_attention(query, key, value, cu_seqlens, max_seqlen, scale)
    torch.testing.assert_close(out, by_formula(query, key, value, cu_seqlens, scale))


def test_gradients_are_those_of_the_formula() -> None:
    query, key, value, cu_seqlens, max_seqlen = packed()
    weight = torch.linspace(-1, 1, query.numel(), dtype=torch.float64).reshape(query.shape)
    ours = torch.autograd.grad(
        (causal_attention(query, key, value, cu_seqlens, max_seqlen) * weight).sum(), (query, key, value)
    )
    theirs = torch.autograd.grad((by_formula(query, key, value, cu_seqlens) * weight).sum(), (query, key, value))
    torch.testing.assert_close(ours, theirs)


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    query, key, value, cu_seqlens, max_seqlen = packed(dtype=torch.float32)
    alone = causal_attention(query[6:18], key[6:18], value[6:18], torch.tensor([0, 12], dtype=torch.int32), 12)
    assert torch.equal(causal_attention(query, key, value, cu_seqlens, max_seqlen)[6:18], alone)


def test_an_empty_batch_gives_an_empty_output() -> None:
    query, key, value, cu_seqlens, max_seqlen = packed(lengths=())
    assert causal_attention(query, key, value, cu_seqlens, max_seqlen).shape == (0, 6, 16)


def test_a_sequence_may_be_empty() -> None:
    query, key, value, _, max_seqlen = packed()
    cu_seqlens = torch.tensor([0, 5, 5, 6, 18, 21], dtype=torch.int32)
    ends = torch.tensor([0, 5, 6, 18, 21], dtype=torch.int32)
    ours, theirs = (causal_attention(query, key, value, where, max_seqlen) for where in (cu_seqlens, ends))
    assert torch.equal(ours, theirs)


def test_under_autocast_it_runs_in_half_precision_as_sdpa_does() -> None:
    query, key, value, cu_seqlens, max_seqlen = packed(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = causal_attention(query, key, value.bfloat16(), cu_seqlens, max_seqlen)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), by_formula(query, key, value, cu_seqlens), atol=0.03, rtol=0.03)


def test_a_cpu_does_not_use_flash_attention() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert not attention._flash_supports(*packed(dtype=dtype)[:3])


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_the_call_of_the_flash_kernel_matches_its_signature(kv_heads: int) -> None:
    """Tensors on the meta device have no data, but the call and its gradient check arguments and shapes."""
    query, key, value, cu_seqlens, max_seqlen = packed(kv_heads=kv_heads, dtype=torch.bfloat16, device="meta")
    lengths = cu_seqlens, max_seqlen
    out = attention._flash_attention(query, key, value, lengths, lengths, 0.2)
    assert out.shape == query.shape and out.dtype == torch.bfloat16
    found = torch.autograd.grad(out.sum(), (query, key, value))
    assert [gradient.shape for gradient in found] == [query.shape, key.shape, value.shape]


def test_the_flash_kernel_is_called_with_causal_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, cu_seqlens, max_seqlen = packed()
    names = [argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments]

    def kernel(*args: object, **options: object) -> tuple[Tensor, None]:
        called = dict(zip(names, args, strict=False)) | options
        assert called["is_causal"] is True and called["dropout_p"] == 0.0 and called["return_debug_mask"] is False
        assert called["cum_seq_q"] is called["cum_seq_k"] is cu_seqlens
        assert called["max_q"] == called["max_k"] == max_seqlen
        return by_formula(query, key, value, cu_seqlens, called["scale"]), None  # type: ignore[arg-type]

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    lengths = cu_seqlens, max_seqlen
    out = attention._flash_attention(query, key, value, lengths, lengths, 0.2)
    torch.testing.assert_close(out, by_formula(query, key, value, cu_seqlens, 0.2))


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [("cpu", torch.float64, 1e-12), pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu)],
)
def test_fewer_queries_than_keys_are_the_last_tokens(device: str, dtype: torch.dtype, tolerance: float) -> None:
    query, key, value, cu_seqlens, max_seqlen = packed((70, 1, 30, 129), 6, 2, 64, dtype, device)
    whole = causal_attention(query, key, value, cu_seqlens, max_seqlen)
    ends, counts = cu_seqlens[1:].tolist(), (1, 1, 30, 65)
    last = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]).to(device)
    own = torch.tensor([0, *counts]).cumsum(0).to(cu_seqlens)
    part = causal_attention(query[last], key, value, own, max(counts), keys=(cu_seqlens, max_seqlen))
    torch.testing.assert_close(part, whole[last], rtol=0, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 20])
def test_on_a_gpu_it_matches_the_formula_up_to_rounding(kv_heads: int, dtype: torch.dtype, width: int) -> None:
    query, key, value, cu_seqlens, max_seqlen = packed((70, 1, 300, 129), 6, kv_heads, width, dtype, "cuda")
    assert attention._flash_supports(query, key, value) == (width == 64)
    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    ours, theirs = causal_attention(query, key, value, cu_seqlens, max_seqlen), by_formula(*exact, cu_seqlens)
    torch.testing.assert_close(ours.double(), theirs, atol=0.02, rtol=0.02)
    weight = torch.randn_like(theirs)
    found = torch.autograd.grad((ours * weight.to(dtype)).sum(), (query, key, value))
    right = torch.autograd.grad((theirs * weight).sum(), exact)
    for mine, true in zip(found, right, strict=True):
        assert (mine.double() - true).norm() < 0.02 * true.norm()


@pytest.mark.gpu
def test_on_a_gpu_full_precision_and_autocast_work_too() -> None:
    query, key, value, cu_seqlens, max_seqlen = packed(dtype=torch.float32, device="cuda")
    exact = by_formula(query, key, value, cu_seqlens)
    torch.testing.assert_close(causal_attention(query, key, value, cu_seqlens, max_seqlen), exact, atol=1e-4, rtol=1e-4)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = causal_attention(query, key, value, cu_seqlens, max_seqlen)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, atol=0.03, rtol=0.03)
