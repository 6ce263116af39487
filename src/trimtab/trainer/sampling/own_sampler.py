"""Samplers of the user's own: `rollout.engine = "python:MODULE:NAME"`, checked before use and at every call.

The function or class is called with the policy and with `rollout.engine_options` by keyword. What it returns has a
method `sample` as in `Sampler`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from trimtab.data import KeptTokens, PromptTokens, Request, Requests, Response, SamplingOptions, Turns
from trimtab.own_parts import OwnPartError, errors_located, location
from trimtab.text import shown
from trimtab.trainer.config import check_own_sampler


def build_own_sampler(name: str, policy: object, options: Mapping[str, Any], vocabulary: int) -> OwnSampler:
    """Build a sampler of the user's own for a policy with so many tokens in its vocabulary."""
    build = check_own_sampler(name, options)
    with errors_located(name, build):
        sampler = build(policy, **options)
    if not callable(getattr(sampler, "sample", None)):
        raise OwnPartError(f"{name}: {location(build)}: it returned {shown(sampler)}, which has no method sample")
    return OwnSampler(name, sampler, vocabulary)


@dataclass
class OwnSampler:
    """A sampler of the user's own; its responses are checked, because a wrong one would train on nonsense."""

    name: str
    sampler: Any
    vocabulary: int

    def sample(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, turns: Turns | None = None
    ) -> list[list[Response]]:
        """Return `options.samples` responses for each prompt, in order."""
        conversing = {} if turns is None else {"turns": turns}
        if conversing:
            self.require_turns()
        with errors_located(self.name, type(self.sampler)):
            groups = self.sampler.sample(prompts, step, options, **conversing)
        if not isinstance(groups, list) or len(groups) != len(prompts):
            self.refuse(f"it returned {_count(groups)} for {len(prompts)} prompts: one list of responses for each")
        for number, group in enumerate(groups):
            if not isinstance(group, list) or len(group) != options.samples:
                self.refuse(f"it returned {_count(group)} for prompt {number}: options.samples are {options.samples}")
            for sample, response in enumerate(group):
                which = f"response {sample} to prompt {number}"
                self.check(response, which, options.max_new_tokens, "options.max_new_tokens")
        return [[replace(response, sample=sample) for sample, response in enumerate(group)] for group in groups]

    def require_turns(self) -> None:
        """Raise if the sampler holds no conversations."""
        if not takes_turns(self.sampler.sample):
            self.refuse(
                "its method sample takes no `turns`, without which there are no conversations and no tools: write "
                "sample(prompts, step, options, turns=None) as in trimtab.data.Sampler, or leave the tools out"
            )

    def serve(self, requests: Requests, options: SamplingOptions) -> None:
        """Answer requests until there are no more."""
        self.require_serve()
        checked = _CheckedRequests(self, requests)
        with errors_located(self.name, type(self.sampler)):
            self.sampler.serve(checked, options)
        checked.require_all_answered()

    def require_serve(self) -> None:
        """Raise if the sampler answers no requests of agents."""
        if not callable(getattr(self.sampler, "serve", None)):
            self.refuse(
                "it has no method serve, without which there are no agents: write serve(requests, options) as in "
                "trimtab.data.Sampler, or leave [agent] out"
            )

    def check(self, response: object, which: str, limit: int, name: str) -> None:
        """Raise if a response cannot be trained on; `limit`, by its name, is the most tokens that it may sample."""
        if not isinstance(response, Response):
            self.refuse(f"{which} is {shown(response)}, and not a trimtab.data.Response")
        bounds = [0, *(bound for span in response.observed for bound in span), len(response.tokens)]
        if any(len(span) != 2 for span in response.observed) or bounds != sorted(bounds):
            self.refuse(f"{which} has observed={shown(response.observed)}: ranges (start, end) of its tokens in order")
        count = response.num_sampled
        if not 1 <= count <= limit:
            self.refuse(f"{which} has {count} sampled tokens: from 1 to {name}, {limit}")
        tokens, logp = response.tokens, response.logp
        if tokens.dtype.kind != "i" or tokens.min() < 0 or tokens.max() >= self.vocabulary:
            self.refuse(f"{which} has a token that is no whole number from 0 to {self.vocabulary - 1}")
        if len(logp) != count or not (np.isfinite(logp) & (logp <= 1e-3)).all():
            self.refuse(f"{which} needs a log-probability (finite, at most 0) for each of its {count} sampled tokens")
        if response.kept is not None:
            self._check_kept(response, which)

    def _check_kept(self, response: Response, which: str) -> None:
        """Raise if the tokens that top-k and top-p kept cannot be those that the response was sampled from."""
        kept = response.kept
        if not isinstance(kept, KeptTokens) or kept.vocabulary != self.vocabulary or len(kept) != response.num_sampled:
            wanted = f"{response.num_sampled} rows of a vocabulary of {self.vocabulary}, a row for each sampled token"
            self.refuse(f"{which} has kept={shown(kept)}: a trimtab.data.KeptTokens of {wanted}")
        if not kept.contains(response.sampled_tokens).all():
            self.refuse(f"{which} has a sampled token that is not among the `kept` tokens of its position")

    def refuse(self, problem: str) -> NoReturn:
        """Raise an error that names the sampler and where it is written."""
        raise OwnPartError(f"{self.name}: {location(type(self.sampler))}: {problem}")


class _CheckedRequests:
    """Requests whose answers are checked before they are passed on."""

    def __init__(self, sampler: OwnSampler, requests: Requests) -> None:
        self._sampler, self._requests = sampler, requests
        self._open: set[Request] = set()

    @property
    def max_tokens(self) -> int:
        return self._requests.max_tokens

    def take(self, block: bool) -> list[Request] | None:
        taken = self._requests.take(block)
        self._open.update(taken or ())
        return taken

    def answer(self, request: Request, response: Response) -> None:
        if request not in self._open:
            self._sampler.refuse("it answered a request twice, or one that was not made")
        self._sampler.check(response, "the answer to a request", request.max_new_tokens, "request.max_new_tokens")
        if response.observed:
            self._sampler.refuse("the answer to a request has `observed` tokens: it is a single message")
        self._open.remove(request)
        self._requests.answer(request, response)

    def require_all_answered(self) -> None:
        """Raise if somebody still waits for an answer."""
        if missing := sum(not request.cancelled for request in self._open):
            self._sampler.refuse(f"its method serve returned and left {missing} requests without an answer")


def takes_turns(sample: Callable[..., Any]) -> bool:
    """Return whether a method `sample` has a parameter `turns`."""
    parameters = inspect.signature(sample).parameters
    return "turns" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _count(value: object) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else shown(value)
