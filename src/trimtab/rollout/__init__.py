"""Samplers: from prompts to responses, with the log-probabilities they were drawn with."""

from trimtab.rollout.native import NativeSampler
from trimtab.rollout.paged.sampler import PagedSampler
from trimtab.rollout.types import PromptTokens, Response, Sampler, SamplingOptions

__all__ = ["NativeSampler", "PagedSampler", "PromptTokens", "Response", "Sampler", "SamplingOptions"]
