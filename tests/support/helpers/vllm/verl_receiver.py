"""What verl needs to send weights to vLLM's CPU build; verl loads this module by itself in every process of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

RECEIVER = "verl.workers.rollout.vllm_rollout.utils"


class _AfterReceiver:
    """A finder that changes the receiver of weights when it has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == RECEIVER else None
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                module.vLLMColocateWorkerExtension._update_weights = _reload_weights

            loader.exec_module = exec_module
        return spec


def _reload_weights(worker: Any, weights: list[tuple[str, Any]], *_: Any, **__: Any) -> None:
    """Load weights as `reload_weights` does: on a CPU vLLM repacks them, after which `load_weights` fails."""
    worker.reload_weights(weights_iterator=iter([(name, tensor.clone()) for name, tensor in weights]))


sys.meta_path.insert(0, _AfterReceiver())
