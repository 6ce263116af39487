"""Triton's interpreter in a process of its own: it has to be chosen before Triton is imported.

    python triton_interpreter.py SCRIPT

runs a script in which kernels are interpreted; `interpret` does so from a test.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch


def interpret(script: Path) -> str:
    """What a script prints when its kernels are interpreted."""
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, __file__, script]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-4000:]
    return out.stdout.strip()


def mend() -> None:
    """What Triton 3.6 gets wrong.

    It makes an int of an array of one number, which numpy 2.4 refuses unless the array has no dimension; and it cuts
    fp32 off to bf16, where a GPU rounds.
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
    mend()
    runpy.run_path(sys.argv[1], run_name="__main__")
