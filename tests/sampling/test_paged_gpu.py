"""The paged sampler on a GPU: kernels and graphs sample what the native sampler does, and graphs are captured once.

A random number may fall on the border of two tokens, which rounding puts on either side: a few samples may diverge
there. Their log-probabilities are still the trainer's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.sampling.paged_models import CONFIGS, EOS, count_preemptions, prompts, tiny, tokens
from helpers.sampling.requests import ArrivingRequests, requests_for
from helpers.sampling.turns import RandomTurns
from trimtab.data import PromptTokens, Request, Response, SamplingOptions
from trimtab.trainer.model import Policy, Transcript, score
from trimtab.trainer.sampling import NativeSampler, PagedSampler
from trimtab.trainer.sampling.paged.decoder import Decoder

pytestmark = pytest.mark.gpu

PROMPTS = prompts(1, 63, 64, 65, 66, 130)
OPTIONS = SamplingOptions(samples=8, max_new_tokens=40, seed=3)
RARE_EOS = frozenset({2})
MESSAGE_ENDS = frozenset({*EOS, *range(40, 52)})  # so many that messages are short, and conversations have many turns


def policy_of(model: Any, precision: Any) -> Policy:
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    return Policy(model, tokenizer, torch.device("cuda"), precision)


def mismatch(policy: Policy, batch: Sequence[PromptTokens], groups: list[list[Response]], temperature: float) -> Any:
    """Return the differences between the sampler's and the trainer's log-probabilities."""
    pairs = [(prompt, response) for prompt, group in zip(batch, groups, strict=True) for response in group]
    transcripts = [Transcript(prompt.ids, response.tokens, response.observed) for prompt, response in pairs]
    measured = score(policy, transcripts, temperature, token_budget=4096, head_chunk=512)
    sampled = torch.tensor([logp for group in groups for response in group for logp in response.logp])
    return (measured.logp.cpu() - sampled).abs()


def nearly_all_same(actual: list[list[Response]], reference: list[list[Response]]) -> None:
    pairs = [(a, b) for ours, others in zip(actual, reference, strict=True) for a, b in zip(ours, others, strict=True)]
    equal = [a for a, b in pairs if a.tokens.tolist() == b.tokens.tolist() and a.finished == b.finished]
    assert len(equal) >= 0.95 * len(pairs), f"{len(equal)} of {len(pairs)} samples are the same"


@pytest.mark.parametrize("family", [*CONFIGS, "lora"])
def test_in_fp32_it_samples_the_native_samplers_tokens(family: str) -> None:
    model = tiny(family, "cuda")
    actual = PagedSampler(model, EOS, torch.float32).sample(PROMPTS, 0, OPTIONS)
    nearly_all_same(actual, NativeSampler(model, EOS, 0, nullcontext).sample(PROMPTS, 0, OPTIONS))
    assert mismatch(policy_of(model, "fp32"), PROMPTS, actual, 1.0).max() < 5e-5


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.7},
        {"temperature": 1.6, "top_k": 7},
        {"top_p": 0.8},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 30},
        {"temperature": 0.0, "samples": 1},
        {"batch_size": 5},
        {"samples": 128},  # so many rows that attention uses small tiles
    ],
)
def test_it_follows_the_sampling_options(how: dict[str, Any]) -> None:
    model, options = tiny("qwen3", "cuda"), replace(OPTIONS, **how)
    actual = PagedSampler(model, EOS, torch.float32).sample(PROMPTS, 0, options)
    nearly_all_same(actual, NativeSampler(model, EOS, 0, nullcontext).sample(PROMPTS, 0, options))


@pytest.mark.parametrize("family", [*CONFIGS, "lora"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_in_bf16_log_probabilities_are_the_trainers_to_rounding(family: str, temperature: float) -> None:
    model = tiny(family, "cuda")
    options = replace(OPTIONS, temperature=temperature)
    actual = PagedSampler(model, EOS, torch.bfloat16).sample(PROMPTS, 0, options)
    policy = policy_of(model, "bf16")
    reference = NativeSampler(model, EOS, 0, policy.autocast).sample(PROMPTS, 0, options)
    ours, native = mismatch(policy, PROMPTS, actual, temperature), mismatch(policy, PROMPTS, reference, temperature)
    slack = 3e-2 if family == "lora" else 1e-3  # merged weights are rounded once more
    assert ours.mean() < 1.5 * native.mean() + slack
    assert ours.max() < 3 * native.max() + 10 * slack


def test_preemption_does_not_change_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    preemptions = count_preemptions(monkeypatch)
    model, batch = tiny("llama tied", "cuda"), prompts(40, 60, 1, 63, 10)
    options = SamplingOptions(samples=4, max_new_tokens=180, seed=3)
    roomy = PagedSampler(model, RARE_EOS, torch.float32).sample(batch, 0, options)
    assert not preemptions
    actual = PagedSampler(model, RARE_EOS, torch.float32, max_pages=1).sample(batch, 0, options)
    assert preemptions, "all fitted: the test proves nothing"
    pairs = [(a, b) for ours, others in zip(actual, roomy, strict=True) for a, b in zip(ours, others, strict=True)]
    assert sum(a.tokens.tolist() == b.tokens.tolist() for a, b in pairs) >= len(pairs) - 2
    assert mismatch(policy_of(model, "fp32"), batch, actual, 1.0).max() < 5e-5


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, bool]]:
    """How often a step ran outside of a graph, by rows and greedy: twice per capture, for warm-up and capture."""
    steps: Counter[tuple[int, bool]] = Counter()
    decode_step = Decoder.decode_step

    def counting(self: Decoder, rows: int, greedy: bool, buffers: Any) -> None:
        steps[rows, greedy] += 1
        decode_step(self, rows, greedy, buffers)

    monkeypatch.setattr(Decoder, "decode_step", counting)
    return steps


def test_graphs_are_captured_once(captured: Counter[tuple[int, bool]]) -> None:
    model = tiny("qwen2", "cuda")
    sampler = PagedSampler(model, EOS, torch.bfloat16)
    first = tokens(sampler.sample(PROMPTS, 0, OPTIONS))
    assert tokens(sampler.sample(PROMPTS, 0, OPTIONS)) == first
    sampler.sample(PROMPTS, 0, replace(OPTIONS, temperature=0.5, top_k=9, top_p=0.9))
    assert captured and set(captured.values()) == {2}, "temperature, top-k and top-p need no graph of their own"
    sampler.sample(PROMPTS, 0, replace(OPTIONS, temperature=0.0))
    assert {greedy for _, greedy in captured} == {False, True}, "greedy is another graph"


def test_graphs_use_changed_weights(captured: Counter[tuple[int, bool]]) -> None:
    model = tiny("llama tied", "cuda")
    sampler = PagedSampler(model, EOS, torch.float32)
    before = tokens(sampler.sample(PROMPTS, 0, OPTIONS))
    captures = captured.total()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = sampler.sample(PROMPTS, 0, OPTIONS)
    assert tokens(after) != before
    assert mismatch(policy_of(model, "fp32"), PROMPTS, after, 1.0).max() < 5e-5
    weight = model.get_input_embeddings().weight
    weight.data = weight.data * 0.7  # at another address, which the old graphs do not know
    moved = sampler.sample(PROMPTS, 0, OPTIONS)
    assert captured.total() > captures
    assert mismatch(policy_of(model, "fp32"), PROMPTS, moved, 1.0).max() < 5e-5


@pytest.mark.parametrize("max_pages", [None, 1])
def test_conversations_in_fp32_are_the_native_samplers(max_pages: int | None) -> None:
    """With few pages those that wait for a reply lose theirs, and are prefilled again."""
    model = tiny("qwen3", "cuda")
    reference = NativeSampler(model, MESSAGE_ENDS, 0, nullcontext).sample(PROMPTS, 0, OPTIONS, RandomTurns())
    assert sum(len(response.observed) for group in reference for response in group) > 50
    sampler = PagedSampler(model, MESSAGE_ENDS, torch.float32, max_pages=max_pages)
    actual = sampler.sample(PROMPTS, 0, OPTIONS, RandomTurns(order=5))
    nearly_all_same(actual, reference)
    assert mismatch(policy_of(model, "fp32"), PROMPTS, actual, 1.0).max() < 5e-5


@pytest.mark.parametrize("family", ["llama tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 15), (60, 110)])
def test_conversations_in_bf16_have_the_trainers_log_probabilities(family: str, lengths: tuple[int, int]) -> None:
    """Replies are prefilled on top of the pages that were kept: a mask that is off by one would show here."""
    model, sampled = tiny(family, "cuda"), []
    policy = policy_of(model, "bf16")
    for sampler in (
        PagedSampler(model, MESSAGE_ENDS, torch.bfloat16),
        NativeSampler(model, MESSAGE_ENDS, 0, policy.autocast),
    ):
        turns = RandomTurns(lengths=lengths, max_turns=3)
        sampled.append(mismatch(policy, PROMPTS, sampler.sample(PROMPTS, 0, OPTIONS, turns), 1.0))
    ours, native = sampled
    assert ours.mean() < 1.5 * native.mean() + 1e-3
    assert ours.max() < 3 * native.max() + 1e-2


def test_after_conversations_single_responses_are_sampled_as_before() -> None:
    sampler = PagedSampler(tiny("qwen2", "cuda"), EOS, torch.bfloat16)
    sampler.sample(PROMPTS, 0, OPTIONS, RandomTurns())
    before = tokens(sampler.sample(PROMPTS, 0, OPTIONS))
    sampler.sample(PROMPTS, 1, OPTIONS, RandomTurns(seed=1))
    assert tokens(sampler.sample(PROMPTS, 0, OPTIONS)) == before


@pytest.mark.parametrize("max_pages", [None, 1])
def test_answers_to_requests_in_fp32_are_those_of_the_native_samplers_sample(max_pages: int | None) -> None:
    """Requests join while others run; each answer is followed by a request that goes on with its pages."""
    model = tiny("qwen3", "cuda")
    followed: dict[Request, Request] = {}

    def then(request: Request, response: Response) -> list[Request]:
        if request.follows is not None:
            return []
        tokens = [*request.prompt, *response.tokens.tolist(), 5, 6, 7, 8, 9]
        followed[request] = Request(tokens, request.key + 1, 30, follows=request)
        return [followed[request]]

    asked = requests_for(PROMPTS, 0, OPTIONS)
    first = [request for group in asked for request in group]
    requests = ArrivingRequests(first, order=1, max_delay=10, then=then)
    PagedSampler(model, EOS, torch.float32, max_pages=max_pages).serve(requests, replace(OPTIONS, batch_size=32))
    assert len(requests.answers) == 2 * len(first)
    actual = [[replace(requests.answers[each], sample=n) for n, each in enumerate(group)] for group in asked]
    nearly_all_same(actual, NativeSampler(model, EOS, 0, nullcontext).sample(PROMPTS, 0, OPTIONS))
    answers = requests.answers.items()
    prompts_ = [PromptTokens(request.prompt, 0) for request, _ in answers]
    groups = [[response] for _, response in answers]
    assert mismatch(policy_of(model, "fp32"), prompts_, groups, 1.0).max() < 5e-5
    anew = ArrivingRequests([Request(each.prompt, each.key, 30) for each in followed.values()])
    NativeSampler(model, EOS, 0, nullcontext).serve(anew, OPTIONS)
    same = [
        requests.answers[ours].tokens.tolist() == anew.answers[native].tokens.tolist()
        for ours, native in zip(followed.values(), anew.come, strict=True)
    ]
    assert sum(same) >= 0.95 * len(same)


def test_answers_to_requests_in_bf16_have_the_trainers_log_probabilities() -> None:
    model = tiny("llama tied", "cuda")
    policy, asked = policy_of(model, "bf16"), requests_for(PROMPTS, 0, OPTIONS)
    found = []
    for sampler in (PagedSampler(model, EOS, torch.bfloat16), NativeSampler(model, EOS, 0, policy.autocast)):
        requests = ArrivingRequests([request for group in asked for request in group], order=2, max_delay=10)
        sampler.serve(requests, replace(OPTIONS, batch_size=32))
        prompts_ = [PromptTokens(request.prompt, 0) for request in requests.answers]
        found.append(mismatch(policy, prompts_, [[response] for response in requests.answers.values()], 1.0))
    ours, native = found
    assert ours.mean() < 1.5 * native.mean() + 1e-3
    assert ours.max() < 3 * native.max() + 1e-2
