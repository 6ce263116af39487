"""Check that code on a GPU does not make the host wait for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise inside where an operation makes the host wait for the GPU."""
    with _sync_debug_mode("error"):
        yield


@contextmanager
def host_sync_allowed() -> Iterator[None]:
    """Allow waits again inside `no_host_sync`."""
    with _sync_debug_mode("default"):
        yield


def count_host_syncs(run: Callable[[], object]) -> int:
    """Return how many operations of `run` make the host wait for the GPU."""
    with _sync_debug_mode("warn"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return sum("synchroniz" in str(warning.message) for warning in seen)


@contextmanager
def _sync_debug_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_mode(mode)
        yield
    finally:
        _set_mode(before)


def _set_mode(mode: int | str) -> None:
    # torch 2.11 sets the mode and then warns that it is a prototype. As an error (pytest's filter) that warning would
    # leave the mode on for all tests that follow.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
