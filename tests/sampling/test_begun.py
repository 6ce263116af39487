"""Responses that are cut and gone on with: by `Request.begun` they become what they would have been in one piece."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from helpers.sampling.paged_models import EOS, assert_same, prompts, tiny
from helpers.sampling.requests import requests_for
from trimtab.data import Request, Response, SamplingOptions
from trimtab.trainer.sampling import NativeSampler, PagedSampler

BATCH = prompts(1, 20, 64, 33)
OPTIONS = SamplingOptions(samples=4, max_new_tokens=50, seed=3)
ENDS = frozenset({*EOS, *range(40, 52)})  # so many that some answers are short


def native(model: Any) -> NativeSampler:
    return NativeSampler(model, ENDS, 0, nullcontext)


def paged(model: Any, **how: Any) -> PagedSampler:
    return PagedSampler(model, ENDS, torch.float32, **how)


def paged_in_few_pages(model: Any) -> PagedSampler:
    return paged(model, max_pages=34, steps_per_sync=3)


SAMPLERS: list[Any] = [native, paged, paged_in_few_pages]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama tied")


@pytest.fixture(scope="module")
def whole(llama: Any) -> list[list[Response]]:
    return native(llama).sample(BATCH, 1, OPTIONS)


@dataclass
class Halting:
    """All requests at once; after so many answers the others are halted."""

    asked: Sequence[Request]
    count: int
    max_tokens: int = 300
    answers: dict[Request, Response] = field(default_factory=dict)
    given: bool = False

    def take(self, block: bool) -> list[Request] | None:
        given, self.given = self.given, True
        return None if given else list(self.asked)

    def answer(self, request: Request, response: Response) -> None:
        assert request not in self.answers
        self.answers[request] = response
        if len(self.answers) >= self.count:
            for other in self.asked:
                other.halted = other.halted or other not in self.answers


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_response_cut_anywhere_goes_on_as_it_would_have(
    llama: Any, whole: list[list[Response]], sampler: Any
) -> None:
    rng, asked = random.Random(0), requests_for(BATCH, 1, OPTIONS)
    for requests, responses in zip(asked, whole, strict=True):
        for request, response in zip(requests, responses, strict=True):
            cut = rng.randrange(len(response.tokens))
            request.begun = replace(response, tokens=response.tokens[:cut], logp=response.logp[:cut])
    served = Halting([request for group in asked for request in group], 10**9)
    sampler(llama).serve(served, OPTIONS)
    assert_same([[replace(served.answers[r], sample=n) for n, r in enumerate(group)] for group in asked], whole)
    for request, response in served.answers.items():
        assert request.begun is not None
        assert response.logp[: len(request.begun.logp)].tolist() == request.begun.logp.tolist(), "they are kept"


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("slots", [100, 3])
def test_what_is_halted_is_answered_with_what_it_has_and_goes_on_later(
    llama: Any, whole: list[list[Response]], sampler: Any, slots: int
) -> None:
    options, begun = replace(OPTIONS, batch_size=slots), dict[tuple[int, int], Response]()
    calls, some_halted, some_not_begun = 0, False, False
    while len([each for each in begun.values() if each.finished or len(each.tokens) == 50]) < 16:
        asked = {
            (prompt, sample): replace(request, begun=begun.get((prompt, sample)))
            for prompt, group in enumerate(requests_for(BATCH, 1, OPTIONS))
            for sample, request in enumerate(group)
            if (prompt, sample) not in begun
            or not (begun[prompt, sample].finished or len(begun[prompt, sample].tokens) == 50)
        }
        served = Halting(list(asked.values()), 4)
        sampler(llama).serve(served, options)
        for where, request in asked.items():
            if request in served.answers:
                begun[where] = replace(served.answers[request], sample=where[1])
                expected = whole[where[0]][where[1]].tokens.tolist()
                assert expected[: len(begun[where].tokens)] == begun[where].tokens.tolist()
                some_halted |= len(begun[where].tokens) < len(expected)
            some_not_begun |= where not in begun
        calls += 1
    assert_same([[begun[prompt, sample] for sample in range(4)] for prompt in range(4)], whole)
    assert calls > 2 and some_halted
    assert some_not_begun or slots == 100, "with few slots, some are halted before they have begun"


@pytest.mark.parametrize("sampler", [native, paged])
def test_all_that_run_are_halted_after_the_same_token(llama: Any, sampler: Any) -> None:
    options = replace(OPTIONS, samples=8)
    asked = [request for group in requests_for(BATCH, 1, options) for request in group]
    served = Halting(asked, 1)
    sampler(llama).serve(served, options)
    lengths = {len(served.answers[request].tokens) for request in asked if not served.answers[request].finished}
    assert len(served.answers) == len(asked) and len(lengths) == 1
