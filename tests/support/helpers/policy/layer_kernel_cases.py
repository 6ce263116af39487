"""What each kernel of a fused layer must do, forward and backward, told by plain formulas and by transformers' layers.

Run as a script, which only makes sense in Triton's interpreter, it prints a JSON object: what went wrong, by case.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from helpers.triton_interpreter import try_all
from trimtab.policy.layers import AddNorm, Gate, Turn, fuse_layers, fusion_unsupported_reason, gpu_kernels
from trimtab.policy.packed import PackedBatch, packed_hidden_states, use_packed_attention

Case = Callable[[torch.device, torch.dtype], None]
HOST = torch.device("cpu")
EPS = 1e-5

SIZE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZE),
    "llama, biases": LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZE),
    "qwen3": Qwen3Config(**SIZE, head_dim=16),
    "qwen3, odd heads": Qwen3Config(**SIZE, head_dim=12),
}


def model_of(config: Any, device: torch.device = HOST) -> Any:
    """A random model: norms and biases too, for what is 1 or 0 hides mistakes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        for name, weight in model.named_parameters():
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    use_packed_attention(model)
    return model.to(device)


def packed(device: torch.device, *lengths: int) -> PackedBatch:
    """Sequences of some lengths."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ids = (positions * 7 + 3) % SIZE["vocab_size"]
    return PackedBatch(ids.to(device), positions.to(device), starts.to(device), max(lengths))


def normal(seed: int, *shape: int) -> Tensor:
    """Normal numbers that are the same for every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(mine: Callable[..., Any], right: Callable[..., Any], given: list[Tensor], dtype: torch.dtype) -> None:
    """Values and gradients of both, by all that is given; those of `right` in fp64."""
    tolerance = 3e-2 if dtype != torch.float32 else 2e-5
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    outs, truths = mine(*leaves), right(*exact)
    slopes = [normal(100 + n, *truth.shape).to(truth.device) for n, truth in enumerate(truths)]
    for out, truth in zip(outs, truths, strict=True):
        torch.testing.assert_close(out.double(), truth, rtol=tolerance, atol=tolerance)
    made = torch.autograd.grad(outs, leaves, [s.to(o.dtype) for s, o in zip(slopes, outs, strict=True)])
    true = torch.autograd.grad(truths, exact, [s.double() for s in slopes])
    for one, other in zip(made, true, strict=True):
        assert one.dtype != torch.float64
        off = float((one.double() - other).norm() / other.norm())
        assert off <= (1e-2 if dtype != torch.float32 else 1e-5), off


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def add_norm(width: int, rows: int, added: bool, passed: bool, device: torch.device, dtype: torch.dtype) -> None:
    kernels = gpu_kernels()
    x, delta, weight = (t.to(device) for t in (normal(0, 1, rows, width), normal(1, 1, rows, width), normal(2, width)))
    x[0, -1] = delta[0, -1] = 0  # eps alone keeps this row finite
    given = [x, weight, *([delta.to(dtype)] if added else [])]

    def mine(x: Tensor, weight: Tensor, delta: Tensor | None = None) -> tuple[Tensor, ...]:
        total, out = AddNorm.apply(kernels, x, delta, weight, EPS, dtype)  # type: ignore[no-untyped-call]
        return (total, out) if passed else (out,)

    def right(x: Tensor, weight: Tensor, delta: Tensor | None = None) -> tuple[Tensor, ...]:
        total = x if delta is None else x + delta
        return (total, rms_norm(total, weight)) if passed else (rms_norm(total, weight),)

    compare(mine, right, given, dtype)


def turn(heads: int, kv: int, d: int, tokens: int, normed: bool, device: torch.device, dtype: torch.dtype) -> None:
    kernels = gpu_kernels()
    angle = normal(3, tokens, d // 2).repeat(1, 2).to(device)
    given = [normal(4, tokens, heads, d).to(device, dtype), normal(5, tokens, kv, d).to(device, dtype)]
    given += [normal(6, d).to(device), normal(7, d).to(device)] if normed else []

    def mine(q: Tensor, k: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        turned: tuple[Tensor, ...] = Turn.apply(kernels, q, k, angle.cos(), angle.sin(), EPS, *norms)  # type: ignore[no-untyped-call]
        return turned

    def right(q: Tensor, k: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        c, s = angle.double().cos()[:, None], angle.double().sin()[:, None]
        if norms:
            q, k = rms_norm(q, norms[0]), rms_norm(k, norms[1])
        return tuple(x * c + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * s for x in (q, k))

    compare(mine, right, given, dtype)


def gate(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
    kernels = gpu_kernels()
    given = [(normal(seed, rows, width) * 4).to(device, dtype) for seed in (8, 9)]
    given[0].view(-1)[:2] = torch.tensor([-200.0, 200.0])
    compare(
        lambda *pair: (Gate.apply(kernels, *pair),),  # type: ignore[no-untyped-call]
        lambda gates, up: (silu(gates) * up,),
        given,
        dtype,
    )


def frozen(device: torch.device, dtype: torch.dtype) -> None:
    """Weights that are not trained get no gradient, and the others' stay what they are."""
    kernels = gpu_kernels()
    x, weight = normal(0, 1, 3, 16).to(device).requires_grad_(), normal(2, 16).to(device)
    (mine,) = torch.autograd.grad(AddNorm.apply(kernels, x, None, weight, EPS, torch.float32)[1].sum(), x)  # type: ignore[no-untyped-call]
    (right,) = torch.autograd.grad(rms_norm(x, weight).sum(), x)
    torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    q = normal(4, 3, 2, 8).to(device).requires_grad_()
    ones = torch.ones(3, 8, device=device)
    turned = Turn.apply(kernels, q, q.detach(), ones, 0 * ones, EPS, weight[:8], weight[8:])  # type: ignore[no-untyped-call]
    (mine,) = torch.autograd.grad(turned[0].sum(), q)
    (right,) = torch.autograd.grad(rms_norm(q, weight[:8]).sum(), q)
    torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def model(name: str, checkpoints: str, device: torch.device, dtype: torch.dtype) -> None:
    """Hidden states and gradients as near the exact ones as those of transformers' layers."""
    near(model_of(CONFIGS[name], device), device, checkpoints)


def hooked(where: str, device: torch.device, dtype: torch.dtype) -> None:
    """Hooks see, and change, what they would of transformers' layers."""
    plain = model_of(CONFIGS["qwen3"], device)
    layer = plain.model.layers[1]
    module = {"layer": plain.model.layers[0], "norm": layer.input_layernorm, "mlp": layer.mlp}[where]
    module.register_forward_hook(lambda module, args, out: torch.as_tensor(out) * 2)
    near(plain, device)


def strided(device: torch.device, dtype: torch.dtype) -> None:
    """A stream whose rows do not lie one after the other."""
    plain = model_of(CONFIGS["llama"], device)
    plain.model.embed_tokens.register_forward_hook(lambda module, args, out: out.mT.contiguous().mT)
    near(plain, device)


def idle(device: torch.device, dtype: torch.dtype) -> None:
    """A layer whose MLP adds nothing: the gradient of the norm before it is 0."""
    plain = model_of(CONFIGS["llama"], device)
    torch.nn.init.zeros_(plain.model.layers[0].mlp.down_proj.weight)
    near(plain, device)


def asked_for_all(device: torch.device, dtype: torch.dtype) -> None:
    """The hidden states of every layer, where somebody wants them."""
    plain = model_of(CONFIGS["llama"], device)
    fused = copy.deepcopy(plain)
    fuse_layers(fused, gpu_kernels())
    plain.config.output_hidden_states = fused.config.output_hidden_states = True
    states: list[Any] = []
    for some in (plain, fused):
        some.model.register_forward_hook(lambda module, args, out: states.append(out.hidden_states))
        passed(some, device, torch.bfloat16)
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def adapted(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """With LoRA: every linear map is a module of another kind, and norms are not trained."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        plain = get_peft_model(model_of(CONFIGS[name]), LoraConfig(r=2, target_modules="all-linear"))
        for parameter_name, weight in plain.named_parameters():
            if "lora" in parameter_name:  # else an adapter changes nothing, and half of its gradient is 0
                torch.nn.init.normal_(weight, std=0.1)
    near(plain.to(device).get_base_model(), device)


def near(plain: Any, device: torch.device, checkpoints: str = "") -> None:
    fused = copy.deepcopy(plain)
    fuse_layers(fused, gpu_kernels())
    assert fusion_unsupported_reason(fused) == ""
    fused = copy.deepcopy(fused)  # a copy's layers are its own
    if checkpoints:
        fused.train()
        fused.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
        fused.enable_input_require_grads()
    exact, before = passed(copy.deepcopy(plain).double(), device, None), passed(plain, device, torch.bfloat16)
    after = passed(fused, device, torch.bfloat16)
    for right, one, other in zip(exact, before, after, strict=True):
        apart = float((other.double() - right).norm())
        assert apart <= 1.3 * float((one.double() - right).norm()) + 2e-3 * float(right.norm())
        assert apart <= 0.1 * float(right.norm())


def passed(model: Any, device: torch.device, dtype: torch.dtype | None) -> list[Tensor]:
    """The hidden states, and the gradients of a sum of theirs, of all parameters in a row."""
    with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        hidden = packed_hidden_states(model.model, packed(device, 5, 1, 3))
    slope = normal(10, *hidden.shape).to(device, hidden.dtype)
    parameters = [parameter for parameter in model.model.parameters() if parameter.requires_grad]
    hidden.backward(slope)
    return [hidden.detach(), torch.cat([parameter.grad.flatten() for parameter in parameters])]


def cases(widths: list[int], heads: list[tuple[int, int, int]], rows: int) -> dict[str, Case]:
    """Every case by its name."""
    made: dict[str, Case] = {"frozen weights": frozen}
    for width, (added, on) in product(widths, ((False, True), (True, True), (True, False), (False, False))):
        name = f"add_norm {width}{', added' if added else ''}{', passed on' if on else ''}"
        made[name] = partial(add_norm, width, rows, added, on)
    for (h, kv, d), normed in product(heads, (False, True)):
        made[f"turn {h}/{kv}x{d}{', normed' if normed else ''}"] = partial(turn, h, kv, d, rows, normed)
    for width in widths:
        made[f"gate {width}"] = partial(gate, rows, width)
    for name, checkpoints in (*product(CONFIGS, ("", "checkpointed")), ("llama", "reentrant")):
        made[f"model {name}, {checkpoints}".removesuffix(", ")] = partial(model, name, checkpoints)
    for name in ("llama", "qwen3"):
        made[f"model {name}, LoRA"] = partial(adapted, name)
    made |= {f"model qwen3, hook of a {where}": partial(hooked, where) for where in ("layer", "norm", "mlp")}
    return made | {"strided stream": strided, "idle MLP": idle, "every hidden state": asked_for_all}


INTERPRETED = cases([1, 40, 64], [(6, 2, 16), (3, 3, 24), (8, 1, 2)], 7)


def main() -> None:
    from trimtab.policy.kernels import layers
    from trimtab.policy.kernels import rope as turning

    layers.ELEMENTS = turning.PAIRS = 64
    layers.PROGRAMS = turning.PROGRAMS = 3  # so that each program meets several rows, and the last ones fewer
    try_all(INTERPRETED)


if __name__ == "__main__":
    main()
