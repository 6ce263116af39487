"""The ledger books every tensor once, by what it is for, and closes its entry when it is gone."""

from __future__ import annotations

import pytest
import torch

from trimtab.memory.fake_model import fake_tensors
from trimtab.memory.tracker import BLOCK, Ledger

MEGA = 1 << 20


def test_what_is_made_is_alive_until_it_is_dropped() -> None:
    with Ledger() as ledger:
        a = torch.zeros(MEGA)
        b = torch.zeros(MEGA)
        assert ledger.alive.total() == 8 * MEGA
        del a
        assert ledger.alive.total() == 4 * MEGA
        del b
    assert ledger.alive.total() == 0
    assert ledger.peak == 8 * MEGA


def test_views_and_changes_in_place_take_nothing() -> None:
    with Ledger() as ledger:
        a = torch.zeros(MEGA)
        _views = a.view(1024, 1024).t()[5:], a.detach(), a.expand(3, MEGA)
        a += 1
    assert ledger.peak == 4 * MEGA


def test_a_view_keeps_all_of_what_it_is_a_view_of() -> None:
    with Ledger() as ledger:
        little = torch.zeros(MEGA)[:1]
        assert ledger.alive.total() == 4 * MEGA
        del little
        assert ledger.alive.total() == 0


def test_memory_comes_in_blocks() -> None:
    with Ledger() as ledger:
        _one, _more = torch.zeros(1), torch.zeros(BLOCK // 4 + 1)
    assert ledger.peak == 3 * BLOCK


def test_each_account_holds_what_was_made_while_it_was_open() -> None:
    with Ledger() as ledger:
        with ledger.booking("outer"):
            _a = torch.zeros(MEGA)
            with ledger.booking("inner"):
                _b = torch.zeros(MEGA)
            _c = torch.zeros(MEGA)
        _d = torch.zeros(MEGA)
    assert ledger.alive == {"outer": 8 * MEGA, "inner": 4 * MEGA, "other": 4 * MEGA}


def test_an_account_is_closed_by_an_error_too() -> None:
    with Ledger() as ledger:
        with pytest.raises(ValueError, match="no"), ledger.booking("brief"):
            raise ValueError("no")
        _a = torch.zeros(MEGA)
    assert ledger.alive == {"other": 4 * MEGA}


def test_the_accounts_at_the_worst_moment_are_kept() -> None:
    with Ledger() as ledger:
        with ledger.booking("long"):
            _kept = torch.zeros(MEGA)
        with ledger.booking("short"):
            passing = torch.zeros(2 * MEGA)
        del passing
        with ledger.booking("late"):
            _late = torch.zeros(MEGA)
    assert ledger.at_peak == {"long": 4 * MEGA, "short": 8 * MEGA}
    assert +ledger.alive == {"long": 4 * MEGA, "late": 4 * MEGA}


def test_a_tensor_that_has_become_something_else_is_moved() -> None:
    with Ledger() as ledger:
        a = torch.zeros(MEGA)
        ledger.move(a.view(2, -1), "gradients")
        assert +ledger.alive == {"gradients": 4 * MEGA}
        del a
    assert ledger.alive.total() == 0


def test_weights_are_not_counted_and_their_copies_are_known() -> None:
    weight = torch.nn.Parameter(torch.zeros(MEGA))
    with Ledger([weight]) as ledger:
        _view = weight.view(2, -1)
        _copy = weight.to(torch.bfloat16)
        _other = torch.zeros(MEGA).to(torch.bfloat16)
    assert ledger.alive == {"copies": 2 * MEGA, "other": 2 * MEGA}


def test_what_autograd_keeps_counts_until_the_backward_pass_lets_go_of_it() -> None:
    weight = torch.nn.Parameter(torch.ones(MEGA))
    with Ledger([weight]) as ledger:
        out = (weight * 2).exp().square().sum()
        assert ledger.alive.total() == 4 * MEGA + BLOCK  # exp keeps its result, which is also what square keeps
        out.backward()
        assert weight.grad is not None
        ledger.move(weight.grad, "gradients")
        del out
    assert +ledger.alive == {"gradients": 4 * MEGA}


@pytest.mark.parametrize("shape", [(64, 64), (100, 30), (1, 7)])
def test_tensors_without_data_are_booked_as_those_with_it(shape: tuple[int, int]) -> None:
    def work() -> Ledger:
        weight = torch.nn.Parameter(torch.ones(shape[1], shape[1]))
        with Ledger([weight]) as ledger:
            x = torch.ones(shape, requires_grad=True)
            torch.nn.functional.silu(x @ weight).softmax(-1).sum().backward()
        return ledger

    real = work()
    with fake_tensors():
        fake = work()
    assert (fake.peak, fake.at_peak) == (real.peak, real.at_peak)


def test_the_size_of_a_model_without_data_does_not_matter() -> None:
    with fake_tensors(), Ledger() as ledger:
        a = torch.zeros(1 << 40)
        _b = a * 2
    assert ledger.peak == 8 << 40
