"""Spans of consecutive tokens: sums and means over a segment or a response, spread back over its tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trimtab.objectives.lazy_torch import Tensor, torch


@dataclass(frozen=True, eq=False)
class Spans:
    """The span of each token (`index`), the `size` of each span, and the first span of each response (`offsets`)."""

    index: Tensor
    size: Tensor
    offsets: Sequence[int]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over each span."""
        if values.is_cpu and len(values) and torch.backends.mkl.is_available():
            return torch.mv(self._membership.to(values.dtype), values)
        # unsafe skips a check of the lengths that would make the host wait for a GPU.
        return torch.segment_reduce(values, "sum", lengths=self.size, unsafe=True)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` over each span (NaN for an empty one)."""
        return self.sum(values) / self.size

    def spread(self, per_span: Tensor) -> Tensor:
        """Return, for every token, the value of its span."""
        return per_span.index_select(0, self.index)

    def select(self, tokens: slice, first: int, last: int) -> Spans:
        """Return the spans of the responses `first` up to `last`, whose tokens are `tokens`."""
        low, high = self.offsets[first], self.offsets[last]
        return Spans(self.index[tokens] - low, self.size[low:high], [o - low for o in self.offsets[first : last + 1]])

    @cached_property
    def _membership(self) -> Tensor:
        """The sparse (spans, tokens) matrix of ones: a product with it sums over spans."""
        # On a CPU four times as fast as segment_reduce.
        tokens = len(self.index)
        ends = self.size.cumsum(0)
        rows = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        # torch warns that sparse CSR is in beta.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse (CSR tensor support is in beta|invariant checks)")
            columns, ones = torch.arange(tokens, dtype=torch.int32), torch.ones(tokens)
            shape = (len(self.size), tokens)
            return torch.sparse_csr_tensor(rows, columns, ones, size=shape, check_invariants=False)
