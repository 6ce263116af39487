"""The life of a run around its steps: start or resume, log, evaluate, save, and stop for a reason."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trimtab import failpoints
from trimtab.grading import crashed_diagnosis, describe_error
from trimtab.objectives import entropy_control
from trimtab.process import StopRequest, deferred_stop
from trimtab.text import command, printable
from trimtab.trainer.config import Config, list_checkpoints
from trimtab.trainer.parallel import World
from trimtab.trainer.train import checkpoints, run_state
from trimtab.trainer.train.alarm_actions import (
    Alarm,
    AlarmHandler,
    Monitor,
    RunStoppedError,
    StopReason,
    steps_around,
)
from trimtab.trainer.train.build import hub_note, input_changes, read_inputs, run_inputs, truncation_note
from trimtab.trainer.train.metrics import (
    BestEvaluation,
    StepResult,
    best_evaluation,
    has_learning_signal,
    has_slow_grading,
    no_signal_diagnosis,
    slow_grading_advice,
)
from trimtab.trainer.train.prompts import check_tasks
from trimtab.trainer.train.recording import start_recording
from trimtab.trainer.train.reporting import Loggers, Reporter, announce_stop
from trimtab.trainer.train.rollouts import evaluate
from trimtab.trainer.train.run_folder import MetricsLog, RunFolder
from trimtab.trainer.train.run_state import environment
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer, keep_freed_memory, set_threads
from trimtab.trainer.train.warm_start import check_problems, open_cache, repeated_problems, warm_start
from trimtab.workers import keep_output

MOSTLY_CRASHED = 0.5  # share of the responses of a step on which rules failed
MAX_CRASHED_STEPS = 3  # such steps in a row
SLOW_STEPS = 3  # steps in a row that grading takes most of: the first waits for the graders to start
KEEP_ALARM_CHECKPOINTS = 10  # an alarm that is raised again and again must not fill the disk


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
    _saver: run_state.CheckpointSaver = field(init=False, repr=False)
    _metrics_log: MetricsLog = field(init=False, repr=False)
    _unwritable: set[Path] = field(default_factory=set)  # files whose failure has been said
    _step_started: float = 0.0
    _failed_rules: set[str] = field(default_factory=set)  # whose errors have been shown
    _first_step: int = 0  # of this process
    _crashed_steps: int = 0  # in a row
    _agent_error: str = ""  # the newest
    _slow_steps: int = 0  # in a row
    _output_named: bool = False  # whether the file with what rules print has been named
    _best: BestEvaluation | None = None
    _fit: entropy_control.FitWindow = field(default_factory=entropy_control.FitWindow)
    model_missing: bool = False  # whether the trained model could not be written
    # The rest is set by `prepare`.
    trainer: Trainer = field(init=False, repr=False)
    _loggers: Loggers = field(init=False, repr=False)
    _alarms: AlarmHandler = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._metrics_log = MetricsLog(self.folder)
        may_go_on = self.config.run.on_failed_checkpoint == "continue"
        self._saver = run_state.CheckpointSaver(self.folder.checkpoints, self.reporter.message, may_go_on)

    def prepare(self) -> Trainer:
        """Build the trainer and bring it to the start of the first step: by a warm start, or from a checkpoint."""
        # Before anything is computed: the last bits of a sum depend on how many threads share it.
        set_threads(self.config)
        keep_freed_memory()
        resumed = self.resume and bool(list_checkpoints(self.folder.checkpoints))
        if self.resume:
            self.folder.check_recipe(self.config)
            if not resumed:
                self._check_unused()
        else:
            self.folder.create(self.config)
        message = self.reporter.message
        self._loggers = Loggers(self.config, self.folder, message)  # before the model, which may take minutes to load
        keep_output(self.folder.rule_output)
        problems = check_problems(self.config, warms_up=not resumed)
        self._check_inputs(run_inputs(self.config, problems))
        for note in filter(None, (hub_note(self.config.model.path), self.config.lag_note)):
            message(note)
        trainer = self.trainer = build_trainer(self.config, problems, self.world)
        set_threads(self.config, trainer.policy.num_weights)
        trainer.together(_keep_output, self.folder.rule_output)
        repeats = repeated_problems(self.config, trainer.task, trainer.test_task)
        trainer.seen_share = len(repeats.seen) / max(repeats.held_out, 1)
        if trainer.agent_use is None:  # an agent writes its prompts itself
            check_tasks(trainer.policy, [trainer.task, trainer.test_task], self.config, trainer.tool_use)
        for sentence in repeats.describe():
            message(f"warning: {sentence}")
        notes = [truncation_note(trainer.policy, self.config.rollout)]
        notes += [] if trainer.tool_use is None else trainer.tool_use.template.notes
        for note in filter(None, notes):
            message(f"note: {note}")
        if resumed:
            self._resume()
        if self.resume:
            self.folder.write_config(self.config)
        if not resumed:
            self._start()
        self._alarms = AlarmHandler(self.monitor, self.config.alarms, self.folder, message)
        earlier = self.folder.records()
        self._alarms.replay(earlier)
        for record in earlier:
            self._fit.add(record)
        # From the metrics, which a resumed run has up to its checkpoint: so it goes on as if it had not stopped.
        self._best = best_evaluation(earlier)
        # Only now, for it deletes the records of steps after the checkpoint that was restored.
        kept, step = self._alarms.steps_to_keep(), self.progress.step
        trainer.recorder = start_recording(trainer, self.folder.path, step, warn=message, kept=kept)
        if self.world.watch is not None:  # for the case that this process cannot say it
            self.world.watch.notices.post("resume", self.resume_command)
        return trainer

    def _check_inputs(self, inputs: dict[str, str]) -> None:
        """Refuse to go on with other data or another base model than before; note what is known for the first time."""
        before = read_inputs(self.folder.path)
        if changes := input_changes(before, inputs, self.config):
            lines = "".join(f"\n  {line}" for line in changes)
            raise ValueError(
                f"{self.folder.path} was run with other inputs:{lines}\nPut them back as they were, or start a new run "
                "with them: " + command("train", self.folder.config, "--out", "FOLDER")
            )
        if inputs.keys() - before.keys() or not self.folder.inputs.exists():
            self.folder.write_inputs({**inputs, **before})

    def _check_unused(self) -> None:
        """Refuse to start a run from the beginning whose checkpoints were removed: it would lose what it has."""
        self.folder.require_own()
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
        self._close()
        if not self.folder.checkpoints.exists():
            self.folder.discard()

    def _close(self) -> None:
        """End what `prepare` has started, as far as it came."""
        if hasattr(self, "trainer"):
            if self.trainer.recorder is not None:  # it may still have steps in its queue
                self.trainer.recorder.close()
            self.trainer.close()
        if hasattr(self, "_loggers"):
            self._loggers.close()
        keep_output(None)

    def steps(self) -> Generator[int]:
        """Yield the steps that remain; Ctrl-C, SIGTERM or SIGHUP ends them after the present one."""
        try:
            with deferred_stop(announce_stop(self.reporter)) as self.stop_request:
                self._first_step = self.progress.step + 1
                while self.progress.step < self.config.run.steps and not self.stop_request:
                    self._step_started = time.perf_counter()
                    yield self.progress.step
                self._end()
        finally:  # also when the loop raises
            self._close()
            self.reporter.close()

    def finish_step(self, result: StepResult) -> None:
        """Log a step, evaluate and save if they are due, and stop the run if there is a reason to."""
        step, run, metrics = self.progress.step, self.config.run, result.metrics
        if run.eval_every and (step % run.eval_every == 0 or step == run.steps):
            metrics |= self._evaluate()
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
            if self._saver.must_stop:
                raise self._stop(StopReason.NOT_SAVED, "no checkpoint can be written")
        self._check_best({"step": step, **metrics})
        self._check_rules(metrics)
        self._check_grading_time(metrics)
        self._check_learning_signal(metrics)
        if stopping and step != run.steps:
            self.save()
            message = f"{stopping[0].message}. To continue regardless: {self.resume_command}; {self._start_advice}"
            raise self._stop(StopReason.ALARM, message)
        failpoints.failpoint("step.finished")

    def save(self) -> bool:
        """Write a checkpoint to resume from; on a full disk the run goes on without it. Return whether it is there."""
        keep = self.config.run.keep_checkpoints
        return self._saver.save(self.progress.step, lambda: self._save_to(self.folder.checkpoints, keep))

    def _save_to(self, folder: Path, keep: int) -> None:
        """Write a checkpoint into a folder."""
        self._check_folder()
        # Records and metrics go to the disk first: a checkpoint never claims a step whose files were lost.
        if self.trainer.recorder is not None:
            self.trainer.recorder.flush()
        self._metrics_log.flush()
        self.folder.sync()
        try:
            with self.trainer.timed("time/checkpoint"):  # logged with the next step
                run_state.save_checkpoint(folder, self.trainer, self.progress, keep)
        except checkpoints.NonFiniteStateError as error:
            raise self._stop(StopReason.NONFINITE, str(error)) from None

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics of an evaluation, and the seconds since the last step was logged."""
        with self.trainer.timed("time/evaluation"):
            metrics = self.trainer.together(evaluate)
        return metrics and metrics | self.trainer.take_seconds()

    def _start(self) -> None:
        """Warm up the policy, evaluate it, and save a first checkpoint."""
        if self.resume:
            self.reporter.message(f"{self.folder.path} has no checkpoint yet: starting from the beginning")
        # A run that died before its first checkpoint may have left metrics of step 0.
        self.folder.rewind(-1, self.reporter.message)
        if taken := self.trainer.together(run_state.load_start, self.progress):
            self.reporter.message(taken)
        cache = self._warm_cache()
        self.trainer.tell(warm_start, cache, Reporter())
        with self.trainer.timed("time/warm_start"):
            warm_start(self.trainer, cache, self.reporter)
        if not self.config.warm_start.steps:  # there was none
            self.trainer.seconds.clear()
        failpoints.failpoint("warm_start.done")
        run_state.save_reference(self.trainer, self.folder)
        metrics = self._evaluate() if self.config.run.eval_every else {}
        self._report_rule_errors()
        if metrics:  # empty without held-out problems
            self._log({"step": 0, **metrics})
            self.reporter.step(0, self.config.run.steps, metrics)
        self.save()
        self._check_best({"step": 0, **metrics})
        if (share := metrics.get("eval/crashed_share", 0.0)) > MOSTLY_CRASHED:
            raise self._stop_for_rules(share)

    def _warm_cache(self) -> Path | None:
        """Return the folder of the cache of warm starts, if this run is to use it and nobody else can write to it."""
        try:
            return open_cache() if self.config.warm_start.steps and self.config.warm_start.cache else None
        except OSError as error:
            self.reporter.message(f"warning: the warm start is neither kept nor taken from the cache: {error}")
            return None

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
        if saved.step > self.config.run.steps:
            raise ValueError(
                f"run.steps = {self.config.run.steps}, but {self.folder.path} is at step {saved.step}: set it to "
                f"{saved.step} to end the run there, or higher to go on"
            )
        self.trainer.together(run_state.restore_follower, saved.path.absolute())
        self.trainer.together(run_state.load_reference, self.folder.reference.absolute())
        # Steps after the checkpoint are repeated with the same results, and must not be logged twice.
        self.folder.rewind(self.progress.step, self.reporter.message)
        self._saver.saved = saved.step
        self.reporter.message(f"resumed from step {saved.step} ({saved.path})")
        before = saved.state["environment"]
        present = environment(self.trainer.policy.device, self.trainer.world.size)
        for name in dict.fromkeys((*present, "processes")):
            was, now = (each.get(name, 1 if name == "processes" else None) for each in (before, present))
            if was != now:
                self.reporter.message(f"warning: {name} was {was} and is {now}: results may differ in the last bits")

    def _end(self) -> None:
        """Save the run and, if it is finished, publish its model."""
        saved = self.save()
        if self.progress.step < self.config.run.steps:
            if not saved:
                raise self._stop(StopReason.NOT_SAVED, "a signal asked for it")
            self.stopped = StopReason.INTERRUPTED
            self.reporter.message(f"stopped after step {self.progress.step}; go on with: {self.resume_command}")
            return
        model = self.folder.model
        # With LoRA only the adapters are published, and they are whole.
        partial = self.config.model.shard and not self.config.model.lora_rank
        state = self.trainer.together(run_state.gather_model) if partial else None
        try:
            self._saver.make_room_for(lambda: run_state.publish_model(self.trainer.policy, model, state))
        except (OSError, SafetensorError) as error:
            self.model_missing = True
            message = f"the trained model could not be written to {model}: {error}. Free some space, then: "
            raise self._stop(StopReason.NOT_SAVED, message + self.resume_command) from None
        if not saved:
            raise self._stop(StopReason.NOT_SAVED, f"the trained model is in {model}")

    def _log(self, record: dict[str, float]) -> None:
        """Append the metrics of a step to metrics.jsonl; on a full disk they are written with a later step's."""
        self._check_folder()
        if problem := self._metrics_log.append(record):
            self._warn_once(self.folder.metrics, problem)
        else:
            self._unwritable.discard(self.folder.metrics)

    def _append(self, file: Path, record: dict[str, Any]) -> None:
        """Append to a file of the run that it can do without; warn at the first failure."""
        try:
            self.folder.append(file, record)
        except (OSError, ValueError) as error:
            self._warn_once(file, f"{file} could not be written: {error}")

    def _warn_once(self, path: Path, problem: str) -> None:
        if path not in self._unwritable:
            self._unwritable.add(path)
            self.reporter.message(f"warning: {problem}")

    def _handle_nonfinite(self, result: StepResult) -> None:
        """Record skipped updates, and stop the run if its weights are not finite or the recipe says so."""
        step, skipped = self.progress.step, int(result.metrics["update/skipped"])
        self.progress.updates_skipped += skipped
        if not skipped:
            return
        for record in result.nonfinite:
            self._append(self.folder.nonfinite, record)
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
        self._agent_error = ""
        for record in self.trainer.rule_errors.take(self.progress.step):
            self._append(self.folder.rule_errors, record)
            if record["what"] == "agent":
                self._agent_error = record["error"]
            if record["rule"] not in self._failed_rules:
                self._failed_rules.add(record["rule"])
                self.reporter.message(describe_error(record, self.folder.rule_errors))
        output = self.folder.rule_output
        if not self._output_named and output.exists() and output.stat().st_size:
            self._output_named = True
            self.reporter.message(f"note: a rule, tool or agent of yours prints; it goes to {output}")

    def _check_rules(self, metrics: dict[str, float]) -> None:
        """Stop the run if its rules fail on most responses: at once at its start and end, else after some steps."""
        # Not at once in the middle: a service that others use too may be away for a minute.
        share = metrics.get("reward/crashed_share", 0.0)
        self._crashed_steps = self._crashed_steps + 1 if share > MOSTLY_CRASHED else 0
        at_an_end = self.progress.step in (self._first_step, self.config.run.steps)
        if self._crashed_steps and (at_an_end or self._crashed_steps >= MAX_CRASHED_STEPS):
            self.save()
            raise self._stop_for_rules(share)

    def _check_best(self, record: dict[str, float]) -> None:
        """Keep the checkpoint of a new best held-out score; stop after `run.early_stop` evaluations without one."""
        before, best, run = self._best, best_evaluation([record], self._best), self.config.run
        self._best = best
        if best is None or best == before:  # the step has no evaluation
            return
        if best.step == record["step"]:
            if run.keep_best and self._save_extra(self.folder.best, keep=1):
                # Others may be of steps after the one that the run was resumed from, which count no more.
                for path in list_checkpoints(self.folder.best):
                    if path.name != f"step-{best.step:08d}":
                        checkpoints.remove(path)
        elif run.early_stop and best.later >= run.early_stop and record["step"] != run.steps:
            self.save()
            raise self._stop(
                StopReason.NO_BETTER,
                f"no better held-out score in {best.later} evaluations: the best is {best.score:.3g}, of step "
                f"{best.step}. To continue regardless: {self.resume_command} --set run.early_stop=0",
            )

    def _save_extra(self, folder: Path, keep: int) -> bool:
        """Write a checkpoint that the run can do without; return whether it is there."""
        try:
            self._save_to(folder, keep)
        except (checkpoints.CheckpointError, OSError) as error:
            self._warn_once(folder, str(error))
            return False
        return True

    def _check_grading_time(self, metrics: dict[str, float]) -> None:
        """Give advice once if grading takes most of the time."""
        if self._slow_steps < SLOW_STEPS:
            self._slow_steps = self._slow_steps + 1 if has_slow_grading(metrics) else 0
            if self._slow_steps == SLOW_STEPS:
                self.reporter.message(slow_grading_advice(metrics))

    def _stop_for_rules(self, share: float) -> RunStoppedError:
        who = "the agent" if self._agent_error else "the rules"
        diagnosis = crashed_diagnosis(share, self._crashed_steps, self.folder.rule_errors, who, self._agent_error)
        return self._stop(StopReason.RULES, f"{diagnosis}. With that mended: {self.resume_command}")

    def _check_alarms(self, record: dict[str, float]) -> list[Alarm]:
        """Handle the alarms of a step; return those that stop the run."""
        by_action = self._alarms.handle(record)
        for alarm in (alarm for alarms in by_action.values() for alarm in alarms):
            self._loggers.alarm(alarm)
        if by_action["save"] or by_action["stop"]:
            if self.trainer.recorder is not None:
                self.trainer.recorder.keep(steps_around(self.progress.step))
            self._save_extra(self.folder.alarm_checkpoints, KEEP_ALARM_CHECKPOINTS)
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
        if self.unsaved and reason not in (StopReason.FOLDER_GONE, StopReason.NONFINITE):
            message += f". The last checkpoint is missing: {self._saver.error}. "
            message += f"Free some space, then go on {self._saver.way_back}: {self.resume_command}"
        return RunStoppedError(reason, message)

    @property
    def unsaved(self) -> bool:
        """Whether the last checkpoint of the run could not be written."""
        return self._saver.failed > 0

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


def _keep_output(_: Trainer, path: Path) -> None:
    """Have a rank send what rules print to the run's file."""
    keep_output(path)
