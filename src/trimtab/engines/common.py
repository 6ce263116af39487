"""What the adapters share: the user's objective, state in checkpoints, records, metrics of ranks."""

from __future__ import annotations

import importlib.metadata
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab import __version__
from trimtab.files import write_atomically
from trimtab.grading import CORRECT_SCORE, Verdict
from trimtab.objectives import Comm, Objective, gather_rows, merge_metrics, segment_ids
from trimtab.record import MANIFEST, RECORDS_FOLDER, Manifest, Recorder, Vocabulary
from trimtab.trainer.train import RunFolder, versions

STATE_FILE = "trimtab.json"  # beside the engine's own files in a checkpoint
STATE_FORMAT = 1

# The metrics of a micro-batch's loss. A rank whose micro-batches have no tokens has no minimum and no maximum.
LOSS_METRICS = ("update/ratio_mean", "update/approx_kl", "update/clip_share", "update/ratio_min", "update/ratio_max")


def start_recorder(
    engine: str, folder: Path, step: int, manifest: Manifest, vocabulary: Vocabulary, device: str = "cpu"
) -> Recorder:
    """Start the recorder of a run that continues after `step`; `device` is where plans are made."""
    manifest = replace(manifest, versions={**versions(), engine: importlib.metadata.version(engine)})

    def warn(text: str) -> None:
        warnings.warn(text, stacklevel=2)

    recorder = Recorder(folder / RECORDS_FOLDER, manifest, vocabulary, warn, device=device)
    recorder.start(step)
    return recorder


def require_unused(folder: Path, step: int, option: str) -> None:
    """Raise if a run would write over files in the folder of its records, and they are not its own."""
    # Starting anew deletes what is there, and a resumed run what is after its step.
    files = RunFolder(folder)
    used = [path for path in (folder / RECORDS_FOLDER, *files.json_lines) if path.exists()]
    resumed = step > 0 and (folder / RECORDS_FOLDER / MANIFEST).is_file()
    if used and not resumed:
        what = "the records" if used[0].name == RECORDS_FOLDER else used[0].name
        raise ValueError(f"{option}={str(folder)!r} holds {what} of another run: choose another folder, or remove it")


def startup_message(objective: Objective) -> str:
    """Return the line to print at the start: the version and the objective in use."""
    return f"trimtab {__version__}: {objective.explain().splitlines()[0]}"


def segments_by_turn(token: Tensor, position: Tensor, sequence: Tensor, tokenizer: Any) -> Tensor:
    """Return segment ids of sampled tokens, from 0 in every response; the output of a tool ends a segment too.

    `position` is where each token is in the batch, tool output included; `sequence` is its response.
    """
    # Sampled tokens that are not neighbours in the data have tool output between them.
    after_tool = torch.diff(position, prepend=position[:1] - 1) != 1
    return segment_ids(token, tokenizer, sequence=sequence, after_tool=after_tool)


def tool_tokens(position: Tensor, sequence: Tensor) -> Tensor:
    """Return how many tokens of a tool's output come right before each sampled token; they are not trained on."""
    between = torch.diff(position, prepend=position[:1] - 1) - 1
    starts_response = torch.diff(sequence, prepend=sequence[:1] - 1) != 0
    return between.masked_fill(starts_response, 0).to(torch.int32)


def observed_spans(sampled: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the [start, end) ranges of a response's tokens that were not sampled, from its mask (tokens,)."""
    outside = torch.nn.functional.pad(~sampled.cpu().bool(), (1, 1)).to(torch.int8)
    edges = outside.diff().nonzero().squeeze(1).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def verdict_of_score(score: float) -> Verdict:
    """Return the verdict that a reward stands for, as trimtab's own trainer judges rules that return numbers."""
    return Verdict("correct" if score >= CORRECT_SCORE else "wrong")


def save_state(folder: Path, objective: Objective, **numbers: int) -> None:
    """Save the state of the controllers, and counters of the adapter, in a checkpoint's folder."""
    state = {"format": STATE_FORMAT, "objective": objective.name, "numbers": numbers}
    state["controllers"] = objective.state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / STATE_FILE, json.dumps(state, sort_keys=True, allow_nan=False) + "\n")


def load_state(folder: Path, objective: Objective) -> dict[str, int]:
    """Restore the controllers from a checkpoint and return the saved counters.

    A checkpoint without our file (made by the engine alone) starts the controllers anew, with a warning.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        if objective.controllers:
            warnings.warn(f"{folder} has no {STATE_FILE}: the controllers of {objective.name} start anew", stacklevel=2)
        return {}
    try:
        state = json.loads(path.read_text())
        if state["format"] != STATE_FORMAT:
            raise ValueError(f"format {state['format']!r:.40}")
        objective.load_state_dict(state["controllers"])
        return {str(name): int(value) for name, value in state["numbers"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not fit {objective.name}: {error}. Resume with the objective that was saved, or remove the "
            "file to let the controllers start anew"
        ) from None


def reduce_metrics(
    micro_batches: Sequence[dict[str, Tensor]], names: Sequence[str], comm: Comm | None
) -> dict[str, float]:
    """Reduce the metrics of an update's micro-batches over all ranks: `_max` and `_min`, else sums."""
    merged = merge_metrics(micro_batches)
    like = next(iter(merged.values()))
    # Every rank sends the same names, so that the gathered rows line up; one without tokens sends what changes nothing.
    neutral = {"_max": -torch.inf, "_min": torch.inf}
    found = [merged[name] if name in merged else like.new_full((), neutral.get(name[-4:], 0.0)) for name in names]
    local = torch.stack([value.to(torch.float64) for value in found])
    if comm is not None:
        all_ranks = merge_metrics([dict(zip(names, row, strict=True)) for row in gather_rows(comm, local)])
        local = torch.stack([all_ranks[name] for name in names])
    values = dict(zip(names, local.tolist(), strict=True))
    # Still infinite: no rank had a token.
    return {name: value for name, value in values.items() if abs(value) != torch.inf}
