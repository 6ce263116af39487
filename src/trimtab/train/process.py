"""What a run changes in its Python process: CPU threads, garbage collection, Ctrl-C; and the versions it runs with."""

from __future__ import annotations

import gc
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import transformers

import trimtab
from trimtab.config import Config
from trimtab.policy import pick_device


def set_threads(config: Config) -> None:
    """Set torch's CPU threads to `run.threads`; if that is 0, to one beside a GPU and else to torch's default."""
    # Beside a GPU the other threads would only spin.
    threads = config.run.threads or (1 if pick_device(config.run.device).type == "cuda" else 0)
    if threads:
        torch.set_num_threads(threads)


@contextmanager
def gc_pause() -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step: its first call freezes all live objects, so collections skip them.

    If somebody else has frozen objects already, nothing more is frozen, and theirs stay frozen.
    """
    # A full collection walks through everything that was ever imported, torch and transformers included: a few tenths
    # of a second in the middle of some step. What is alive after the first step stays alive for the whole run.
    ours = not gc.get_freeze_count()

    def freeze_once() -> None:
        if not gc.get_freeze_count():
            gc.collect()  # or the garbage of the start would be frozen, and kept for the whole run
            gc.freeze()

    try:
        yield freeze_once
    finally:
        if ours:
            gc.unfreeze()


@contextmanager
def deferred_interrupt(message: Callable[[str], None]) -> Iterator[threading.Event]:
    """Make the first Ctrl-C set the event, a request to stop after the step; the second raises KeyboardInterrupt."""
    requested = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        with suppress(RuntimeError):  # a signal in the middle of a print makes another print a reentrant call
            message("finishing this step; press Ctrl-C again to stop at once")

    # Python accepts signal handlers in the main thread only; elsewhere Ctrl-C never arrives.
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, handle) if in_main_thread else None
    try:
        yield requested
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def versions() -> dict[str, str]:
    """Return the versions of the software that the last bits of results depend on."""
    return {
        "trimtab": trimtab.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Return everything outside the recipe that the last bits of results depend on."""
    return {"threads": torch.get_num_threads(), "device": device.type, **versions()}
