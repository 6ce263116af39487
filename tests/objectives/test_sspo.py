"""SSPO: one ratio per subsentence, a clip range that follows its entropy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

import trimtab as tt
from helpers.objectives.batches import batch, moved, seeds


def tokens(entropy: list[float]) -> tt.TokenBatch:
    """Three segments of two tokens; the last is another response's, with the same segment id."""
    return tt.TokenBatch(
        old_logp=torch.full((6,), -1.0, dtype=torch.float64),
        entropy=torch.tensor(entropy, dtype=torch.float64),
        advantage=torch.ones(6, dtype=torch.float64),
        sequence=torch.tensor([0, 0, 0, 0, 1, 1]),
        segment=torch.tensor([0, 0, 1, 1, 1, 1]),
    )


def test_the_clip_range_follows_the_segments_entropy() -> None:
    # Segment means 0.2, 0.4, 0.3; their mean is 0.3, so the relative entropies are 2/3, 4/3 and 1.
    plan = tt.objective("sspo").plan(tokens([0.1, 0.3, 0.4, 0.4, 0.2, 0.4]))
    factor = torch.tensor([2 / 3, 2 / 3, 4 / 3, 4 / 3, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(plan.clip_low, 0.02 * factor)
    torch.testing.assert_close(plan.clip_high, 0.028 * factor)
    assert [tt.Reason(code) for code in plan.reason[:4].tolist()] == [tt.Reason.NARROWED] * 2 + [tt.Reason.WIDENED] * 2
    assert plan.segment is not None
    assert plan.segment.tolist() == [0, 0, 1, 1, 2, 2]


def test_the_factor_is_limited_on_both_sides() -> None:
    plan = tt.objective("sspo").plan(tokens([0.0, 0.0, 3.0, 3.0, 0.3, 0.3]))
    assert plan.clip_high[0].item() == pytest.approx(0.014)
    assert plan.clip_high[2].item() == pytest.approx(0.042)


def test_without_any_entropy_the_range_is_as_given() -> None:
    plan = tt.objective("sspo").plan(tokens([0.0] * 6))
    assert plan.clip_high.tolist() == [0.028] * 6
    assert plan.reason.tolist() == [0] * 6


def test_bounds_of_one_give_a_fixed_clip() -> None:
    plan = tt.objective("sspo", widen_low=1.0, widen_high=1.0).plan(tokens([0.1, 0.3, 0.4, 0.4, 0.2, 0.9]))
    assert plan.clip_low.tolist() == [0.02] * 6


def test_a_range_by_length_is_divided_by_the_root_of_the_segments_tokens() -> None:
    batch_ = replace(tokens([0.3] * 6), segment=torch.tensor([0, 1, 1, 1, 1, 1]))  # of 1, 3 and 2 tokens
    plan = tt.objective("sspo", clip_low=0.2, clip_high=0.28, clip_scale="sqrt_length").plan(batch_)
    root = torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0, 2.0], dtype=torch.float64).sqrt()
    torch.testing.assert_close(plan.clip_low, 0.2 / root)
    torch.testing.assert_close(plan.clip_high, 0.28 / root)
    assert plan.reason.tolist() == [0] * 6  # its entropy has neither widened nor narrowed it


def test_a_range_by_length_follows_the_entropy_too() -> None:
    batch_ = tokens([0.1, 0.3, 0.4, 0.4, 0.2, 0.4])
    fixed, scaled = (tt.objective("sspo").plan(batch_), tt.objective("sspo", clip_scale="sqrt_length").plan(batch_))
    torch.testing.assert_close(scaled.clip_high, fixed.clip_high / 2**0.5)
    assert torch.equal(scaled.reason, fixed.reason)


def test_a_range_by_length_clips_a_long_segment_that_a_fixed_range_lets_pass() -> None:
    batch_ = replace(tokens([0.3] * 6), segment=torch.zeros(6))  # of 4 and 2 tokens: ranges 0.014 and 0.0198
    clipped = {}
    for scale in ("fixed", "sqrt_length"):
        objective = tt.objective("sspo", clip_scale=scale)
        clipped[scale] = objective.loss(batch_.old_logp + 0.015, objective.plan(batch_)).clipped
    assert clipped["fixed"] is not None and not clipped["fixed"].any()
    assert clipped["sqrt_length"] is not None
    assert clipped["sqrt_length"].tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("scale", ["fixed", "sqrt_length"])
@given(seed=seeds)
@settings(max_examples=30)
def test_the_range_grows_with_the_entropy(scale: str, seed: int) -> None:
    batch_ = batch(seed)
    plan = tt.objective("sspo", clip_scale=scale).plan(batch_)
    assert plan.spans is not None and batch_.entropy is not None
    entropy = plan.spans.spread(plan.spans.mean(batch_.entropy))
    size = plan.spans.spread(plan.spans.size)
    for length in size.unique():
        same_length = size == length if scale == "sqrt_length" else size > 0
        order = entropy[same_length].argsort()
        assert (plan.clip_high[same_length][order].diff() >= -1e-12).all()
        assert (plan.clip_low[same_length][order].diff() >= -1e-12).all()


@given(seed=seeds)
@settings(max_examples=30)
def test_all_tokens_of_a_segment_share_their_fate(seed: int) -> None:
    batch_ = batch(seed)
    objective = tt.objective("sspo")
    plan, new = objective.plan(batch_), moved(batch_, by=0.6)
    (gradient,) = torch.autograd.grad(objective.loss(new, plan).loss, new)
    assert plan.spans is not None
    clipped = (gradient == 0).double()
    share = plan.spans.mean(clipped)
    assert ((share == 0) | (share == 1)).all()


def test_a_segments_ratio_is_the_geometric_mean() -> None:
    batch_ = tokens([0.3] * 6)
    objective = tt.objective("sspo", clip_high=0.28)
    new = (batch_.old_logp + torch.tensor([0.1, 0.2, 0.0, 0.0, -0.3, 0.1], dtype=torch.float64)).requires_grad_()
    out = objective.loss(new, objective.plan(batch_))
    ratio = torch.tensor([0.15, 0.0, -0.1], dtype=torch.float64).exp()
    # Response means: (two segments of two tokens) and (one segment); then the mean over responses.
    assert out.loss.item() == pytest.approx(-((ratio[0] + ratio[1]) / 2 + ratio[2]).item() / 2)


def test_a_segment_never_crosses_a_response() -> None:
    batch_ = tokens([0.3] * 6)
    assert batch_.spans.size.tolist() == [2, 2, 2]
    assert list(batch_.spans.offsets) == [0, 2, 3]
