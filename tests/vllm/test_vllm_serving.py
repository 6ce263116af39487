"""vLLM answers requests as it samples: with the same tokens for the same key, and the trainer's log-probabilities."""

from __future__ import annotations

import pytest

from helpers.sampling.requests import ArrivingRequests, requests_for
from helpers.vllm import vllm_models as small
from trimtab.data import PromptTokens, Request, Response, Sampler
from trimtab.trainer.model import Policy
from trimtab.trainer.train.build import build_sampler

pytest.importorskip("vllm", reason="make test-vllm has an environment with it", exc_type=ImportError)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return small.load(small.save_model(tmp_path_factory.mktemp("serving")))


@pytest.fixture(scope="module")
def sampler(policy: Policy) -> Sampler:
    return build_sampler(policy, small.rollout())


@pytest.mark.parametrize("max_delay", [0, 9])
def test_answers_are_those_of_sample(policy: Policy, sampler: Sampler, max_delay: int) -> None:
    prompts = small.prompts(policy)
    expected = sampler.sample(prompts, 3, small.OPTIONS)
    asked = requests_for(prompts, 3, small.OPTIONS)
    requests = ArrivingRequests([each for group in asked for each in group], max_delay=max_delay, max_tokens=100)
    sampler.serve(requests, small.OPTIONS)
    served = [[requests.answers[each] for each in group] for group in asked]
    assert small.tokens(served) == small.tokens(expected)
    assert [r.finished for group in served for r in group] == [r.finished for group in expected for r in group]
    assert small.mismatch(policy, prompts, served) < 1e-5


def test_requests_that_follow_or_stop_have_the_trainers_log_probabilities(policy: Policy, sampler: Sampler) -> None:
    def then(request: Request, response: Response) -> list[Request]:
        if request.follows is not None:
            return []
        return [Request([*request.prompt, *response.tokens.tolist(), 5], 7, 9, stop=stop, follows=request)]

    def stop(tokens: object) -> int | None:
        return 3 if len(tokens) >= 3 else None  # type: ignore[arg-type]

    (long,) = small.prompts(policy, [small.LONG])
    requests = ArrivingRequests([Request(long.ids, key, 9) for key in range(6)], then=then, max_tokens=216)
    sampler.serve(requests, small.OPTIONS)
    assert len(requests.answers) == 12
    assert {len(response.tokens) for request, response in requests.answers.items() if request.follows} <= {1, 2, 3}
    prompts = [PromptTokens(request.prompt, 0) for request in requests.answers]
    assert small.mismatch(policy, prompts, [[response] for response in requests.answers.values()]) < 1e-5


def test_after_a_cancelled_request_the_sampler_samples_as_before(policy: Policy, sampler: Sampler) -> None:
    prompts = small.prompts(policy)
    before = small.tokens(sampler.sample(prompts, 0, small.OPTIONS))
    (first,) = asked = [Request(prompts[0].ids, 1, 80)]
    requests = ArrivingRequests(asked, max_tokens=216)
    requests.at_poll = lambda number: setattr(first, "cancelled", number == 2)
    sampler.serve(requests, small.OPTIONS)
    assert not requests.answers or not first.cancelled
    assert small.tokens(sampler.sample(prompts, 0, small.OPTIONS)) == before
