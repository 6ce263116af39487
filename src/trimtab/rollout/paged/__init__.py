"""The fast sampler: decoder models of known families over a paged KV cache, each decoding step one CUDA graph."""

from trimtab.rollout.paged.decode_state import PAGE
from trimtab.rollout.paged.decoder import head_size, unsupported_reason
from trimtab.rollout.paged.graphs import bucket
from trimtab.rollout.paged.sampler import GRAIN, PREFILL, PagedSampler

__all__ = ["GRAIN", "PAGE", "PREFILL", "PagedSampler", "bucket", "head_size", "unsupported_reason"]
