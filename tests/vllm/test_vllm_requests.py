"""Requests over vLLM, with an engine that samples by its own rule, a token of every request in each step."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.sampling.requests import ArrivingRequests
from trimtab.data import Request, Response, SamplingOptions
from trimtab.trainer.sampling import VllmSampler, VllmSettings
from trimtab.trainer.sampling import vllm as module

ENDS = frozenset({2, 3})
OPTIONS = SamplingOptions(samples=1, max_new_tokens=1, batch_size=5)
KINDS = SimpleNamespace(DELTA="delta", FINAL_ONLY="final")


@dataclass
class Engine:
    """An engine whose tokens depend on the request's seed and token ids, and that is its own `llm_engine`."""

    open: dict[str, tuple[list[int], Any, list[int]]] = field(default_factory=dict)
    largest: int = 0
    steps: int = 0
    fails_at: int = 0

    @property
    def llm_engine(self) -> Engine:
        return self

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert name not in self.open
        self.open[name] = prompt["prompt_token_ids"], params, []

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.open.pop(name, None)

    def step(self) -> list[Any]:
        self.steps += 1
        self.largest = max(self.largest, len(self.open))
        if self.steps == self.fails_at:
            raise RuntimeError("out of memory")
        return [output for name in list(self.open) for output in self.outputs(name)]

    def outputs(self, name: str) -> list[Any]:
        ids, params, tokens = self.open[name]
        tokens.append(expected(ids, params.seed, len(tokens) + 1)[-1])
        finished = tokens[-1] in params.stop_token_ids or len(tokens) == params.max_tokens
        if finished:
            del self.open[name]
        if not finished and params.output_kind == KINDS.FINAL_ONLY:
            return []
        new = tokens if params.output_kind == KINDS.FINAL_ONLY else tokens[-1:]
        reason = ("stop" if tokens[-1] in params.stop_token_ids else "length") if finished else None
        logprobs = SimpleNamespace(token_ids=list(new), logprobs=[-token / 10 for token in new])
        output = SimpleNamespace(finish_reason=reason, token_ids=list(new), logprobs=logprobs)
        return [SimpleNamespace(request_id=name, outputs=[output], finished=finished)]


def expected(ids: list[int], seed: int, count: int) -> list[int]:
    """The first tokens that the engine samples for a request."""
    rng = random.Random(f"{seed} {ids}")
    return [rng.randrange(2, 20) for _ in range(count)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(module, "_running", [made])
    return made


def serve(engine: Engine, requests: ArrivingRequests, max_model_len: int = 300) -> ArrivingRequests:
    sampler = VllmSampler.__new__(VllmSampler)
    embeddings = SimpleNamespace(num_embeddings=211)
    sampler.model, sampler.eos_token_ids = SimpleNamespace(get_input_embeddings=lambda: embeddings), ENDS
    sampler.autocast, sampler.settings = nullcontext, VllmSettings(torch.float32, max_model_len)
    vllm = SimpleNamespace(SamplingParams=SimpleNamespace, sampling_params=SimpleNamespace(RequestOutputKind=KINDS))
    sampler._vllm, sampler._engine = vllm, engine
    sampler._sleeps, sampler._load_weights = False, lambda: None  # type: ignore[method-assign]
    sampler.serve(requests, OPTIONS)
    assert not engine.open
    return requests


def asked(count: int, limit: int = 40, **how: Any) -> list[Request]:
    return [Request([7, 8, key % 5 + 5], key - 3, limit, **how) for key in range(count)]


def check(request: Request, response: Response, limit: int = 40) -> None:
    """Check that an answer is what the engine samples for this request, up to an end token or the limit."""
    tokens = expected(list(request.prompt), request.key & (2**63 - 1), limit)
    ends = [number for number, token in enumerate(tokens, 1) if token in ENDS]
    assert response.tokens.tolist() == tokens[: ends[0] if ends else limit]
    assert response.finished == bool(ends)
    assert response.logp.tolist() == pytest.approx([-token / 10 for token in response.tokens])


@pytest.mark.parametrize("max_delay", [0, 30])
def test_every_request_has_the_answer_to_its_key_whenever_it_comes(engine: Engine, max_delay: int) -> None:
    def then(request: Request, response: Response) -> Iterable[Request]:
        tokens = [*request.prompt, *response.tokens.tolist(), 9]
        return [Request(tokens, request.key + 100, 40, follows=request)] if request.follows is None else []

    requests = serve(engine, ArrivingRequests(asked(20), max_delay=max_delay, then=then))
    assert len(requests.answers) == 40
    for request, response in requests.answers.items():
        check(request, response)
    assert engine.largest == OPTIONS.batch_size


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_stop_ends_an_answer_and_its_work(engine: Engine, cut: int) -> None:
    stopped = asked(5, stop=lambda tokens: cut if len(tokens) >= cut else None)
    requests = serve(engine, ArrivingRequests([*stopped, *asked(5)]))
    for request in stopped:
        response = requests.answers[request]
        tokens = expected(list(request.prompt), request.key & (2**63 - 1), cut)
        ends = [number for number, token in enumerate(tokens, 1) if token in ENDS]
        assert response.tokens.tolist() == tokens[: ends[0] if ends else cut]
        assert response.finished
    for request in requests.answers.keys() - stopped:
        check(request, requests.answers[request])


@pytest.mark.parametrize("poll", [1, 3])
def test_who_is_cancelled_is_dropped(engine: Engine, poll: int) -> None:
    requests = ArrivingRequests(asked(20))

    def cancel(number: int) -> None:
        for request in requests.come[::2] if number == poll else []:
            request.cancelled = request not in requests.answers

    requests.at_poll = cancel
    serve(engine, requests)
    assert sum(request.cancelled for request in requests.come) > 5
    assert requests.answers.keys() == {request for request in requests.come if not request.cancelled}


def test_after_an_error_the_engine_has_no_requests_left(engine: Engine) -> None:
    engine.fails_at = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        serve(engine, ArrivingRequests(asked(20)))
    assert not engine.open
    assert len(serve(engine, ArrivingRequests(asked(20))).answers) == 20


def test_without_requests_the_engine_makes_no_step(engine: Engine) -> None:
    serve(engine, ArrivingRequests([]))
    assert engine.steps == 0


def test_requests_longer_than_vllm_has_room_for_are_an_error(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"requests of up to 300 tokens, .* exceed vLLM's max_model_len of 299"):
        serve(engine, ArrivingRequests(asked(1)), max_model_len=299)
