"""The parts of a decoding step as Triton kernels; `plain` says in torch what each one does."""

from trimtab.rollout.paged.kernels.drawing import draw
from trimtab.rollout.paged.kernels.layers import add_norm, attend, copy_pages, gated, place

__all__ = ["add_norm", "attend", "copy_pages", "draw", "gated", "place"]
