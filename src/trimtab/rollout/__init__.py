"""Samplers: from prompts to responses, with the log-probabilities they were sampled with."""

from trimtab.rollout.native import NativeSampler
from trimtab.rollout.own_sampler import OwnSampler, build_own_sampler, check_own_sampler
from trimtab.rollout.paged import PagedSampler
from trimtab.rollout.rng import rng_keys, uniform
from trimtab.rollout.sampling import sample_tokens
from trimtab.rollout.types import PromptTokens, Reply, Response, Sampler, SamplingOptions, Turns
from trimtab.rollout.vllm import VllmSampler, VllmSettings, check_vllm_options, require_vllm

__all__ = [
    "NativeSampler", "OwnSampler", "PagedSampler", "PromptTokens", "Reply", "Response", "Sampler", "SamplingOptions",
    "Turns", "VllmSampler", "VllmSettings", "build_own_sampler", "check_own_sampler", "check_vllm_options",
    "require_vllm", "rng_keys", "sample_tokens", "uniform",
]  # fmt: skip
