"""The parts of a decoding step as Triton kernels; `plain` says in torch what each one does."""

from trimtab.rollout.paged.kernels.drawing import draw
from trimtab.rollout.paged.kernels.layers import add_norm, attend, gated

__all__ = ["add_norm", "attend", "draw", "gated"]
