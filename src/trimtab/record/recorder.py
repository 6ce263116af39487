"""The recorder of a run: our trainer, TRL and verl hand their steps to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimtab.record.inputs import RecordedResponse, UpdateRecord
from trimtab.record.step_tables import SegmentFinder, select_groups, step_data
from trimtab.record.vocabulary import Vocabulary
from trimtab.record.writer import RecordWriter, StepData


@dataclass(frozen=True)
class Recorder:
    """Record the steps of one run.

    `find_segments` finds the subsentences of responses; `device` is where plans are made.
    """

    writer: RecordWriter
    vocabulary: Vocabulary
    find_segments: SegmentFinder
    device: str = "cpu"

    def wants(self, step: int) -> bool:
        """Return whether a step is to be recorded: ask before copying its columns from a GPU."""
        return self.writer.wants(step)

    def record_step(
        self,
        step: int,
        responses: Sequence[RecordedResponse],
        updates: Sequence[UpdateRecord],
        *,
        observed_entropy: float | None,
        controllers: Mapping[str, dict[str, float]],
    ) -> None:
        """Record a step. Tables are built and written in the writer's thread; nothing happens for an unwanted step."""
        import torch

        # Read now: the tables are built later, in another thread, when the next step has begun.
        facts: dict[str, Any] = {
            "observed_entropy": observed_entropy,
            "controllers": controllers,
            "device": self.device,
            "threads": torch.get_num_threads(),
        }

        def build() -> StepData:
            selected = select_groups(responses, self.writer.manifest.settings.group_share)
            data = step_data(step, responses, updates, selected, self.vocabulary, self.find_segments)
            return replace(data, info=replace(data.info, **facts))

        self.writer.write(step, build)

    def keep(self, steps: Iterable[int]) -> None:
        """Record these steps whatever the stride; the size budget drops all others first."""
        self.writer.keep(steps)

    def flush(self) -> None:
        """Wait until everything is on disk."""
        self.writer.flush()

    def close(self) -> None:
        """Write what is queued and end the writer's thread."""
        self.writer.close()
