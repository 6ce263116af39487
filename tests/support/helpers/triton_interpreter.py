"""Run kernels in Triton's interpreter, in a separate process: it must be chosen before Triton is imported.

    python triton_interpreter.py SCRIPT

runs a script whose kernels are interpreted; `interpret` does so from a test.
"""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from helpers.thorough import THOROUGH


def interpret(script: Path) -> str:
    """Return what a script prints when its kernels are interpreted."""
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    environment |= {"TRIMTAB_THOROUGH": "1"} if THOROUGH else {}
    command = [sys.executable, __file__, script]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-4000:]
    return out.stdout.strip()


def case_errors(script: Path) -> str:
    """Return the errors, by case, of a script that ends with `run_cases`: one process, since it starts slowly."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return interpret(script)


def run_cases(cases: Mapping[str, Callable[[torch.device, torch.dtype], None]], slow: Collection[str]) -> None:
    """Run cases on the CPU in fp32 and print the traceback of each that fails; the slow ones in `make thorough`."""
    assert cases and not {*slow} - {*cases}
    for name, case in cases.items():
        if name in slow and not THOROUGH:
            continue
        try:
            case(torch.device("cpu"), torch.float32)
        except Exception:
            print(f"{name}: {traceback.format_exc()[-3000:]}")  # noqa: T201


def patch_interpreter() -> None:
    """Patch two faults of Triton 3.6's interpreter.

    It converts an array of one element to int, which numpy 2.4 refuses unless the array has no dimension; and it
    truncates fp32 to bf16, where a GPU rounds.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def rounded(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source, target) != (tl.float32, tl.bfloat16):
            return cast(np.ndarray, convert(data, source, target, mode))
        exact = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return exact.to(torch.bfloat16).view(torch.uint16).numpy().reshape(data.shape)

    interpreter._patch_lang_tensor, interpreter._convert_float = patched, rounded


if __name__ == "__main__":
    patch_interpreter()
    runpy.run_path(sys.argv[1], run_name="__main__")
