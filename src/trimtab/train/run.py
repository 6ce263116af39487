"""The life of a run around its steps: start or resume, log, evaluate, save, and stop for a reason."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from safetensors import SafetensorError

from trimtab import failpoints
from trimtab.config import Config, list_checkpoints
from trimtab.objectives import entropy_control
from trimtab.parallel import World
from trimtab.rewards import crashed_diagnosis, describe_error
from trimtab.stop_signals import StopRequest, deferred_stop
from trimtab.text import command, printable
from trimtab.train import checkpoints, run_state
from trimtab.train.alarm_actions import Alarm, AlarmHandler, Monitor, steps_around
from trimtab.train.metrics import StepResult, has_learning_signal, no_signal_diagnosis
from trimtab.train.process import environment, keep_freed_memory, set_threads
from trimtab.train.recording import start_recording
from trimtab.train.reporting import Loggers, Reporter, SilentReporter, announce_stop
from trimtab.train.responses import check_positions
from trimtab.train.rollouts import evaluate
from trimtab.train.run_folder import RunFolder
from trimtab.train.trainer import RunProgress, Trainer, build_trainer
from trimtab.train.warm_start import check_problems, warm_start

MOSTLY_CRASHED = 0.5  # share of the responses of a step on which rules failed
MAX_CRASHED_STEPS = 3  # such steps in a row
KEEP_ALARM_CHECKPOINTS = 10  # an alarm that is raised again and again must not fill the disk


class StopReason(StrEnum):
    """Why a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    NO_SIGNAL = "no learning signal"
    NONFINITE = "not finite"
    NOT_SAVED = "not saved"
    FOLDER_GONE = "folder gone"
    ALARM = "alarm"
    RULES = "rules failed"


class RunStoppedError(RuntimeError):
    """A run ended before its last step; the message is a diagnosis."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Run:
    """One run in one folder."""

    config: Config
    folder: RunFolder
    reporter: Reporter
    resume: bool = False
    monitor: Monitor | None = None
    world: World = field(default_factory=World)
    progress: RunProgress = field(default_factory=RunProgress)
    stopped: StopReason = StopReason.FINISHED
    stop_request: StopRequest = field(default_factory=StopRequest)  # of a signal
    # Records that found no space in metrics.jsonl; kept so that a full disk costs no step of the curve.
    _unwritten: list[dict[str, float]] = field(default_factory=list)
    _step_started: float = 0.0
    _failed_rules: set[str] = field(default_factory=set)  # whose errors have been shown
    _first_step: int = 0  # of this process
    _crashed_steps: int = 0  # in a row
    _fit: entropy_control.FitWindow = field(default_factory=entropy_control.FitWindow)
    # The rest is set by `prepare`.
    trainer: Trainer = field(init=False, repr=False)
    _loggers: Loggers = field(init=False, repr=False)
    _alarms: AlarmHandler = field(init=False, repr=False)

    def prepare(self) -> Trainer:
        """Build the trainer and bring it to the start of the first step: by a warm start, or from a checkpoint."""
        # Before anything is computed: the last bits of a sum depend on how many threads share it.
        set_threads(self.config)
        keep_freed_memory()
        resumed = self.resume and bool(list_checkpoints(self.folder.checkpoints))
        if self.resume:
            if not resumed:
                self._check_unused()
            self.folder.reopen(self.config)
        else:
            self.folder.create(self.config)
        trainer = self.trainer = build_trainer(
            self.config, check_problems(self.config, warms_up=not resumed), self.world
        )
        check_positions(trainer.policy, trainer.task, self.config, trainer.tool_use)
        message = self.reporter.message
        for note in [] if trainer.tool_use is None else trainer.tool_use.template.notes:
            message(f"note: {note}")
        self._loggers = Loggers(self.config, self.folder, message)
        if resumed:
            self._resume()
        else:
            self._start()
        self._alarms = AlarmHandler(self.monitor, self.config.alarms, self.folder, message)
        earlier = self.folder.records()
        self._alarms.replay(earlier)
        for record in earlier:
            self._fit.add(record)
        # Only now, for it deletes the records of steps after the checkpoint that was restored.
        kept, step = self._alarms.steps_to_keep(), self.progress.step
        trainer.recorder = start_recording(trainer, self.folder.path, step, warn=message, kept=kept)
        if self.world.watch is not None:  # for the case that this process cannot say it
            self.world.watch.notices.post("resume", self.resume_command)
        return trainer

    def _check_unused(self) -> None:
        """Refuse to start a run from the beginning whose checkpoints were removed: it would lose what it has."""
        last = int(max((record["step"] for record in self.folder.records()), default=0))
        # A full disk leaves an empty folder and no model: such a run has nothing but its metrics.
        if self.folder.model.exists() or (last >= 1 and not self.folder.checkpoints.exists()):
            raise checkpoints.CheckpointError(
                f"{self.folder.path} has the metrics of {last} steps, but no checkpoint to go on from. Nothing was "
                f"changed: put {self.folder.checkpoints} back, or train again in another folder: "
                + command("train", self.folder.config, "--out", "FOLDER")
            )

    def discard_if_unused(self) -> None:
        """Close a run that failed before its first step, and remove its folder if it has no checkpoint."""
        if hasattr(self, "trainer"):
            self.trainer.close()
        if not self.folder.checkpoints.exists():
            self.folder.discard()

    def steps(self) -> Generator[int]:
        """Yield the steps that remain; Ctrl-C, SIGTERM or SIGHUP ends them after the present one."""
        try:
            with deferred_stop(announce_stop(self.reporter)) as self.stop_request:
                self._first_step = self.progress.step + 1
                while self.progress.step < self.config.run.steps and not self.stop_request:
                    self._step_started = time.perf_counter()
                    yield self.progress.step
                self._end()
        finally:  # also when the loop raises: the recorder still has steps in its queue
            if self.trainer.recorder is not None:
                self.trainer.recorder.close()
            self.trainer.close()
            self._loggers.close()
            self.reporter.close()

    def finish_step(self, result: StepResult) -> None:
        """Log a step, evaluate and save if they are due, and stop the run if there is a reason to."""
        step, run, metrics = self.progress.step, self.config.run, result.metrics
        if run.eval_every and (step % run.eval_every == 0 or step == run.steps):
            metrics |= self.trainer.together(evaluate)
        metrics["time/tokens_per_second"] = metrics["tokens/count"] / (time.perf_counter() - self._step_started)
        metrics |= self._fit.add({"step": step, **metrics})
        streak = self.progress.steps_without_signal
        self.progress.steps_without_signal = 0 if has_learning_signal(metrics) else streak + 1
        # It may stop the run; the step is then not logged, since its checkpoint is not written either.
        self._handle_nonfinite(result)
        self._report_rule_errors()
        self._log({"step": step, **metrics})
        self._loggers.log(step, metrics, result.samples)
        self.reporter.step(step, run.steps, metrics, result.samples)
        stopping = self._check_alarms({"step": step, **metrics})
        # The last step is saved by `_end`, after the loop.
        if run.checkpoint_every and step % run.checkpoint_every == 0 and step != run.steps:
            self.save()
        self._check_rules(metrics)
        self._check_learning_signal(metrics)
        if stopping and step != run.steps:
            self.save()
            message = f"{stopping[0].message}. To continue regardless: {self.resume_command}; {self._start_advice}"
            raise self._stop(StopReason.ALARM, message)
        failpoints.failpoint("step.finished")

    def save(self, folder: Path | None = None) -> None:
        """Write a checkpoint, by default one to resume from; on a full disk the run goes on without it."""
        self._check_folder()
        # Records and metrics go to the disk first: a checkpoint never claims a step whose files were lost.
        if self.trainer.recorder is not None:
            self.trainer.recorder.flush()
        keep = self.config.run.keep_checkpoints if folder is None else KEEP_ALARM_CHECKPOINTS
        try:
            self.folder.sync()
            run_state.save_checkpoint(folder or self.folder.checkpoints, self.trainer, self.progress, keep)
        except (checkpoints.CheckpointError, OSError) as error:
            self.reporter.message(f"warning: {error}")
        except checkpoints.NonFiniteStateError as error:
            raise self._stop(StopReason.NONFINITE, str(error)) from None

    def _start(self) -> None:
        """Warm up the policy, evaluate it, and save a first checkpoint."""
        if self.resume:
            self.reporter.message(f"{self.folder.path} has no checkpoint yet: starting from the beginning")
        # A run that died before its first checkpoint may have left metrics of step 0.
        self.folder.rewind(-1, self.reporter.message)
        if taken := self.trainer.together(run_state.load_start, self.progress):
            self.reporter.message(taken)
        cache = self.folder.path.parent / ".warm_start"
        self.trainer.tell(warm_start, cache, SilentReporter())
        warm_start(self.trainer, cache, self.reporter)
        failpoints.failpoint("warm_start.done")
        run_state.save_reference(self.trainer, self.folder)
        metrics = self.trainer.together(evaluate) if self.config.run.eval_every else {}
        self._report_rule_errors()
        if metrics:  # empty without held-out problems
            self._log({"step": 0, **metrics})
            self.reporter.step(0, self.config.run.steps, metrics)
        self.save()
        if (share := metrics.get("eval/crashed_share", 0.0)) > MOSTLY_CRASHED:
            raise self._stop_for_rules(share)

    def _resume(self) -> None:
        """Restore the newest intact checkpoint, and warn if the environment has changed since."""
        saved = checkpoints.load_newest(
            self.folder.checkpoints,
            lambda saved: run_state.restore_checkpoint(saved, self.trainer, self.progress),
            self.reporter.message,
        )
        if saved is None:
            raise checkpoints.CheckpointError(
                f"no checkpoint under {self.folder.checkpoints} can be used. Nothing was changed: put a good one back, "
                "or train again in another folder: " + command("train", self.folder.config, "--out", "FOLDER")
            )
        self.trainer.together(run_state.restore_follower, saved.path.absolute())
        self.trainer.together(run_state.load_reference, self.folder.reference.absolute())
        # Steps after the checkpoint are repeated with the same results, and must not be logged twice.
        self.folder.rewind(self.progress.step, self.reporter.message)
        self.reporter.message(f"resumed from step {saved.step} ({saved.path})")
        before = saved.state["environment"]
        present = environment(self.trainer.policy.device, self.trainer.world.size)
        for name in dict.fromkeys((*present, "processes")):
            was, now = (each.get(name, 1 if name == "processes" else None) for each in (before, present))
            if was != now:
                self.reporter.message(f"warning: {name} was {was} and is {now}: results may differ in the last bits")

    def _end(self) -> None:
        """Save the run and, if it is finished, publish its model."""
        self.save()
        if self.progress.step < self.config.run.steps:
            self.stopped = StopReason.INTERRUPTED
            self.reporter.message(f"stopped after step {self.progress.step}; go on with: {self.resume_command}")
            return
        model = self.folder.model
        # Adapters, which alone are published, are whole.
        partial = self.config.model.shard and not self.config.model.lora_rank
        state = self.trainer.together(run_state.gather_model) if partial else None
        try:
            run_state.publish_model(self.trainer.policy, model, state)
        except (OSError, SafetensorError) as error:
            message = f"the trained model could not be written to {model}: {error}. Free some space, then: "
            raise self._stop(StopReason.NOT_SAVED, message + self.resume_command) from None

    def _log(self, record: dict[str, float]) -> None:
        """Append the metrics of a step to metrics.jsonl; on a full disk they are written with a later step's."""
        self._check_folder()
        self._unwritten.append(record)
        try:
            while self._unwritten:
                self.folder.append_metrics(self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            self.reporter.message(f"warning: metrics of {len(self._unwritten)} step(s) are not written yet: {error}")

    def _handle_nonfinite(self, result: StepResult) -> None:
        """Record skipped updates, and stop the run if its weights are not finite or the recipe says so."""
        step, skipped = self.progress.step, int(result.metrics["update/skipped"])
        self.progress.updates_skipped += skipped
        if not skipped:
            return
        try:
            for record in result.nonfinite:
                self.folder.append(self.folder.nonfinite, record)
        except OSError as error:
            self.reporter.message(f"warning: {self.folder.nonfinite} could not be written: {error}")
        found = "; ".join(f"{record['value']} ({record['count']} responses)" for record in result.nonfinite)
        self.reporter.message(f"warning: step {step}: {skipped} update(s) not finite, skipped: {found}")
        # Skipped updates leave the weights alone, so weights that are not finite were broken by an earlier update that
        # looked finite (an overflow in the optimizer): no later update can repair them.
        if not self.trainer.together(run_state.weights_are_finite):
            message = (
                f"the weights are not finite at step {step}: lower update.lr and start again; {self._start_advice}"
            )
            raise self._stop(StopReason.NONFINITE, message)
        if self.config.update.on_nonfinite == "stop":
            message = f"an update of step {step} was not finite ({found}): see {self.folder.nonfinite}. To skip it: "
            raise self._stop(StopReason.NONFINITE, f"{message}{self.resume_command} --set update.on_nonfinite=skip")

    def _report_rule_errors(self) -> None:
        """Keep the errors of rules in a file, and show the first of each rule, and of each tool, in full."""
        for error in [] if self.trainer.tool_use is None else self.trainer.tool_use.take_errors():
            self.reporter.message(f"warning: a tool failed; the model was told so:\n{printable(error)}")
        for record in self.trainer.rule_errors.take(self.progress.step):
            try:
                self.folder.append(self.folder.rule_errors, record)
            except (OSError, ValueError) as error:
                self.reporter.message(f"warning: {self.folder.rule_errors} could not be written: {error}")
            if record["rule"] not in self._failed_rules:
                self._failed_rules.add(record["rule"])
                self.reporter.message(describe_error(record, self.folder.rule_errors))

    def _check_rules(self, metrics: dict[str, float]) -> None:
        """Stop the run if its rules fail on most responses: at once at its start and end, else after some steps."""
        # Not at once in the middle: a service that others use too may be away for a minute.
        share = metrics.get("reward/crashed_share", 0.0)
        self._crashed_steps = self._crashed_steps + 1 if share > MOSTLY_CRASHED else 0
        at_an_end = self.progress.step in (self._first_step, self.config.run.steps)
        if self._crashed_steps and (at_an_end or self._crashed_steps >= MAX_CRASHED_STEPS):
            self.save()
            raise self._stop_for_rules(share)

    def _stop_for_rules(self, share: float) -> RunStoppedError:
        diagnosis = crashed_diagnosis(share, self._crashed_steps, self.folder.rule_errors)
        return self._stop(StopReason.RULES, f"{diagnosis}. With the rule mended: {self.resume_command}")

    def _check_alarms(self, record: dict[str, float]) -> list[Alarm]:
        """Handle the alarms of a step; return those that stop the run."""
        by_action = self._alarms.handle(record)
        for alarm in (alarm for alarms in by_action.values() for alarm in alarms):
            self._loggers.alarm(alarm)
        if by_action["save"] or by_action["stop"]:
            if self.trainer.recorder is not None:
                self.trainer.recorder.keep(steps_around(self.progress.step))
            self.save(self.folder.alarm_checkpoints)
        return by_action["stop"]

    def _check_learning_signal(self, metrics: dict[str, float]) -> None:
        """Warn about the first of several steps that teach nothing; stop once `run.patience` is used up."""
        streak, patience = self.progress.steps_without_signal, self.config.run.patience
        if streak == 1 and not metrics["update/skipped"]:
            step = f"step {self.progress.step}"
            self.reporter.message(f"warning: {step}: rewards do not differ within any group, nothing was learnt")
        if patience and streak >= patience:
            self.save()
            raise self._stop(StopReason.NO_SIGNAL, no_signal_diagnosis(streak, metrics, self.folder.nonfinite))

    def _check_folder(self) -> None:
        """Stop the run if its folder is gone."""
        if problem := self.folder.problem():
            raise self._stop(StopReason.FOLDER_GONE, problem)

    def _stop(self, reason: StopReason, message: str) -> RunStoppedError:
        self.stopped = reason
        return RunStoppedError(reason, message)

    @property
    def _start_advice(self) -> str:
        lower = f"--set update.lr={self.config.update.lr / 2:g}"
        start = command("train", "--from", self.folder.path)
        return f"from a checkpoint with other settings: {start}[@STEP] {lower}"

    @property
    def resume_command(self) -> str:
        """The command that goes on with the run."""
        several = ["--gpus", self.world.size] if self.world.size > 1 else []
        return command("train", "--resume", self.folder.path, *several)
