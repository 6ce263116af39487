"""Packed sequences give what padded rows give in every family that supports them; other models stay padded."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import trimtab as tt
from helpers.gpu import no_host_sync
from trimtab.data import PromptTokens, SamplingOptions
from trimtab.trainer.model import Policy, Transcript, UpdateOptions, load_policy, score, update
from trimtab.trainer.model import packed as packing
from trimtab.trainer.model.loading import with_packing
from trimtab.trainer.model.score import log_probs, micro_batch_sizes, response_hidden_states, split_by_token_budget
from trimtab.trainer.model.update import UpdateResult, forward_backward
from trimtab.trainer.sampling import NativeSampler

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": None},
}
UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a sliding window": ("Mistral", {"sliding_window": 4}, "no sliding window"),
    "some layers with a window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "no sliding window",
    ),
    "attention dropout": ("Llama", {"attention_dropout": 0.1}, "no dropout, mask or bias"),
}


def tiny(family: str, **options: Any) -> Policy:
    """Return a model of a family with random weights and the demo's tokenizer."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **options,
    )
    demo = load_policy("demo", device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for parameter in model.parameters():  # norms and biases too: values of 1 or 0 would hide mistakes
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
    return Policy(model, demo.tokenizer, demo.device)


def transcripts(count: int = 7, longest: int = 9) -> list[Transcript]:
    """Return prompts and responses of random lengths; the first prompt is one token long."""
    rng = torch.Generator().manual_seed(1)

    def sample(most: int) -> list[int]:
        length = int(torch.randint(1, most, (1,), generator=rng))
        return torch.randint(2, 17, (length,), generator=rng).tolist()

    return [Transcript([5], sample(longest)), *(Transcript(sample(longest), sample(longest)) for _ in range(count - 1))]


def padded_and_packed(policy: Policy) -> tuple[Policy, Policy]:
    """Return the policy with padding, and a copy of it with packing."""
    packed = with_packing(replace(policy, model=copy.deepcopy(policy.model)))
    assert packed.packed and not policy.packed
    return policy, packed


def gradients(policy: Policy, sequences: list[Transcript]) -> dict[str, Tensor]:
    policy.model.zero_grad()
    hidden, _ = response_hidden_states(policy, sequences)
    (hidden * torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view_as(hidden)).sum().backward()
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


def assert_same_gradients(padded: Policy, packed: Policy, sequences: list[Transcript]) -> None:
    """Compare in fp64: in fp32 rounding changes some gradients of random models by 1e-4."""
    padded.model.double(), packed.model.double()
    right, found = gradients(padded, sequences), gradients(packed, sequences)
    assert right and right.keys() == found.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [7, 1])
def test_hidden_states_and_gradients_are_those_of_padded_rows(family: str, count: int) -> None:
    padded, packed = padded_and_packed(tiny(family, **FAMILIES[family]))
    sequences = transcripts()[:count]
    (right, tokens), (found, same) = (response_hidden_states(policy, sequences) for policy in (padded, packed))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert torch.equal(tokens, same)
    assert tokens.tolist() == [token for transcript in sequences for token in transcript.response]
    assert_same_gradients(padded, packed, sequences)


def test_gradient_checkpointing_recomputes_packed_sequences() -> None:
    padded, packed = padded_and_packed(tiny("Llama"))
    packed.model.train()
    packed.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_gradients(padded, packed, transcripts())


def test_lora_trains_on_packed_sequences() -> None:
    pytest.importorskip("peft")
    policy = load_policy("demo", device="cpu", seed=3, lora_rank=2, gradient_checkpointing=True)
    rng = torch.Generator().manual_seed(0)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:  # a fresh adapter changes nothing, and half of its gradients are 0
            torch.nn.init.normal_(parameter, std=0.1, generator=rng)
    padded, packed = padded_and_packed(policy)
    assert_same_gradients(padded, packed, transcripts())


def test_scores_do_not_depend_on_micro_batches() -> None:
    padded, packed = padded_and_packed(tiny("Qwen3", head_dim=16))
    right = score(padded, transcripts(), 0.7, token_budget=10_000, head_chunk=10_000)
    for budget in (1, 30, 10_000):
        for fused in (False, True):
            for mine, theirs in zip(score(packed, transcripts(), 0.7, budget, 5, fused), right, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_packed_budget_counts_no_padding() -> None:
    assert micro_batch_sizes([1, 9, 1, 9], 20) == [2, 2]
    assert micro_batch_sizes([1, 9, 1, 9], 20, packed=True) == [4]
    assert micro_batch_sizes([1, 9, 1, 9], 11, packed=True) == [3, 1]
    assert micro_batch_sizes([2] * 9, 16, packed=True) == [5, 4]
    assert micro_batch_sizes([30, 30, 1], 11, packed=True) == [1, 1, 1]
    assert micro_batch_sizes([100, 5, 5, 5], 10, packed=True) == [1, 2, 1]
    assert micro_batch_sizes([], 10, packed=True) == []
    assert micro_batch_sizes([0, 0], 10, packed=True) == [2]
    assert [len(micro) for micro in split_by_token_budget(transcripts(), 1000, packed=True)] == [7]


def test_packed_micro_batches_are_few_and_even() -> None:
    rng = torch.Generator().manual_seed(2)
    for count, budget in ((1, 50), (40, 50), (40, 333), (40, 1000)):
        lengths = torch.randint(1, 50, (count,), generator=rng).tolist()
        sizes = micro_batch_sizes(lengths, budget, packed=True)
        assert sum(sizes) == count
        tokens = [sum(micro) for micro in torch.tensor(lengths).split(sizes)]
        assert max(tokens) <= budget
        filled, room = 0, 0  # greedy filling has the fewest micro-batches
        for length in lengths:
            filled, room = (filled, room - length) if length <= room else (filled + 1, budget - length)
        assert len(sizes) == filled
        even = sum(lengths) / len(sizes)
        assert max(tokens) <= even + budget / 8 + max(lengths), "no micro-batch is much larger than the others"


def planned(policy: Policy, name: str) -> tuple[tt.Objective, Any]:
    sequences, objective = transcripts(), tt.objective(name)
    measured = score(policy, sequences, 1.0, 1000, 1000)
    lengths = torch.tensor([len(transcript.response) for transcript in sequences], device=policy.device)
    sequence = torch.arange(len(sequences), device=policy.device).repeat_interleave(lengths)
    advantage = torch.linspace(-1, 1, len(sequences), device=policy.device)[sequence]
    segment = torch.arange(len(sequence), device=policy.device) // 3
    batch = tt.TokenBatch(measured.logp - 0.01, advantage, sequence, entropy=measured.entropy, segment=segment)
    return objective, objective.plan(batch)


def updated(policy: Policy, name: str, options: UpdateOptions) -> tuple[dict[str, Tensor], UpdateResult]:
    objective, plan = planned(policy, name)
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.1)
    result = update(policy, optimizer, objective, plan, transcripts(), options)
    assert result.taken and sum(result.micro_batch_sizes) == len(transcripts())
    return dict(policy.model.named_parameters()), result


@pytest.mark.parametrize("name", ["stapo", "sspo", "gspo"])
@pytest.mark.parametrize("budget", [25, 1000])
def test_an_update_through_packed_sequences_and_the_fused_head_is_the_plain_one(name: str, budget: int) -> None:
    padded, packed = padded_and_packed(tiny("Qwen3", head_dim=16, tie_word_embeddings=budget == 25))
    right, plain = updated(padded, name, UpdateOptions(1000, 1000, 1.0, 1e9, fused_head=False))
    found, fused = updated(packed, name, UpdateOptions(budget, 8, 1.0, 1e9, fused_head=True))
    for metric in ("update/loss", "update/grad_norm", "update/ratio_max"):
        assert fused.metrics[metric] == pytest.approx(plain.metrics[metric], rel=1e-4, abs=1e-5)
    for parameter, value in right.items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-5, atol=1e-5)
        assert (value.grad is None) == (found[parameter].grad is None)
        torch.testing.assert_close(found[parameter].grad, value.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_model_that_does_more_than_causal_attention_stays_padded_with_a_warning(kind: str) -> None:
    family, options, why = UNSUPPORTED[kind]
    policy = tiny(family, **options)
    right = response_hidden_states(policy, transcripts())[0]
    with pytest.warns(UserWarning, match=rf"padded.*{family}ForCausalLM does not support packed sequences \(.*{why}"):
        same = with_packing(policy)
    assert same is policy and policy.causal_lm.config._attn_implementation == "sdpa"
    assert torch.equal(response_hidden_states(same, transcripts())[0], right)


def test_a_model_that_attends_across_sequences_stays_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_attention = packing._attention

    def without_borders(*args: Any, cu_seq_lens_q: Tensor | None = None, **options: Any) -> tuple[Tensor, None]:
        return packed_attention(*args, **options)

    monkeypatch.setattr(packing, "_attention", without_borders)
    with pytest.warns(UserWarning, match="hidden states are [0-9]+% off"):
        assert not with_packing(tiny("Llama")).packed


def test_an_attention_chosen_by_the_user_is_kept() -> None:
    policy = tiny("Llama")
    policy.causal_lm.set_attn_implementation("eager")
    assert with_packing(policy) is policy
    assert policy.causal_lm.config._attn_implementation == "eager"


def test_a_cpu_pads() -> None:
    assert not load_policy("demo", device="cpu", precision="bf16").packed


def test_other_calls_of_a_packing_model_are_bit_equal_to_sdpa() -> None:
    padded, packed = padded_and_packed(tiny("Qwen3", head_dim=16))
    right, found = (
        response_hidden_states(replace(policy, packed=False), transcripts())[0] for policy in (padded, packed)
    )
    assert torch.equal(right, found)
    prompts = [PromptTokens([2, 3, 4], 0), PromptTokens([5], 1)]
    sampled = [
        NativeSampler(policy.model, policy.eos_token_ids, 0, policy.autocast).sample(prompts, 0, SamplingOptions(3, 8))
        for policy in (padded, packed)
    ]
    assert sampled[0] == sampled[1]


def test_a_saved_model_has_no_trace_of_packing(tmp_path: Path) -> None:
    _, packed = padded_and_packed(tiny("Llama"))
    packed.model.save_pretrained(tmp_path)
    assert "trimtab" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"


class OnEveryOperation(TorchDispatchMode):
    """Call a function with every operation and its output."""

    def __init__(self, see: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(func, out)
        return out


def test_no_mask_of_tokens_by_tokens_is_made() -> None:
    _, packed = padded_and_packed(tiny("Llama"))
    sequences = transcripts(60)
    tokens = sum(map(len, sequences))
    sizes: list[int] = []
    with OnEveryOperation(lambda func, out: sizes.extend(t.numel() for t in [out] if isinstance(t, Tensor))):
        log_probs(packed, sequences, 1.0, 16).sum().backward()
    assert max(sizes) <= tokens * 48 < tokens * tokens / 4  # the widest layer


@pytest.fixture
def host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect reads of tensors by the host, each of which would wait for a GPU; attention on a CPU may."""
    reads: list[str] = []
    tensor_tolist = torch.Tensor.tolist

    def tolist(self: Tensor) -> Any:
        if self.dtype != torch.int32:  # lengths of sequences
            reads.append("tolist")
        return tensor_tolist(self)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)

    def see(func: Any, out: Any) -> None:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal):
            reads.append(str(func))

    with OnEveryOperation(see):
        yield reads


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_reads_its_numbers_from_the_device_once(fused: bool, host_reads: list[str]) -> None:
    _, packed = padded_and_packed(tiny("Qwen3", head_dim=16))
    objective, plan = planned(packed, "stapo")
    optimizer = torch.optim.SGD(packed.model.parameters(), lr=0.1)
    sequences = transcripts()
    host_reads.clear()
    update(packed, optimizer, objective, plan, sequences, UpdateOptions(25, 8, 1.0, 1.0, fused))
    assert host_reads == ["tolist"]


def test_bf16_copies_of_weights_are_made_once_an_update_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, fresh = (replace(load_policy("demo", device="cpu", seed=3), precision="bf16") for _ in range(2))
    counts: list[int] = []
    made: list[dict[str, Tensor]] = []
    for policy in (kept, fresh):
        casts: list[int] = []
        shapes = {p.shape for p in policy.model.parameters() if p.ndim == 2}

        def see(func: Any, out: Any, casts: list[int] = casts, shapes: set[torch.Size] = shapes) -> None:
            if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16 and out.shape in shapes:
                casts.append(1)

        if policy is fresh:
            monkeypatch.setattr(Policy, "keep_autocast_cache", lambda self: nullcontext())
        with OnEveryOperation(see):
            weights, result = updated(policy, "stapo", UpdateOptions(25, 1000, 1.0, 1e9, fused_head=True))
        counts.append(len(casts))
        made.append(weights)
        assert len(result.micro_batch_sizes) > 2
    assert counts[0] < counts[1]
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


@pytest.mark.gpu
def test_on_a_gpu_bf16_packs_and_fp32_does_not() -> None:
    assert load_policy("demo", device="cuda", precision="bf16").packed
    assert not load_policy("demo", device="cuda", precision="fp32").packed


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_packed_bf16_is_as_near_the_truth_as_padded(family: str) -> None:
    exact = tiny(family, **FAMILIES[family])
    right = response_hidden_states(exact, transcripts(40, 25))[0].detach()
    right_gradients = gradients(exact, transcripts(40, 25))
    model = copy.deepcopy(exact.model).to("cuda")
    padded = Policy(model, exact.tokenizer, torch.device("cuda"), "bf16")
    off: list[float] = []
    for policy in (padded, padded_and_packed(padded)[1]):
        with policy.autocast():
            hidden = response_hidden_states(policy, transcripts(40, 25))[0].detach().float().cpu()
            found = gradients(policy, transcripts(40, 25))
        off.append(float((hidden - right).norm() / right.norm()))
        apart = sum(float((found[n].cpu() - g).norm() ** 2) for n, g in right_gradients.items())
        off.append((apart / sum(float(g.norm() ** 2) for g in right_gradients.values())) ** 0.5)
    assert off[0] < 0.1 and off[2] < 1.5 * off[0]
    assert off[1] < 0.3 and off[3] < 1.5 * off[1]


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_on_a_gpu_an_update_is_that_of_the_cpu_to_rounding(checkpointing: bool) -> None:
    exact = load_policy("demo", device="cpu", seed=3)
    before = {n: p.detach().clone() for n, p in exact.model.named_parameters()}
    right, plain = updated(exact, "grpo", UpdateOptions(1000, 1000, 1.0, 1e9))
    packed = load_policy("demo", device="cuda", seed=3, precision="bf16", gradient_checkpointing=checkpointing)
    found, fused = updated(packed, "grpo", UpdateOptions(1000, 1000, 1.0, 1e9))
    assert packed.packed and packed.fused_head(1.0, None) is not None
    assert fused.metrics["update/grad_norm"] == pytest.approx(plain.metrics["update/grad_norm"], rel=0.05)
    moved = {n: (found[n].detach().cpu() - before[n], right[n].detach() - before[n]) for n in before}
    assert all(float((mine - true).norm()) < 0.15 * float(true.norm()) for mine, true in moved.values())


@pytest.mark.gpu
def test_on_a_gpu_forward_and_backward_never_wait_for_the_device() -> None:
    packed = load_policy("demo", device="cuda", seed=3, precision="bf16")
    objective, plan = planned(packed, "stapo")
    head = packed.fused_head(1.0, None)
    forward_backward(packed, objective, plan, transcripts(), 1.0, 1000, head)  # kernels are compiled
    torch.cuda.synchronize()
    with no_host_sync():
        forward_backward(packed, objective, plan, transcripts(), 1.0, 1000, head)


@pytest.mark.gpu
def test_on_a_gpu_lora_packs_too() -> None:
    pytest.importorskip("peft")
    packed = load_policy("demo", device="cuda", seed=3, precision="bf16", lora_rank=2, gradient_checkpointing=True)
    assert packed.packed
    _, result = updated(packed, "stapo", UpdateOptions(1000, 1000, 1.0, 1e9))
    assert 0 < result.metrics["update/grad_norm"] < float("inf")
