"""Partial rollouts (`rollout.max_lag`): a step ends without its longest responses, which the next one goes on with.

A group is begun, waits until all of its responses are finished, and is trained. At most `1 + max_lag` steps' worth of
groups are begun and not trained yet, which paces how far sampling runs ahead; none is dropped. The KV cache of the old
weights is not kept: a response goes on from its tokens, prefilled with the present weights, so that the log-probability
of every token is exactly that of the weights which sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab import failpoints
from trimtab.data import PromptTokens, Request, Response, Sampler, SamplingOptions
from trimtab.trainer.sampling import rng_keys

# The tensors of a state that have a row per group, response, span and token.
PER_GROUP, PER_RESPONSE = ("number", "problem", "step"), ("finished", "length", "spans")
PER_SPAN, PER_TOKEN = ("span_tokens", "span_version"), ("token", "logp")
MOST = 2**62  # of any number in a state


@dataclass
class PartialGroup:
    """A group that is begun: the number of its prompt, the index of its problem, and its responses so far.

    `step` is the one in which it was begun. It is part of the responses' random keys, which they keep.
    """

    number: int
    problem: int
    step: int
    responses: list[Response]

    def keys(self, options: SamplingOptions) -> list[int]:
        """Return the random key of each response."""
        keys: list[int] = rng_keys(options.seed, self.step, [self.number], len(self.responses)).tolist()
        return keys

    def unfinished(self, options: SamplingOptions) -> list[Response]:
        """Return the responses that neither an end token nor the limit has ended."""
        limit = options.max_new_tokens
        return [each for each in self.responses if not each.finished and len(each.tokens) < limit]


@dataclass
class PartialRollouts:
    """The groups of a run that are begun and not trained yet, the oldest first; `most` is how many there may be."""

    most: int
    groups: list[PartialGroup] = field(default_factory=list)

    def room(self, admitted: int) -> int:
        """Return how many groups may be begun if so many of the present step wait to be trained."""
        return max(self.most - admitted - len(self.groups), 0)

    def begin(self, numbers: range, problems: Sequence[int], step: int, samples: int) -> None:
        """Begin a group for each of these numbers of prompts, with its problem."""
        for number, problem in zip(numbers, problems, strict=True):
            responses = [Response([], [], False, sample) for sample in range(samples)]
            self.groups.append(PartialGroup(number, problem, step, responses))

    def split(self, options: SamplingOptions) -> tuple[list[PartialGroup], list[PartialGroup]]:
        """Return the groups whose responses are all finished, and the others."""
        finished = [group for group in self.groups if not group.unfinished(options)]
        return finished, [group for group in self.groups if group.unfinished(options)]

    def take(self, count: int, options: SamplingOptions) -> list[PartialGroup]:
        """Remove the oldest finished groups, up to so many, and return them."""
        taken = self.split(options)[0][:count]
        numbers = {group.number for group in taken}
        self.groups = [group for group in self.groups if group.number not in numbers]
        return taken

    def metrics(self, options: SamplingOptions) -> dict[str, float]:
        """Return what a step leaves for later ones."""
        return {
            "lag/unfinished": sum(len(group.unfinished(options)) for group in self.groups),
            "lag/waiting": len(self.split(options)[0]),
        }

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps."""
        responses = [response for group in self.groups for response in group.responses]
        spans = [span for response in responses for span in response.versions]
        columns: dict[str, Sequence[int]] = {
            "number": [group.number for group in self.groups],
            "problem": [group.problem for group in self.groups],
            "step": [group.step for group in self.groups],
            "finished": [response.finished for response in responses],
            "length": [len(response.tokens) for response in responses],
            "spans": [len(response.versions) for response in responses],
            "span_tokens": [tokens for tokens, _ in spans],
            "span_version": [version for _, version in spans],
        }
        state = {name: torch.tensor(values, dtype=torch.int64) for name, values in columns.items()}
        nothing = np.zeros(0)
        tokens = np.concatenate([nothing.astype(np.int64), *(response.tokens for response in responses)])
        logps = np.concatenate([nothing.astype(np.float32), *(response.logp for response in responses)])
        return {**state, "token": torch.from_numpy(tokens), "logp": torch.from_numpy(logps)}

    def load_state(self, state: Mapping[str, Tensor], samples: int, step: int, problems: int, vocabulary: int) -> None:
        """Go on from a state after a step; one that is not valid raises ValueError."""
        _check_state(state, samples, step, problems, vocabulary)
        rows = {name: state[name].tolist() for name in (*PER_GROUP, *PER_RESPONSE, *PER_SPAN)}
        tokens, logps = state["token"].numpy(), state["logp"].numpy()
        spans = list(zip(rows["span_tokens"], rows["span_version"], strict=True))
        responses = [
            Response(
                tokens[first:last].copy(),
                logps[first:last].copy(),
                bool(finished),
                number % samples,
                versions=tuple(spans[low:high]),
            )
            for number, (finished, (first, last), (low, high)) in enumerate(
                zip(rows["finished"], bounds(rows["length"]), bounds(rows["spans"]), strict=True)
            )
        ]
        groups = zip(rows["number"], rows["problem"], rows["step"], strict=True)
        self.groups = [
            PartialGroup(*group, responses[row * samples : (row + 1) * samples]) for row, group in enumerate(groups)
        ]


def bounds(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last position, not included, of parts of these sizes that lie end to end."""
    return list(pairwise(accumulate(counts, initial=0)))


def _check_state(state: Mapping[str, Tensor], samples: int, step: int, problems: int, vocabulary: int) -> None:
    rows = {
        **dict.fromkeys(PER_GROUP, len(state["number"])),
        **dict.fromkeys(PER_RESPONSE, len(state["number"]) * samples),
        **dict.fromkeys(PER_SPAN, int(state["spans"].sum())),
        **dict.fromkeys(PER_TOKEN, int(state["length"].sum())),
    }
    limits = {"problem": problems, "step": step, "finished": 2, "span_version": step, "token": vocabulary}
    for name, count in rows.items():
        values = state[name]
        if values.shape != (count,) or values.dtype != (torch.float32 if name == "logp" else torch.int64):
            raise ValueError(f"rollouts/{name} has {tuple(values.shape)} values of {values.dtype}, not {count}")
        if name != "logp" and count and not 0 <= int(values.min()) <= int(values.max()) < limits.get(name, MOST):
            raise ValueError(f"rollouts/{name} has a value outside of its range")
    sampled = [sum(state["span_tokens"].tolist()[low:high]) for low, high in bounds(state["spans"].tolist())]
    if sampled != state["length"].tolist():
        raise ValueError("rollouts/span_tokens are not the lengths of the responses")


def went_on(before: Response, after: Response, version: int) -> Response:
    """Return a response that weights of this version have gone on with, which says how many tokens are theirs."""
    added, versions = after.num_sampled - before.num_sampled, before.versions
    if versions and versions[-1][1] == version:
        added, versions = added + versions[-1][0], versions[:-1]
    return replace(after, sample=before.sample, versions=(*versions, (added, version)) if added else versions)


def finish_groups(
    sampler: Sampler,
    groups: Sequence[PartialGroup],
    prompts: Sequence[PromptTokens],
    count: int,
    step: int,
    options: SamplingOptions,
) -> None:
    """Go on with unfinished groups, the first ones first, until so many of them are finished."""
    requests = _Requests(groups, prompts, count, step, options)
    slots = min(options.batch_size, max(len(requests.open), 1))
    sampler.serve(requests, replace(options, batch_size=slots))
    failpoints.failpoint("rollouts.sampled")


class _Requests:
    """The unfinished responses of groups as requests to a sampler, which end once enough groups are finished."""

    def __init__(
        self,
        groups: Sequence[PartialGroup],
        prompts: Sequence[PromptTokens],
        count: int,
        step: int,
        options: SamplingOptions,
    ) -> None:
        self.count, self.step, self.options = count, step, options
        self.max_tokens = max((len(prompt.ids) for prompt in prompts), default=0) + options.max_new_tokens
        self.open: dict[Request, PartialGroup] = {}
        self.samples: dict[Request, int] = {}
        for group, prompt in zip(groups, prompts, strict=True):
            keys = group.keys(options)
            for response in group.unfinished(options):
                request = Request(prompt.ids, keys[response.sample], options.max_new_tokens, begun=response)
                self.open[request], self.samples[request] = group, response.sample
        self._given = False

    def take(self, block: bool) -> list[Request] | None:
        """Return all requests, once."""
        given, self._given = self._given, True
        return None if given else list(self.open)

    def answer(self, request: Request, response: Response) -> None:
        """Keep what was sampled; halt the others once enough groups are finished."""
        group, sample = self.open.pop(request), self.samples[request]
        group.responses[sample] = went_on(group.responses[sample], response, self.step)
        self.count -= not group.unfinished(self.options)
        if self.count <= 0:
            for other in self.open:
                other.halted = True


def token_lags(responses: Sequence[Response], step: int) -> NDArray[np.int64] | None:
    """Return for every sampled token by how many steps its weights are older than those of a step; None: not kept."""
    if not any(response.versions for response in responses):
        return None
    tokens, versions = zip(*(span for response in responses for span in response.versions), strict=True)
    return np.repeat(step - np.array(versions), tokens)


def lag_metrics(responses: Sequence[Response], lags: NDArray[np.int64]) -> dict[str, float]:
    """Return how much older than the present weights those are that sampled a step's tokens."""
    return {
        "lag/mean": float(lags.mean()),
        "lag/max": float(lags.max()),
        "lag/spans_mean": float(np.mean([len(response.versions) for response in responses])),
    }
