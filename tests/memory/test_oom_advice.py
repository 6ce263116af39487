"""When memory runs out, the error names the phase and the settings to lower."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch

from trimtab.trainer.config import load
from trimtab.trainer.memory.advice import DURING, Phase, is_out_of_memory, oom_message, remedy, too_large


def _place() -> None:
    inner()  # type: ignore[name-defined]  # noqa: F821


def raised_in(*places: tuple[str, str]) -> BaseException:
    """The error of memory running out in functions of these modules, each called by the one before."""

    def fail() -> None:
        raise torch.OutOfMemoryError("no memory left")

    call: Callable[[], Any] = fail
    for module, function in reversed(places):
        call = FunctionType(_place.__code__.replace(co_name=function), {"__name__": module, "inner": call})
    with pytest.raises(torch.OutOfMemoryError) as error:
        call()
    return error.value


TRAIN, SAMPLING, MODEL = "trimtab.trainer.train", "trimtab.trainer.sampling", "trimtab.trainer.model"
PLACES: dict[Phase, list[tuple[str, str]]] = {
    "sampling": [
        (f"{TRAIN}.rollouts", "sample_groups"),
        (f"{SAMPLING}.paged.sampler", "sample"),
    ],
    "scoring": [(f"{TRAIN}.scoring", "score_responses"), (f"{MODEL}.score", "score")],
    "update": [
        (f"{MODEL}.update", "update"),
        (f"{MODEL}.forward_backward", "forward_backward"),
    ],
    "optimizer_step": [(f"{MODEL}.update", "update"), (f"{MODEL}.update", "_step")],
}


@pytest.mark.parametrize("phase", PLACES)
def test_the_phase_is_known_from_where_it_happened(phase: Phase) -> None:
    config = load(None)
    text = oom_message(raised_in(*PLACES[phase]), config)
    assert text.startswith(f"out of memory {DURING[phase]}")
    assert text.endswith(f": {remedy(phase, config)}")


def test_outside_of_all_phases_the_model_is_too_large() -> None:
    config = load(None, ["model.path=huge", "run.device=cuda"])
    text = oom_message(raised_in(("trimtab.trainer.train.build", "build_policy")), config)
    assert text == f"out of memory before the first step: {too_large(config)}"
    assert "huge is too large for cuda; take a smaller model.path, or set model.lora_rank=16" in text


def test_numbers_are_those_of_the_recipe() -> None:
    config = load(None, ["rollout.batch_size=77", "update.token_budget=1234", "update.head_chunk=99"])
    assert remedy("sampling", config) == "lower rollout.batch_size (now 77), or on a GPU rollout.kv_cache_memory"
    assert remedy("scoring", config) == "lower update.token_budget (now 1234), then update.head_chunk (now 99)"


def test_a_setting_in_use_is_not_advised() -> None:
    assert "gradient_checkpointing" in remedy("update", load(None))
    assert "gradient_checkpointing" not in remedy("update", load(None, ["model.gradient_checkpointing=true"]))
    assert "lora_rank" in too_large(load(None))
    assert "lora_rank" not in too_large(load(None, ["model.lora_rank=8"]))


@pytest.mark.parametrize("phase", PLACES)
def test_every_setting_that_is_named_exists(phase: Phase) -> None:
    words = remedy(phase, load(None)).replace("=", " ").replace(",", " ").split()
    keys = [word for word in words if "." in word]
    assert keys
    for key in keys:
        section, name = key.split(".")
        assert name in getattr(load(None), section).model_dump()


@pytest.mark.parametrize(
    ("error", "out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, out: bool) -> None:
    assert is_out_of_memory(error) is out
