"""The life of a run around its steps: start or resume, evaluate, checkpoint, stop for a reason, and say so."""

from __future__ import annotations

import platform
import shutil
import signal
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

import trimtab
from trimtab import failpoints
from trimtab.config import Config
from trimtab.train import checkpoints
from trimtab.train.alarm_actions import Alarm, Watch, Watcher, around
from trimtab.train.build import set_threads
from trimtab.train.experience import answer_problems
from trimtab.train.loop import Trainer, build_trainer
from trimtab.train.progress import Progress
from trimtab.train.recording import start_recording
from trimtab.train.reporter import Reporter
from trimtab.train.run_folder import RunFolder, config_fingerprint
from trimtab.train.sinks import Sinks
from trimtab.train.warm_start import load_parameters, parameters, warm_start

ALARM_CHECKPOINTS = 10  # those that alarms ask for; of more, the oldest go


class Stop(StrEnum):
    """Why a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    NO_SIGNAL = "no learning signal"
    NOT_FINITE = "not finite"
    NOT_SAVED = "not saved"
    ALARM = "alarm"


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
    watcher: Watcher | None = None
    progress: Progress = field(default_factory=Progress)
    stopped: Stop = Stop.FINISHED
    _interrupted: bool = False
    _unwritten: list[dict[str, Any]] = field(default_factory=list)
    _trainer: Trainer | None = None
    _sinks: Sinks | None = None
    _watch: Watch | None = None
    _started: float = 0.0

    @property
    def trainer(self) -> Trainer:
        """The parts of the run, once it is prepared."""
        assert self._trainer is not None
        return self._trainer

    def prepare(self) -> Trainer:
        """Build everything and bring it to where the first step starts."""
        set_threads(self.config)
        if self.resume:
            self.folder.reopen(self.config)
        else:
            self.folder.create(self.config)
        self._trainer = build_trainer(self.config)
        self._sinks = Sinks(self.config, self.folder, self.reporter.message)
        if self.resume and checkpoints.found(self.folder.checkpoints):
            self._go_on()
        else:
            self._start()
        trainer, say, step = self.trainer, self.reporter.message, self.progress.step
        self._watch = Watch(self.watcher, self.config.alarms, self.folder, say)
        self._watch.catch_up(self.folder.records())
        trainer.recorder = start_recording(
            self.config,
            self.folder.path,
            trainer.policy,
            trainer.objective,
            step=step,
            versions=versions(),
            warn=say,
            kept=self._watch.kept_steps(),
        )
        return self.trainer

    def steps(self) -> Generator[int]:
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
            if self.trainer.recorder is not None:
                self.trainer.recorder.close()
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
        self._log({"step": step, **metrics})
        assert self._sinks is not None
        self._sinks.log(step, metrics)
        self.reporter.step(step, run.steps, metrics)
        stopping = self._look_out({"step": step, **metrics})
        if run.checkpoint_every and step % run.checkpoint_every == 0 and step != run.steps:
            self.save()
        self._check_signal(metrics)
        if stopping and step != run.steps:
            self.save()
            raise self._stop(Stop.ALARM, f"{stopping[0].message}. To go on regardless: {self._go_on_with}")
        failpoints.failpoint("step.finished")

    def evaluate(self) -> dict[str, float]:
        """Greedy accuracy on held-out problems; nothing where the task has none."""
        test = self.trainer.test
        if test is None:
            return {}
        problems = [(n, test[n]) for n in range(min(len(test), self.config.run.eval_problems))]
        options = self.config.sampling_options(samples=1, temperature=0.0)
        groups = answer_problems(self.trainer.policy, self.trainer.sampler, problems, -1, options, self.config)
        return {"eval/accuracy": fmean(group[0].verdict.kind == "correct" for group in groups)}

    def save(self, where: Path | None = None) -> None:
        """Publish a checkpoint, to resume from or somewhere else; a full disk costs the checkpoint, not the run."""
        tensors = {
            "model": parameters(self.trainer.policy),
            "optimizer": checkpoints.optimizer_tensors(self.trainer.optimizer),
        }
        state = {
            "progress": self.progress.state(),
            "objective": self.trainer.objective.state_dict(),
            "config_fingerprint": config_fingerprint(self.config),
            "environment": self._environment(),
        }
        if self.trainer.recorder is not None:
            self.trainer.recorder.flush()
        try:
            self.folder.settle()
            keep = self.config.run.keep_checkpoints if where is None else ALARM_CHECKPOINTS
            checkpoints.save(where or self.folder.checkpoints, self.progress.step, tensors, state, keep)
        except (checkpoints.CheckpointError, OSError) as error:
            self.reporter.message(f"warning: {error}")
        except checkpoints.RuinedError as error:
            raise self._stop(Stop.NOT_FINITE, str(error)) from None

    def _start(self) -> None:
        """Warm start, first evaluation, and a checkpoint to come back to."""
        if self.resume:
            self.reporter.message(f"{self.folder.path} has no checkpoint yet: starting from the beginning")
        self.folder.rewind(-1)
        cache, say, trainer = self.folder.path.parent / ".warm_start", self.reporter, self.trainer
        warm_start(trainer.policy, trainer.task, self.config, cache, say.warm, self.evaluate, say.message)
        failpoints.failpoint("warm_start.done")
        self._keep_reference()
        if self.config.run.eval_every:
            metrics = self.evaluate()
            if metrics:
                self._log({"step": 0, **metrics})
                self.reporter.step(0, self.config.run.steps, metrics)
        self.save()

    def _go_on(self) -> None:
        """Go back to the newest checkpoint that is whole, and say what is not as it was."""
        saved = checkpoints.newest(self.folder.checkpoints, self._restore, self.reporter.message)
        if saved is None:
            raise checkpoints.CheckpointError(
                f"no checkpoint under {self.folder.checkpoints} can be used. Nothing was changed: put a good one back, "
                "or remove that folder to start from the beginning"
            )
        self._load_reference()
        self.folder.rewind(self.progress.step)
        self.reporter.message(f"resumed from step {saved.step} ({saved.path})")
        then = saved.state["environment"]
        for name, now in self._environment().items():
            if then.get(name) != now:
                self.reporter.message(
                    f"warning: {name} was {then.get(name)} and is {now}: results may differ in the last bits"
                )

    def _restore(self, saved: checkpoints.Checkpoint) -> None:
        with checkpoints.fitting(saved):
            now = config_fingerprint(self.config)
            other = [key for key, value in saved.state["config_fingerprint"].items() if now.get(key, value) != value]
            if other:
                raise ValueError(f"it is of a run with another {', '.join(other)}")
            load_parameters(self.trainer.policy, saved.tensors["model"])
            checkpoints.load_optimizer(self.trainer.optimizer, saved.tensors["optimizer"])
            self.trainer.objective.load_state_dict(saved.state["objective"])
            self.progress.restore(saved.state["progress"])
            sensible = self.progress.step == saved.step and min(self.progress.state().values()) >= 0
            if not sensible or not isinstance(saved.state["environment"], dict):
                raise ValueError("its state makes no sense")

    def _keep_reference(self) -> None:
        """The policy as it starts is what a KL penalty compares with, to the end of the run and after a resume too."""
        if self.config.model.reference == "start":
            start = {"model": parameters(self.trainer.policy)}
            checkpoints.save(self.folder.reference, 0, start, {}, keep=1)
            self._load_reference()

    def _load_reference(self) -> None:
        reference = self.trainer.reference
        if self.config.model.reference == "start" and reference is not None:
            load_parameters(reference, checkpoints.read(self.folder.reference / "step-00000000").tensors["model"])

    def _environment(self) -> dict[str, Any]:
        """What results depend on in their last bits."""
        return {"threads": torch.get_num_threads(), "device": self.trainer.policy.device.type, **versions()}

    def _log(self, record: dict[str, float]) -> None:
        """Write a step's metrics; on a full disk they wait for the next step's."""
        self._unwritten.append(record)
        try:
            while self._unwritten:
                self.folder.append(self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            self.reporter.message(f"warning: metrics of {len(self._unwritten)} step(s) are not written yet: {error}")

    def _end(self) -> None:
        self.save()
        if self._interrupted and self.progress.step < self.config.run.steps:
            self.stopped = Stop.INTERRUPTED
            self.reporter.message(f"stopped after step {self.progress.step}; go on with: {self._go_on_with}")
            return
        self._publish_model()

    def _publish_model(self) -> None:
        """The trained model for others to load: whole or not there."""
        model, writing = self.folder.path / "model", self.folder.path / ".model.writing"
        try:
            for folder in (writing, model):
                shutil.rmtree(folder, ignore_errors=True)
            self.trainer.policy.model.save_pretrained(writing)
            self.trainer.policy.tokenizer.save_pretrained(writing)
            failpoints.failpoint("model.written")
            writing.rename(model)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(writing, ignore_errors=True)
            message = f"the trained model could not be written to {model}: {error}. Make room, then: {self._go_on_with}"
            raise self._stop(Stop.NOT_SAVED, message) from None

    @property
    def _go_on_with(self) -> str:
        return f"trimtab train --resume {self.folder.path}"

    def _stop(self, why: Stop, message: str) -> RunStoppedError:
        self.stopped = why
        return RunStoppedError(why, message)

    def _count_troubles(self, metrics: dict[str, float]) -> None:
        """Updates that were not finite, and steps that taught nothing."""
        step, skipped = self.progress.step, int(metrics["update/skipped"])
        self.progress.updates_skipped += skipped
        taught = metrics.get("groups/mixed_share", 0.0) > 0 and "update/loss" in metrics
        self.progress.steps_without_signal = 0 if taught else self.progress.steps_without_signal + 1
        if not skipped:
            return
        try:
            for record in self.trainer.faults:
                self.folder.append_fault(record)
        except OSError as error:
            self.reporter.message(f"warning: {self.folder.faults} could not be written: {error}")
        what = "; ".join(f"{record['fault']} ({record['count']} responses)" for record in self.trainer.faults)
        self.reporter.message(f"warning: step {step}: {skipped} update(s) not finite, not taken: {what}")
        weights = parameters(self.trainer.policy).values()
        if not all(bool(torch.isfinite(weight).all()) for weight in weights):
            message = f"the weights are not finite at step {step}: lower update.lr and start again"
            raise self._stop(Stop.NOT_FINITE, message)
        if self.config.update.on_nonfinite == "stop":
            message = f"an update of step {step} was not finite ({what}): see {self.folder.faults}. To pass over it: "
            raise self._stop(Stop.NOT_FINITE, message + f"{self._go_on_with} --set update.on_nonfinite=skip")

    def _look_out(self, record: dict[str, float]) -> list[Alarm]:
        """Show a step to the watcher; the alarms that end the run."""
        assert self._watch is not None
        wanted = self._watch.look(record)
        if wanted["save"] or wanted["stop"]:
            if self.trainer.recorder is not None:
                self.trainer.recorder.keep(around(self.progress.step))
            self.save(self.folder.alarm_checkpoints)
        return wanted["stop"]

    def _check_signal(self, metrics: dict[str, float]) -> None:
        patience, streak = self.config.run.patience, self.progress.steps_without_signal
        skipped, accuracy = metrics["update/skipped"], metrics.get("reward/accuracy", 0.0)
        if streak == 1 and not skipped:
            self.reporter.message(
                f"warning: step {self.progress.step}: no group has any spread in reward, nothing was learnt"
            )
        if not patience or streak < patience:
            return
        if skipped:
            advice = f"no update was finite, see {self.folder.faults}: lower update.lr"
        elif accuracy < 0.5:
            advice = "no response is right: check the task's rule and prompt, use a warm start or an easier task"
        else:
            advice = "every response is right: use a harder task, or stop here"
        self.save()
        raise self._stop(
            Stop.NO_SIGNAL,
            f"{streak} steps in a row without learning signal (accuracy {accuracy:.2f}, truncated "
            f"{metrics.get('response/truncated_share', 0.0):.2f}): {advice}",
        )

    def _watch_interrupts(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return None

        def note(number: int, frame: Any) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            with suppress(RuntimeError):  # the signal may have come in the middle of a print
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
