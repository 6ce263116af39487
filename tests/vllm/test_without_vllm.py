"""What can be tested without vLLM: its settings, its errors, and the weights it would load."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trimtab.trainer.config import RolloutConfig, load
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.sampling import vllm as module
from trimtab.trainer.sampling.weights import checkpoint_weights
from trimtab.trainer.train.build import build_sampler

VLLM = RolloutConfig(engine="vllm")


@pytest.fixture
def policy() -> Policy:
    return load_policy("demo", device="cpu")


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Install a package vllm with the given code and version."""

    def install(code: str, version: str) -> None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        # Set first, so that what the import leaves behind is removed after the test.
        monkeypatch.setitem(sys.modules, "vllm", None)
        for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
            monkeypatch.delitem(sys.modules, name)
        for name in (*module.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        monkeypatch.setattr(importlib.metadata, "version", lambda package: version)

    return install


def test_vllm_is_imported_only_when_it_is_chosen() -> None:
    code = (
        "import sys; from trimtab.trainer.train.build import build_policy, build_sampler;"
        "from trimtab.trainer.config import load; config = load('addition');"
        "build_sampler(build_policy(config), config.rollout);"
        "sys.exit(any(name.split('.')[0] == 'vllm' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_package_says_what_to_install(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        ValueError, match=r"rollout\.engine='vllm' needs the package vllm==0\.32\.0: .*pip install vllm"
    ):
        build_sampler(policy, VLLM)


def test_an_untested_version_is_warned_about(fake_vllm: Callable[[str, str], None]) -> None:
    fake_vllm("LLM = SamplingParams = None", "0.33.1+cu130")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        module.import_vllm()
    (one,) = caught
    assert "was tested with vllm 0.32.0 (CPU) and 0.24.0 (GPU); this is 0.33.1." in str(one.message)


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.24.0"])
def test_a_tested_version_gives_no_warning_and_no_log_lines(
    fake_vllm: Callable[[str, str], None], version: str
) -> None:
    fake_vllm("LLM = SamplingParams = None", version)
    module.import_vllm()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert {"VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"} <= os.environ.keys()


@pytest.mark.parametrize(
    ("code", "message"),
    [("import no_such_module", "no_such_module"), ("SamplingParams = None", "LLM"), ("1 / 0", "zero")],
)
def test_a_broken_version_is_named_with_its_error(
    fake_vllm: Callable[[str, str], None], code: str, message: str
) -> None:
    fake_vllm(code, "0.9.2")
    with pytest.raises(ValueError, match=rf"vllm 0\.9\.2 could not be imported: .*{message}.*Tested with vllm 0\.32"):
        module.import_vllm()


@pytest.mark.parametrize(
    ("device", "platform", "advice"),
    [
        ("cpu", "cuda", r"built for cuda, the policy is on cpu: set run\.device"),
        ("cuda", "", r"built for no platform here, the policy is on cuda"),
        ("cuda:1", "cuda", r"the policy on cuda:1: .*CUDA_VISIBLE_DEVICES=1"),
    ],
)
def test_vllm_and_the_policy_must_be_on_the_same_device(
    monkeypatch: pytest.MonkeyPatch, device: str, platform: str, advice: str
) -> None:
    found = SimpleNamespace(current_platform=SimpleNamespace(device_type=platform))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=found))
    monkeypatch.setitem(sys.modules, "vllm.platforms", found)
    with pytest.raises(ValueError, match=advice):
        module._check_device(torch.device(device))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.engine=vlm", "rollout.engine"),
        ("rollout.vllm_gpu_memory_utilization=1.0", "rollout.vllm_gpu_memory_utilization"),
        ("rollout.vllm_gpu_memory_utilization=0", "rollout.vllm_gpu_memory_utilization"),
        ("rollout.vllm_options={dtype='half'}", r"vllm_options\.dtype is set by trimtab: set rollout\.precision"),
        ("rollout.vllm_options={seed=1}", r"vllm_options\.seed .* set run\.seed"),
        ("rollout.vllm_options={tensor_parallel_size=2}", r"tensor_parallel_size .* remove it"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("addition", ["rollout.engine=vllm", setting])


def test_options_of_vllm_reach_it() -> None:
    config = load("addition", ["rollout.engine=vllm", "rollout.vllm_options={enforce_eager=true, block_size=32}"])
    assert config.rollout.vllm_options == {"enforce_eager": True, "block_size": 32}


def test_weights_have_their_checkpoint_names_and_a_tied_head_has_both(policy: Policy) -> None:
    weights = dict(checkpoint_weights(policy.model))
    assert weights.keys() == policy.model.state_dict().keys()
    head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    assert head.data_ptr() == embedding.data_ptr() == policy.lm_head.weight.data_ptr()  # nothing is copied
    assert not any(weight.requires_grad for weight in weights.values())


def test_lora_is_merged_without_changing_the_policy() -> None:
    pytest.importorskip("peft")
    plain, policy = load_policy("demo", device="cpu"), load_policy("demo", device="cpu", lora_rank=3)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    before = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    weights = dict(checkpoint_weights(policy.model))
    assert weights.keys() == plain.model.state_dict().keys()
    assert all(torch.equal(weight, before[name]) for name, weight in policy.model.state_dict().items())
    plain.model.load_state_dict(weights)
    ids = torch.tensor([[2, 3, 4, 5]])
    torch.testing.assert_close(plain.model(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    changed = [name for name, weight in weights.items() if not torch.equal(weight, plain_weight(name))]
    assert len(changed) == 14 and all("_proj" in name for name in changed)


def test_experts_are_separate_as_in_a_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    few = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    small = {"vocab_size": 17, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**few, **small)).save_pretrained(tmp_path)
    weights = dict(checkpoint_weights(Qwen3MoeForCausalLM.from_pretrained(tmp_path)))
    saved = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == saved.keys() and "model.layers.0.mlp.experts.2.up_proj.weight" in saved
    assert all(torch.equal(weight, saved[name]) for name, weight in weights.items())


def plain_weight(name: str) -> torch.Tensor:
    """A weight of the demo model as it is made."""
    weight: torch.Tensor = load_policy("demo", device="cpu").model.state_dict()[name]
    return weight
