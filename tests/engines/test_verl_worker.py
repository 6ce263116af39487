"""One update by verl's own training worker (FSDP2, gloo) is the update that trimtab's own trainer makes."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.engines.verl_runs import environment, write_inputs
from helpers.engines.verl_worker import LR, TABLES, launch

Numbers = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The updates of one rank and of two."""
    made = tmp_path_factory.mktemp("worker")
    write_inputs(made)
    for ranks in (1, 2):
        launch(made, ranks, environment(made))
    return made


def update(folder: Path, name: str) -> Numbers:
    return load_file(folder / f"{name}.safetensors")


def farthest(one: Numbers, other: Numbers, kind: str) -> float:
    """The largest difference in a gradient (of the largest gradient) or a weight (of the learning rate)."""
    names = [name for name in one if name.startswith(kind)]
    assert names and set(names) == {name for name in other if name.startswith(kind)}
    scale = LR if kind == "weight" else max(float(one[name].abs().max()) for name in names)
    return max(float((one[name] - other[name]).abs().max()) for name in names) / scale


def same(one: Numbers, other: Numbers) -> bool:
    # Adam's first step is the sign of a gradient, so a gradient of next to nothing may go either way: weights are near.
    return farthest(one, other, "gradient") < 1e-5 and farthest(one, other, "weight") < 0.2


@pytest.mark.parametrize("method", list(TABLES))
def test_an_update_in_verl_is_the_native_update(folder: Path, method: str) -> None:
    native = update(folder, f"{method}-native")
    assert max(float(native[name].abs().max()) for name in native if name.startswith("gradient")) > 1e-3
    assert same(native, update(folder, f"{method}-1-8"))


@pytest.mark.parametrize("method", list(TABLES))
@pytest.mark.parametrize("micro", [2, 0])
def test_an_update_does_not_depend_on_micro_batches(folder: Path, method: str, micro: int) -> None:
    assert same(update(folder, f"{method}-1-8"), update(folder, f"{method}-1-{micro}"))


@pytest.mark.parametrize("method", list(TABLES))
def test_one_rank_and_two_make_the_same_update(folder: Path, method: str) -> None:
    one, two = update(folder, f"{method}-1-8"), update(folder, f"{method}-2-4")
    assert same(one, two)
    metrics = [name for name in one if name.startswith("metric")]
    assert metrics
    for name in metrics:
        assert float(two[name]) == pytest.approx(float(one[name]), rel=1e-4, abs=1e-6), name


def test_verls_own_kl_cov_depends_on_micro_batches(folder: Path) -> None:
    theirs = farthest(update(folder, "verl-8"), update(folder, "verl-2"), "gradient")
    ours = farthest(update(folder, "kl_cov-1-8"), update(folder, "kl_cov-1-2"), "gradient")
    assert theirs > 0.01
    assert ours < 1e-5


def test_methods_make_different_updates(folder: Path) -> None:
    updates = [update(folder, f"{method}-1-8") for method in TABLES]
    for n, one in enumerate(updates):
        for other in updates[n + 1 :]:
            assert farthest(one, other, "gradient") > 1e-3
