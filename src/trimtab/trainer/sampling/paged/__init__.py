"""The paged sampler: Llama, Qwen2 and Qwen3 with continuous batching, a paged KV cache and CUDA graphs."""

from trimtab.trainer.sampling.paged.buffers import PAGE_SIZE, num_cache_pages, pages_per_sequence
from trimtab.trainer.sampling.paged.decoder import get_head_dim, graph_size, unsupported_reason
from trimtab.trainer.sampling.paged.sampler import MAX_PREFILL_TOKENS, PagedSampler

__all__ = [
    "MAX_PREFILL_TOKENS", "PAGE_SIZE", "PagedSampler", "get_head_dim", "graph_size", "num_cache_pages",
    "pages_per_sequence", "unsupported_reason",
]  # fmt: skip
