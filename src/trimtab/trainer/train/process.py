"""What a run changes in its Python process: CPU threads, garbage collection; and the versions it runs with."""

from __future__ import annotations

import ctypes
import gc
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

import trimtab
from trimtab.trainer.config import Config
from trimtab.trainer.model import pick_device

# glibc's mallopt: which option, and its value in bytes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = (-1, 256 << 20), (-3, 32 << 20)


SMALL_MODEL = 2_000_000  # weights, below which a model trains on one CPU thread by default


def set_threads(config: Config, weights: int | None = None) -> None:
    """Set torch's CPU threads to `run.threads`; if that is 0, to one for a GPU or a small model, else as torch does.

    `weights` is how many the model has, once that is known.
    """
    # Beside a GPU the other threads would only spin. The operations of a small model are so short that threads mostly
    # wait for each other: on two busy cores, a decoding step of the demo model (0.12 million weights) took 22 ms with
    # two threads and 2 ms with one; of a model of 1 million, 41 ms and 7 ms. Larger models gain on an idle machine.
    one = pick_device(config.run.device).type == "cuda" or (weights is not None and weights < SMALL_MODEL)
    threads = config.run.threads or (1 if one else 0)
    if threads:
        torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Have glibc keep the memory of freed tensors for the next ones; nothing with another C library."""
    # By default it returns large blocks to the system at once, and every page of the next tensor is a page fault: 2,000
    # to 4,000 of them, 5 to 12 ms of the 120 ms that a step of the demo model takes.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(*M_TRIM_THRESHOLD)
        mallopt(*M_MMAP_THRESHOLD)


@contextmanager
def gc_pause() -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step: its first call freezes all live objects, so collections skip them.

    If somebody else has frozen objects already, nothing more is frozen, and theirs stay frozen.
    """
    # A full collection walks through everything that was ever imported, torch and transformers included: a few tenths
    # of a second in the middle of some step. What is alive after the first step stays alive for the whole run.
    ours = not gc.get_freeze_count()
    frozen = not ours

    def freeze_once() -> None:
        # Asked once, above: get_freeze_count walks through every frozen object, 0.035 s for the 360,000 of a run.
        nonlocal frozen
        if not frozen:
            gc.collect()  # or the garbage of the start would be frozen, and kept for the whole run
            gc.freeze()
            frozen = True

    try:
        yield freeze_once
    finally:
        if ours:
            gc.unfreeze()


def versions() -> dict[str, str]:
    """Return the versions of the software that the last bits of results depend on."""
    return {
        "trimtab": trimtab.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def environment(device: torch.device, processes: int = 1) -> dict[str, Any]:
    """Return everything outside the recipe that the last bits of results depend on."""
    several = {} if processes == 1 else {"processes": processes}  # runs of earlier versions had one
    return {"threads": torch.get_num_threads(), "device": device.type, **several, **versions()}
