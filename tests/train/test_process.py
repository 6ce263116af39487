"""What a run changes in its process: threads and frozen objects; and all of it is undone afterwards."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.train.short_runs import trained
from trimtab.trainer.config import load
from trimtab.trainer.train.trainer import SMALL_MODEL, gc_pause, keep_freed_memory, set_threads


@pytest.fixture(autouse=True)
def _nothing_is_frozen_before_or_after() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


class Node:
    """Something that can refer to itself."""

    itself: Node | None = None


def cyclic_garbage() -> weakref.ref[Node]:
    node = Node()
    node.itself = node
    return weakref.ref(node)


def test_objects_are_frozen_by_the_first_call_and_only_by_it() -> None:
    with gc_pause() as freeze_once:
        assert gc.get_freeze_count() == 0
        freeze_once()
        frozen = gc.get_freeze_count()
        assert frozen > 0
        later = [Node() for _ in range(1000)]
        freeze_once()
        assert gc.get_freeze_count() < frozen + len(later)
    assert gc.get_freeze_count() == 0


def test_garbage_of_a_run_is_still_collected() -> None:
    early = cyclic_garbage()
    with gc_pause() as freeze_once:
        freeze_once()
        assert early() is None, "what is garbage already is not frozen"
        late = cyclic_garbage()
        gc.collect()
        assert late() is None


def test_what_others_froze_stays_frozen() -> None:
    gc.freeze()
    with gc_pause() as freeze_once:
        freeze_once()
    assert gc.get_freeze_count() > 0


def test_after_an_error_nothing_is_frozen() -> None:
    def fail() -> None:
        with gc_pause() as freeze_once:
            freeze_once()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("device", "setting", "used"), [("cpu", 0, 2), ("cpu", 1, 1), ("cuda", 0, 1), ("cuda", 3, 3), ("cuda:1", 0, 1)]
)
def test_threads_are_the_recipes_or_one_beside_a_gpu(
    device: str, setting: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    torch.set_num_threads(2)
    set_threads(load("addition", [f"run.device={device}", f"run.threads={setting}"]))
    assert torch.get_num_threads() == used


@pytest.mark.parametrize(
    ("weights", "setting", "used"), [(SMALL_MODEL - 1, 0, 1), (SMALL_MODEL, 0, 2), (None, 0, 2), (1, 2, 2)]
)
def test_a_small_model_has_one_thread_unless_the_recipe_says_otherwise(
    weights: int | None, setting: int, used: int
) -> None:
    torch.set_num_threads(2)
    set_threads(load("addition", ["run.device=cpu", f"run.threads={setting}"]), weights)
    assert torch.get_num_threads() == used


def test_a_run_of_a_tiny_model_stores_its_one_thread(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    run, _ = trained(tmp_path / "run", {"run.threads": "0", "run.steps": "1", "warm_start.steps": "0"})
    state = json.loads((run.folder.checkpoints / "step-00000001" / "state.json").read_text())
    assert state["environment"]["threads"] == torch.get_num_threads() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_the_memory_of_a_freed_tensor_is_that_of_the_next_one() -> None:
    import resource

    def page_faults(tensors: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(tensors):
            torch.ones(4 << 20)  # 16 MiB: 4096 pages, if each of them comes from the system
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    keep_freed_memory()
    page_faults(2)
    assert page_faults(20) < 10 * 4096  # other tests may have left the heap so that a tensor or two do not fit
