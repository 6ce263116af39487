"""The operations of prefill and decoding as Triton kernels; `torch_ops` has the same functions in plain torch."""

from trimtab.trainer.sampling.paged.kernels.attention import (
    copy_pages,
    fused_add_rms_norm,
    paged_attention,
    rope_and_write_kv,
    swiglu,
)
from trimtab.trainer.sampling.paged.kernels.sampling import sample_tokens

__all__ = ["copy_pages", "fused_add_rms_norm", "paged_attention", "rope_and_write_kv", "sample_tokens", "swiglu"]
