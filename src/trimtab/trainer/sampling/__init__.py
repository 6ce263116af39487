"""Samplers: from prompts to responses, with the log-probabilities they were sampled with."""

from trimtab.trainer.sampling.native import NativeSampler
from trimtab.trainer.sampling.own_sampler import OwnSampler, build_own_sampler
from trimtab.trainer.sampling.paged import PagedSampler
from trimtab.trainer.sampling.sampling import rng_keys, sample_tokens, uniform
from trimtab.trainer.sampling.vllm import VllmSampler, VllmSettings, require_vllm

__all__ = [
    "NativeSampler", "OwnSampler", "PagedSampler",
    "VllmSampler", "VllmSettings", "build_own_sampler",
    "require_vllm", "rng_keys", "sample_tokens", "uniform",
]  # fmt: skip
