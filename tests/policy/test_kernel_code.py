"""Kernels as they are compiled for a GPU, without one: what is read and written in bulk moves in whole vectors.

A mask that differs from element to element makes a kernel several times slower and changes no result, so nothing else
would find it.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

HOPPER = 90


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> Counter[str]:
    """The loads and stores of a kernel's PTX; integers and addresses are multiples of 16, as those of real tensors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    aligned = [name for name, kind in types.items() if not kind.startswith("fp")]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    code = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options={"num_warps": warps}).asm["ptx"]
    return Counter(re.findall(r"\b((?:ld|st)\.global(?:\.v\d)?\.b\d+|cp\.async\.cg)", code))


def head_types(kind: str) -> dict[str, str]:
    types = {"logits": f"*{kind}", "token": "*i64", "own": "*fp32", "out": "*fp32", "stride": "i32", "rows": "i32"}
    return types | {"vocabulary": "i32", "inverse_temperature": "fp32", "cap": "fp32"}


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("cap", [False, True])
def test_a_heads_logits_move_in_vectors(kind: str, cap: bool) -> None:
    from trimtab.policy.kernels import softmax

    block = {"HAS_CAP": cap, "BLOCK": softmax.BLOCK}
    slope = compiled(softmax._slope_part, head_types(kind), block, softmax.WARPS)
    scores = compiled(softmax._softmax_part, head_types(kind), block | {"WRITE": False}, softmax.WARPS)
    assert slope["st.global.v4.b32"] >= 1
    for moves in (slope, scores):
        assert moves["ld.global.v4.b32"] >= 1
        assert moves["ld.global.b16"] == 0
    assert slope["st.global.b16"] <= 1, "the drawn token's place, and nothing else, is written by itself"


def test_rows_are_scaled_in_vectors() -> None:
    from trimtab.policy.kernels import softmax

    types = {"x": "*bf16", "factor": "*fp32", "out": "*bf16", "x_stride": "i32", "out_stride": "i32", "width": "i32"}
    moves = compiled(softmax._scale_rows, types, {"BLOCK": 1024}, 4)
    assert moves["ld.global.v4.b32"] == moves["st.global.v4.b32"] == 1


def test_pages_are_read_in_vectors() -> None:
    from trimtab.rollout.paged.kernels import attention

    half = ("qkv", "q_norm", "k_norm", "k_cache", "v_cache", "out", "partial_out", "partial_softmax")
    types = dict.fromkeys(half, "*bf16") | {"cos": "*fp32", "sin": "*fp32", "page_table": "*i32", "scalars": "*i64"}
    types |= {"scale": "fp32", "eps": "fp32", "page_table_stride": "i32", "state_rows": "i32"}
    shape = {"KV_HEADS": 3, "HEADS": 9, "HEAD_DIM": 64, "GROUP": 4, "QK_NORM": False, "SPLITS": 1, "FP32": False}
    for tile, warps in ((64, 4), (32, 2)):
        moves = compiled(attention._paged_attention_kernel, types, shape | {"TILE": tile}, warps)
        assert moves["cp.async.cg"] >= 4, "keys and values are fetched 16 bytes at a time"


def layer_types(kernel: Any, wide: tuple[str, ...] = ()) -> dict[str, str]:
    """The types of a layer kernel's arguments: bf16 but for the residual stream, weights and sums."""
    numbers = {"width": "i32", "rows": "i32", "size": "i32", "tokens": "i32", "eps": "fp32"}
    tensors = [name for name in kernel.arg_names if not name.isupper() and name not in numbers]
    types = {name: "*fp32" if name in wide else "*bf16" for name in tensors}
    return types | {name: kind for name, kind in numbers.items() if name in kernel.arg_names}


@pytest.mark.parametrize("width", [576, 2048])
def test_a_layers_stream_and_products_move_in_vectors(width: int) -> None:
    from trimtab.policy.kernels import layers

    stream = ("x", "total", "weight", "inverse", "d_total", "d_x", "partial")
    block = 1024 if width < 1024 else width
    both, warps = {"BLOCK": block}, layers._warps(block)
    there = compiled(layers._add_norm, layer_types(layers._add_norm, stream), both | {"ADD": True}, warps)
    flags = {"PASSED": True, "ADDED": True, "WEIGHT": True}
    back = compiled(layers._add_norm_back, layer_types(layers._add_norm_back, stream), both | flags, warps)
    for kernel in (layers._gate, layers._gate_back):
        moves = compiled(kernel, layer_types(kernel), {"BLOCK": layers.ELEMENTS}, 8)
        assert not moves["ld.global.b16"] and not moves["st.global.b16"]
    for moves in (there, back):
        assert not moves["ld.global.b16"] and not moves["st.global.b16"]
        assert moves["ld.global.v4.b32"] and moves["st.global.v4.b32"]


@pytest.mark.parametrize(("heads", "kv", "d", "normed"), [(9, 3, 64, False), (16, 8, 128, True)])
def test_heads_are_turned_in_vectors(heads: int, kv: int, d: int, normed: bool) -> None:
    from trimtab.policy.kernels import rope as turning

    shape = {"HEADS": heads, "KV": kv, "D": d, "HALF": d // 2, "ROWS": 2 * turning.PAIRS // d, "NORM": normed}
    wide = ("q_norm", "k_norm", "cos", "sin", "partial")
    for kernel, more in ((turning._turn, {}), (turning._turn_back, {"WEIGHT": normed})):
        moves = compiled(kernel, layer_types(kernel, wide), shape | more, 4)
        assert not moves["ld.global.b16"] and not moves["st.global.b16"]
        assert moves["st.global.v4.b32"] >= 4, "two halves of queries and of keys"
