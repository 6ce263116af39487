"""The life of a run around its steps: start or resume, evaluate, checkpoint, stop for a reason, and say so."""

from __future__ import annotations

import platform
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Any

import torch
import transformers

import trimtab
from trimtab.train import checkpoints, faults
from trimtab.train.config import Config
from trimtab.train.experience import answer_problems, sampling_options
from trimtab.train.loop import Trainer, build_trainer
from trimtab.train.progress import Progress
from trimtab.train.reporters import Reporter
from trimtab.train.run_folder import RunFolder
from trimtab.train.sinks import Sinks
from trimtab.train.warm_start import load_parameters, parameters, warm_start


class Stop(StrEnum):
    """Why a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    NO_SIGNAL = "no learning signal"
    NOT_FINITE = "not finite"


class RunStoppedError(RuntimeError):
    """A run that ended before its last step, with a diagnosis."""

    def __init__(self, why: Stop, message: str) -> None:
        super().__init__(message)
        self.why = why


@dataclass
class Run:
    """One run in one folder."""

    config: Config
    folder: RunFolder
    reporter: Reporter
    resume: bool = False
    progress: Progress = field(default_factory=Progress)
    stopped: Stop = Stop.FINISHED
    _interrupted: bool = False
    _trainer: Trainer | None = None
    _sinks: Sinks | None = None
    _started: float = 0.0

    @property
    def trainer(self) -> Trainer:
        """The parts of the run, once it is prepared."""
        assert self._trainer is not None
        return self._trainer

    def prepare(self) -> Trainer:
        """Build everything and bring it to where the first step starts."""
        if self.config.run.threads:
            torch.set_num_threads(self.config.run.threads)
        if self.resume:
            self.folder.reopen(self.config)
        else:
            self.folder.create(self.config)
        self._trainer = build_trainer(self.config)
        self._sinks = Sinks(self.config, self.folder, self.reporter.message)
        saved = checkpoints.newest(self.folder.checkpoints, self.reporter.message) if self.resume else None
        if saved is not None:
            self._restore(saved)
        else:
            self._start()
        self.folder.rewind(self.progress.step)
        return self.trainer

    def steps(self) -> Iterator[int]:
        """The steps still to do; Ctrl-C ends them after the one under way."""
        before = self._watch_interrupts()
        try:
            while self.progress.step < self.config.run.steps and not self._interrupted:
                self._started = time.perf_counter()
                yield self.progress.step
            self._end()
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)
            assert self._sinks is not None
            self._sinks.close()
            self.reporter.close()

    def finish_step(self, metrics: dict[str, float]) -> None:
        """Metrics, evaluation, alarms of the plainest kind, checkpoint."""
        step, run = self.progress.step, self.config.run
        if run.eval_every and (step % run.eval_every == 0 or step == run.steps):
            metrics |= self.evaluate()
        metrics["time/tokens_per_second"] = metrics["tokens/count"] / (time.perf_counter() - self._started)
        self._count_troubles(metrics)
        self.folder.append({"step": step, **metrics})
        assert self._sinks is not None
        self._sinks.log(step, metrics)
        self.reporter.step(step, run.steps, metrics)
        if run.checkpoint_every and step % run.checkpoint_every == 0 and step != run.steps:
            self.save()
        self._check_signal()
        faults.point("step.finished")

    def evaluate(self) -> dict[str, float]:
        """Greedy accuracy on held-out problems; nothing where the task has none."""
        test = self.trainer.test
        if test is None:
            return {}
        problems = [(n, test[n]) for n in range(min(len(test), self.config.run.eval_problems))]
        options = sampling_options(self.config, samples=1, temperature=0.0)
        groups = answer_problems(self.trainer.policy, self.trainer.sampler, problems, -1, options, self.config)
        return {"eval/accuracy": fmean(group[0].verdict.kind == "correct" for group in groups)}

    def save(self) -> None:
        """Publish a checkpoint; a full disk costs the checkpoint, not the run."""
        tensors = {
            "model": parameters(self.trainer.policy),
            "optimizer": checkpoints.optimizer_tensors(self.trainer.optimizer),
        }
        state = {
            "progress": self.progress.state(),
            "objective": self.trainer.objective.state_dict(),
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }
        try:
            checkpoints.save(
                self.folder.checkpoints, self.progress.step, tensors, state, self.config.run.keep_checkpoints
            )
        except checkpoints.CheckpointError as error:
            self.reporter.message(f"warning: {error}")

    def _start(self) -> None:
        """Warm start, first evaluation, and a checkpoint to come back to."""
        cache = self.folder.path.parent / ".warm_start"
        trainer = self.trainer
        warm_start(trainer.policy, trainer.task, self.config, cache, self.reporter.warm, self.evaluate)
        if self.config.run.eval_every:
            metrics = self.evaluate()
            if metrics:
                self.folder.append({"step": 0, **metrics})
                self.reporter.step(0, self.config.run.steps, metrics)
        self.save()

    def _restore(self, saved: checkpoints.Checkpoint) -> None:
        self.progress.restore(saved.state["progress"])
        load_parameters(self.trainer.policy, saved.tensors["model"])
        checkpoints.load_optimizer(self.trainer.optimizer, saved.tensors["optimizer"])
        self.trainer.objective.load_state_dict(saved.state["objective"])
        self.reporter.message(f"resumed from step {saved.step} ({saved.path})")
        now = {"threads": torch.get_num_threads(), **versions()}
        then = {"threads": saved.state["threads"], **saved.state["versions"]}
        for name in sorted(name for name in now if then.get(name) != now[name]):
            self.reporter.message(
                f"warning: {name} was {then.get(name)} and is {now[name]}: results may differ in the last bits"
            )

    def _end(self) -> None:
        self.save()
        if self._interrupted and self.progress.step < self.config.run.steps:
            self.stopped = Stop.INTERRUPTED
            self.reporter.message(
                f"stopped after step {self.progress.step}; go on with: trimtab train --resume {self.folder.path}"
            )
            return
        model = self.folder.path / "model"
        self.trainer.policy.model.save_pretrained(model)
        self.trainer.policy.tokenizer.save_pretrained(model)

    def _count_troubles(self, metrics: dict[str, float]) -> None:
        skipped = int(metrics["update/skipped"])
        self.progress.updates_skipped += skipped
        without = metrics.get("groups/mixed_share", 0.0) == 0.0
        self.progress.steps_without_signal = self.progress.steps_without_signal + 1 if without else 0
        if skipped:
            self.reporter.message(f"warning: step {self.progress.step}: {skipped} update(s) not finite, not taken")
            if self.config.update.not_finite == "stop":
                raise RunStoppedError(
                    Stop.NOT_FINITE, f"an update of step {self.progress.step} was not finite (update.not_finite='stop')"
                )

    def _check_signal(self) -> None:
        patience, streak = self.config.run.patience, self.progress.steps_without_signal
        if streak == 1:
            self.reporter.message(f"step {self.progress.step}: no group has any spread in reward, nothing was learnt")
        if patience and streak >= patience:
            self.stopped = Stop.NO_SIGNAL
            last = self.folder.records()[-1]
            accuracy = last.get("reward/accuracy", 0.0)
            advice = (
                "no response is right: check the task's rule and prompt, use a warm start or an easier task"
                if accuracy < 0.5
                else "every response is right: use a harder task, or stop here"
            )
            raise RunStoppedError(
                Stop.NO_SIGNAL,
                f"{streak} steps in a row without learning signal (accuracy {accuracy:.2f}, truncated "
                f"{last.get('response/truncated_share', 0.0):.2f}): {advice}",
            )

    def _watch_interrupts(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return None

        def note(number: int, frame: Any) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            self.reporter.message("finishing this step; press Ctrl-C again to stop at once")

        return signal.signal(signal.SIGINT, note)


def versions() -> dict[str, str]:
    """What results depend on in their last bits."""
    return {
        "trimtab": trimtab.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
