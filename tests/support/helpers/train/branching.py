"""Runs whose responses are cut into the branches of a rollout, as an agent's would be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

from trimtab.data import Group, Sample
from trimtab.trainer.train import rollouts

MOST = 3


def cut_into_branches(sample: Sample) -> list[Sample]:
    """Cut a response at up to two places: what a later branch begins with is in its prompt, and not trained on again.

    Every token of the response is in one branch. How many there are depends on the number of the sample.
    """
    whole = sample.response
    cuts = [*range(min(MOST, len(whole.tokens), 1 + whole.sample % MOST)), len(whole.tokens)]
    branches = []
    for branch, (start, end) in enumerate(pairwise(cuts)):
        response = replace(
            whole, tokens=whole.tokens[start:end], logp=whole.logp[start:end], finished=end == len(whole.tokens)
        )
        prompt = [*sample.prompt, *whole.tokens[:start].tolist()]
        branches.append(replace(sample, prompt=prompt, response=response, branch=branch))
    return branches


@contextmanager
def branching() -> Iterator[None]:
    """Cut the responses of every training step into branches."""
    whole = rollouts.sample_and_grade_alone

    def cut(trainer: Any, problems: Any, step: int, options: Any, training: bool, begun: Any = None) -> list[Group]:
        groups = whole(trainer, problems, step, options, training, begun)
        return (
            [[part for sample in group for part in cut_into_branches(sample)] for group in groups]
            if training
            else groups
        )

    rollouts.sample_and_grade_alone = cut
    try:
        yield
    finally:
        rollouts.sample_and_grade_alone = whole
