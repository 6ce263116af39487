"""What a run will take is known from its recipe: every item, the peak of every phase, and what to lower."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import load, packaged_recipes
from trimtab.console.dry_run import describe_dry_run
from trimtab.memory.estimate import (
    WORKSPACE,
    Forecast,
    forecast,
    largest_part,
    pool_bytes,
    sequences_at_once,
)
from trimtab.memory.estimate_text import Room, describe_estimate, fits
from trimtab.memory.fake_model import fake_policy, fake_tensors
from trimtab.memory.model_shape import NoForecastError, model_shape

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
    """A model's folder with a config and no weights: a forecast needs none."""
    path = tmp_path_factory.mktemp("models") / "small"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPE))
    return path


@cache
def of(*settings: str, device: Any = "cuda", memory: int | None = None) -> Forecast:
    return forecast(load(None, [*SMALL_RUN, *settings]), device, memory)


@pytest.fixture
def small(folder: Path) -> str:
    return f"model.path={folder}"


def test_what_lasts_is_multiplied_out(small: str) -> None:
    made = of(small, "model.precision=bf16")
    assert made.weights == made.gradients == 4 * PARAMETERS
    assert made.optimizer == 8 * PARAMETERS
    assert made.reference == 0


def test_lora_has_gradients_and_state_for_what_it_trains_alone(small: str) -> None:
    pytest.importorskip("peft")
    rank = 4
    added = rank * 2 * ((128 + 128) * 2 + (128 + 64) * 2 + (128 + 256) * 3)
    made = of(small, f"model.lora_rank={rank}")
    assert made.weights == 4 * (PARAMETERS + added)
    assert made.gradients == 4 * added
    assert made.optimizer == 8 * added


@pytest.mark.parametrize("reference", ["start", "demo"])
def test_a_reference_model_is_there_all_the_time(small: str, reference: str) -> None:
    alone, both = of(small), of(small, f"model.reference={reference}")
    weights = alone.weights if reference == "start" else of().weights
    assert both.reference == weights
    assert {phase: peak - alone.phases[phase] for phase, peak in both.phases.items()} == dict.fromkeys(
        alone.phases, weights
    )


def test_the_peak_is_that_of_the_largest_phase(small: str) -> None:
    made = of(small)
    assert made.peak == max(made.sampling, made.scoring, made.update, made.step) == made.phases[made.worst]
    assert replace(made, step=10 * made.peak).worst == "step"


def test_every_phase_holds_at_least_what_lasts(small: str) -> None:
    for device in ("cpu", "cuda"):
        made = of(small, device=device)
        assert min(made.phases.values()) >= made.lasting
        assert made.update >= made.lasting + made.activations


def test_the_token_budget_decides_over_activations(small: str) -> None:
    long = ("rollout.max_new_tokens=2028", "model.precision=bf16")
    one, two = of(small, *long, "update.token_budget=8192"), of(small, *long, "update.token_budget=16384")
    assert two.activations == pytest.approx(2 * one.activations, rel=0.001)
    assert two.update > one.update
    assert (two.sampling, two.step) == (one.sampling, one.step)


def test_gradient_checkpointing_lowers_an_update_alone(small: str) -> None:
    long = ("rollout.max_new_tokens=1004", "model.precision=bf16")
    plain, saving = of(small, *long), of(small, *long, "model.gradient_checkpointing=true")
    assert saving.update < plain.update
    assert replace(saving, update=plain.update).phases == plain.phases


def test_an_update_in_one_part_does_not_hold_all_gradients_at_its_worst(small: str) -> None:
    one, many = of(small, "update.token_budget=512"), of(small, "update.token_budget=511")
    assert largest_part(load(None, SMALL_RUN), "cpu").rows == 16
    assert one.update - one.lasting < many.update - many.lasting + one.gradients


def test_parts_are_packed_on_a_gpu_in_bf16_and_padded_elsewhere() -> None:
    config = load(None, [*SMALL_RUN, "update.token_budget=100", "model.precision=bf16"])
    packed, padded = largest_part(config, "cuda"), largest_part(config, "cpu")
    assert (packed.packed, packed.fused, packed.tokens) == (True, True, 100)
    assert (padded.packed, padded.fused, padded.rows, padded.longest) == (False, False, 3, 32)
    assert not largest_part(load(None, [*SMALL_RUN, "model.precision=bf16", "model.attention=eager"]), "cuda").packed


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [(10, 32), (10_000, 16 * 32), (100, 100)],
    ids=["one response is longer than the budget", "a mini-batch is smaller than it", "it is full"],
)
def test_a_part_holds_what_there_is(budget: int, tokens: int) -> None:
    config = load(None, [*SMALL_RUN, f"update.token_budget={budget}", "model.precision=bf16"])
    assert largest_part(config, "cuda").tokens == tokens


def test_the_cache_is_pages_for_all_who_sample_at_once() -> None:
    shape = {"layers": 28, "kv_heads": 8, "head_dim": 128, "bytes_per_value": 2, "share": 0.3}
    token = 28 * 2 * 8 * 128 * 2
    assert pool_bytes(**shape, sequences=5, tokens=256) == 5 * 256 * token  # type: ignore[arg-type]
    assert pool_bytes(**shape, sequences=5, tokens=257) == 5 * 512 * token  # type: ignore[arg-type]
    assert pool_bytes(**shape, sequences=100, tokens=1) == 100 * 256 * token  # type: ignore[arg-type]


def test_the_cache_takes_no_more_than_its_share_of_the_device() -> None:
    shape = {"layers": 28, "kv_heads": 8, "head_dim": 128, "bytes_per_value": 2, "sequences": 1024, "tokens": 4096}
    page = 64 * 28 * 2 * 8 * 128 * 2
    held = pool_bytes(**shape, share=0.3, memory=80 * GIGA)  # type: ignore[arg-type]
    assert 24 * GIGA - page < held <= 24 * GIGA
    assert held % page == 0
    least = pool_bytes(**shape, share=0.3, memory=GIGA)  # type: ignore[arg-type]
    assert least == (2 * 64 + 2) * page  # two responses have to fit, come what may


def test_the_sampler_keeps_a_copy_of_the_linear_weights(small: str) -> None:
    made = of(small, "model.precision=bf16")
    assert 2 * LINEAR <= made.sampler <= 2 * LINEAR + 16 * 10_000
    assert made.cache == 16 * 256 * 2 * 2 * 2 * 32 * 2
    assert (of(small, device="cpu").sampler, of(small, device="cpu").cache) == (0, 0)


def test_more_at_once_take_more_cache(small: str) -> None:
    half, whole = of(small, "rollout.batch_size=8"), of(small, "rollout.batch_size=16")
    assert whole.cache == 2 * half.cache
    assert of(small, "rollout.batch_size=1000") == whole  # there are no more


def test_an_evaluation_may_need_more_cache_than_training(small: str) -> None:
    trained, evaluated = of(small), of(small, "run.eval_every=1", "run.eval_problems=32")
    assert evaluated.cache == 2 * trained.cache
    assert of(small, "run.eval_every=1", "run.eval_problems=32", "task.name=gsm8k").cache == trained.cache


def test_adapters_are_added_to_one_weight_after_the_other_before_they_are_sampled_from(small: str) -> None:
    pytest.importorskip("peft")
    made = of(small, "model.lora_rank=4", "rollout.max_prompt_tokens=1")
    layers = LINEAR - 1000 * 128
    assert 0 < made.sampling - made.lasting - made.gradients - WORKSPACE < 4 * layers


def test_dynamic_sampling_draws_more_at_once() -> None:
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


def test_other_families_are_sampled_the_plain_way(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "gemma"}))
    made = of(f"model.path={tmp_path}")
    assert made.cache == 0
    assert made.sampling > made.lasting + made.gradients + 16 * 31 * 2 * 2 * 2 * 32 * 4


def test_a_large_model_is_foretold_without_its_weights(tmp_path: Path) -> None:
    large = {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | large | heads))
    begin = time.process_time()
    made = of(f"model.path={tmp_path}", "model.precision=bf16", "rollout.max_new_tokens=8192")
    assert time.process_time() - begin < 10
    assert made.weights == pytest.approx(4 * (2 * 151_936 * 4096 + 4 * 193e6), rel=0.01)


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_recipe_gets_a_forecast_or_hears_why_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    lines = describe_estimate(load(name))
    if "/" in load(name).model.path:
        assert lines == [f"  no forecast: {fault(load(name).model.path)}"]
    else:
        assert "GB of main memory" in lines[0]


def fault(path: str) -> str:
    with pytest.raises(NoForecastError) as error:
        model_shape(path)
    assert path in str(error.value)
    return str(error.value)


def test_smollm2_has_the_shape_it_has() -> None:
    with fake_tensors():
        model = fake_policy(model_shape("smollm2"), "fp32").model
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


def test_a_folder_that_is_not_there_or_holds_no_model_is_named(tmp_path: Path) -> None:
    assert "there is no such folder" in fault(f"{tmp_path}/nothing")
    (tmp_path / "model.safetensors").touch()
    assert "config.json" in fault(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in fault(str(tmp_path))


@pytest.mark.parametrize("name", ["nobody/nothing", "no such name", "a/b/c", "x" * 300, "../../etc/passwd"])
def test_a_name_that_nothing_is_known_by_gives_words_at_once(name: str) -> None:
    begin = time.monotonic()
    fault(name)
    assert time.monotonic() - begin < 20  # transformers would try again and again


def test_a_hub_that_answers_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    asked = []

    def get(url: str, **options: Any) -> httpx.Response:
        asked.append(url)
        return httpx.Response(200, json=SHAPE, request=httpx.Request("GET", url))

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx, "get", get)
    assert model_shape("someone/something").hidden_size == 128
    assert len(asked) == 1
    assert "someone/something" in asked[0]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"model_type": "unheard of"}', b'{"model_type": 3}'])
def test_what_a_hub_answers_is_not_trusted(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    def get(url: str, **options: Any) -> httpx.Response:
        return httpx.Response(200, content=body, request=httpx.Request("GET", url))

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx, "get", get)
    assert "neither cached" in fault("someone/something")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("family", ["mixtral", "gpt2", "mamba", "t5", "bert"])
def test_a_model_that_cannot_be_counted_does_not_stop_the_dry_run(family: str, device: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "num_hidden_layers": 1, "n_layer": 1}))
    settings = [*SMALL_RUN, f"model.path={tmp_path}", f"run.device={device}"]
    text = "\n".join(describe_estimate(load(None, settings), Room("the GPU", GIGA, GIGA)))
    assert "no forecast: " in text or "GB" in text


def made_up(**peaks: int) -> Forecast:
    items = ("weights", "gradients", "optimizer", "reference", "activations", "copies", "head", "backward")
    sizes = dict.fromkeys((*items, "sampler", "cache"), GIGA)
    phases = {"sampling": 10, "scoring": 10, "update": 10, "step": 10} | peaks
    return Forecast("cuda", **sizes, **{phase: size * GIGA for phase, size in phases.items()})


def said(made: Forecast, *settings: str, gigabytes: int = 40) -> str:
    return fits(made, load(None, settings), Room("the GPU", gigabytes * GIGA, gigabytes * GIGA))


def test_what_fits_is_said_to_fit() -> None:
    assert said(made_up()) == "the GPU has 40.0 GB free: it fits"


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("sampling", "while sampling: lower rollout.batch_size (now 1024)"),
        (
            "scoring",
            "while scoring responses: lower update.token_budget (now 16384), then update.head_chunk (now 4096)",
        ),
        (
            "update",
            "in an update: lower update.token_budget (now 16384), set model.gradient_checkpointing=true, "
            "then lower update.head_chunk (now 4096)",
        ),
        ("step", "in the optimizer step: set model.lora_rank=16"),
    ],
)
def test_what_does_not_fit_names_what_to_lower(phase: str, words: str) -> None:
    assert said(made_up(**{phase: 50})) == f"the GPU has 40.0 GB free: it does not fit, {words}"


def test_every_phase_that_does_not_fit_is_named() -> None:
    told = said(made_up(sampling=50, update=60))
    assert "while sampling: lower rollout.batch_size" in told
    assert "in an update: lower update.token_budget" in told
    assert "scoring" not in told


def test_what_is_done_already_is_not_advised() -> None:
    assert "checkpointing" not in said(made_up(update=50), "model.gradient_checkpointing=true")


def test_a_little_is_left_for_the_allocator() -> None:
    assert "it fits" in said(made_up(update=38))
    assert "does not fit" in said(made_up(update=39))


def test_a_model_that_is_too_large_by_itself_is_told_so() -> None:
    told = said(made_up(), gigabytes=3)
    assert "nor do weights and optimizer alone" in told
    assert "take a smaller model.path, or set model.lora_rank=16" in told


def gpu_lines(*settings: str, room: Room | None) -> list[str]:
    return describe_estimate(load(None, [*SMALL_RUN, "run.device=cuda", *settings]), room)


def test_the_dry_run_has_a_table_for_a_gpu(small: str) -> None:
    lines = gpu_lines(small, "model.precision=bf16", room=Room("H200", 150 * GIGA, 149 * GIGA))
    text = "\n".join(lines)
    for words in ("weights, fp32", "their gradients", "AdamW's state", "cache of responses", "activations of a part"):
        assert words in text
    assert "while sampling" in text
    assert lines[-1] == "  H200 has 149.0 GB free: it fits"
    assert "reference" not in text  # there is none


def test_a_gpu_that_is_too_small_is_found_before_the_run(small: str) -> None:
    last = gpu_lines(small, "rollout.max_new_tokens=1004", room=Room("a small GPU", GIGA, GIGA // 4))[-1]
    assert last.startswith("  a small GPU has 0.2 GB free: it does not fit, ")
    assert "in an update: lower update.token_budget (now 16384), set model.gradient_checkpointing=true" in last


def test_without_a_gpu_nothing_is_said_about_fitting(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    lines = gpu_lines(small, room=None)
    assert lines[-1] == "  no GPU is visible here to say whether that fits"
    assert "30% of the device (rollout.kv_cache_memory)" in lines[-2]
    assert "40% of the device for vLLM" in gpu_lines(small, "rollout.engine=vllm", room=None)[-2]


def test_on_a_cpu_one_line_will_do(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = load(None, [*SMALL_RUN, small])
    assert len(describe_estimate(config)) == 2
    monkeypatch.setattr("trimtab.memory.estimate_text._main_memory", lambda: 1000)
    assert "this machine has 1e-06 GB free: it does not fit" in describe_estimate(config)[1]


def test_the_forecast_is_a_comment_of_the_dry_run(small: str) -> None:
    text = describe_dry_run(load(None, [*SMALL_RUN, small, "run.device=cpu"]))
    assert "#   foretold: " in text.split("# Memory")[1]


@pytest.mark.parametrize("value", ["0", "1", "-0.1", "2.0", "'much'"])
def test_a_share_of_memory_is_between_nothing_and_all(value: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.kv_cache_memory"):
        load(None, [f"rollout.kv_cache_memory={value}"])
