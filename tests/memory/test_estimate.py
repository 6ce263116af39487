"""A recipe's memory is estimated item by item and phase by phase, with what to lower."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.thorough import slow_but
from trimtab.bounded_http import HttpError
from trimtab.cli.dry_run import describe_dry_run
from trimtab.trainer.config import load, packaged_recipes
from trimtab.trainer.memory.advice import DeviceMemory, _main_memory, describe_estimate, describe_fit, fits
from trimtab.trainer.memory.estimate import (
    WORKSPACE,
    MemoryEstimate,
    NoEstimateError,
    estimate_memory,
    kv_cache_bytes,
    largest_micro_batch,
    model_shape,
    sequences_at_once,
)
from trimtab.trainer.memory.fake_model import fake_policy, fake_tensors

GIGA = 10**9
SMALL_RUN = (
    *("rollout.prompts=4", "rollout.samples=4", "rollout.max_prompt_tokens=20", "rollout.max_new_tokens=12"),
    "run.eval_every=0",
)
SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
# By hand: the embedding, and in both layers q and o, k and v, three of the MLP, norms of 128 and of heads.
LINEAR = 1000 * 128 + 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128)
PARAMETERS = LINEAR + 2 * (2 * 128 + 2 * 32) + 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a config and no weights: an estimate needs none."""
    path = tmp_path_factory.mktemp("models") / "small"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPE))
    return path


@cache
def of(*settings: str, device: Any = "cuda", memory: int | None = None) -> MemoryEstimate:
    return estimate_memory(load(None, [*SMALL_RUN, *settings]), device, memory)


@pytest.fixture
def small(folder: Path) -> str:
    return f"model.path={folder}"


def test_weights_gradients_and_optimizer_state_are_computed_from_sizes(small: str) -> None:
    estimate = of(small, "model.precision=bf16")
    assert estimate.weights == estimate.gradients == 4 * PARAMETERS
    assert estimate.optimizer_state == 8 * PARAMETERS
    assert estimate.reference == 0


def test_lora_has_gradients_and_state_only_for_its_adapters(small: str) -> None:
    pytest.importorskip("peft")
    rank = 4
    added = rank * 2 * ((128 + 128) * 2 + (128 + 64) * 2 + (128 + 256) * 3)
    estimate = of(small, f"model.lora_rank={rank}")
    assert estimate.weights == 4 * (PARAMETERS + added)
    assert estimate.gradients == 4 * added
    assert estimate.optimizer_state == 8 * added


@pytest.mark.parametrize("reference", ["start", "demo"])
def test_a_reference_model_is_there_all_the_time(small: str, reference: str) -> None:
    alone, both = of(small), of(small, f"model.reference={reference}")
    weights = alone.weights if reference == "start" else of().weights
    assert both.reference == weights
    assert {phase: peak - alone.phases[phase] for phase, peak in both.phases.items()} == dict.fromkeys(
        alone.phases, weights
    )


def persistent(estimate: MemoryEstimate) -> int:
    """What is allocated in every phase."""
    return estimate.weights + estimate.optimizer_state + estimate.reference + estimate.sampler + estimate.kv_cache


def test_the_peak_is_that_of_the_largest_phase(small: str) -> None:
    estimate = of(small)
    assert (
        estimate.peak
        == max(estimate.sampling, estimate.scoring, estimate.update, estimate.optimizer_step)
        == estimate.phases[estimate.worst_phase]
    )
    assert replace(estimate, optimizer_step=10 * estimate.peak).worst_phase == "optimizer_step"


def test_every_phase_holds_at_least_what_is_persistent(small: str) -> None:
    for device in ("cpu", "cuda"):
        estimate = of(small, device=device)
        assert min(estimate.phases.values()) >= persistent(estimate)
        assert estimate.update >= persistent(estimate) + estimate.activations


def test_the_token_budget_decides_over_activations(small: str) -> None:
    long = ("rollout.max_new_tokens=2028", "model.precision=bf16")
    one, two = of(small, *long, "update.token_budget=8192"), of(small, *long, "update.token_budget=16384")
    assert two.activations == pytest.approx(2 * one.activations, rel=0.001)
    assert two.update > one.update
    assert (two.sampling, two.optimizer_step) == (one.sampling, one.optimizer_step)


def test_gradient_checkpointing_lowers_an_update_alone(small: str) -> None:
    long = ("rollout.max_new_tokens=1004", "model.precision=bf16")
    plain, saving = of(small, *long), of(small, *long, "model.gradient_checkpointing=true")
    assert saving.update < plain.update
    assert replace(saving, update=plain.update).phases == plain.phases


def test_an_update_of_one_micro_batch_does_not_hold_all_gradients_at_its_peak(small: str) -> None:
    one, many = of(small, "update.token_budget=512"), of(small, "update.token_budget=511")
    assert largest_micro_batch(load(None, SMALL_RUN), "cpu").rows == 16
    assert one.update - persistent(one) < many.update - persistent(many) + one.gradients


def test_micro_batches_are_packed_on_a_gpu_in_bf16_and_padded_elsewhere() -> None:
    config = load(None, [*SMALL_RUN, "update.token_budget=100", "model.precision=bf16"])
    packed, padded = largest_micro_batch(config, "cuda"), largest_micro_batch(config, "cpu")
    assert (packed.packed, packed.fused, packed.tokens) == (True, True, 100)
    assert (padded.packed, padded.fused, padded.rows, padded.longest) == (False, False, 3, 32)
    assert not largest_micro_batch(
        load(None, [*SMALL_RUN, "model.precision=bf16", "model.attention=eager"]), "cuda"
    ).packed


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [(10, 32), (10_000, 16 * 32), (100, 100)],
    ids=["one response is longer than the budget", "a mini-batch is smaller than it", "it is full"],
)
def test_a_micro_batch_holds_what_there_is(budget: int, tokens: int) -> None:
    config = load(None, [*SMALL_RUN, f"update.token_budget={budget}", "model.precision=bf16"])
    assert largest_micro_batch(config, "cuda").tokens == tokens


def test_the_kv_cache_has_pages_for_all_sequences_at_a_time() -> None:
    token = 28 * 2 * 8 * 128 * 2
    assert kv_cache_bytes(token, 5, 256) == 5 * 256 * token
    assert kv_cache_bytes(token, 5, 257) == 5 * 512 * token
    assert kv_cache_bytes(token, 100, 1) == 100 * 256 * token


def test_the_kv_cache_takes_no_more_than_its_limit() -> None:
    token = 28 * 2 * 8 * 128 * 2
    page = 64 * token
    limited = kv_cache_bytes(token, 1024, 4096, limit=24 * GIGA)
    assert 24 * GIGA - page < limited <= 24 * GIGA
    assert limited % page == 0
    assert kv_cache_bytes(token, 1024, 4096, limit=GIGA // 3) == (2 * 64 + 2) * page  # two sequences always fit


def test_the_sampler_keeps_a_copy_of_the_linear_weights(small: str) -> None:
    estimate = of(small, "model.precision=bf16")
    assert 2 * LINEAR <= estimate.sampler <= 2 * LINEAR + 16 * 10_000
    assert estimate.kv_cache == 16 * 256 * 2 * 2 * 2 * 32 * 2
    in_fp32 = of(small, "model.precision=bf16", "rollout.precision=fp32")
    assert (in_fp32.kv_cache, in_fp32.weights) == (2 * estimate.kv_cache, estimate.weights)
    assert 4 * LINEAR <= in_fp32.sampler <= 4 * LINEAR + 2 * 16 * 10_000
    assert (of(small, device="cpu").sampler, of(small, device="cpu").kv_cache) == (0, 0)


def test_more_sequences_take_more_kv_cache(small: str) -> None:
    half, whole = of(small, "rollout.batch_size=8"), of(small, "rollout.batch_size=16")
    assert whole.kv_cache == 2 * half.kv_cache
    assert of(small, "rollout.batch_size=1000") == whole  # there are no more


def test_an_evaluation_may_need_more_kv_cache_than_training(small: str) -> None:
    trained, evaluated = of(small), of(small, "run.eval_every=1", "run.eval_problems=32")
    assert evaluated.kv_cache == 2 * trained.kv_cache
    assert of(small, "run.eval_every=1", "run.eval_problems=32", "task.name=gsm8k").kv_cache == trained.kv_cache


def test_lora_weights_are_merged_one_after_the_other(small: str) -> None:
    pytest.importorskip("peft")
    estimate = of(small, "model.lora_rank=4", "rollout.max_prompt_tokens=1")
    layers = LINEAR - 1000 * 128
    assert 0 < estimate.sampling - persistent(estimate) - estimate.gradients - WORKSPACE < 4 * layers


def test_dynamic_sampling_samples_more_at_a_time() -> None:
    assert sequences_at_once(load(None, SMALL_RUN)) == 16
    assert (
        sequences_at_once(load(None, [*SMALL_RUN, "rollout.dynamic_sampling=true", "rollout.dynamic_oversample=2.5"]))
        == 40
    )


def test_vllm_takes_its_share_while_it_samples(small: str) -> None:
    settings = (small, "rollout.engine=vllm", "rollout.vllm_gpu_memory_utilization=0.5")
    asleep, awake = of(*settings), of(*settings, memory=80 * GIGA)
    assert awake.sampling - asleep.sampling == 40 * GIGA
    assert awake.update == asleep.update


def test_other_model_families_use_the_native_sampler(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "gemma"}))
    estimate = of(f"model.path={tmp_path}")
    assert estimate.kv_cache == 0
    assert estimate.sampling > persistent(estimate) + estimate.gradients + 16 * 31 * 2 * 2 * 2 * 32 * 4


def test_a_model_larger_than_any_memory_is_estimated_without_its_weights(tmp_path: Path) -> None:
    hidden, layers = 1 << 20, 4
    large = {"vocab_size": 151_936, "hidden_size": hidden, "intermediate_size": 12_288, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | large | heads))
    estimate = of(f"model.path={tmp_path}", "model.precision=bf16", "rollout.max_new_tokens=8192")
    attention, mlp = (2 * 32 + 2 * 8) * 128 * hidden, 3 * 12_288 * hidden
    assert estimate.weights == pytest.approx(4 * (2 * 151_936 * hidden + layers * (attention + mlp)), rel=0.001)


@pytest.mark.parametrize(
    "name", slow_but({*packaged_recipes()} - {"smollm2", "smollm2-tools", "smollm2-zero"}, packaged_recipes())
)
def test_every_recipe_gets_an_estimate_or_a_reason_why_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    lines = describe_estimate(load(name))
    if "/" in load(name).model.path:
        assert lines == [f"  no estimate: {reason(load(name).model.path)}"]
    else:
        assert "GB of main memory" in lines[0]


def reason(path: str) -> str:
    with pytest.raises(NoEstimateError) as error:
        model_shape(path)
    assert path in str(error.value)
    return str(error.value)


def test_the_built_in_shape_of_smollm2_has_its_number_of_parameters() -> None:
    with fake_tensors():
        model = fake_policy(model_shape("smollm2"), "fp32").model
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


def test_a_folder_that_is_not_there_or_holds_no_model_is_named(tmp_path: Path) -> None:
    assert "there is no such folder" in reason(f"{tmp_path}/nothing")
    (tmp_path / "model.safetensors").touch()
    assert "config.json" in reason(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in reason(str(tmp_path))


def hub_replies(monkeypatch: pytest.MonkeyPatch, reply: bytes | Exception) -> list[str]:
    """Let the hub reply so; return the list of the addresses that are requested."""
    requests: list[str] = []

    def fetch(url: str, **limits: Any) -> bytes:
        requests.append(url)
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("trimtab.trainer.memory.estimate.fetch", fetch)
    return requests


@pytest.mark.parametrize("name", ["nobody/nothing", "no such name", "a/b/c", "x" * 300, "../../etc/passwd"])
def test_an_unknown_name_is_looked_up_once_at_most(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = hub_replies(monkeypatch, HttpError("no network"))
    reason(name)
    assert len(requests) <= 1  # transformers would try again and again, for minutes


def test_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = hub_replies(monkeypatch, json.dumps(SHAPE).encode())
    assert model_shape("someone/something").hidden_size == 128
    assert len(requests) == 1
    assert "someone/something" in requests[0]


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b"{}", b'{"model_type": "unheard of"}', b'{"model_type": 3}', b"[" * 100_000]
)
def test_a_bad_reply_of_the_hub_is_refused(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_replies(monkeypatch, body)
    assert "neither cached" in reason("someone/something")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("family", ["mixtral", "gpt2", "mamba", "t5", "bert"])
def test_a_model_that_cannot_run_on_fake_tensors_does_not_stop_the_dry_run(
    family: str, device: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "num_hidden_layers": 1, "n_layer": 1}))
    settings = [*SMALL_RUN, f"model.path={tmp_path}", f"run.device={device}"]
    text = "\n".join(describe_estimate(load(None, settings), DeviceMemory("the GPU", GIGA, GIGA)))
    assert "no estimate: " in text or "GB" in text


def estimate_with(**peaks: int) -> MemoryEstimate:
    items = ("weights", "gradients", "optimizer_state", "reference", "activations", "weight_copies", "head", "backward")
    sizes = dict.fromkeys((*items, "sampler", "kv_cache"), GIGA)
    phases = {"sampling": 10, "scoring": 10, "update": 10, "optimizer_step": 10} | peaks
    return MemoryEstimate("cuda", **sizes, **{phase: size * GIGA for phase, size in phases.items()})


def fit_of(estimate: MemoryEstimate, *settings: str, gigabytes: int = 40) -> str:
    return describe_fit(estimate, load(None, settings), DeviceMemory("the GPU", gigabytes * GIGA, gigabytes * GIGA))


def test_an_estimate_below_the_free_memory_fits() -> None:
    assert fit_of(estimate_with()) == "the GPU has 40.0 GB free: it fits"


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("sampling", "while sampling: lower rollout.batch_size (now 1024), or on a GPU rollout.kv_cache_memory"),
        (
            "scoring",
            "while scoring responses: lower update.token_budget (now 16384), then update.head_chunk (now 4096)",
        ),
        (
            "update",
            "in an update: lower update.token_budget (now 16384), set model.gradient_checkpointing=true, "
            "then lower update.head_chunk (now 4096)",
        ),
        ("optimizer_step", "in the optimizer step: set model.lora_rank=16"),
    ],
)
def test_a_phase_that_does_not_fit_names_what_to_lower(phase: str, words: str) -> None:
    assert fit_of(estimate_with(**{phase: 50})) == f"the GPU has 40.0 GB free: it does not fit, {words}"


def test_every_phase_that_does_not_fit_is_named() -> None:
    text = fit_of(estimate_with(sampling=50, update=60))
    assert "while sampling: lower rollout.batch_size" in text
    assert "in an update: lower update.token_budget" in text
    assert "scoring" not in text


def test_a_setting_in_use_is_not_advised() -> None:
    assert "checkpointing" not in fit_of(estimate_with(update=50), "model.gradient_checkpointing=true")


def test_a_little_is_left_for_the_allocator() -> None:
    assert "it fits" in fit_of(estimate_with(update=38))
    assert "does not fit" in fit_of(estimate_with(update=39))


def test_weights_that_do_not_fit_ask_for_a_smaller_model() -> None:
    text = fit_of(estimate_with(), gigabytes=3)
    assert "nor do weights and optimizer alone" in text
    assert "take a smaller model.path, or set model.lora_rank=16" in text


def gpu_lines(*settings: str, available: DeviceMemory | None) -> list[str]:
    return describe_estimate(load(None, [*SMALL_RUN, "run.device=cuda", *settings]), available)


def test_the_dry_run_has_a_table_for_a_gpu(small: str) -> None:
    lines = gpu_lines(small, "model.precision=bf16", available=DeviceMemory("H200", 150 * GIGA, 149 * GIGA))
    text = "\n".join(lines)
    for words in ("weights, fp32", "  gradients", "AdamW's state", "sampler: KV cache", "activations of a micro-batch"):
        assert words in text
    assert "while sampling" in text
    assert lines[-1] == "  H200 has 149.0 GB free: it fits"
    assert "reference" not in text  # there is none


def test_a_gpu_that_is_too_small_is_found_before_the_run(small: str) -> None:
    last = gpu_lines(small, "rollout.max_new_tokens=1004", available=DeviceMemory("a small GPU", GIGA, GIGA // 4))[-1]
    assert last.startswith("  a small GPU has 0.2 GB free: it does not fit, ")
    assert "in an update: lower update.token_budget (now 16384), set model.gradient_checkpointing=true" in last


def test_without_a_gpu_nothing_is_said_about_fitting(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    lines = gpu_lines(small, available=None)
    assert lines[-1] == "  whether that fits is unknown: no GPU is visible here"
    assert "30% of the device (rollout.kv_cache_memory)" in lines[-2]
    assert "40% of the device for vLLM" in gpu_lines(small, "rollout.engine=vllm", available=None)[-2]


def test_on_a_cpu_one_line_is_enough(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = load(None, [*SMALL_RUN, small])
    monkeypatch.setattr("trimtab.trainer.memory.advice._main_memory", lambda: 10**12)
    assert len(describe_estimate(config)) == 2
    monkeypatch.setattr("trimtab.trainer.memory.advice._main_memory", lambda: 1000)
    assert "this machine has 1e-06 GB free: it does not fit" in describe_estimate(config)[1]


def test_the_file_cache_counts_as_free_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 3 kB\nMemAvailable:     20 kB\nCached: 17 kB\n")
    assert _main_memory(tmp_path / "meminfo") == 20 * 1024
    assert (_main_memory(tmp_path / "missing") or 1) > 0


def test_the_estimate_is_a_comment_of_the_dry_run(small: str) -> None:
    text = describe_dry_run(load(None, [*SMALL_RUN, small, "run.device=cpu"]))
    assert "#   estimated: " in text.split("# Memory")[1]


@pytest.mark.parametrize("value", ["0", "1", "-0.1", "2.0", "'much'"])
def test_a_share_of_memory_is_between_nothing_and_all(value: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.kv_cache_memory"):
        load(None, [f"rollout.kv_cache_memory={value}"])


def test_several_processes_share_the_optimizer_state_and_with_shard_the_layers(small: str) -> None:
    settings = [small, "rollout.prompts=8", "update.per_step=1"]
    alone = estimate_memory(load("addition", settings), "cpu")
    four = estimate_memory(load("addition", settings), "cpu", processes=4)
    split = estimate_memory(load("addition", [*settings, "model.shard=true"]), "cpu", processes=4)
    assert (four.weights, four.gradients) == (alone.weights, alone.gradients)
    assert four.optimizer_state == split.optimizer_state == alone.optimizer_state // 4
    with fake_tensors():
        policy = fake_policy(model_shape(small.partition("=")[2]), "fp32")
        layers = [m for name, m in policy.backbone.named_modules() if isinstance(m, torch.nn.Linear)]
        linear = sum(p.numel() * 4 for layer in layers for p in layer.parameters())
    assert four.weights - split.weights == four.gradients - split.gradients == int(linear * 3 / 4)


def test_a_run_fits_where_its_estimate_says_so(small: str) -> None:
    config, needed = load(None, [*SMALL_RUN, small]), of(small, memory=80 << 30).peak
    assert fits(config, DeviceMemory("X", 80 << 30, 2 * needed))
    assert not fits(config, DeviceMemory("X", 80 << 30, needed))


def test_without_a_device_the_kv_cache_takes_its_share_of_the_smallest_that_fits(small: str) -> None:
    settings = ("rollout.prompts=4096", "rollout.max_new_tokens=4096", "rollout.batch_size=4096")
    whole = of(small, *settings, "rollout.kv_cache_memory=0.999999")
    shared = of(small, *settings, "rollout.kv_cache_memory=0.25")
    assert shared.kv_cache == pytest.approx(0.25 * shared.peak, rel=1e-6)
    assert shared.peak - shared.kv_cache == whole.peak - whole.kv_cache
    assert shared.kv_cache < whole.kv_cache
    known = of(small, *settings, "rollout.kv_cache_memory=0.25", memory=shared.peak)
    assert known.peak == pytest.approx(shared.peak, rel=0.01)
