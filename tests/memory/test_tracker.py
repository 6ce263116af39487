"""The memory tracker counts every tensor once, by what it is for, until it is freed."""

from __future__ import annotations

import pytest
import torch

from trimtab.trainer.memory.fake_model import BLOCK, MemoryTracker, fake_tensors

MEGA = 1 << 20


def test_what_is_made_is_alive_until_it_is_dropped() -> None:
    with MemoryTracker() as tracker:
        a = torch.zeros(MEGA)
        b = torch.zeros(MEGA)
        assert tracker.alive.total() == 8 * MEGA
        del a
        assert tracker.alive.total() == 4 * MEGA
        del b
    assert tracker.alive.total() == 0
    assert tracker.peak == 8 * MEGA


def test_views_and_changes_in_place_take_nothing() -> None:
    with MemoryTracker() as tracker:
        a = torch.zeros(MEGA)
        _views = a.view(1024, 1024).t()[5:], a.detach(), a.expand(3, MEGA)
        a += 1
    assert tracker.peak == 4 * MEGA


def test_a_view_keeps_all_of_what_it_is_a_view_of() -> None:
    with MemoryTracker() as tracker:
        little = torch.zeros(MEGA)[:1]
        assert tracker.alive.total() == 4 * MEGA
        del little
        assert tracker.alive.total() == 0


def test_memory_comes_in_blocks() -> None:
    with MemoryTracker() as tracker:
        _one, _more = torch.zeros(1), torch.zeros(BLOCK // 4 + 1)
    assert tracker.peak == 3 * BLOCK


def test_a_category_holds_the_tensors_made_while_it_was_set() -> None:
    with MemoryTracker() as tracker:
        with tracker.category("outer"):
            _a = torch.zeros(MEGA)
            with tracker.category("inner"):
                _b = torch.zeros(MEGA)
            _c = torch.zeros(MEGA)
        _d = torch.zeros(MEGA)
    assert tracker.alive == {"outer": 8 * MEGA, "inner": 4 * MEGA, "other": 4 * MEGA}


def test_an_error_ends_a_category_too() -> None:
    with MemoryTracker() as tracker:
        with pytest.raises(ValueError, match="no"), tracker.category("brief"):
            raise ValueError("no")
        _a = torch.zeros(MEGA)
    assert tracker.alive == {"other": 4 * MEGA}


def test_the_categories_at_the_peak_are_kept() -> None:
    with MemoryTracker() as tracker:
        with tracker.category("long"):
            _kept = torch.zeros(MEGA)
        with tracker.category("short"):
            passing = torch.zeros(2 * MEGA)
        del passing
        with tracker.category("late"):
            _late = torch.zeros(MEGA)
    assert tracker.at_peak == {"long": 4 * MEGA, "short": 8 * MEGA}
    assert +tracker.alive == {"long": 4 * MEGA, "late": 4 * MEGA}


def test_a_tensor_can_be_moved_to_another_category() -> None:
    with MemoryTracker() as tracker:
        a = torch.zeros(MEGA)
        tracker.move(a.view(2, -1), "gradients")
        assert +tracker.alive == {"gradients": 4 * MEGA}
        del a
    assert tracker.alive.total() == 0


def test_weights_are_not_counted_but_their_copies_are() -> None:
    weight = torch.nn.Parameter(torch.zeros(MEGA))
    with MemoryTracker([weight]) as tracker:
        _view = weight.view(2, -1)
        _copy = weight.to(torch.bfloat16)
        _other = torch.zeros(MEGA).to(torch.bfloat16)
    assert tracker.alive == {"weight_copies": 2 * MEGA, "other": 2 * MEGA}


def test_what_autograd_saves_counts_until_the_backward_pass_frees_it() -> None:
    weight = torch.nn.Parameter(torch.ones(MEGA))
    with MemoryTracker([weight]) as tracker:
        out = (weight * 2).exp().square().sum()
        assert tracker.alive.total() == 4 * MEGA + BLOCK  # exp keeps its result, which is also what square keeps
        out.backward()
        assert weight.grad is not None
        tracker.move(weight.grad, "gradients")
        del out
    assert +tracker.alive == {"gradients": 4 * MEGA}


@pytest.mark.parametrize("shape", [(64, 64), (100, 30), (1, 7)])
def test_fake_tensors_are_counted_like_real_ones(shape: tuple[int, int]) -> None:
    def work() -> MemoryTracker:
        weight = torch.nn.Parameter(torch.ones(shape[1], shape[1]))
        with MemoryTracker([weight]) as tracker:
            x = torch.ones(shape, requires_grad=True)
            torch.nn.functional.silu(x @ weight).softmax(-1).sum().backward()
        return tracker

    real = work()
    with fake_tensors():
        fake = work()
    assert (fake.peak, fake.at_peak) == (real.peak, real.at_peak)


def test_fake_tensors_may_have_any_size() -> None:
    with fake_tensors(), MemoryTracker() as tracker:
        a = torch.zeros(1 << 40)
        _b = a * 2
    assert tracker.peak == 8 << 40
