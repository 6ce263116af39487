"""From a recipe to the parts of a run: how many CPU threads it uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trimtab.config import load
from trimtab.train import build


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "asked", "used"), [("cpu", 0, 2), ("cpu", 1, 1), ("cuda", 0, 1), ("cuda", 3, 3), ("cuda:1", 0, 1)]
)
def test_threads_are_the_recipes_and_one_beside_a_gpu(
    device: str, asked: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    torch.set_num_threads(2)
    build.set_threads(load("demo", [f"run.device={device}", f"run.threads={asked}"]))
    assert torch.get_num_threads() == used
