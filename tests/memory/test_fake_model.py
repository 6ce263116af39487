"""Passes on fake tensors take the memory that the same passes take on real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from trimtab.data import PromptTokens, SamplingOptions
from trimtab.trainer.memory.fake_model import (
    MicroBatchShape,
    PassMemory,
    fake_policy,
    fake_tensors,
    sampling_memory,
    scoring_memory,
    update_memory,
)
from trimtab.trainer.model import Policy, Transcript, score
from trimtab.trainer.model.score import log_probs
from trimtab.trainer.sampling import NativeSampler

ROWS, LONGEST, CHUNK, VOCABULARY = 8, 96, 256, 1024


class NoTokenizer:
    pad_token_id = 0
    eos_token_id = 1


def shape(family: str = "llama", **options: Any) -> Any:
    from transformers import AutoConfig

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    return AutoConfig.for_model(family, **(sizes | options))


def real_policy(config: Any, precision: Any = "fp32", checkpointing: bool = False) -> Policy:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Policy(model, NoTokenizer(), torch.device("cpu"), precision)


def counted(count: Callable[[Policy], PassMemory], config: Any, precision: Any = "fp32", **options: Any) -> PassMemory:
    with fake_tensors():
        return count(fake_policy(config, precision, **options))


def saved_bytes(policy: Policy, forward: Callable[[], object]) -> int:
    """Return the bytes that autograd saves in a forward pass: every storage once, and no weight."""
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _alive = forward()
    return sum(kept.values())


def allocated(work: Callable[[], object]) -> int:
    """Return the peak of the CPU allocator, workspaces of kernels included."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def ragged() -> list[Transcript]:
    """A micro-batch with a prompt of every length, whose longest response is of the maximal length."""
    return [Transcript([2] * (10 + row), [3] * (LONGEST - 10 - row - (row == 1))) for row in range(ROWS)]


def micro_batch(packed: bool = False, rows: int = ROWS, longest: int = LONGEST) -> MicroBatchShape:
    return MicroBatchShape(rows, longest, CHUNK, packed=packed, fused=packed)


@pytest.mark.parametrize(("family", "tokens"), [("llama", 300), ("qwen2", 64), ("qwen3", 200), ("gemma", 100)])
def test_activations_are_what_autograd_keeps_of_a_real_forward_pass(family: str, tokens: int) -> None:
    config = shape(family)
    policy = real_policy(config)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    # One sequence without a mask goes through torch's flash attention here as packed ones do on a GPU.
    kept = saved_bytes(policy, lambda: policy.backbone(input_ids=ids, use_cache=False).last_hidden_state)
    found = counted(lambda p: update_memory(p, micro_batch(True, 1, tokens), first=True), config)
    rows = tokens * 128 * 4  # those that go to the head are not autograd's
    assert found.activations - rows == pytest.approx(kept, rel=0.02)


def test_weights_kept_for_the_backward_pass_are_not_counted_again() -> None:
    wide = shape(vocab_size=100_000)
    found = counted(lambda p: update_memory(p, micro_batch(True, 1, 16), first=True), wide)
    assert found.activations < 100_000 * 128


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_grow_with_tokens_along_a_line(checkpointing: bool) -> None:
    def kept(tokens: int) -> int:
        count = counted(
            lambda p: update_memory(p, micro_batch(True, 1, tokens), first=False),
            shape(),
            gradient_checkpointing=checkpointing,
        )
        return count.activations

    small, middle, large = kept(1024), kept(2048), kept(8192)
    assert large == pytest.approx(small + 7 * (middle - small), rel=0.001)


@pytest.mark.parametrize(("precision", "checkpointing", "error"), [("bf16", False, 0.03), ("fp32", True, 0.08)])
def test_the_peak_of_an_update_is_what_the_allocator_saw(precision: str, checkpointing: bool, error: float) -> None:
    config = shape()
    policy = real_policy(config, precision, checkpointing)
    gradients = 0
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        gradients += parameter.numel() * 4

    def update() -> None:
        with policy.keep_autocast_cache():
            log_probs(policy, ragged(), 1.0, CHUNK).sum().backward()

    found = counted(
        lambda p: update_memory(p, micro_batch(), first=False), config, precision, gradient_checkpointing=checkpointing
    )
    assert found.peak - gradients == pytest.approx(allocated(update), rel=error)


def test_the_first_micro_batch_of_an_update_makes_the_gradients_on_its_way() -> None:
    config = shape()
    policy = real_policy(config)

    def update() -> None:
        log_probs(policy, ragged(), 1.0, CHUNK).sum().backward()
        policy.model.zero_grad(set_to_none=True)

    found = counted(lambda p: update_memory(p, micro_batch(), first=True), config)
    assert found.peak == pytest.approx(allocated(update), rel=0.03)


def test_the_peak_of_scoring_is_what_the_allocator_saw() -> None:
    config = shape()
    policy = real_policy(config, "bf16")
    found = counted(lambda p: scoring_memory(p, micro_batch()), config, "bf16")
    seen = allocated(lambda: score(policy, ragged(), 1.0, ROWS * LONGEST, CHUNK))
    assert found.peak == pytest.approx(seen, rel=0.03)


def test_the_peak_of_sampling_is_what_the_allocator_saw() -> None:
    config = shape()
    policy = real_policy(config)
    sampler = NativeSampler(policy.model, frozenset({VOCABULARY}), 0, policy.autocast)
    options = SamplingOptions(samples=4, max_new_tokens=9, temperature=1.0)
    prompts = [PromptTokens([2] * (50 + row % 2), row) for row in range(16)]
    found = counted(lambda p: sampling_memory(p, 16, 51, options), config)
    assert found.peak == pytest.approx(allocated(lambda: sampler.sample(prompts, 0, options)), rel=0.1)


def test_no_matrix_of_tokens_by_tokens_exists_on_a_gpu() -> None:
    tokens = 1 << 20
    found = counted(lambda p: update_memory(p, micro_batch(True, 1, tokens), first=True), shape(num_hidden_layers=1))
    assert found.peak < tokens * tokens // 8


def test_a_padded_micro_batch_has_a_mask() -> None:
    packed = counted(lambda p: scoring_memory(p, MicroBatchShape(2, 4096, 64, packed=True, fused=True)), shape())
    padded = counted(lambda p: scoring_memory(p, MicroBatchShape(2, 4096, 64, packed=False, fused=True)), shape())
    assert padded.peak > packed.peak + 2 * 4096 * 4096


def test_checkpointing_keeps_one_state_per_layer() -> None:
    plain = counted(lambda p: update_memory(p, micro_batch(True), first=False), shape())
    saving = counted(lambda p: update_memory(p, micro_batch(True), first=False), shape(), gradient_checkpointing=True)
    states = 3 * ROWS * LONGEST * 128 * 4
    assert states <= saving.activations <= 2.5 * states
    assert saving.peak < plain.peak / 2


def test_bf16_keeps_copies_of_the_linear_weights() -> None:
    found = counted(lambda p: update_memory(p, micro_batch(True), first=False), shape(), "bf16")
    linear = 3 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128) + VOCABULARY * 128
    assert found.categories["weight_copies"] == 2 * linear
    assert (
        "weight_copies" not in counted(lambda p: update_memory(p, micro_batch(True), first=False), shape()).categories
    )


def test_gradients_are_of_trained_weights_alone() -> None:
    pytest.importorskip("peft")
    whole = counted(lambda p: update_memory(p, micro_batch(True), first=False), shape())
    lora = counted(lambda p: update_memory(p, micro_batch(True), first=False), shape(), lora_rank=4)
    assert lora.categories["gradients"] < 0.2 * whole.categories["gradients"]


def test_lora_with_checkpointing_gets_its_gradients_too() -> None:
    pytest.importorskip("peft")
    count = counted(
        lambda p: update_memory(p, micro_batch(True), first=True), shape(), lora_rank=4, gradient_checkpointing=True
    )
    assert count.categories["gradients"] + count.categories["backward"] > 0


def test_the_fused_head_has_one_chunk_of_logits() -> None:
    def head(chunk: int) -> int:
        made = MicroBatchShape(1, 4096, chunk, packed=True, fused=True)
        return counted(lambda p: scoring_memory(p, made), shape(vocab_size=50_000), "bf16").categories["head"]

    assert head(2048) - head(1024) == 1024 * 50_000 * 2


def test_tied_weights_stay_tied() -> None:
    with fake_tensors():
        tied = fake_policy(shape(), "fp32").model
        apart = fake_policy(shape(tie_word_embeddings=False), "fp32").model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert apart.lm_head.weight is not apart.model.embed_tokens.weight


def test_a_pass_leaves_nothing_behind() -> None:
    with fake_tensors():
        policy = fake_policy(shape(), "bf16")
        first = update_memory(policy, micro_batch(True), first=True)
        again = update_memory(policy, micro_batch(True), first=True)
    assert (first.peak, first.activations) == (again.peak, again.activations)
