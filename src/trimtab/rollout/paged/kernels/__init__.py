"""The parts of a decoding step as Triton kernels; `plain` says in torch what each one does."""

from trimtab.rollout.paged.kernels.layers import add_norm, attend, copy_pages, gated, place
from trimtab.rollout.paged.kernels.sampling import draw

__all__ = ["add_norm", "attend", "copy_pages", "draw", "gated", "place"]
