"""The paged sampler samples the native sampler's tokens, whatever its KV cache, batch size and sync interval are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from helpers.sampling.paged_models import CONFIGS, EOS, assert_same, count_preemptions, prompts, tiny, tokens
from helpers.thorough import slow_but
from trimtab.data import PromptTokens, Response, SamplingOptions
from trimtab.trainer.model import Transcript, load_policy, score
from trimtab.trainer.sampling import NativeSampler, PagedSampler
from trimtab.trainer.sampling.paged.decoder import Decoder, unsupported_reason
from trimtab.trainer.sampling.paged.scheduler import Scheduler, SequenceGroup
from trimtab.trainer.sampling.sequence import SampledSequence

LENGTHS = (1, 63, 64, 65, 66, 130)  # around the page size
OPTIONS = SamplingOptions(samples=3, max_new_tokens=20, seed=3)
MANY, LONG = prompts(40, 60, 1, 63, 10), SamplingOptions(samples=4, max_new_tokens=180, seed=3)
RARE_EOS = frozenset({2})  # with one end token most samples grow over several pages


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama tied")


@pytest.fixture
def changing() -> Any:
    """A model that a test may change."""
    return tiny("llama tied")


@pytest.fixture
def preemptions(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each sequence was preempted."""
    return count_preemptions(monkeypatch)


def native(model: Any, batch: Sequence[PromptTokens], options: SamplingOptions, step: int = 0) -> list[list[Response]]:
    return NativeSampler(model, EOS, 0, nullcontext).sample(batch, step, options)


def paged(model: Any, **options: Any) -> PagedSampler:
    return PagedSampler(model, EOS, torch.float32, **options)


@pytest.mark.parametrize("family", [*CONFIGS, "lora"])
def test_it_samples_the_native_samplers_tokens(family: str) -> None:
    model = tiny(family)
    responses = paged(model).sample(prompts(*LENGTHS), 0, OPTIONS)
    assert_same(responses, native(model, prompts(*LENGTHS), OPTIONS))
    lengths = {len(response.tokens) for group in responses for response in group}
    assert len(lengths) > 2, "responses that all end at once would prove little"


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.7},
        {"temperature": 1.6, "top_k": 7},
        {"top_p": 0.8},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 30},
        {"temperature": 0.0, "top_k": 3, "samples": 1},
        {"max_new_tokens": 1},
        {"top_k": 10_000, "top_p": 1.0},
    ],
)
def test_it_follows_the_sampling_options(llama: Any, how: dict[str, Any]) -> None:
    options = replace(OPTIONS, **how)
    assert_same(paged(llama).sample(prompts(*LENGTHS), 2, options), native(llama, prompts(*LENGTHS), options, 2))


@pytest.mark.parametrize("steps_per_sync", [1, 3, 16, 32])
@pytest.mark.parametrize("batch_size", [1, 4, 1000])
def test_neither_batch_size_nor_sync_interval_matters(llama: Any, steps_per_sync: int, batch_size: int) -> None:
    batch = prompts(1, 63, 66)
    responses = paged(llama, steps_per_sync=steps_per_sync).sample(batch, 0, replace(OPTIONS, batch_size=batch_size))
    assert_same(responses, native(llama, batch, OPTIONS))


@pytest.mark.parametrize("steps_per_sync", slow_but([3], [3, 16]))
def test_preemption_does_not_change_a_sample(llama: Any, preemptions: Counter[int], steps_per_sync: int) -> None:
    small = PagedSampler(llama, RARE_EOS, torch.float32, max_pages=1, steps_per_sync=steps_per_sync)
    responses = small.sample(MANY, 0, LONG)
    before = preemptions.total()
    assert before, "all fitted: the test proves nothing"
    assert_same(responses, NativeSampler(llama, RARE_EOS, 0, nullcontext).sample(MANY, 0, LONG))
    assert_same(small.sample(MANY, 0, LONG), responses)
    assert preemptions.total() == 2 * before


def test_with_pages_for_all_none_is_preempted(llama: Any, preemptions: Counter[int]) -> None:
    PagedSampler(llama, RARE_EOS, torch.float32).sample(MANY, 0, LONG)
    assert not preemptions


def test_tokens_are_appended_while_the_next_interval_runs(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences: list[SampledSequence] = []
    seen: list[tuple[str, int]] = []  # the calls, and how many tokens the sequences had then
    init = Scheduler.__init__

    def keep_sequences(self: Scheduler, groups: list[SequenceGroup], *rest: Any, **options: Any) -> None:
        sequences.extend(sequence for group in groups for sequence in group.waiting)
        init(self, groups, *rest, **options)

    def record(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def recording(self: Any, *rest: Any) -> Any:
            seen.append((name, sum(len(sequence.tokens) for sequence in sequences)))
            return original(self, *rest)

        monkeypatch.setattr(owner, name, recording)

    monkeypatch.setattr(Scheduler, "__init__", keep_sequences)
    record(Decoder, "decode_step")
    record(Scheduler, "record_outputs")
    options = SamplingOptions(samples=1, max_new_tokens=12)
    responses = PagedSampler(llama, frozenset(), torch.float32, steps_per_sync=2).sample(prompts(5, 9), 0, options)
    assert seen == [
        *[("decode_step", 0)] * 4,
        *[("record_outputs", 0), *[("decode_step", 0)] * 4],  # the 8 tokens of the first interval are not appended yet
        *[("record_outputs", 8), *[("decode_step", 8)] * 4],
        ("record_outputs", 16),
    ]
    assert_same(responses, NativeSampler(llama, frozenset(), 0, nullcontext).sample(prompts(5, 9), 0, options))


def test_what_else_is_in_the_batch_does_not_matter(llama: Any) -> None:
    batch = prompts(5, 64, 70)
    sampler = paged(llama)
    together = tokens(sampler.sample(batch, 0, OPTIONS))
    assert [tokens(sampler.sample([prompt], 0, OPTIONS))[0] for prompt in batch] == together
    assert tokens(sampler.sample(batch[::-1], 0, OPTIONS)) == together[::-1]
    fewer = tokens(sampler.sample(batch, 0, replace(OPTIONS, samples=1)))
    assert fewer == [group[:1] for group in together]


def test_another_seed_step_or_prompt_number_gives_other_samples(llama: Any) -> None:
    batch, sampler = prompts(5, 64), paged(llama)
    base = tokens(sampler.sample(batch, 0, OPTIONS))
    assert tokens(sampler.sample(batch, 0, OPTIONS)) == base
    assert tokens(paged(llama).sample(batch, 0, OPTIONS)) == base
    assert tokens(sampler.sample(batch, 1, OPTIONS)) != base
    assert tokens(sampler.sample(batch, 0, replace(OPTIONS, seed=4))) != base
    renumbered = [PromptTokens(prompt.ids, prompt.number + 9) for prompt in batch]
    assert tokens(sampler.sample(renumbered, 0, OPTIONS)) != base
    twice = [batch[0], batch[0]]
    first, second = tokens(sampler.sample(twice, 0, OPTIONS))
    assert first == second == base[0]


def test_later_calls_may_need_more_or_less_room(llama: Any) -> None:
    sampler = paged(llama)
    for lengths, how in (
        ((3,), {"samples": 1, "max_new_tokens": 4}),
        ((3, 200, 9), {"max_new_tokens": 30}),
        ((9, 9), {"samples": 9, "temperature": 0.5}),
        ((64,), {"samples": 2, "temperature": 0.0}),
        ((5, 300), {"samples": 2, "max_new_tokens": 2, "top_p": 0.7}),
        ((3,), {"samples": 1, "max_new_tokens": 70}),
    ):
        options = replace(OPTIONS, **how)
        assert_same(sampler.sample(prompts(*lengths), 1, options), native(llama, prompts(*lengths), options, 1))
    assert sampler.sample([], 0, OPTIONS) == []


def test_buffers_are_kept_from_call_to_call(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = paged(llama)
    sampler.sample(prompts(30, 40), 0, OPTIONS)
    monkeypatch.setattr(Decoder, "allocate", None)
    sampler.sample(prompts(20, 50), 1, replace(OPTIONS, samples=2, temperature=0.0))


@pytest.mark.parametrize(
    "where", ["Decoder.allocate", "Prefill", "Decoder.decode_step", "Prefill.run", "Scheduler.record_outputs"]
)
def test_after_an_interruption_it_samples_what_a_new_sampler_does(
    llama: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    sampler, batch = paged(llama, max_pages=12), prompts(40, 130, 1)
    sampler.sample(batch[2:], 0, OPTIONS)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"trimtab.trainer.sampling.paged.sampler.{where}", stop)
        with pytest.raises(KeyboardInterrupt):
            sampler.sample(batch, 0, OPTIONS)
    assert_same(sampler.sample(batch, 0, OPTIONS), native(llama, batch, OPTIONS))


def learn(model: Any) -> None:
    """Take optimizer steps that change all weights in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids = torch.tensor([prompts(40)[0].ids])
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_adapters_act_as_in_the_models_own_forward() -> None:
    model = tiny("lora")
    sampler, batch = paged(model), prompts(5, 64)
    with model.disable_adapter():
        assert_same(sampler.sample(batch, 0, OPTIONS), native(model, batch, OPTIONS))
    assert_same(sampler.sample(batch, 0, OPTIONS), native(model, batch, OPTIONS))
    model.merge_adapter()
    assert_same(sampler.sample(batch, 0, OPTIONS), native(model, batch, OPTIONS))
    with model.disable_adapter():  # PEFT unmerges the adapter only when the model runs
        responses = sampler.sample(batch, 0, OPTIONS)
        assert_same(responses, native(model, batch, OPTIONS))


def test_an_adapter_that_is_added_later_takes_effect() -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny("qwen2")
    sampler, batch = paged(model), prompts(5, 64)
    before = sampler.sample(batch, 0, OPTIONS)
    get_peft_model(model, LoraConfig(r=3, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))
    after = sampler.sample(batch, 0, OPTIONS)
    assert_same(after, native(model, batch, OPTIONS))
    assert tokens(after) != tokens(before)


@pytest.mark.parametrize("family", ["llama tied", "qwen3", "lora"])
def test_an_optimizers_step_takes_effect(family: str) -> None:
    model = tiny(family)
    sampler = paged(model)
    before = sampler.sample(prompts(5, 64), 0, OPTIONS)
    learn(model)
    after = sampler.sample(prompts(5, 64), 0, OPTIONS)
    assert tokens(after) != tokens(before)
    assert_same(after, native(model, prompts(5, 64), OPTIONS))


def test_loaded_weights_take_effect(changing: Any) -> None:
    sampler = paged(changing)
    before = sampler.sample(prompts(5, 64), 0, OPTIONS)
    kept = {name: weight.clone() for name, weight in changing.state_dict().items()}
    changing.load_state_dict({name: weight * 1.2 for name, weight in kept.items()})
    after = sampler.sample(prompts(5, 64), 0, OPTIONS)
    assert tokens(after) != tokens(before)
    assert_same(after, native(changing, prompts(5, 64), OPTIONS))
    changing.load_state_dict(kept)
    assert_same(sampler.sample(prompts(5, 64), 0, OPTIONS), before)


def test_an_embedding_at_another_address_takes_effect(changing: Any) -> None:
    sampler = paged(changing)
    sampler.sample(prompts(5, 64), 0, OPTIONS)
    weight = changing.get_input_embeddings().weight
    weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 0.1
    assert_same(sampler.sample(prompts(5, 64), 0, OPTIONS), native(changing, prompts(5, 64), OPTIONS))


def test_the_model_is_left_as_it_was(changing: Any) -> None:
    changing.train()
    kept = {name: weight.clone() for name, weight in changing.state_dict().items()}
    paged(changing).sample(prompts(5, 64), 0, OPTIONS)
    assert changing.training
    assert all(torch.equal(weight, kept[name]) for name, weight in changing.state_dict().items())
    assert all(parameter.grad is None for parameter in changing.parameters())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_in_bf16_log_probabilities_are_the_trainers_to_rounding(temperature: float) -> None:
    policy = load_policy("demo", device="cpu", precision="bf16", seed=3)
    batch = [PromptTokens(policy.tokenizer.encode(text), n) for n, text in enumerate(["1+1=", "12+34=", "99*9="])]
    options = SamplingOptions(samples=16, max_new_tokens=30, temperature=temperature)
    groups = PagedSampler(policy.model, policy.eos_token_ids, torch.bfloat16).sample(batch, 0, options)
    transcripts = [Transcript(p.ids, r.tokens) for p, group in zip(batch, groups, strict=True) for r in group]
    measured = score(policy, transcripts, temperature, token_budget=512, head_chunk=64)
    sampled = torch.tensor([logp for group in groups for response in group for logp in response.logp])
    off = (measured.logp - sampled).abs()
    assert off.mean() < 2e-3
    assert off.max() < 3e-2


def test_an_empty_prompt_is_named(llama: Any) -> None:
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        paged(llama).sample([*prompts(3), PromptTokens([], 1)], 0, OPTIONS)


def test_the_cache_always_fits_one_response(llama: Any) -> None:
    sampler = paged(llama, max_pages=1)
    assert_same(sampler.sample(prompts(130), 0, OPTIONS), native(llama, prompts(130), OPTIONS))


def test_a_cache_too_small_for_one_response_is_an_error(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.trainer.sampling.paged.sampler.num_cache_pages", lambda *_: 2)
    with pytest.raises(RuntimeError, match=r"2 pages are too few for one response: raise rollout\.kv_cache_memory"):
        paged(llama).sample(prompts(200), 0, OPTIONS)


def test_a_model_of_another_family_is_refused_by_name() -> None:
    model = SimpleNamespace(config=GPT2Config())
    with pytest.raises(ValueError, match="cannot run SimpleNamespace: its family is gpt2, not one of llama, qwen2"):
        PagedSampler(model, EOS, torch.float32).sample(prompts(3), 0, OPTIONS)


SIZES = {"hidden_size": 64, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "its family is gpt2"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "its activation is gelu"),
        (
            Qwen2Config(**SIZES, num_hidden_layers=2, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "some of its layers have a sliding window",
        ),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "its rotary embedding is dynamic",
        ),
        (LlamaConfig(**SIZES, head_dim=96), "its heads are 96 wide"),
        (LlamaConfig(**SIZES, head_dim=8), "its heads are 8 wide"),
        (LlamaConfig(**SIZES, head_dim=512), "its heads are 512 wide"),
    ],
)
def test_the_reason_why_a_model_is_unsupported_is_given(config: Any, reason: str) -> None:
    found = unsupported_reason(SimpleNamespace(config=config))
    assert found is not None
    assert found.startswith(reason)


@pytest.mark.parametrize("family", [*CONFIGS, "lora"])
def test_a_supported_model_has_no_reason_against_it(family: str) -> None:
    assert unsupported_reason(tiny(family)) is None
