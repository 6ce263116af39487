"""Runs with sharded layers (`model.shard`) on two processes train, save and sample what one process does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from helpers.made_once import made_once, shared_folder
from helpers.parallel.sharding import SHARDED, Job, run_on_two, sample_and_fuse
from trimtab.trainer.parallel import World, shard_layers
from trimtab.trainer.train.trainer import build_trainer

# How far weights are apart after three steps, relative to how far they have moved. AdamW divides a gradient by its own
# size, and with it the rounding of a gradient near zero; it has the same figure with whole layers on two processes.
ADAMW, ROUNDING = 1e-3, 5e-6
REFERENCE = {"objective": '"grpo + kl"', "model.reference": '"start"', "warm_start.cache": "true"}
LORA = {"model.lora_rank": "2", "model.gradient_checkpointing": "true"}
# One prompt with one response, and a warm start with one solution: one process has nothing to do in any phase.
SMALL = {
    "rollout.prompts": "1",
    "rollout.samples": "1",
    "objective.advantage": "python:helpers.objectives.lone_advantage:reward_itself",
    "warm_start.batch_size": "1",
    "update.per_step": "1",
}
# One micro-batch per process and no clipping: the order of sums is then the same, whether weights are sharded or not.
SAME_ORDER = {"model.precision": '"bf16"', "update.token_budget": "1000", "update.max_grad_norm": "1e9"}
EXACT_SGD = {"update.max_grad_norm": "1e9", "update.lr": "0.05", "model.gradient_checkpointing": "true"}
TWO_STEPS = {"run.steps": "2"}

ALONE = [
    Job("alone", REFERENCE),
    Job("alone-sgd", EXACT_SGD, sgd=True),
    Job("alone-lora", LORA),
    Job("alone-small", SMALL),
    Job("alone-plain", {}),
    Job("from-one", TWO_STEPS),
]
TOGETHER = [
    Job("sharded", {**REFERENCE, **SHARDED}),
    Job("sharded-sgd", {**EXACT_SGD, **SHARDED}, sgd=True),
    Job("sharded-lora", {**LORA, **SHARDED}),
    Job("sharded-small", {**SMALL, **SHARDED}),
    Job("bf16", SAME_ORDER),
    Job("sharded-bf16", {**SAME_ORDER, **SHARDED}),
    Job("from-two", {**TWO_STEPS, **SHARDED}),
    Job("from-one", SHARDED, resume=True),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        for job in ALONE:
            job.run(folder, World())
        run_on_two(TOGETHER, sample_and_fuse, folder)
        Job("from-two", {}, resume=True).run(folder, World())

    return made_once(shared_folder(tmp_path_factory), "sharded", make)


def saved(run: Path, step: int = 3, file: str = "model") -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / f"{file}.safetensors")


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return float(sum((one[name] - other[name]).square().sum() for name in one)) ** 0.5


def norms(run: Path) -> Tensor:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return torch.tensor([json.loads(line)["update/grad_norm"] for line in lines])


@pytest.mark.parametrize(("kind", "tolerance"), [("", ADAMW), ("-sgd", ROUNDING), ("-lora", ADAMW), ("-small", ADAMW)])
def test_weights_and_gradient_norms_are_those_of_one_process(runs: Path, kind: str, tolerance: float) -> None:
    alone, sharded = runs / f"alone{kind}", runs / f"sharded{kind}"
    moved = distance(saved(alone), saved(alone, 0))
    assert moved > 0
    assert distance(saved(sharded, 0), saved(alone, 0)) < tolerance * moved, "after the warm start"
    assert distance(saved(sharded), saved(alone)) < tolerance * moved
    assert norms(alone).min() > 0
    torch.testing.assert_close(norms(sharded), norms(alone), rtol=tolerance, atol=0)


def test_bf16_is_bit_equal_to_whole_layers_on_as_many_processes(runs: Path) -> None:
    for file in ("model", "optimizer"):
        whole, sharded = saved(runs / "bf16", file=file), saved(runs / "sharded-bf16", file=file)
        assert whole.keys() == sharded.keys()
        assert all(torch.equal(whole[name], sharded[name]) for name in whole), file


@pytest.mark.parametrize("run", ["from-one", "from-two"])
def test_a_checkpoint_is_resumed_on_another_number_of_processes(runs: Path, run: str) -> None:
    plain = runs / "alone-plain"
    assert distance(saved(runs / run), saved(plain)) < ADAMW * distance(saved(plain), saved(plain, 0))


def test_the_published_model_is_whole(runs: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(runs / "sharded" / "model")
    weights = dict(model.named_parameters())
    assert weights.keys() == saved(runs / "sharded").keys()
    assert all(torch.equal(weights[name], value) for name, value in saved(runs / "sharded").items())


@pytest.mark.parametrize(
    ("rollout", "world", "words"),
    [
        ({}, World(), "--gpus N"),
        ({"engine": "python:mine:sampler"}, World(0, 2, True), "a part of the weights"),
        ({"precision": "fp32"}, World(0, 2, True), "rollout.precision"),
    ],
)
def test_what_cannot_be_sharded_is_refused(rollout: Mapping[str, str], world: World, words: str) -> None:
    config = Job("", {**SHARDED, "model.precision": '"bf16"'}).config()
    # Changed, not loaded: there is no such sampler.
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})
    with pytest.raises(ValueError, match=words):
        build_trainer(config, world=world)


class Layer(nn.Module):
    """A layer with a linear map of 16 weights, and others."""

    def __init__(self, **others: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        for name, other in others.items():
            setattr(self, name, other)


@pytest.mark.parametrize(
    ("backbone", "words"),
    [
        (nn.Sequential(Layer()), "no list of decoder layers"),
        (nn.Sequential(nn.ModuleList([Layer(experts=nn.Parameter(torch.zeros(2, 4, 4)))])), "Layer are not"),
        (nn.Sequential(nn.ModuleList([Layer(experts=nn.ModuleList([nn.Linear(4, 4)]))])), "Layer are not"),
    ],
)
def test_a_model_whose_layers_cannot_be_split_is_refused(backbone: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shard_layers(backbone, backbone, World(0, 2, True), torch.device("cpu"), torch.float32)
