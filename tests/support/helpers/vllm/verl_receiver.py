"""What verl needs to send weights to vLLM's CPU build; verl loads this module by itself in every process of a run."""

from __future__ import annotations

from typing import Any

from trimtab.engines.verl.plugin import AFTER


def _reload_weights(worker: Any, weights: list[tuple[str, Any]], *_: Any, **__: Any) -> None:
    """Load weights as `reload_weights` does: on a CPU vLLM repacks them, after which `load_weights` fails."""
    worker.reload_weights(weights_iterator=iter([(name, tensor.clone()) for name, tensor in weights]))


def _mend(receiver: Any) -> None:
    receiver.vLLMColocateWorkerExtension._update_weights = _reload_weights


AFTER["verl.workers.rollout.vllm_rollout.utils"] = _mend
