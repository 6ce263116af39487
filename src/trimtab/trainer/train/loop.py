"""The training loop: sample, grade, score, plan, update. One page that reads like the algorithm."""

from __future__ import annotations

from contextlib import closing

from trimtab import failpoints
from trimtab.objectives import NotFiniteError
from trimtab.trainer.config import Config
from trimtab.trainer.model import UpdateOptions, UpdateResult, update
from trimtab.trainer.parallel import World
from trimtab.trainer.train.agents import agent_metrics
from trimtab.trainer.train.metrics import StepResult, memory_metrics, nonfinite_records, step_metrics
from trimtab.trainer.train.recording import FinishedUpdate, record_step
from trimtab.trainer.train.rollouts import collect_rollouts, sample_texts
from trimtab.trainer.train.run import Run
from trimtab.trainer.train.scoring import Minibatch, measured_change, rescore, score_rollouts
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer, gc_pause, keep_freed_memory, set_threads


def train(run: Run) -> None:
    """Train a run from its start, or from its newest checkpoint, to its end."""
    with run.folder.locked():
        try:
            trainer = run.prepare()
        except BaseException:
            run.discard_if_unused()  # while it is locked: a moment later the folder may be another run's
            raise
        # `closing` ends the generator, and with it the recorder and Ctrl-C handling, before an exception leaves here.
        with closing(run.steps()) as steps, gc_pause() as freeze_once:
            for _ in steps:
                run.finish_step(trainer.together(scheduled_step, run.progress))
                freeze_once()


def follow_run(config: Config, world: World) -> None:
    """Take part in a run as another rank than 0, until rank 0 ends it."""
    set_threads(config)
    keep_freed_memory()
    trainer = build_trainer(config, world=world)
    set_threads(config, trainer.policy.num_weights)
    with closing(trainer), gc_pause() as freeze_once:
        trainer.follow(freeze_once)


def scheduled_step(trainer: Trainer, progress: RunProgress) -> StepResult:
    """Take a step with the learning rate and the dropout that belong to its number."""
    trainer.set_learning_rate(progress.step)
    trainer.seed_dropout("dropout", progress.step)
    return train_step(trainer, progress)


def train_step(trainer: Trainer, progress: RunProgress) -> StepResult:
    """Collect the experience of one step, update the policy on its mini-batches, and advance `progress`."""
    with trainer.timed("time/rollout"):
        rollouts = collect_rollouts(trainer, progress)
        with trainer.timed("time/scoring"):
            experience = score_rollouts(trainer, rollouts)
    trainer.objective.observe(experience.batch)  # controllers see every batch, also one without tokens
    finished: list[FinishedUpdate] = []
    with trainer.timed("time/update"):
        minibatches = experience.minibatches(trainer.config.update.passes)
        results = [update_policy(trainer, minibatch, finished) for minibatch in minibatches]
    if experience.nonfinite is not None:
        results = [_skipped(experience.nonfinite)]
    measured = (
        measured_change(trainer, experience) if is_due(trainer.config.update.measure_every, progress.step) else {}
    )
    # A step that was skipped moves on as well, or a bad prompt could hold the run up for ever.
    progress.position = experience.rollouts.position
    progress.step += 1
    if trainer.recorder is not None:
        record_step(trainer.recorder, progress.step, experience, finished, trainer.objective)
    failpoints.failpoint("step.done")
    leads = trainer.world.leads  # the only one that has texts and verdicts
    ended = [] if trainer.agent_use is None else trainer.agent_use.take_ended()
    metrics = step_metrics(experience, results, trainer.config.reward) | agent_metrics(ended) if leads else {}
    metrics = trainer.world.from_leader(metrics)
    metrics |= measured | trainer.take_seconds() | memory_metrics(trainer.policy.device)
    if trainer.config.update.warmup_steps or trainer.config.decay_steps is not None:
        metrics["update/lr"] = trainer.optimizer.param_groups[0]["lr"]
    if not leads:
        return StepResult(metrics)
    nonfinite = nonfinite_records(progress.step, experience, results)
    return StepResult(metrics, nonfinite, sample_texts(experience.rollouts.responses))


def update_policy(trainer: Trainer, minibatch: Minibatch, finished: list[FinishedUpdate]) -> UpdateResult:
    """Plan one update and take it; append it to `finished` if it is to be recorded."""
    config = trainer.config
    # The first update's policy is the one that scored the step, so its statistics are there already.
    if "current_logp" in trainer.objective.needs and minibatch.number > 0:
        try:
            minibatch = rescore(trainer, minibatch)
        except NotFiniteError as error:
            return _skipped(error)
    plan = trainer.objective.plan(minibatch.batch)
    failpoints.failpoint("update.planned")
    options = UpdateOptions(
        config.update.token_budget, config.update.head_chunk, config.rollout.temperature, config.update.max_grad_norm
    )
    result = update(
        trainer.policy,
        trainer.optimizer,
        trainer.objective,
        plan,
        minibatch.transcripts,
        options,
        trainer.world,
        trainer.loss_scale,
    )
    # A record has every response once, as the last pass trained on it: its log-probabilities are the furthest from the
    # rollout's. What is not recorded leaves its plan's memory to the next update.
    if trainer.recorder is not None and minibatch.last_pass:
        finished.append(FinishedUpdate(minibatch, plan, result))
    failpoints.failpoint("update.done")
    return result


def is_due(every: int, step: int) -> bool:
    """Return whether something that happens every so many steps happens at this one, counted from 0."""
    return every > 0 and step % every == 0


def _skipped(error: NotFiniteError) -> UpdateResult:
    """Return the result of an update that could not be planned."""
    return UpdateResult({}, taken=False, nonfinite=error.field, nonfinite_responses=error.responses)
