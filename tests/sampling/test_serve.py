"""Answers to requests: each is what `sample` would give it, whatever else is served, and whenever it comes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from helpers.sampling.paged_models import COMMON, EOS, VOCABULARY, assert_same, prompts, tiny
from helpers.sampling.requests import ArrivingRequests, ThreadRequests, requests_for
from trimtab.data import Request, Response, SamplingOptions
from trimtab.trainer.model import Policy, Transcript, score
from trimtab.trainer.sampling import NativeSampler, PagedSampler
from trimtab.trainer.sampling import native as native_module
from trimtab.trainer.sampling.decode_engine import DecodeEngine
from trimtab.trainer.sampling.paged.sampler import Prefill
from trimtab.trainer.sampling.paged.scheduler import Scheduler

BATCH = prompts(1, 20, 64, 70, 33)
OPTIONS = SamplingOptions(samples=4, max_new_tokens=50, seed=3)
ENDS = frozenset({*EOS, *range(40, 52)})  # so many that some answers are short


def native(model: Any, ends: frozenset[int] = ENDS, **how: Any) -> NativeSampler:
    return NativeSampler(model, ends, 0, nullcontext, **how)


def paged(model: Any, ends: frozenset[int] = ENDS, **how: Any) -> PagedSampler:
    return PagedSampler(model, ends, torch.float32, **how)


SAMPLERS: list[Any] = [native, paged]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama tied")


@pytest.fixture(scope="module")
def reference(llama: Any) -> list[list[Response]]:
    """What `sample` gives; answers must be equal to it."""
    return native(llama).sample(BATCH, 1, OPTIONS)


def serve(sampler: Any, asked: list[list[Request]], options: SamplingOptions = OPTIONS, **how: Any) -> ArrivingRequests:
    """Let a sampler answer requests."""
    requests = ArrivingRequests([request for group in asked for request in group], **how)
    sampler.serve(requests, options)
    return requests


def answers(requests: ArrivingRequests, asked: list[list[Request]]) -> list[list[Response]]:
    """Return the answers in the order of `asked`, with the number of the sample as `sample` gives it."""
    return [[replace(requests.answers[each], sample=n) for n, each in enumerate(group)] for group in asked]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("order", "max_delay", "batch_size"), [(1, 0, 100), (2, 20, 100), (3, 90, 100), (4, 6, 3)],
    ids=["at once", "late", "very late", "few slots"],
)  # fmt: skip
def test_answers_are_those_of_sample_whenever_requests_come(
    llama: Any, reference: list[list[Response]], sampler: Any, order: int, max_delay: int, batch_size: int
) -> None:
    asked = requests_for(BATCH, 1, OPTIONS)
    options = replace(OPTIONS, batch_size=batch_size, max_new_tokens=1, samples=1, seed=99)  # the request has its own
    requests = serve(sampler(llama), asked, options, order=order, max_delay=max_delay)
    assert_same(answers(requests, asked), reference)
    assert {response.finished for response in requests.answers.values()} == {True, False}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("how", [{"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.9, "top_k": 30}])
def test_answers_follow_the_sampling_options(llama: Any, sampler: Any, how: dict[str, Any]) -> None:
    options, asked = replace(OPTIONS, **how), requests_for(BATCH, 1, OPTIONS)
    requests = serve(sampler(llama), asked, options, max_delay=9)
    assert_same(answers(requests, asked), native(llama).sample(BATCH, 1, options))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_greedy_answers_are_those_of_transformers(llama: Any, sampler: Any) -> None:
    asked = [[Request(prompt.ids, 0, 25)] for prompt in BATCH]
    requests = serve(sampler(llama, EOS), asked, replace(OPTIONS, temperature=0.0), max_delay=30)
    for request, response in requests.answers.items():
        ids = torch.tensor([request.prompt])
        how = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": sorted(EOS), "pad_token_id": 0}
        generated = llama.generate(ids, attention_mask=torch.ones_like(ids), **how)
        assert response.tokens.tolist() == generated[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_log_probs_are_those_of_the_training_forward(llama: Any, sampler: Any) -> None:
    requests = serve(sampler(llama), requests_for(BATCH, 1, OPTIONS), max_delay=30)
    policy = Policy(llama, SimpleNamespace(pad_token_id=0, eos_token_id=2), torch.device("cpu"), "fp32")
    transcripts = [Transcript(request.prompt, response.tokens) for request, response in requests.answers.items()]
    measured = score(policy, transcripts, 1.0, token_budget=1000, head_chunk=64).logp
    sampled = torch.tensor([logp for response in requests.answers.values() for logp in response.logp])
    torch.testing.assert_close(measured, sampled, rtol=0, atol=5e-5)


def test_answers_of_the_native_sampler_have_moments_as_those_of_sample(llama: Any) -> None:
    sampler, asked = native(llama, with_moments=True), requests_for(BATCH, 1, OPTIONS)
    served = answers(serve(sampler, asked, max_delay=9), asked)
    for ours, others in zip(served, sampler.sample(BATCH, 1, OPTIONS), strict=True):
        for a, b in zip(ours, others, strict=True):
            assert a.moments is not None and b.moments is not None
            assert a.moments.dtype == b.moments.dtype
            torch.testing.assert_close(torch.tensor(a.moments), torch.tensor(b.moments), rtol=0, atol=5e-5)
    greedy = serve(sampler, requests_for(BATCH, 1, OPTIONS), replace(OPTIONS, temperature=0.0))
    assert all(response.moments is None for response in greedy.answers.values())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_request_joins_while_others_run_and_need_not_wait_for_them(llama: Any, sampler: Any) -> None:
    long = Request(BATCH[1].ids, 5, 200)
    short = [Request(BATCH[2].ids, key, 10) for key in range(8)]
    requests = ArrivingRequests([long])
    requests.at_poll = lambda number: requests._ask(short) if number == 3 else None
    sampler(llama, frozenset()).serve(requests, OPTIONS)
    assert list(requests.answers)[-1] is long
    assert requests.blocked == 1


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_first_token_may_be_the_last(llama: Any, sampler: Any) -> None:
    asked = [[Request(prompt.ids, 7, 9)] for prompt in BATCH]
    requests = serve(sampler(llama, frozenset(range(VOCABULARY))), asked, max_delay=3)
    assert [(len(r.tokens), r.finished) for r in requests.answers.values()] == [(1, True)] * len(BATCH)
    requests = serve(sampler(llama, frozenset()), [[Request(BATCH[0].ids, 7, 1)]])
    assert [(len(r.tokens), r.finished) for r in requests.answers.values()] == [(1, False)]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_prompt_and_answer_have_no_more_than_max_tokens(llama: Any, sampler: Any) -> None:
    asked = [[Request(prompt.ids, 7, 100)] for prompt in BATCH]
    requests = serve(sampler(llama, frozenset()), asked, max_tokens=72)
    found = [requests.answers[request] for (request,) in asked]
    assert [len(response.tokens) for response in found] == [71, 52, 8, 2, 39]
    assert not any(response.finished for response in found)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("cut", [1, 5, 13, 16, 17, 50])
def test_stop_ends_an_answer_where_it_says(llama: Any, sampler: Any, cut: int) -> None:
    options = replace(OPTIONS, samples=2)
    whole = native(llama, frozenset()).sample(BATCH, 1, options)
    asked = requests_for(BATCH, 1, options, stop=lambda tokens: cut if len(tokens) >= cut else None)
    free = [Request(prompt.ids, 3, 30) for prompt in BATCH]
    requests = serve(sampler(llama, frozenset()), [*asked, free], options, max_delay=9)
    for (ours, others), first in zip(zip(answers(requests, asked), whole, strict=True), asked, strict=True):
        assert first[0] in requests.answers
        for a, b in zip(ours, others, strict=True):
            assert a.tokens.tolist() == b.tokens[:cut].tolist()
            torch.testing.assert_close(torch.tensor(a.logp), torch.tensor(b.logp[:cut]), rtol=0, atol=2e-5)
            assert a.finished
    assert [len(requests.answers[request].tokens) for request in free] == [30] * len(BATCH)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_stop_cuts_off_may_have_had_an_end_token(
    llama: Any, reference: list[list[Response]], sampler: Any
) -> None:
    ended = reference[0][next(n for n, response in enumerate(reference[0]) if response.finished)]
    seen: list[list[int]] = []

    def stop(tokens: Any) -> int | None:
        seen.append(list(tokens))
        return 1

    asked = requests_for(BATCH, 1, OPTIONS, stop=stop)
    response = serve(sampler(llama), asked).answers[asked[0][ended.sample]]
    assert response.tokens.tolist() == ended.tokens[:1].tolist()
    assert response.finished
    assert len(seen) == 20, "nobody is asked again"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_stop_that_keeps_nothing_is_an_error(llama: Any, sampler: Any) -> None:
    with pytest.raises(ValueError, match=r"request\.stop returned 0 for \d+ tokens: it must keep 1 or more"):
        serve(sampler(llama), [[Request([5], 0, 9, stop=lambda tokens: 0)]])


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("poll", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [2, 100])
def test_who_is_cancelled_is_dropped_and_the_others_stay_the_same(
    llama: Any, sampler: Any, poll: int, batch_size: int
) -> None:
    options = replace(OPTIONS, samples=2, batch_size=batch_size, max_new_tokens=64)
    whole = native(llama, frozenset()).sample(BATCH, 1, options)
    asked = requests_for(BATCH, 1, options)

    def cancel(number: int) -> None:
        for first, _ in asked if number == poll else []:
            first.cancelled = first not in requests.answers

    requests = ArrivingRequests([request for group in asked for request in group], at_poll=cancel)
    sampler(llama, frozenset()).serve(requests, options)
    assert not any(request.cancelled for request in requests.answers)
    assert sum(first.cancelled for first, _ in asked) >= 3
    for (_, second), group in zip(asked, whole, strict=True):
        assert requests.answers[second].tokens.tolist() == group[1].tokens.tolist()


def chain_of(turns: int, follows: bool, reply: int = 9) -> Callable[[Request, Response], Iterable[Request]]:
    """Ask for the next message of a conversation, with a reply before it, until there were enough."""
    turn: dict[Request, int] = {}

    def then(request: Request, response: Response) -> Iterable[Request]:
        number = turn.get(request, 1)
        if number == turns:
            return ()
        rng = random.Random(f"{request.key}")
        tokens = [*request.prompt, *response.tokens.tolist(), *(rng.randrange(5, VOCABULARY) for _ in range(reply))]
        following = Request(tokens, rng.getrandbits(60), 20, follows=request if follows else None)
        turn[following] = number + 1
        return (following,)

    return then


def conversations(sampler: Any, follows: bool, **how: Any) -> list[Any]:
    """Return what was asked and answered, in an order of its own."""
    asked = [[Request(prompt.ids, key, 20) for key in range(prompt.number, 40, 7)] for prompt in BATCH]
    requests = serve(sampler, asked, then=chain_of(4, follows), **how)
    assert len(requests.answers) == 4 * sum(map(len, asked))
    pairs = [(list(a.prompt), a.key, r.tokens.tolist(), r.logp.tolist()) for a, r in requests.answers.items()]
    return sorted(pairs)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("follows", [True, False])
def test_requests_that_follow_others_are_answered_as_if_they_did_not(llama: Any, sampler: Any, follows: bool) -> None:
    expected = conversations(native(llama), follows=False)
    actual = conversations(sampler(llama), follows=follows, order=3, max_delay=20)
    assert [each[:3] for each in actual] == [each[:3] for each in expected]
    for ours, others in zip(actual, expected, strict=True):
        assert ours[3] == pytest.approx(others[3], abs=2e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_many_threads_get_the_answers_to_their_own_requests(llama: Any, sampler: Any) -> None:
    requests, found = ThreadRequests(), dict[int, list[list[int]]]()
    running = [threading.Thread(target=lambda n=n: found.update({n: talk(requests, n)})) for n in range(64)]

    def end() -> None:
        for thread in running:
            thread.join()
        requests.leave()

    for thread in (*running, threading.Thread(target=end)):
        thread.start()
    sampler(llama).serve(requests, OPTIONS)
    expected = ArrivingRequests([first_of(n) for n in range(64)], then=chain_of(3, follows=False))
    native(llama).serve(expected, OPTIONS)
    answered = {(tuple(a.prompt), a.key): r.tokens.tolist() for a, r in expected.answers.items()}
    assert len(found) == 64
    assert {tuple(tokens) for messages in found.values() for tokens in messages} == set(map(tuple, answered.values()))
    assert sum(map(len, found.values())) == len(expected.answers) == 64 * 3


def first_of(number: int) -> Request:
    return Request(BATCH[number % 5].ids, number, 20)


def talk(requests: ThreadRequests, number: int) -> list[list[int]]:
    """Ask for three messages, with random delays; return them."""
    rng, request, messages, then = random.Random(number), first_of(number), list[list[int]](), chain_of(3, True)
    while True:
        time.sleep(rng.random() * 0.02)
        response = requests.ask(request)
        messages.append(response.tokens.tolist())
        following = list(then(request, response))
        if not following:
            return messages
        (request,) = following


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("where", ["take", "answer", "stop"])
def test_after_an_error_of_the_other_side_the_sampler_is_as_before(
    llama: Any, reference: list[list[Response]], sampler: Any, where: str
) -> None:
    class Broken(ArrivingRequests):
        def take(self, block: bool) -> list[Request] | None:
            if where == "take" and self.polls == 2:
                raise OSError("the network is down")
            return super().take(block)

        def answer(self, request: Request, response: Response) -> None:
            if where == "answer":
                raise OSError("the network is down")
            super().answer(request, response)

    def broken_stop(tokens: Any) -> int | None:
        raise OSError("the network is down")

    made, stop = sampler(llama), broken_stop if where == "stop" else None
    llama.train()
    with pytest.raises(OSError, match="the network is down"):
        made.serve(Broken([*chain.from_iterable(requests_for(BATCH, 1, OPTIONS, stop=stop))]), OPTIONS)
    assert llama.training
    llama.eval()
    asked = requests_for(BATCH, 1, OPTIONS)
    assert_same(answers(serve(made, asked), asked), reference)
    assert_same(made.sample(BATCH, 1, OPTIONS), reference)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_without_requests_it_returns(llama: Any, sampler: Any) -> None:
    requests = serve(sampler(llama), [])
    assert requests.polls == 1 and not requests.answers


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 0, 5), "has no tokens"),
        (Request([5, VOCABULARY], 0, 5), f"holds token {VOCABULARY}, but the model's vocabulary is 0 to"),
        (Request([5, -1], 0, 5), "holds token -1"),
        (Request([5] * 300, 0, 5), "a request of 300 tokens with max_new_tokens=5: no token may be sampled"),
        (Request([5], 0, 0), "a request of 1 tokens with max_new_tokens=0: no token may be sampled"),
    ],
)
def test_a_wrong_request_is_named(llama: Any, sampler: Any, request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve(sampler(llama), [[request_]])


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every forward pass of the native sampler."""
    rows, forward = list[int](), DecodeEngine._forward

    def noting(self: DecodeEngine, batch: Any, ids: Any, position: Any) -> None:
        rows.append(len(ids))
        forward(self, batch, ids, position)

    monkeypatch.setattr(DecodeEngine, "_forward", noting)
    return rows


def test_late_requests_share_the_forward_passes_of_those_that_run(llama: Any, forwards: list[int]) -> None:
    asked = [[Request(prompt.ids, key, 60) for key in range(4)] for prompt in BATCH]
    requests = serve(native(llama, frozenset()), asked, max_delay=30)
    joins = 30 / native_module.JOIN_ROUNDS + 1
    # Decoded alone they would take 20 x 60 passes; together as many as from the first token to the last.
    assert len(forwards) <= 60 + 30 + native_module.JOIN_ROUNDS + joins
    assert sum(forwards) < 1.2 * sum(len(response.tokens) for response in requests.answers.values())


def test_prefills_are_limited_to_so_many_tokens(
    llama: Any, reference: list[list[Response]], forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_module, "MAX_PREFILL_TOKENS", 150)
    asked = requests_for(BATCH, 1, OPTIONS)
    assert_same(answers(serve(native(llama), asked), asked), reference)
    assert max(forwards[:2]) <= 5


def test_caches_that_cannot_be_merged_are_decoded_apart() -> None:
    """The cache of a sliding window drops tokens, and a batch that joined would have others at the same index."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(MistralConfig(**COMMON, sliding_window=16)).eval()
    asked, sampler = requests_for(BATCH, 1, OPTIONS), native(model)
    requests = serve(sampler, asked, max_delay=20)
    assert_same(answers(requests, asked), sampler.sample(BATCH, 1, OPTIONS))


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens the paged sampler's prefills had, and at last whether all pages were accounted for."""
    counts, run, generate = list[int](), Prefill.run, PagedSampler._generate

    def counting(self: Prefill, prefixes: Any, pages: Any, cached: Any = None) -> None:
        counts.append(sum(map(len, prefixes)) - sum(cached or ()))
        run(self, prefixes, pages, cached)

    def checking(self: PagedSampler, scheduler: Scheduler, *rest: Any) -> None:
        generate(self, scheduler, *rest)
        while scheduler._free_kept():
            pass
        assert scheduler.allocator.num_free == scheduler.allocator.num_pages, "pages were lost"

    monkeypatch.setattr(Prefill, "run", counting)
    monkeypatch.setattr(PagedSampler, "_generate", checking)
    return counts


def test_kept_pages_leave_only_what_is_new_to_prefill(llama: Any, prefilled: list[int]) -> None:
    asked = conversations(paged(llama), follows=True)
    first = sum(len(prompt.ids) - 1 for prompt in BATCH)
    # The newest token of an answer has no keys and values, nor has the last of a prompt: as many tokens as a reply has.
    assert sum(prefilled) == first + 9 * (len(asked) // 4) * 3


@pytest.mark.parametrize("how", [{"max_pages": 1, "steps_per_sync": 3}, {"max_pages": 20}])
def test_with_few_pages_answers_are_the_same(
    llama: Any, prefilled: list[int], monkeypatch: pytest.MonkeyPatch, how: dict[str, int]
) -> None:
    roomy = conversations(paged(llama), follows=True)
    before = sum(prefilled)
    few = conversations(paged(llama, **how), follows=True, order=3, max_delay=5)
    assert [each[:3] for each in few] == [each[:3] for each in roomy]
    assert sum(prefilled) > 2 * before, "all fitted: the test proves nothing"


def test_equal_prompts_that_come_together_are_prefilled_once(llama: Any, prefilled: list[int]) -> None:
    serve(paged(llama), requests_for(BATCH, 1, OPTIONS))
    assert sum(prefilled) == sum(len(prompt.ids) - 1 for prompt in BATCH)


@pytest.mark.parametrize("cut", [3, 11, 64])
def test_several_may_follow_an_answer_that_was_cut_or_not_follow_it_at_all(
    llama: Any, prefilled: list[int], cut: int
) -> None:
    """The first takes over the pages; one that only says that it follows, with another prompt, is prefilled anew."""
    first = Request(BATCH[2].ids, 5, 100, stop=lambda tokens: cut if len(tokens) >= cut else None)

    def then(request: Request, response: Response) -> Iterable[Request]:
        whole = [*request.prompt, *response.tokens.tolist()]
        prompts = [whole, [*whole, 9], [*whole, 9], whole[:-1], [9, *whole[1:]]] if request is first else []
        return [Request(prompt, key, 30, follows=request) for key, prompt in enumerate(prompts)]

    sampler = paged(llama, frozenset())
    served = serve(sampler, [[first]], then=then, max_delay=40).answers
    assert len(served[first].tokens) == cut and len(served) == 6
    anew = [Request(each.prompt, each.key, 30) for each in served if each is not first]
    others = serve(native(llama, frozenset()), [anew]).answers
    for request, response in served.items():
        same = [other for other in anew if (other.prompt, other.key) == (request.prompt, request.key)]
        assert [others[other].tokens.tolist() for other in same] == [response.tokens.tolist()] * (request is not first)
