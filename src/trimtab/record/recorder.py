"""The recorder of a run: our trainer, TRL and verl hand their steps to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimtab.record.inputs import RecordedResponse, UpdateRecord
from trimtab.record.step_tables import SegmentFinder, select_groups, step_data
from trimtab.record.writer import RecordWriter, StepData


@dataclass(kw_only=True)
class Recorder(RecordWriter):
    """Build and write the tables of a run's steps; `find_segments` finds subsentences, plans are made on `device`."""

    find_segments: SegmentFinder
    device: str = "cpu"

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
        facts: dict[str, Any] = {"observed_entropy": observed_entropy, "controllers": controllers}
        facts |= {"device": self.device, "threads": torch.get_num_threads()}

        def build() -> StepData:
            selected = select_groups(responses, self.manifest.settings.group_share)
            data = step_data(step, responses, updates, selected, self.vocabulary, self.find_segments)
            return replace(data, info=replace(data.info, **facts))

        self.write(step, build)
