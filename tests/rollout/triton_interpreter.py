"""Triton's interpreter in a process of its own: it has to be chosen before Triton is imported.

    python triton_interpreter.py SCRIPT

runs a script in which kernels are interpreted; `interpret` does so from a test.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any


def interpret(script: Path) -> str:
    """What a script prints when its kernels are interpreted."""
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, __file__, script]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-4000:]
    return out.stdout.strip()


def mend() -> None:
    """Triton 3.6 makes an int of an array of one number, which numpy 2.4 refuses unless the array has no dimension."""
    from triton.runtime import interpreter

    theirs = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        theirs(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    mend()
    runpy.run_path(sys.argv[1], run_name="__main__")
