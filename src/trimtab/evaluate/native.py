"""Sampling with the native sampler, from a model in this process.

The batches of an evaluation are the same whatever is done already: rounding depends on what shares a batch, so a batch
is drawn whole or not at all, and a resumed evaluation gives the very texts of an unbroken one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.config import load
from trimtab.evaluate.folder import Generation, Key, prompt_hash
from trimtab.evaluate.jobs import Job
from trimtab.evaluate.settings import Settings, digest
from trimtab.policy import Policy, Transcript, load_policy, score
from trimtab.rollout import PromptTokens, Response, Sampler, SamplingOptions
from trimtab.tasks import derive_seed
from trimtab.train import build_policy, build_sampler, list_checkpoints, load_weights

SCORE_BUDGET, SCORE_CHUNK = 32_768, 4_096  # tokens in a forward pass; rows of logits at a time
ENDS = 1 << 16  # bytes at either end of a file that tell it from others


@dataclass
class NativeSource:
    """Draws from a policy. With `entropy` every response is scored once more, by a pass over the whole of it."""

    policy: Policy
    settings: Settings
    entropy: bool = True
    sampler: Sampler = field(init=False)
    _encoded: dict[Key, list[int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.sampler = build_sampler(self.policy)

    def kept(self, jobs: Sequence[Job], done: AbstractSet[Key]) -> set[Key]:
        """The samples of batches that are complete."""
        whole = [batch for batch in self.batches(jobs) if _keys(batch) <= done]
        return set().union(*map(_keys, whole))

    def draw(self, jobs: Sequence[Job], done: AbstractSet[Key]) -> Iterator[list[Generation]]:
        """The batches that are not complete."""
        for batch in self.batches(jobs):
            if not _keys(batch) <= done:
                yield self._draw_batch(batch)

    def batches(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Jobs that are drawn together: of one benchmark, for they take about as long, and by the prompt's length.

        The longest come first, so that what does not fit into memory says so at once.
        """
        groups: dict[tuple[str, int], list[Job]] = {}
        for job in jobs:
            groups.setdefault((job.question.benchmark, job.samples), []).append(job)
        batches = []
        for (_, samples), group in groups.items():
            size = max(1, self.settings.batch // samples)
            ordered = sorted(group, key=lambda job: -len(self._prompt(job)))
            batches += [ordered[first : first + size] for first in range(0, len(ordered), size)]
        return batches

    def check_lengths(self, jobs: Sequence[Job]) -> None:
        """Refuse responses that would run past what the model was made for."""
        context = getattr(self.policy.causal_lm.config, "max_position_embeddings", None)
        longest = max(len(self._prompt(job)) for job in jobs)
        room = math.inf if context is None else context - longest
        if room < 1:
            raise ValueError(f"the model takes {context} tokens in all, and the longest prompt alone has {longest}")
        if self.settings.max_new_tokens > room:
            raise ValueError(
                f"--max-new-tokens {self.settings.max_new_tokens}: the model takes {context} tokens in all and the "
                f"longest prompt has {longest}; say --max-new-tokens {room:g} or less"
            )

    def _prompt(self, job: Job) -> list[int]:
        name = (job.question.benchmark, job.question.id, 0)
        if name not in self._encoded:
            self._encoded[name] = self.policy.encode(job.question.problem.prompt)
        return self._encoded[name]

    def _draw_batch(self, batch: list[Job]) -> list[Generation]:
        settings = self.settings
        prompts = [PromptTokens(self._prompt(job), _stream(job)) for job in batch]
        options = SamplingOptions(
            samples=batch[0].samples,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
            batch_size=max(settings.batch, batch[0].samples),
        )
        groups = self.sampler.sample(prompts, 0, options)
        entropies = iter(self._entropies(prompts, groups))
        return [
            self._generation(job, sample, response, next(entropies))
            for job, responses in zip(batch, groups, strict=True)
            for sample, response in enumerate(responses)
        ]

    def _entropies(self, prompts: Sequence[PromptTokens], groups: Sequence[Sequence[Response]]) -> list[float | None]:
        """The mean entropy of the next-token distribution over each response, at the sampling temperature."""
        transcripts = [
            Transcript(prompt.ids, response.tokens)
            for prompt, group in zip(prompts, groups, strict=True)
            for response in group
        ]
        if not self.entropy:
            return [None] * len(transcripts)
        temperature = self.settings.temperature or 1.0
        order = sorted(range(len(transcripts)), key=lambda n: len(transcripts[n]))  # little padding
        measured = score(self.policy, [transcripts[n] for n in order], temperature, SCORE_BUDGET, SCORE_CHUNK)
        means: list[float | None] = [None] * len(transcripts)
        lengths = [len(transcripts[n].response) for n in order]
        for number, values in zip(order, measured.entropy.split(lengths), strict=True):
            mean = float(values.double().mean())
            means[number] = mean if math.isfinite(mean) else None
        return means

    def _generation(self, job: Job, sample: int, response: Response, entropy: float | None) -> Generation:
        question = job.question
        logp = math.fsum(response.logp) / len(response.logp)
        return Generation(
            benchmark=question.benchmark,
            problem=question.id,
            sample=sample,
            prompt_hash=prompt_hash(question),
            settings=self.settings.digest(),
            seed=self.settings.seed,
            text=self.policy.decode(response.tokens),
            tokens=len(response.tokens),
            finished=response.finished,
            logp=logp if math.isfinite(logp) else None,
            entropy=entropy,
        )


def open_model(model: str, device: str, precision: str, chat: bool) -> Policy:
    """A policy by path, `demo`, `smollm2`, hub name, or a run of trimtab's (its folder or one of its checkpoints)."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"--precision {precision}: it is fp32 or bf16")
    run, checkpoint = _run_of(Path(model).expanduser())
    if run is None:
        return load_policy(model, device=device, precision=precision, chat=chat)  # type: ignore[arg-type]
    config = load(run / "config.toml", [f"run.device={device}", f"model.precision={precision}"])
    if checkpoint is None:
        return load_policy(
            str((run / "model").resolve()),
            device=device,
            precision=precision,  # type: ignore[arg-type]
            chat=chat and config.model.chat,
        )
    policy = build_policy(config)
    load_weights(policy, checkpoint)
    return policy


def fingerprint(model: str) -> str:
    """What tells that the model's files are others: their names, sizes and ends; nothing for a name on the hub."""
    where = Path(model).expanduser()
    run, checkpoint = _run_of(where)
    folder = where if run is None else checkpoint or run / "model"
    if not folder.is_dir():
        return ""
    files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    return digest([[file.name, file.stat().st_size, *_ends(file)] for file in files])


def _run_of(path: Path) -> tuple[Path | None, Path | None]:
    """The run that a path is of, and the checkpoint to read; without a checkpoint the run's finished model is meant."""
    if path.parent.name == "checkpoints" and (path / "manifest.json").is_file():
        return path.parent.parent, path
    if not (path / "config.toml").is_file():
        return None, None
    if (path / "model").is_dir():
        return path, None
    found = list_checkpoints(path / "checkpoints")
    if not found:
        raise ValueError(f"the run {path} has neither a finished model nor a checkpoint yet")
    return path, found[-1]


def _ends(file: Path) -> list[str]:
    with file.open("rb") as content:
        first = content.read(ENDS)
        content.seek(max(0, file.stat().st_size - ENDS))
        return [digest(first.hex()), digest(content.read(ENDS).hex())]


def _stream(job: Job) -> int:
    """The number of a question's random streams; not its place in the benchmark, so `--problems` changes no sample."""
    return derive_seed("evaluate", job.question.benchmark, job.question.id)


def _keys(batch: Sequence[Job]) -> set[Key]:
    return {key for job in batch for key in job.names()}
