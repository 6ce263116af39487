"""From a step of the trainer to its record: what the updates saw, decided and did, as the recorder's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.config import Config
from trimtab.objectives import Objective, Plan, TokenBatch, segment_ids, token_bytes
from trimtab.policy import Policy, UpdateResult
from trimtab.record import FOLDER, Manifest, Recorder, Settings, StepData, StepInfo, UpdateInfo, Vocabulary, rewind
from trimtab.tasks import derive_seed
from trimtab.train.experience import Experience, GradedResponse
from trimtab.train.run_folder import RunFolder

BATCH_COLUMNS = (
    "token", "old_logp", "sampler_logp", "current_logp", "ref_logp", "proxy_logp", "entropy", "sum_p2", "sum_p2_logp",
    "advantage", "segment",
)  # fmt: skip
PLAN_COLUMNS = ("weight", "scale", "clip_low", "clip_high", "penalty", "reason")

Columns = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """One update as it happened: its number, its first answer, its mini-batch, plan and result."""

    update: int
    first: int
    batch: TokenBatch
    plan: Plan
    result: UpdateResult


@dataclass(frozen=True)
class Held:
    """What is kept of an update until it is written: columns in the main memory, which nothing changes any more."""

    info: UpdateInfo
    first: int
    columns: dict[str, Tensor]


@dataclass(frozen=True)
class Recording:
    """The recorder of a run, and what turns steps into records."""

    recorder: Recorder
    vocabulary: Vocabulary
    device: str
    config: Config

    def step(self, number: int, experience: Experience, traces: Sequence[Trace], objective: Objective) -> None:
        """Record a step, unless nothing was planned in it."""
        if not traces or not self.recorder.wants(number):
            return
        answers = experience.answers
        held = [hold(trace, list(trace.result.parts)) for trace in traces]
        facts: dict[str, Any] = {
            "observed_entropy": observed_entropy(experience.batch),
            "controllers": objective.state_dict(),
            "device": self.device,
            "threads": torch.get_num_threads(),
        }

        def build() -> StepData:
            data = step_data(number, answers, held, choose(answers, self.config.record.group_share), self.vocabulary)
            return replace(data, info=replace(data.info, **facts))

        self.recorder.write(number, build)

    def keep(self, steps: Iterable[int]) -> None:
        """Steps whose records are worth more than others'."""
        self.recorder.keep(steps)

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        self.recorder.flush()

    def close(self) -> None:
        """Write what is waiting, and end."""
        self.recorder.close()


def start_recording(
    config: Config,
    folder: RunFolder,
    policy: Policy,
    objective: Objective,
    step: int,
    versions: Mapping[str, str],
    warn: Callable[[str], None],
    kept: Iterable[int] = (),
) -> Recording | None:
    """The recorder of a run that goes on after `step`; None where the recipe wants none."""
    where = folder.path / FOLDER
    if not config.record.enabled:
        try:
            rewind(where, step)
        except OSError as error:
            warn(f"warning: records after step {step} are not of this run any more, and cannot be removed: {error}")
        return None
    manifest = Manifest(
        objective=objective_options(config),
        advantage=objective.advantage,
        settings=Settings(config.record.every, config.record.group_share, config.record.max_megabytes),
        versions=dict(versions),
    )
    recorder, words = Recorder(where, manifest, warn), vocabulary(policy)
    recorder.keep(kept)
    recorder.start(words, step)
    return Recording(recorder, words, policy.device.type, config)


def objective_options(config: Config) -> dict[str, Any]:
    """The table that builds the run's objective again."""
    current = {"token_stats": "current"} if config.update.token_stats == "current" else {}
    return {**current, **config.objective}


def vocabulary(policy: Policy) -> Vocabulary:
    """The text of every token that the model can sample; special ones by their name."""
    return vocabulary_of(policy.tokenizer, int(policy.head.weight.shape[0]))  # type: ignore[index]


def vocabulary_of(tokenizer: Any, size: int) -> Vocabulary:
    """The text of the first `size` token ids."""
    try:
        spelling = token_bytes(range(size), tokenizer)
    except ValueError:  # a tokenizer without bytes: text will do
        special = set(tokenizer.all_special_ids)
        known = [n for n in range(min(size, len(tokenizer))) if n not in special]
        spelling = {n: tokenizer.decode([n]).encode("utf-8", "replace") for n in known}
    names = dict(enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))))
    text = [spelling[n] if n in spelling else (names.get(n) or f"<{n}>").encode() for n in range(size)]
    return Vocabulary(text, [n not in spelling for n in range(size)])


def observed_entropy(batch: TokenBatch) -> float | None:
    """What `Objective.observe` hands to controllers."""
    if batch.entropy is None or not batch.tokens:
        return None
    return float(batch.entropy.sum(dtype=torch.float64)) / batch.tokens


def choose(answers: Sequence[GradedResponse], share: float) -> list[bool]:
    """Which answers are recorded: whole groups, by their numbers alone, at least one of them."""
    if share >= 1:
        return [True] * len(answers)
    lot = {group: derive_seed("record", group) / 2**63 for group in {answer.group for answer in answers}}
    limit = max(share, min(lot.values(), default=0.0))
    return [lot[answer.group] <= limit for answer in answers]


def hold(trace: Trace, parts: list[int]) -> Held:
    """The columns of an update: what came, what was planned, what the forward pass gave."""
    batch, result = trace.batch, trace.result
    given: dict[str, Tensor | None] = {name: getattr(batch, name) for name in BATCH_COLUMNS}
    given |= plan_columns(trace.plan, parts)
    given |= {"new_logp": result.new_logp, "clipped": result.clipped, "sequence": batch.sequence}
    columns = on_host({name: value for name, value in given.items() if value is not None})
    if torch.equal(columns["advantage"], columns["planned_advantage"]):
        del columns["planned_advantage"]
    return Held(UpdateInfo(trace.update, batch.responses, batch.tokens, result.taken, parts), trace.first, columns)


def on_host(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns in the main memory: all copies are asked for, then a GPU is waited for once."""
    copies = {name: value.to("cpu", non_blocking=value.is_cuda) for name, value in columns.items()}
    for device in {value.device for value in columns.values() if value.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def plan_columns(plan: Plan, parts: Sequence[int]) -> dict[str, Tensor | None]:
    """What a plan decided, token by token; with `scope = "micro"`, what its parts did."""
    pieces = plan.split(parts) if plan.replan else [plan]

    def joined(name: str) -> Tensor | None:
        values = [getattr(piece, name) for piece in pieces]
        return values[0] if len(values) == 1 or values[0] is None else torch.cat(values)

    return {name: joined(name) for name in PLAN_COLUMNS} | {"planned_advantage": joined("advantage")}


def step_data(
    step: int, answers: Sequence[GradedResponse], held: Sequence[Held], chosen: Sequence[bool], words: Vocabulary
) -> StepData:
    """The record of a step: of its answers those that are chosen and were planned over."""
    tables, updates, kept = [], [], []
    for update in held:
        mine = range(update.first, update.first + update.info.responses)
        rows = [n for n in mine if chosen[n]]
        table = update_table(update, [chosen[n] for n in mine], words)
        tables.append(table)
        updates.append(replace(update.info, responses=len(rows), tokens=len(table["old_logp"])))
        kept += [(update.info.update, n) for n in rows]
    # A column that one update lacks is one that the step lacks.
    names = [name for name in tables[0] if all(name in table for table in tables)]
    tokens = {name: np.concatenate([table[name] for table in tables]) for name in names}
    lengths = [len(answers[n].response.tokens) for _, n in kept]
    tokens["response"] = np.repeat(np.arange(len(kept), dtype=np.int32), lengths)
    info = StepInfo(step, len(kept), sum(lengths), len(answers), updates)
    return StepData(info, tokens, response_table(step, answers, kept, lengths, words))


def update_table(update: Held, chosen: Sequence[bool], words: Vocabulary) -> Columns:
    """The tokens of an update's chosen responses; subsentences are always found, for a replay may want them."""
    columns = dict(update.columns)
    sequence = columns.pop("sequence")
    if "segment" not in columns:
        columns["segment"] = segment_ids(columns["token"], words.spelling, sequence=sequence)
    narrow = {"token": torch.int32, "segment": torch.int32}
    table = {name: value.to(narrow.get(name, value.dtype)).numpy() for name, value in columns.items()}
    if all(chosen):
        return table
    wanted = torch.tensor(chosen)[sequence].numpy()
    return {name: values[wanted] for name, values in table.items()}


def response_table(
    step: int,
    answers: Sequence[GradedResponse],
    kept: Sequence[tuple[int, int]],
    lengths: Sequence[int],
    words: Vocabulary,
) -> Columns:
    """The table of responses; a prompt's text is made once for its group."""
    mine = [answers[n] for _, n in kept]
    prompts = {a.group: words.decode(a.prompt) for a in _first(mine)}
    return {
        "step": [step] * len(kept),
        "response": list(range(len(kept))),
        "update": [update for update, _ in kept],
        "tokens": list(lengths),
        "group": [a.group for a in mine],
        "sample": [a.response.sample for a in mine],
        "reward": [a.reward for a in mine],
        "verdict": [a.verdict.kind for a in mine],
        "extracted": _texts(a.verdict.extracted or "" for a in mine),
        "finished": [a.response.finished for a in mine],
        "prompt": _texts(prompts[a.group] for a in mine),
        "answer": _texts(a.problem.answer for a in mine),
        "source": _texts(a.problem.source for a in mine),
    }


def _first(answers: Sequence[GradedResponse]) -> list[GradedResponse]:
    """One answer of each group."""
    return list({answer.group: answer for answer in answers}.values())


def _texts(texts: Iterable[str]) -> list[str]:
    """Texts that can be written: a lone half of a surrogate pair cannot."""
    held = list(texts)
    clean = {text: text.encode("utf-8", "replace").decode() for text in set(held)}
    return [clean[text] for text in held]
