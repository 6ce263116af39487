"""The flight recorder in a verl run: `+trimtab.record=FOLDER`, read by `trimtab replay` and `trimtab report`.

The driver has the batch and the plans. The forward passes of the updates stay on the workers, so the columns `new_logp`
and `clipped` are missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.data import Problem, Response, Sample
from trimtab.engines.common import observed_spans, require_unused, start_recorder, tool_tokens, verdict_of_score
from trimtab.engines.options import EngineOptions
from trimtab.engines.verl.planning import PlannedStep
from trimtab.objectives import Objective
from trimtab.record import Manifest, Recorder, RecordSettings, update_record
from trimtab.trainer.train import observed_entropy, tokenizer_vocabulary

FIELDS = ("uid", "prompts", "rm_scores", "reward_model", "data_source")  # of verl's data, per response


def start_recording(options: EngineOptions, objective: Objective, tokenizer: Any, step: int) -> Recorder | None:
    """Open the recorder of a run that continues after `step`; None if `record` is not set."""
    if not options.record:
        return None
    require_unused(Path(options.record), step, "trimtab.record")
    settings = RecordSettings(options.record_every, options.record_group_share, options.record_max_megabytes)
    manifest = Manifest(options.objective, objective.advantage, settings)
    vocabulary = tokenizer_vocabulary(tokenizer, len(tokenizer))
    return start_recorder("verl", Path(options.record), step, manifest, vocabulary)


def record_step(
    recorder: Recorder, step: int, planned: PlannedStep, data: Any, objective: Objective, end_token: int
) -> None:
    """Record a step that the driver has planned."""
    if not recorder.wants(step):
        return
    size = len(planned.rows[0])
    batches = [planned.tokens.select(first, first + size) for first in range(0, len(planned.plans) * size, size)]
    pairs = zip(batches, planned.plans, strict=True)
    updates = [update_record(number, number * size, batch, plan) for number, (batch, plan) in enumerate(pairs)]
    tools = tool_tokens(planned.sampled.index, planned.sampled.sequence).cpu()
    if bool(tools.any()):
        for update, some in zip(updates, tools.split([batch.tokens for batch in batches]), strict=True):
            update.columns["tool_tokens"] = some
    recorder.record_step(
        step,
        samples(planned, data, end_token),
        updates,
        observed_entropy=observed_entropy(planned.tokens),
        controllers=objective.state_dict(),
    )


def samples(planned: PlannedStep, data: Mapping[str, Any], end_token: int) -> list[Sample]:
    """Return the responses in the order of the plans, with what verl has of each."""
    prompts, scores = data["prompts"].unbind(), data["rm_scores"].unbind()
    everything, masks = data["responses"].unbind(), data["response_mask"].unbind()
    uids, truths, sources = (_field(data, name) for name in ("uid", "reward_model", "data_source"))
    groups: dict[str, int] = {}
    counts: dict[int, int] = {}
    found = []
    for row in (row for update in planned.rows for row in update):
        # verl names groups by random strings; numbers are in the order of appearance.
        group = groups.setdefault(str(uids[row]), len(groups))
        counts[group] = counts.get(group, -1) + 1
        reward = float(scores[row].sum())
        truth = truths[row].get("ground_truth") if isinstance(truths[row], Mapping) else None
        tokens, sampled = everything[row].cpu().numpy(), masks[row].bool()
        # One that ends with the reply of a tool was cut there, though its last sampled token ended a turn.
        finished = bool(len(tokens) and sampled[-1] and tokens[-1] == end_token)
        found.append(
            Sample(
                Problem((), "" if truth is None else str(truth), "", str(sources[row])),
                prompt=prompts[row].tolist(),
                response=Response(tokens, (), finished, counts[group], observed_spans(sampled)),
                group=group,
                verdict=verdict_of_score(reward),  # verl grades, and passes on the score only
                reward=reward,
            )
        )
    return found


def _field(data: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return a field that is no tensor, one value per response; empty strings if verl does not have it."""
    if name not in data.keys():  # noqa: SIM118  (a TensorDict)
        return [""] * len(data["prompts"].unbind())
    values = data[name]
    return list(values.tolist() if hasattr(values, "tolist") else values)
