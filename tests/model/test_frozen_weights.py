"""LoRA's frozen weights are kept in bf16 where every pass casts them to bf16: the same results in half the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.train.short_runs import contents, differences, recipe, trained
from trimtab.trainer.config import Config
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.sampling.weights import checkpoint_weights
from trimtab.trainer.train import build_policy, export_model

pytest.importorskip("peft")

LORA = {"model.lora_rank": "4", "model.precision": "bf16", "run.eval_every": "3", "warm_start.steps": "2"}


def lora_policy(**options: Any) -> Policy:
    policy = load_policy("demo", device="cpu", seed=0, precision="bf16", lora_rank=4, **options)
    generator = torch.Generator().manual_seed(0)
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:  # they start at 0, and the adapters would do nothing
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    return policy


def dtypes(policy: Policy) -> dict[torch.dtype, set[str]]:
    found: dict[torch.dtype, set[str]] = {}
    for name, weight in policy.model.named_parameters():
        kind = "adapter" if "lora_" in name else name.split(".")[-2]
        found.setdefault(weight.dtype, set()).add(kind)
    return found


def test_a_run_is_the_same_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halved, _ = trained(tmp_path / "bf16", LORA)
    assert dtypes(halved.trainer.policy)[torch.bfloat16], "the run did what the test is about"
    monkeypatch.setattr(Config, "frozen_in_bf16", False)
    whole, _ = trained(tmp_path / "fp32", LORA)
    assert dtypes(whole.trainer.policy).keys() == {torch.float32}
    assert differences(contents(halved.folder.path), contents(whole.folder.path)) == []


def test_only_frozen_linear_layers_are_in_bf16() -> None:
    found = dtypes(lora_policy(frozen_in_bf16=True))
    assert found[torch.bfloat16] == {"base_layer"}
    assert {"adapter", "norm", "embed_tokens"} <= found[torch.float32], "which autocast does not cast"
    size = {half: sum(p.numel() * p.element_size() for p in lora_policy(frozen_in_bf16=half).model.parameters())
            for half in (False, True)}  # fmt: skip
    linear = sum(p.numel() for n, p in lora_policy().model.named_parameters() if "base_layer" in n)
    assert size[False] - size[True] == 2 * linear


@pytest.mark.parametrize(
    ("changes", "halved"),
    [
        ({}, True),
        ({"rollout.precision": "bf16"}, True),
        ({"rollout.precision": "fp32"}, False),
        ({"model.precision": "fp32"}, False),
        ({"model.shard": "true"}, False),
        ({"model.lora_rank": "0"}, False),
    ],
)
def test_weights_stay_fp32_where_something_computes_in_fp32(changes: dict[str, str], halved: bool) -> None:
    config = recipe(LORA | changes)
    assert config.frozen_in_bf16 == halved
    if not config.model.shard:
        assert (torch.bfloat16 in dtypes(build_policy(config))) == halved


def test_a_sampler_in_fp32_still_samples(tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", LORA | {"rollout.precision": "fp32", "run.steps": "1"})
    assert run.progress.step == 1


def test_an_engine_gets_merged_weights_that_differ_by_the_rounding_of_the_base_alone() -> None:
    whole, halved = lora_policy(), lora_policy(frozen_in_bf16=True)
    exact, got = (dict(checkpoint_weights(policy.model)) for policy in (whole, halved))
    assert exact.keys() == got.keys()
    for name, weight in got.items():
        assert weight.dtype == torch.float32, "an adapter is not rounded before it is added"
        base = dict(whole.causal_lm.named_parameters()).get(name.replace(".weight", ".base_layer.weight"))
        rounded = exact[name] if base is None else exact[name] - base.detach() + base.detach().to(torch.bfloat16)
        torch.testing.assert_close(weight, rounded, rtol=0, atol=1e-6)


def test_an_exported_model_has_the_whole_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "bf16", LORA | {"run.steps": "1"})
    monkeypatch.setattr(Config, "frozen_in_bf16", False)
    trained(tmp_path / "fp32", LORA | {"run.steps": "1"})
    for name in ("bf16", "fp32"):
        export_model(str(tmp_path / name), tmp_path / f"{name}-model")
    one, other = (load_policy(str(tmp_path / f"{name}-model"), device="cpu").model for name in ("bf16", "fp32"))
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in pairs)
