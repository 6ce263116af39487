"""The flight recorder in a verl run: `+trimtab.record=FOLDER`, read by `trimtab replay` and `trimtab report`.

The driver has what came and what was planned. The updates' own forward passes stay on the workers, so the columns
`new_logp` and `clipped` are not there. verl does the grading: a verdict is read off the sign of the reward.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trimtab import __version__
from trimtab.engines.verl.options import Options
from trimtab.engines.verl.planning import PlannedStep
from trimtab.objectives import Objective
from trimtab.policy import UpdateResult
from trimtab.record import FOLDER, Manifest, Recorder, Settings, StepData, Vocabulary
from trimtab.rewards import Verdict
from trimtab.rollout import Response
from trimtab.tasks import Problem
from trimtab.train import GradedResponse, Trace, choose, hold, observed_entropy, step_data, vocabulary_of

FIELDS = ("uid", "prompts", "rm_scores", "reward_model", "data_source")  # of verl's data, per response


@dataclass(frozen=True)
class Recording:
    """The recorder of a run, and the text of its tokens."""

    recorder: Recorder
    words: Vocabulary
    end_token: int
    share: float

    def step(self, number: int, planned: PlannedStep, data: Any, objective: Objective) -> None:
        """Record a step, if it is one to be recorded."""
        if not self.recorder.wants(number):
            return
        answers = answers_of(planned, data, self.end_token)
        size, held = len(planned.rows[0]), []
        for update, plan in enumerate(planned.plans):
            batch = planned.tokens.select(update * size, (update + 1) * size)
            held.append(hold(Trace(update, update * size, batch, plan, UpdateResult({})), []))
        facts: dict[str, Any] = {
            "observed_entropy": observed_entropy(planned.tokens),
            "controllers": objective.state_dict(),
            "threads": torch.get_num_threads(),
        }

        def build() -> StepData:
            built = step_data(number, answers, held, choose(answers, self.share), self.words)
            return replace(built, info=replace(built.info, **facts))

        self.recorder.write(number, build)

    def close(self) -> None:
        """Write what is waiting, and end."""
        self.recorder.close()


def start_recording(options: Options, objective: Objective, tokenizer: Any, step: int) -> Recording | None:
    """The recorder of a run that goes on after `step`; None where none is wanted."""
    if not options.record:
        return None
    manifest = Manifest(
        objective=dict(options.objective),
        advantage=objective.advantage,
        settings=Settings(options.record_every, options.record_share, options.record_max_megabytes),
        versions={"trimtab": __version__, "verl": importlib.metadata.version("verl"), "torch": torch.__version__},
    )
    words = vocabulary_of(tokenizer, len(tokenizer))
    recorder = Recorder(Path(options.record) / FOLDER, manifest, lambda text: warnings.warn(text, stacklevel=2))
    recorder.start(words, step)
    return Recording(recorder, words, int(tokenizer.eos_token_id), options.record_share)


def answers_of(planned: PlannedStep, data: Mapping[str, Any], end_token: int) -> list[GradedResponse]:
    """The responses in the order of the plans, each with what verl knows of it."""
    assert planned.tokens.token is not None
    ids = planned.tokens.token.tolist()
    starts = planned.tokens.offsets
    prompts, scores = data["prompts"].unbind(), data["rm_scores"].unbind()
    uids, truths, sources = (_listed(data, name) for name in ("uid", "reward_model", "data_source"))
    groups: dict[str, int] = {}
    seen: dict[int, int] = {}
    answers = []
    for place, row in enumerate(row for update in planned.rows for row in update):
        tokens = ids[starts[place] : starts[place + 1]]
        group = groups.setdefault(str(uids[row]), len(groups))
        sample = seen[group] = seen.get(group, -1) + 1
        reward = float(scores[row].sum())
        truth = truths[row].get("ground_truth") if isinstance(truths[row], Mapping) else None
        answers.append(
            GradedResponse(
                problem=Problem((), "" if truth is None else str(truth), "verl", str(sources[row])),
                prompt=prompts[row].tolist(),
                response=Response(tokens, [], tokens[-1:] == [end_token], sample=sample),
                text="",
                verdict=Verdict("correct" if reward > 0 else "wrong"),
                reward=reward,
                group=group,
            )
        )
    return answers


def _listed(data: Mapping[str, Any], name: str) -> Sequence[Any]:
    """A field that is no tensor, one value per response; blanks where verl has none."""
    if name not in data.keys():  # noqa: SIM118  (a TensorDict)
        return [""] * len(data["prompts"].unbind())
    values = data[name]
    found: Iterable[Any] = values.tolist() if hasattr(values, "tolist") else values
    return list(found)
