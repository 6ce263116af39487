"""torch, imported on first use: a recipe is checked and methods are described without it, and its import takes seconds.

Modules of objectives take `torch` and, for annotations only, `Tensor` from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _LazyTorch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch, Tensor = _LazyTorch(), Any

__all__ = ["Tensor", "torch"]
