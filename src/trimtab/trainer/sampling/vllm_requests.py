"""Answer requests with a vLLM engine: they are added between its steps, and its prefix cache has what they follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trimtab.trainer.sampling.request_queue import RequestQueue, ServedSequence
from trimtab.trainer.sampling.sequence import SampledSequence


@dataclass
class VllmRequests:
    """Passes requests to an engine and its outputs back; `params_of` gives a request's sampling parameters."""

    engine: Any
    queue: RequestQueue
    batch_size: int
    params_of: Callable[[ServedSequence], Any]
    _running: dict[str, ServedSequence] = field(default_factory=dict)
    _waiting: deque[ServedSequence] = field(default_factory=deque)

    def run(self) -> None:
        """Answer requests until there are no more."""
        try:
            while self._take():
                self._step()
        finally:
            # Otherwise the engine would go on with them in the next call.
            self.engine.abort_request(list(self._running))

    def _take(self) -> bool:
        """Add the requests that have come, abort those that were cancelled; return whether there may be more."""
        self._waiting += self.queue.take(block=not (self._waiting or self._running))
        self._waiting = deque(sequence for sequence in self._waiting if not sequence.request.cancelled)
        for name in [name for name, sequence in self._running.items() if sequence.request.cancelled]:
            self._abort(name)
        while self._waiting and len(self._running) < self.batch_size:
            sequence = self._waiting.popleft()
            name = f"request-{sequence.prompt_index}"
            self.engine.add_request(name, {"prompt_token_ids": list(sequence.prompt)}, self.params_of(sequence))
            self._running[name] = sequence
        return bool(self._running) or not self.queue.closed

    def _step(self) -> None:
        """Run a step of the engine, and answer the requests that are over then."""
        for output in self.engine.step() if self._running else ():
            sequence = self._running.get(output.request_id)
            if sequence is None:  # aborted while a step was under way
                continue
            append_output(sequence, output.outputs[0])
            if output.finished:
                del self._running[output.request_id]
            if sequence.is_over(self.queue.eos_token_ids):
                if not output.finished:
                    self._abort(output.request_id)
                self.queue.answer(sequence)

    def _abort(self, name: str) -> None:
        del self._running[name]
        self.engine.abort_request([name])


def append_output(sequence: SampledSequence, output: Any) -> None:
    """Append an output of vLLM, or the new tokens of one that is not finished, to its sequence."""
    if output.finish_reason not in (None, "stop", "length"):
        raise RuntimeError(f"vLLM aborted a response: finish_reason={output.finish_reason!r}")
    tokens = list(output.token_ids)
    sequence.tokens += tokens
    if list(output.logprobs.token_ids) != tokens:
        raise RuntimeError("vLLM gave log-probabilities of other tokens than it sampled: set rollout.engine='native'")
    sequence.logp += output.logprobs.logprobs
