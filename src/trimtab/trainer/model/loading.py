"""Load a policy: choose the device, read or build the model, attach LoRA, switch on packing and fused layers.

The demo models are built here: tiny Qwen3s over characters, initialised from a seed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from trimtab.text import install_command
from trimtab.trainer.config import DEMO_MODELS
from trimtab.trainer.model.layers import fuse_layers, fusion_unsupported_reason, gpu_kernels, unfuse_layers
from trimtab.trainer.model.packed import packing_unsupported_reason, use_packed_attention
from trimtab.trainer.model.policy import DTYPES, Policy, Precision
from trimtab.trainer.model.pretrained import WEIGHTS, errors_in_words, read_pretrained, read_tokenizer, smollm2_cache
from trimtab.trainer.model.prompts import start_rendering
from trimtab.trainer.parallel import World, gathered_layers, shard_layers


def load_policy(
    path: str,
    *,
    device: str = "auto",
    precision: Precision = "fp32",
    attention: str | None = None,
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    lora_alpha: int = 32,
    lora_targets: Sequence[str] = (),
    lora_dropout: float = 0.0,
    frozen_in_bf16: bool = False,
    chat: bool = True,
    seed: int = 0,
    prepare: Callable[[Any], Any] = lambda model: model,
    shard: World | None = None,
) -> Policy:
    """Load a policy by path: a folder or hub name, a demo or `smollm2`; `prepare` may replace the model as read.

    `frozen_in_bf16` halves what LoRA's frozen weights take; every pass then needs `Policy.autocast` in bf16.
    `shard` names the processes among which the layers' weights are split; all of them must call this together.
    """
    where = pick_device(device)
    is_demo = path in DEMO_MODELS
    model, tokenizer = (demo_model(seed, path), demo_tokenizer(path)) if is_demo else read_pretrained(path, attention)
    if chat:
        start_rendering(tokenizer)
    model = prepare(model)
    if lora_rank:
        model = add_lora(model, lora_rank, lora_alpha, seed, lora_targets, lora_dropout, base=path)
    if frozen_in_bf16:  # before the model is moved: a GPU never holds more
        freeze_in_bf16(model)
    if where.type == "cuda" and where.index is not None:
        torch.cuda.set_device(where)  # Triton launches on the current device, whatever its arguments' device
    if shard is None:
        model.to(where)
    if gradient_checkpointing:
        enable_gradient_checkpointing(model)
    policy = Policy(model, tokenizer, where, precision, chat, sharded=shard is not None)
    with errors_in_words(path, WEIGHTS):
        _check_weights(policy)
        _check_end_tokens(policy)
    if shard is not None:
        shard_layers(model, policy.backbone, shard, where, DTYPES[precision])
    with errors_in_words(path, WEIGHTS):
        _check_logits(policy)
    # Flash attention needs half precision: in fp32 packed sequences would go through attention one by one, which is
    # slower than padding.
    return with_packing(policy) if where.type == "cuda" and precision == "bf16" else policy


def tokenizer_at_hand(path: str) -> Any | None:
    """Return the tokenizer of a model without loading the model; None if it is not on this machine yet."""
    if path in DEMO_MODELS:
        return demo_tokenizer(path)
    if path == "smollm2" and not smollm2_cache().is_dir():
        return None
    if path == "smollm2" or os.path.isdir(os.path.expanduser(path)):
        return read_tokenizer(path)
    try:
        return read_tokenizer(path, local_files_only=True)
    except ValueError:
        return None


def with_packing(policy: Policy) -> Policy:
    """Return the policy with packed forward passes; the same policy, with a warning, if its model does not support it.

    On a GPU the layers are fused too.
    """
    before = policy.causal_lm.config._attn_implementation
    if before != "sdpa":  # the user has chosen another attention
        return policy
    use_packed_attention(policy.causal_lm)
    reason = packing_unsupported_reason(policy.backbone, policy.device, policy.autocast)
    name = type(policy.causal_lm).__name__
    if reason and policy.sharded:
        # The pass that failed may have left layers gathered: nothing that follows could be trusted.
        raise ValueError(
            f"model.shard = true: {name} does not support packed sequences ({reason}); choose model.attention='eager'"
        )
    if reason:
        policy.causal_lm.set_attn_implementation(before)
        warnings.warn(
            f"sequences are padded, which is slower: {name} does not support packed sequences ({reason})", stacklevel=2
        )
        return policy
    if policy.device.type == "cuda":
        with gathered_layers(policy.model):
            _fuse_if_supported(policy.causal_lm)
    return replace(policy, packed=True)


def _fuse_if_supported(causal_lm: Any) -> None:
    """Fuse the layers; undo it, with a warning, if they do not compute what transformers' layers do."""
    try:
        fuse_layers(causal_lm, gpu_kernels())
    except ModuleNotFoundError:  # no Triton
        return
    reason = fusion_unsupported_reason(causal_lm)
    if reason:
        unfuse_layers(causal_lm)
        warnings.warn(
            f"the layers of {type(causal_lm).__name__} are not fused, which is slower ({reason})", stacklevel=3
        )


def pick_device(name: str) -> torch.device:
    """Return a device by name; `auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"run.device={name!r} is no device: say auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"run.device={name!r}, but torch sees no GPU here: say cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"run.device={name!r}, but torch sees {torch.cuda.device_count()} GPUs here, the first is cuda:0"
        )
    if device.type in ("cpu", "cuda"):  # checked above, without a CUDA context
        return device
    try:
        torch.ones((), device=device).item()
    except Exception:  # every backend that is missing, or holds no data (meta), raises its own type
        raise ValueError(f"run.device={name!r}, which torch cannot use here: say auto, cpu or cuda") from None
    return device


@torch.no_grad()
def _check_weights(policy: Policy) -> None:
    """Raise if a weight is infinite or not a number."""
    # A sum is infinite or NaN if one of its terms is; it needs no memory, and 30 ms for SmolLM2 on a CPU.
    checked = {name: w for name, w in policy.model.named_parameters() if w.dtype in (torch.float32, torch.bfloat16)}
    sums = {name: weight.sum(dtype=torch.float32) for name, weight in checked.items()}
    finite = torch.stack([*sums.values()]).isfinite().tolist()
    if not all(finite):
        worst = [*sums][finite.index(False)]
        raise ValueError(f"the weights hold numbers that are infinite or NaN, in {worst}; use another checkpoint")


def _check_end_tokens(policy: Policy) -> None:
    """Raise if an end or padding token is not one of the model's tokens."""
    size = policy.causal_lm.get_input_embeddings().num_embeddings
    for token in (*policy.eos_token_ids, policy.pad_token_id):
        if not isinstance(token, int) or not 0 <= token < size:
            raise ValueError(
                f"the end or padding token {token!r} of generation_config.json or tokenizer_config.json is none of the "
                f"model's tokens, 0 to {size - 1}"
            )


@torch.no_grad()
def _check_logits(policy: Policy) -> None:
    """Raise if the model's logits are not those of its output embedding."""
    # Some families scale or shift logits in their own forward: training would go on with wrong log-probabilities.
    ids = torch.tensor([[min(policy.eos_token_ids), policy.pad_token_id, 0]], device=policy.device)
    mask = torch.ones_like(ids)
    policy.model.eval()
    # Layers that are sharded, or frozen in bf16, have weights of the precision in which they compute.
    mixed = len({weight.dtype for weight in policy.model.parameters()}) > 1
    with policy.autocast() if policy.sharded or mixed else nullcontext():
        ours = policy.logits(policy.hidden_states(ids, mask), 1.0)
        theirs = policy.model(input_ids=ids, attention_mask=mask).logits.float()
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(policy.causal_lm).__name__} does more to its logits than its output embedding: this family is not "
            "supported yet"
        )


def add_lora(
    model: Any, rank: int, alpha: int, seed: int, targets: Sequence[str] = (), dropout: float = 0.0, base: str = ""
) -> Any:
    """Return the model with freshly initialised adapters; the rest is frozen.

    They are on the linear layers whose names end in one of `targets`, without any on all but the head. `base` is the
    model's path, for those who load the adapters with peft.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError(f"model.lora_rank needs peft: {install_command(extra='lora')}") from None
    _check_targets(model, targets)
    layers = list(targets) or "all-linear"
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    # peft takes it from the model's own config, which knows nothing of weights that were loaded afterwards.
    adapted.peft_config["default"].base_model_name_or_path = base or None
    return adapted


def _check_targets(model: Any, targets: Sequence[str]) -> None:
    """Raise ValueError for a name that is no linear layer's: peft ignores it if another one matches."""
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    known = sorted({name.rpartition(".")[2] for name in linear})
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise ValueError(f"model.lora_targets: {target!r:.100} is no linear layer of the model: {', '.join(known)}")


def freeze_in_bf16(model: Any) -> None:
    """Keep the frozen weights of linear layers in bf16, in place.

    Only for a model that computes under autocast, which casts these weights to bf16 at every use: results are equal to
    the bit. It does not cast norms and embeddings, so those stay as they are, and with them a head that is tied.
    """
    embedding = model.get_input_embeddings().weight
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer.weight is not embedding:
            for weight in layer.parameters(recurse=False):
                if not weight.requires_grad:
                    weight.data = weight.data.to(torch.bfloat16)


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute each layer's activations in the backward pass instead of keeping them."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(model, "peft_config"):
        # The embedding is frozen: without this no input of a checkpointed layer would require a gradient.
        model.enable_input_require_grads()


PAD, END = "<pad>", "<end>"
# The tokens of prompt and response together; conversations are longer.
POSITIONS = {"demo": 64, "demo-tools": 128, "demo-countdown": 128}


def demo_tokenizer(name: str = "demo") -> Any:
    """Return the tokenizer of a demo model, with one token per character; others become padding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([PAD, END, *DEMO_MODELS[name]])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def demo_model(seed: int, name: str = "demo") -> Any:
    """Return a model of 0.13 million parameters with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(DEMO_MODELS[name]) + 2,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS[name],
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
