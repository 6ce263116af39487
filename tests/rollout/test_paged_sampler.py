"""The paged sampler draws what the native one draws, however small its cache, its batch and its strides are."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from helpers.rollout.paged_models import CONFIGS, ENDS, count_waits, prompts, same, tiny, tokens
from trimtab.policy import Transcript, load_policy, score
from trimtab.rollout import NativeSampler, PagedSampler, PromptTokens, Response, SamplingOptions
from trimtab.rollout.paged.decoder import Decoder, unsupported_reason
from trimtab.rollout.paged.page_allocator import Pool
from trimtab.rollout.paged.scheduler import Drawn, Group, Sample, Schedule

LENGTHS = (1, 63, 64, 65, 66, 130)  # about the borders of pages
OPTIONS = SamplingOptions(samples=3, max_new_tokens=20, seed=3)
MANY, LONG = prompts(40, 60, 1, 63, 10), SamplingOptions(samples=4, max_new_tokens=180, seed=3)
SELDOM = frozenset({2})  # one end token alone: most samples grow over several pages


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama tied")


@pytest.fixture
def changing() -> Any:
    """A model that a test may change."""
    return tiny("llama tied")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How often each sample has given way."""
    return count_waits(monkeypatch)


def native(model: Any, asked: Sequence[PromptTokens], options: SamplingOptions, step: int = 0) -> list[list[Response]]:
    return NativeSampler(model, ENDS, 0, nullcontext).sample(asked, step, options)


def paged(model: Any, **options: Any) -> PagedSampler:
    return PagedSampler(model, ENDS, torch.float32, **options)


@pytest.mark.parametrize("family", [*CONFIGS, "lora"])
def test_it_draws_what_the_native_sampler_draws(family: str) -> None:
    model = tiny(family)
    mine = paged(model).sample(prompts(*LENGTHS), 0, OPTIONS)
    same(mine, native(model, prompts(*LENGTHS), OPTIONS))
    lengths = {len(response.tokens) for group in mine for response in group}
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
def test_it_draws_as_it_is_asked(llama: Any, how: dict[str, Any]) -> None:
    options = replace(OPTIONS, **how)
    same(paged(llama).sample(prompts(*LENGTHS), 2, options), native(llama, prompts(*LENGTHS), options, 2))


@pytest.mark.parametrize("stride", [1, 3, 16, 32])
@pytest.mark.parametrize("batch", [1, 4, 1000])
def test_neither_batch_nor_stride_matters(llama: Any, stride: int, batch: int) -> None:
    asked = prompts(1, 63, 66)
    mine = paged(llama, stride=stride).sample(asked, 0, replace(OPTIONS, batch=batch))
    same(mine, native(llama, asked, OPTIONS))


@pytest.mark.parametrize("stride", [3, 16])
def test_samples_that_give_way_are_what_they_would_have_been(
    llama: Any, waits: Counter[tuple[int, int]], stride: int
) -> None:
    small = PagedSampler(llama, SELDOM, torch.float32, pages=1, stride=stride)
    mine = small.sample(MANY, 0, LONG)
    before = waits.total()
    assert before, "there was room for all: the test proves nothing"
    same(mine, NativeSampler(llama, SELDOM, 0, nullcontext).sample(MANY, 0, LONG))
    same(small.sample(MANY, 0, LONG), mine)
    assert waits.total() == 2 * before


def test_with_room_for_all_nobody_gives_way(llama: Any, waits: Counter[tuple[int, int]]) -> None:
    PagedSampler(llama, SELDOM, torch.float32).sample(MANY, 0, LONG)
    assert not waits


def test_what_a_stride_drew_is_read_while_the_next_one_runs(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noting(owner: Any, name: str) -> None:
        theirs = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *rest: (seen.append(name), theirs(self, *rest))[1])

    for owner, name in ((Decoder, "step"), (Drawn, "read"), (Schedule, "look")):
        noting(owner, name)
    options = SamplingOptions(samples=1, max_new_tokens=12)
    mine = PagedSampler(llama, frozenset(), torch.float32, stride=2).sample(prompts(5, 9), 0, options)
    stride = ["step"] * 4
    assert seen == [*stride, "look", *stride, "read", "look", *stride, "read", "look", "read"]
    same(mine, NativeSampler(llama, frozenset(), 0, nullcontext).sample(prompts(5, 9), 0, options))


def test_what_else_is_in_the_batch_does_not_matter(llama: Any) -> None:
    asked = prompts(5, 64, 70)
    sampler = paged(llama)
    together = tokens(sampler.sample(asked, 0, OPTIONS))
    assert [tokens(sampler.sample([prompt], 0, OPTIONS))[0] for prompt in asked] == together
    assert tokens(sampler.sample(asked[::-1], 0, OPTIONS)) == together[::-1]
    fewer = tokens(sampler.sample(asked, 0, replace(OPTIONS, samples=1)))
    assert fewer == [group[:1] for group in together]


def test_another_seed_step_or_prompt_number_is_another_stream(llama: Any) -> None:
    asked, sampler = prompts(5, 64), paged(llama)
    base = tokens(sampler.sample(asked, 0, OPTIONS))
    assert tokens(sampler.sample(asked, 0, OPTIONS)) == base
    assert tokens(paged(llama).sample(asked, 0, OPTIONS)) == base
    assert tokens(sampler.sample(asked, 1, OPTIONS)) != base
    assert tokens(sampler.sample(asked, 0, replace(OPTIONS, seed=4))) != base
    renumbered = [PromptTokens(prompt.ids, prompt.number + 9) for prompt in asked]
    assert tokens(sampler.sample(renumbered, 0, OPTIONS)) != base
    twice = [asked[0], asked[0]]
    first, second = tokens(sampler.sample(twice, 0, OPTIONS))
    assert first == second == base[0]


def test_later_calls_may_ask_for_more_and_for_less(llama: Any) -> None:
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
        same(sampler.sample(prompts(*lengths), 1, options), native(llama, prompts(*lengths), options, 1))
    assert sampler.sample([], 0, OPTIONS) == []


def test_memory_is_kept_from_call_to_call(llama: Any) -> None:
    sampler = paged(llama)
    sampler.sample(prompts(30, 40), 0, OPTIONS)
    before = sampler._memory
    sampler.sample(prompts(20, 50), 1, replace(OPTIONS, samples=2, temperature=0.0))
    assert sampler._memory is before


@pytest.mark.parametrize("part", ["Memory.of", "Reader", "Decoder.step", "Reader.read", "Schedule.look"])
def test_after_an_interruption_it_draws_what_a_new_one_draws(
    llama: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    sampler, asked = paged(llama, pages=12), prompts(40, 130, 1)
    sampler.sample(asked[2:], 0, OPTIONS)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"trimtab.rollout.paged.sampler.{part}", stop)
        with pytest.raises(KeyboardInterrupt):
            sampler.sample(asked, 0, OPTIONS)
    same(sampler.sample(asked, 0, OPTIONS), native(llama, asked, OPTIONS))


def learn(model: Any) -> None:
    """Steps that change all weights in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids = torch.tensor([prompts(40)[0].ids])
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_adapters_count_as_the_models_own_forward_counts_them() -> None:
    model = tiny("lora")
    sampler, asked = paged(model), prompts(5, 64)
    with model.disable_adapter():
        same(sampler.sample(asked, 0, OPTIONS), native(model, asked, OPTIONS))
    same(sampler.sample(asked, 0, OPTIONS), native(model, asked, OPTIONS))
    model.merge_adapter()
    same(sampler.sample(asked, 0, OPTIONS), native(model, asked, OPTIONS))
    with model.disable_adapter():  # which takes the adapter out of the weights only when the model is run
        mine = sampler.sample(asked, 0, OPTIONS)
        same(mine, native(model, asked, OPTIONS))


def test_an_adapter_that_comes_later_takes_effect() -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny("qwen2")
    sampler, asked = paged(model), prompts(5, 64)
    before = sampler.sample(asked, 0, OPTIONS)
    get_peft_model(model, LoraConfig(r=3, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))
    after = sampler.sample(asked, 0, OPTIONS)
    same(after, native(model, asked, OPTIONS))
    assert tokens(after) != tokens(before)


@pytest.mark.parametrize("family", ["llama tied", "qwen3", "lora"])
def test_an_optimizers_step_takes_effect(family: str) -> None:
    model = tiny(family)
    sampler = paged(model)
    before = sampler.sample(prompts(5, 64), 0, OPTIONS)
    learn(model)
    after = sampler.sample(prompts(5, 64), 0, OPTIONS)
    assert tokens(after) != tokens(before)
    same(after, native(model, prompts(5, 64), OPTIONS))


def test_loaded_weights_take_effect(changing: Any) -> None:
    sampler = paged(changing)
    before = sampler.sample(prompts(5, 64), 0, OPTIONS)
    kept = {name: weight.clone() for name, weight in changing.state_dict().items()}
    changing.load_state_dict({name: weight * 1.2 for name, weight in kept.items()})
    after = sampler.sample(prompts(5, 64), 0, OPTIONS)
    assert tokens(after) != tokens(before)
    same(after, native(changing, prompts(5, 64), OPTIONS))
    changing.load_state_dict(kept)
    same(sampler.sample(prompts(5, 64), 0, OPTIONS), before)


def test_an_embedding_in_another_place_takes_effect(changing: Any) -> None:
    sampler = paged(changing)
    sampler.sample(prompts(5, 64), 0, OPTIONS)
    weight = changing.get_input_embeddings().weight
    weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 0.1
    same(sampler.sample(prompts(5, 64), 0, OPTIONS), native(changing, prompts(5, 64), OPTIONS))


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
    asked = [PromptTokens(policy.tokenizer.encode(text), n) for n, text in enumerate(["1+1=", "12+34=", "99*9="])]
    options = SamplingOptions(samples=16, max_new_tokens=30, temperature=temperature)
    groups = PagedSampler(policy.model, policy.eos_token_ids, torch.bfloat16).sample(asked, 0, options)
    transcripts = [Transcript(p.ids, r.tokens) for p, group in zip(asked, groups, strict=True) for r in group]
    measured = score(policy, transcripts, temperature, token_budget=512, head_chunk=64)
    drawn = torch.tensor([logp for group in groups for response in group for logp in response.logp])
    off = (measured.logp - drawn).abs()
    assert off.mean() < 2e-3
    assert off.max() < 3e-2


def test_an_empty_prompt_is_named(llama: Any) -> None:
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        paged(llama).sample([*prompts(3), PromptTokens([], 1)], 0, OPTIONS)


def test_a_cache_is_never_made_too_small_for_one_response(llama: Any) -> None:
    sampler = paged(llama, pages=1)
    same(sampler.sample(prompts(130), 0, OPTIONS), native(llama, prompts(130), OPTIONS))
    assert sampler._memory is not None
    group = Group([5] * 200, deque([Sample(0, 0, 1, [5] * 200)]))
    with pytest.raises(RuntimeError, match="2 pages are too few for one response"):
        sampler._admit(Schedule([group], Pool(2), 1, 4, 20, 16), sampler._memory)


def test_a_model_of_another_family_is_refused_by_name() -> None:
    model = SimpleNamespace(config=GPT2Config())
    with pytest.raises(ValueError, match="cannot run SimpleNamespace: its family is gpt2, not one of llama, qwen2"):
        PagedSampler(model, ENDS, torch.float32).sample(prompts(3), 0, OPTIONS)


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
def test_what_it_cannot_run_it_says(config: Any, reason: str) -> None:
    said = unsupported_reason(SimpleNamespace(config=config))
    assert said is not None
    assert said.startswith(reason)


@pytest.mark.parametrize("family", [*CONFIGS, "lora"])
def test_what_it_can_run_it_does_not_refuse(family: str) -> None:
    assert unsupported_reason(tiny(family)) is None
