"""The kernels of the paged sampler equal their references in torch, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.sampling import paged_kernel_cases
from helpers.sampling.paged_kernel_cases import GPU_SHAPES, cases
from helpers.triton_interpreter import case_errors

ON_GPU = cases(GPU_SHAPES, [40, 4096, 9000, 50_257], 256)


def test_interpreted_kernels_equal_their_references() -> None:
    assert not case_errors(Path(paged_kernel_cases.__file__))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ON_GPU)
def test_a_kernel_equals_its_reference(name: str, dtype: torch.dtype) -> None:
    ON_GPU[name](torch.device("cuda"), dtype)


def test_pages_are_split_only_where_rows_are_few() -> None:
    attention = pytest.importorskip("trimtab.trainer.sampling.paged.kernels.attention")
    for programs in (1, 7, 100, 511, 512, 100_000):
        for pages in (1, 2, 3, 31, 32, 500):
            splits = attention.num_splits(programs, pages)
            assert splits & (splits - 1) == 0, "a power of two"
            assert splits <= min(pages, 32)
            assert splits == 1 or programs * splits < 2 * attention.TARGET_PROGRAMS
    assert attention.num_splits(1, 500) == 32
    assert attention.num_splits(attention.TARGET_PROGRAMS, 500) == 1
