"""The vLLM engine: start-up errors name the key to change, it sleeps between rollouts, and a process has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.vllm import vllm_models as small
from trimtab.data import PromptTokens, SamplingOptions
from trimtab.trainer.model import Policy
from trimtab.trainer.sampling import vllm as module
from trimtab.trainer.sampling.sequence import new_sequences
from trimtab.trainer.sampling.vllm import VllmSampler
from trimtab.trainer.sampling.vllm_requests import append_output
from trimtab.trainer.train.build import build_sampler

pytest.importorskip("vllm", reason="make test-vllm has an environment with it", exc_type=ImportError)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return small.load(small.save_model(tmp_path_factory.mktemp("life")))


def test_more_memory_than_there_is_names_the_key_to_lower(policy: Policy) -> None:
    with pytest.raises(
        ValueError, match=r"could not start: .*rollout\.vllm_gpu_memory_utilization=0\.999 .*Tested with vllm 0\.32"
    ):
        build_sampler(policy, small.rollout(vllm_gpu_memory_utilization=0.999, vllm_options={}))


def test_a_kv_cache_too_small_for_a_response_names_the_length(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"could not start: .*a prompt and response of 216 tokens"):
        build_sampler(policy, small.rollout(vllm_options={"kv_cache_memory_bytes": 4096}))


def test_an_option_that_vllm_does_not_know_is_named(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"could not start: .*'nonsense'"):
        build_sampler(policy, small.rollout(vllm_options={"nonsense": 1}))


def test_a_version_that_cannot_load_weights_from_memory_is_refused(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    def older(self: Any, weights_path: str) -> None: ...

    monkeypatch.setattr(Worker, "reload_weights", older)
    with pytest.raises(ValueError, match=r"could not load new weights: .*weights_iterator.*Tested with vllm 0\.32"):
        build_sampler(policy, small.rollout())


def test_weights_that_were_not_loaded_are_noticed_at_the_start(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "checkpoint_weights", lambda model: iter(()))
    with pytest.raises(ValueError, match=r"differ by .* nats per token on Qwen3ForCausalLM .* set rollout\.engine"):
        build_sampler(policy, small.rollout())


def test_a_process_has_one_engine_and_an_older_sampler_raises(policy: Policy) -> None:
    older = build_sampler(policy, small.rollout())
    newer = build_sampler(policy, small.rollout())
    with pytest.raises(RuntimeError, match="shut down when another was started"):
        older.sample(small.prompts(policy), 0, small.OPTIONS)
    assert len(newer.sample(small.prompts(policy), 0, small.OPTIONS)) == 5


def test_prompts_and_responses_may_have_one_token(policy: Policy) -> None:
    sampler = build_sampler(policy, small.rollout(max_prompt_tokens=1, max_new_tokens=1))
    ((one,),) = sampler.sample([PromptTokens([2], 0)], 0, SamplingOptions(samples=1, max_new_tokens=1))
    assert len(one.tokens) == 1


def test_a_bf16_policy_is_sampled_in_bf16(policy: Policy) -> None:
    rough = small.load(policy.model.config._name_or_path, precision="bf16")
    sampler = build_sampler(rough, small.rollout())
    prompts = small.prompts(rough)
    groups = sampler.sample(prompts, 0, small.OPTIONS)
    assert 1e-5 < small.mismatch(rough, prompts, groups) < 0.2
    assert {weight.dtype for weight in rough.model.parameters()} == {module.torch.float32}


def test_the_engine_sleeps_between_rollouts_and_wakes_with_the_policys_weights(policy: Policy) -> None:
    with sleeping(policy) as (sampler, engine):
        for step in range(2):
            sampler.sample(small.prompts(policy), step, small.OPTIONS)
    rollout = ["wake weights", "reload_weights", "reset_prefix_cache", "wake kv_cache", "generate", "sleep 2"]
    assert engine.calls == ["sleep 2", *rollout, *rollout]


def test_the_engine_sleeps_after_a_failed_rollout_too(policy: Policy) -> None:
    with sleeping(policy) as (sampler, engine):
        engine.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            sampler.sample(small.prompts(policy), 0, small.OPTIONS)
    assert engine.calls[-2:] == ["generate", "sleep 2"]


@contextmanager
def sleeping(policy: Policy) -> Iterator[tuple[VllmSampler, RecordingEngine]]:
    """A sampler with sleep mode on. There is none on a CPU, so its engine is wrapped in one that records the calls."""
    sampler = build_sampler(policy, small.rollout())
    assert isinstance(sampler, VllmSampler) and not sampler._sleeps
    engine = RecordingEngine(sampler._engine)
    sampler._engine, sampler._sleeps = engine, True
    module._running.append(engine)
    sampler._sleep()
    yield sampler, engine
    module._running.remove(engine)


@dataclass(eq=False)
class RecordingEngine:
    """Records calls, and forwards those that work on a CPU."""

    engine: Any
    fails: bool = False
    calls: list[str] = field(default_factory=list)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def collective_rpc(self, method: str, **options: Any) -> Any:
        self.calls.append(method)
        return self.engine.collective_rpc(method, **options)

    def reset_prefix_cache(self) -> Any:
        self.calls.append("reset_prefix_cache")
        return self.engine.reset_prefix_cache()

    def generate(self, *args: Any, **options: Any) -> Any:
        self.calls.append("generate")
        if self.fails:
            raise RuntimeError("out of memory")
        return self.engine.generate(*args, **options)


def test_a_response_that_vllm_aborted_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="aborted a response: finish_reason='abort'"):
        append_output(sequence(), SimpleNamespace(finish_reason="abort", token_ids=[1], logprobs=[{}]))


def test_log_probabilities_of_other_tokens_are_an_error() -> None:
    logprobs = SimpleNamespace(token_ids=[1, 3], logprobs=[-0.1, -0.2])
    with pytest.raises(RuntimeError, match="of other tokens than it sampled"):
        append_output(sequence(), SimpleNamespace(finish_reason="stop", token_ids=[1, 2], logprobs=logprobs))


def sequence() -> Any:
    """Return a sequence that nothing was sampled for."""
    return new_sequences([PromptTokens([2], 0)], 0, small.OPTIONS)[0][0]
