"""Two causes of slow kernels that change no result, checked without a GPU.

Vector loads: kernels are compiled for Hopper, and their PTX must move bulk data 16 bytes at a time. A mask that differs
from element to element makes loads scalar and a kernel several times slower.
Operations: what each objective launches per micro-batch beyond plain GRPO, counted on a CPU. Small operations cost
their launch, so their number is their cost.

Prints the figures and exits with an error that names what is over its limit.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import trimtab as tt
from made_batch import LENGTH, RESPONSES, made_batch, made_transcripts
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.model.kernels import layers, rope, softmax
from trimtab.trainer.model.update import forward_backward
from trimtab.trainer.sampling.paged.kernels import attention

HOPPER = 90
LOAD, STORE, ASYNC_COPY = "ld.global.v4.b32", "st.global.v4.b32", "cp.async.cg"
SCALARS = ("ld.global.b16", "st.global.b16")
CHUNK = 32  # tokens of the micro-batch that the head takes at a time
METHODS = ("grpo", "stapo", "stare", "sspo", "gspo")
MOST_IN_LOSS = 34  # operations of a loss and its gradient
MOST_IN_PLAN = {"stapo": 12, "stare": 16, "sspo": 36}  # operations of a plan beyond GRPO's


def memory_instructions(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> Counter[str]:
    """Compile a kernel and count the loads and stores of its PTX."""
    names = kernel.arg_names
    # Integers and addresses are multiples of 16, as those of real tensors.
    aligned = [name for name, kind in types.items() if not kind.startswith("fp")]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    code = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options={"num_warps": warps}).asm["ptx"]
    return Counter(re.findall(r"\b((?:ld|st)\.global(?:\.v\d)?\.b\d+|cp\.async\.cg)", code))


def head_cases() -> Iterator[tuple[str, Counter[str], dict[str, int], int]]:
    """Yield name, instructions, the vector instructions needed, and the 2-byte stores allowed, of the LM head."""
    for dtype in ("bf16", "fp32"):
        types = {"logits": f"*{dtype}", "tokens": "*i64", "target_logits": "*fp32", "out": "*fp32", "stride": "i32"}
        types |= {"rows": "i32", "vocabulary": "i32", "inverse_temperature": "fp32", "cap": "fp32"}
        for cap in (False, True):
            constants, name = {"HAS_CAP": cap, "BLOCK": softmax.BLOCK}, f"{dtype}{', soft cap' if cap else ''}"
            found = memory_instructions(softmax._logp_and_grad, types, constants, softmax.WARPS)
            yield f"logp_and_grad {name}", found, {LOAD: 1, STORE: 1}, 1  # the target's position is written by itself
            constants |= {"WRITE_GRAD": False}
            found = memory_instructions(softmax._softmax_moments, types, constants, softmax.WARPS)
            yield f"softmax_moments {name}", found, {LOAD: 1}, 0
    types = {"x": "*bf16", "factor": "*fp32", "out": "*bf16", "x_stride": "i32", "out_stride": "i32", "width": "i32"}
    yield "scale_rows", memory_instructions(softmax._scale_rows, types, {"BLOCK": 1024}, 4), {LOAD: 1, STORE: 1}, 0


def layer_cases() -> Iterator[tuple[str, Counter[str], dict[str, int], int]]:
    """Yield the same for the kernels of a fused layer."""
    fp32 = ("x", "residual", "weight", "inverse_rms", "d_residual", "d_x", "partial")
    for width in (576, 2048):
        constants = layers._row_options(width)
        warps = constants.pop("num_warps")
        for kernel, flags in (
            (layers._fused_add_rms_norm, {"ADD": True}),
            (
                layers._fused_add_rms_norm_backward,
                dict.fromkeys(("HAS_D_RESIDUAL", "HAS_D_DELTA", "HAS_D_WEIGHT"), True),
            ),
        ):
            found = memory_instructions(kernel, layer_types(kernel, fp32), constants | flags, warps)
            yield f"{kernel.__name__} {width}", found, {LOAD: 1, STORE: 1}, 0
    for kernel in (layers._swiglu, layers._swiglu_backward):
        found = memory_instructions(kernel, layer_types(kernel), {"BLOCK": layers.ELEMENTS}, 8)
        yield kernel.__name__, found, {}, 0
    read_in_fp32 = ("q_norm", "k_norm", "cos", "sin", "partial")
    for heads, kv_heads, d, norm in ((9, 3, 64, False), (16, 8, 128, True)):
        shape = {"HEADS": heads, "KV_HEADS": kv_heads, "D": d, "HALF": d // 2, "ROWS": 2 * rope.PAIRS // d}
        for kernel, flags in ((rope._rope, {}), (rope._rope_backward, {"HAS_D_NORMS": norm})):
            found = memory_instructions(kernel, layer_types(kernel, read_in_fp32), shape | {"NORM": norm} | flags, 4)
            yield f"{kernel.__name__} {heads}/{kv_heads}x{d}", found, {STORE: 4}, 0  # two halves of queries and of keys


def layer_types(kernel: Any, fp32: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the types of a layer kernel's arguments: tensors are bf16 unless named."""
    numbers = {"width": "i32", "rows": "i32", "size": "i32", "tokens": "i32", "eps": "fp32"}
    tensors = [name for name in kernel.arg_names if not name.isupper() and name not in numbers]
    types = {name: "*fp32" if name in fp32 else "*bf16" for name in tensors}
    return types | {name: kind for name, kind in numbers.items() if name in kernel.arg_names}


def attention_cases() -> Iterator[tuple[str, Counter[str], dict[str, int], int]]:
    """Yield the same for attention over KV pages, which fetches keys and values asynchronously."""
    half = ("qkv", "q_norm", "k_norm", "k_cache", "v_cache", "out", "split_acc", "split_stats")
    types = dict.fromkeys(half, "*bf16") | {"cos": "*fp32", "sin": "*fp32", "page_table": "*i32", "scalars": "*i64"}
    types |= {"scale": "fp32", "eps": "fp32", "page_table_stride": "i32", "state_rows": "i32"}
    shape = {"KV_HEADS": 3, "HEADS": 9, "HEAD_DIM": 64, "GROUP": 4, "QK_NORM": False, "SPLITS": 1, "FP32": False}
    for tile, warps in ((64, 4), (32, 2)):
        found = memory_instructions(attention._paged_attention_kernel, types, shape | {"TILE": tile}, warps)
        yield f"paged attention, tile {tile}", found, {ASYNC_COPY: 4}, len(types) * 1000  # its outputs are small


def scalar_problems() -> Iterator[str]:
    """Yield the kernels that move bulk data element by element."""
    for cases in (head_cases, layer_cases, attention_cases):
        for name, found, needed, scalar_stores in cases():
            print(f"{name}: {dict(found)}")
            for instruction, least in needed.items():
                if found[instruction] < least:
                    yield f"{name}: {found[instruction]} {instruction}, {least} at least"
            if sum(found[scalar] for scalar in SCALARS) > scalar_stores:
                yield f"{name}: loads or stores of 2 bytes"


class OperationCounter(TorchDispatchMode):
    """Count operations, views aside."""

    def __init__(self) -> None:
        """Start at nothing."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run one operation."""
        if not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(run: Callable[[], object]) -> Counter[str]:
    """Return the operations that a call runs."""
    counter = OperationCounter()
    with counter:
        run()
    return counter.counts


def method_operations(policy: Policy, name: str) -> dict[str, Counter[str]]:
    """Return the operations of a method's plan, of its loss and gradient, and of a whole micro-batch."""
    objective, batch = tt.objective(name), made_batch()
    planning = operations(lambda: objective.plan(batch))
    plan = objective.plan(made_batch())
    policy.model.zero_grad()
    head, transcripts = policy.fused_head(1.0, True), made_transcripts()
    return {
        "plan": planning,
        "loss": operations(lambda: objective.loss_and_grad(plan.old_logp, plan)),
        "micro-batch": operations(
            lambda: forward_backward(policy, objective, plan, transcripts, 1.0, CHUNK, head),
        ),
    }


def operation_problems() -> Iterator[str]:
    """Yield the methods that launch more than they should."""
    policy = load_policy("demo", device="cpu", seed=3)
    with patch.object(torch.backends.mkl, "is_available", lambda: False):  # spans are summed as on a GPU
        counts = {name: method_operations(policy, name) for name in METHODS}
    plain = counts["grpo"]
    for name, found in counts.items():
        totals = {what: counter.total() for what, counter in found.items()}
        print(f"{name}: {totals} operations")
        more = found["plan"].total() - plain["plan"].total()
        if more > MOST_IN_PLAN.get(name, more):
            yield f"{name}: {more} operations of its plan beyond GRPO's, {MOST_IN_PLAN[name]} at most"
        if totals["loss"] > MOST_IN_LOSS:
            yield f"{name}: {totals['loss']} operations of a loss and its gradient, {MOST_IN_LOSS} at most"
        gemms = [found["micro-batch"][gemm] - plain["micro-batch"][gemm] for gemm in ("mm", "addmm")]
        if any(gemms):
            yield f"{name}: {sum(gemms)} GEMMs of a micro-batch beyond GRPO's"
        if totals["micro-batch"] - plain["micro-batch"].total() > RESPONSES * LENGTH // CHUNK:
            yield f"{name}: more than one operation per chunk beyond GRPO's"


def main() -> None:
    """Check both and exit with the problems found."""
    problems = [*operation_problems(), *scalar_problems()]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
