"""A second implementation of the optimal token baseline, response by response and place by place."""

from __future__ import annotations

import math

from helpers.objectives.reference_terms import Batch, Response, Rule, Token


def energy(response: Response, place: int) -> float:
    """The squared gradient norms of a response's tokens up to a place, added up."""
    seen: list[Token] = response[: place + 1]
    return sum(max(0.0, 1 - 2 * math.exp(token.logp) + token.sum_p2) for token in seen)  # type: ignore[operator]


def token_baseline(ended: str = "left_out") -> Rule:
    """A' = A - B_t, from the advantages that the batch came with; a token without a companion keeps its own."""

    def rule(batch: Batch) -> None:
        given = [[token.advantage for token in response] for response in batch]
        for number, response in enumerate(batch):
            group = response[0].group if response else None
            for place, token in enumerate(response):
                peers = [i for i, other in enumerate(batch) if other and (other[0].group == group or i == number)]
                if ended == "left_out":
                    peers = [i for i in peers if len(batch[i]) > place]
                weights = [energy(batch[i], place) for i in peers]
                if len(peers) == 1 or sum(weights) == 0:
                    continue
                values = [given[i][min(place, len(given[i]) - 1)] for i in peers]
                baseline = sum(w * a for w, a in zip(weights, values, strict=True)) / sum(weights)
                token.advantage -= baseline
                if baseline != 0:
                    token.reasons.add("RESHAPED")

    return rule
