"""verl's synchronous v1 trainer with a plan: `trainer.v1.trainer_mode=trimtab`.

When verl has computed the advantages, the driver has the whole batch. It plans every mini-batch as verl will split it
and adds the plan to the batch as fields, which the loss on the workers reads.

With `+trimtab.record=FOLDER` it also records batch and plans. The forward passes of the updates stay on the workers, so
the columns `new_logp` and `clipped` are missing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import validate_config
from verl.utils.debug import marked_timer

from trimtab.data import Problem, Response, Sample, rollout_ids
from trimtab.engines import AGENT_STATS, OWN_AGENT_LOOP
from trimtab.engines.agents import most_have_failed, rollout_metrics, start_agents
from trimtab.engines.common import (
    load_state,
    observed_spans,
    require_unused,
    save_state,
    start_recorder,
    startup_message,
    tool_tokens,
    verdict_of_score,
)
from trimtab.engines.options import EngineOptions
from trimtab.engines.verl import agent_loop  # noqa: F401  (registers the agent loop in every process)
from trimtab.engines.verl.options import check_config, read_options, reward_warning
from trimtab.engines.verl.planning import (
    METRIC_PREFIX,
    SENT_COLUMNS,
    Place,
    PlannedLoss,
    PlannedStep,
    fields_read,
    places,
    plan_step,
)
from trimtab.objectives import Objective
from trimtab.own_parts import module_folders
from trimtab.record import Manifest, Recorder, RecordSettings, update_record
from trimtab.trainer.config import build_objective
from trimtab.trainer.train import observed_entropy, tokenizer_vocabulary


@register_trainer("trimtab")
class TrimtabRayTrainer(PPOTrainerSync):
    """verl's synchronous trainer with actor updates by trimtab's plans."""

    def __init__(self, config: DictConfig) -> None:
        section = OmegaConf.to_container(config.trimtab, resolve=True) if "trimtab" in config else None
        self.options = read_options(section)
        self.objective = build_objective(self.options.objective)
        check_config(config, self.options, self.objective)
        _try_own_parts(config, self.options)
        if "ref_logp" in self.objective.needs:
            _load_reference(config)
        super().__init__(config)
        print(startup_message(self.objective), flush=True)  # noqa: T201  (verl itself prints on the driver)
        if reward_warning(config):
            warnings.warn(reward_warning(config), stacklevel=2)

    def _build_replay_buffer(self) -> Any:
        # verl branches on this name wherever sync and async runs differ, for the first time here.
        self.trainer_mode = "sync"
        return super()._build_replay_buffer()

    def on_init_end(self) -> None:
        """Send the loss that reads the plan to every worker."""
        self.actor_rollout_wg.set_loss_fn(PlannedLoss(self.options.objective, tuple(module_folders())))
        self.missing = 0  # responses so far
        self.recorder = start_recording(self.options, self.objective, self.tokenizer, self.global_steps)
        super().on_init_end()

    def fit(self, agent_loop_manager: Any) -> None:
        """Run verl's training loop, and close the record however it ends."""
        try:
            super().fit(agent_loop_manager)
        finally:
            if self.recorder:
                self.recorder.close()

    def _balance_batch(self, batch: Any, *args: Any, **settings: Any) -> Any:
        self._rows = len(batch)
        rollouts = self._wanted()
        if self._has_agent() and 2 * (missing := rollouts - _rollouts(batch)) > rollouts:
            raise most_have_failed(missing, rollouts, "The workers' log has the agent's first error in full.")
        return super()._balance_batch(batch, *args, **settings)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Return what verl pads the number of rows to a multiple of."""
        if self._rows <= self._wanted():
            return int(super()._get_required_batch_multiple(dp_size))
        # More rows than rollouts, since some have several branches. verl would make more updates of as many rows as
        # ever; here there are as many updates as without branches.
        actor, rollout, ref = (self.config.actor_rollout_ref[name] for name in ("actor", "rollout", "ref"))
        micro = (
            0 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
            0 if rollout.log_prob_use_dynamic_bsz else rollout.log_prob_micro_batch_size_per_gpu,
            0 if ref.log_prob_use_dynamic_bsz else ref.log_prob_micro_batch_size_per_gpu,
        )
        return self._updates() * math.lcm(dp_size * math.lcm(*(int(size or 1) for size in micro)), int(rollout.n))

    def _updates(self) -> int:
        """Return the number of updates of a step."""
        prompts = int(self.config.actor_rollout_ref.actor.ppo_mini_batch_size)
        return math.ceil(int(self.config.data.train_batch_size) / prompts)

    def _wanted(self) -> int:
        """Return the number of rollouts of a step."""
        return int(self.config.data.train_batch_size) * int(self.config.actor_rollout_ref.rollout.n)

    def _has_agent(self) -> bool:
        return bool(self.config.actor_rollout_ref.rollout.agent.default_agent_loop == OWN_AGENT_LOOP)

    @contextmanager
    def _minibatch_of(self, rows: int) -> Iterator[None]:
        """Make verl take as many rows for an update."""
        actor, samples = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
        configured = actor.ppo_mini_batch_size
        with open_dict(self.config):
            actor.ppo_mini_batch_size = rows // samples
        try:
            yield
        finally:
            with open_dict(self.config):
                actor.ppo_mini_batch_size = configured

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        actor, samples = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
        branches = self._rows > self._wanted()
        rows = len(batch) // self._updates() if branches else actor.ppo_mini_batch_size * samples
        with marked_timer("trimtab_plan", self.timing_raw, color="brown"):
            batch = self._plan(batch, metrics, rows)
        with self._minibatch_of(rows):
            batch = super()._update_actor(batch, metrics)
        _rename_loss_metrics(metrics)  # also checks that our loss was used
        return batch

    def _plan(self, batch: Any, metrics: dict[str, Any], size: int) -> Any:
        """Plan the updates of a batch, of `size` rows each, and add the plans to its fields."""
        # verl has no public way to learn over how many data-parallel ranks it will split the batch.
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        recorded = self._recorded_columns()
        fields = [*fields_read({*self.objective.needs, *recorded}), *(FIELDS if self.recorder else ())]
        fields += ["extra_fields"] if self._has_agent() else []
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = places(batch.keys)
        # Other agent loops too may return several outputs.
        branched = rows if self._has_agent() or any(row.branch for row in rows) else None
        rollouts = (
            None if branched is None else rollout_ids([row.prompt for row in rows], [row.rollout for row in rows])
        )
        planned = plan_step(self.objective, data, size, ranks, self.tokenizer, recorded, rollouts)
        metrics.update(planned.metrics)
        self._count_missing(batch, metrics)
        if self._has_agent():
            metrics.update(agent_metrics(batch.tags, _field(data, "extra_fields")))
        if self.recorder:
            end_token = int(self.tokenizer.eos_token_id)
            record_step(self.recorder, self.global_steps, planned, data, self.objective, end_token, branched)
        # As fields of the batch they are split and padded with the responses they belong to.
        put = TensorDict(planned.fields, batch_size=len(batch.keys))
        batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=put)
        batch.extra_info[SENT_COLUMNS] = planned.sent
        return batch

    def _count_missing(self, batch: Any, metrics: dict[str, Any]) -> None:
        """Count the rollouts that verl lost. It logs the error of a tool, agent loop or reward, pads and goes on."""
        wanted = self._wanted()
        missing = max(0, wanted - _rollouts(batch))
        if missing and not self.missing:
            text = (
                f"trimtab: {missing} of {wanted} responses of this step are missing; the error is in the workers' log"
            )
            warnings.warn(text, stacklevel=2)
        self.missing += missing
        metrics[f"{METRIC_PREFIX}responses/missing"] = missing

    def _recorded_columns(self) -> list[str]:
        """Return the columns to record besides those that the objective reads, as far as this run has them."""
        if not self.recorder:
            return []
        correction = self.config.algorithm.get("rollout_correction") or {}
        entropy = [] if correction.get("bypass_mode") else ["entropy"]
        sampler = ["sampler_logp"] if self.config.actor_rollout_ref.rollout.calculate_log_probs else []
        return ["token", *entropy, *sampler]

    def _save_checkpoint(self) -> None:
        # Before verl marks this step as the latest: every checkpoint has the controllers' state and its records.
        if self.recorder:
            self.recorder.flush()
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        save_state(folder, self.objective)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.global_steps:
            return
        trainer = self.config.trainer
        folder = Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
        load_state(Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else folder, self.objective)


def _rename_loss_metrics(metrics: dict[str, Any]) -> None:
    """Remove verl's prefix from the metrics of our loss. If there are none, another loss was used."""
    ours = [name for name in metrics if name.startswith(f"actor/{METRIC_PREFIX}")]
    if not ours:
        raise RuntimeError(
            "trimtab: the update used another loss than trimtab's: something else calls set_loss_fn, or the workers "
            "have another version of trimtab than the driver"
        )
    for name in ours:
        metrics[name.removeprefix("actor/")] = metrics.pop(name)


def _rollouts(batch: Any) -> int:
    """Return how many rollouts there are in a batch of verl's, whose rows are their outputs."""
    pairs = zip(batch.keys, batch.tags, strict=True)
    return len({key.rsplit("_", 1)[0] for key, tag in pairs if not tag.get("is_padding", False)})


def agent_metrics(tags: Sequence[Mapping[str, Any]], extra_fields: Sequence[Any]) -> dict[str, float]:
    """Return the metrics of the rollouts of users' agents that are in a batch."""
    found = [
        fields[AGENT_STATS]
        for tag, fields in zip(tags, extra_fields, strict=True)
        if not tag.get("is_padding", False) and isinstance(fields, Mapping) and AGENT_STATS in fields
    ]
    return {f"{METRIC_PREFIX}{name}": value for name, value in rollout_metrics(found).items()}


def _try_own_parts(config: DictConfig, options: EngineOptions) -> None:
    """Try trimtab's tools or agent, if the run has any, and tell the workers where the driver looks for modules."""
    # Now: an error in a worker would only lose its conversations, one after another.
    if options.has_tools:
        assert options.tool_set.names
    if options.has_agent:
        start_agents(options).close()
    if options.has_tools or options.has_agent:
        with open_dict(config):
            config.trimtab.tool_folders = list(options.tool_folders)


def _load_reference(config: DictConfig) -> None:
    """Make verl load the reference model and score with it; verl's own KL term is part of the loss we replace."""
    with open_dict(config):
        config.actor_rollout_ref.actor.use_kl_loss = True
    validate_config(config=config, use_reference_policy=True, use_critic=False)


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
    recorder: Recorder,
    step: int,
    planned: PlannedStep,
    data: Any,
    objective: Objective,
    end_token: int,
    branched: Sequence[Place] | None = None,
) -> None:
    """Record a step that the driver has planned; `branched` are the places of rows that are branches of rollouts."""
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
        samples(planned, data, end_token, branched),
        updates,
        observed_entropy=observed_entropy(planned.tokens),
        controllers=objective.state_dict(),
    )


def samples(
    planned: PlannedStep, data: Mapping[str, Any], end_token: int, branched: Sequence[Place] | None = None
) -> list[Sample]:
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
        place = None if branched is None else branched[row]
        sample = counts[group] if place is None else place.rollout
        # One that ends with the reply of a tool was cut there, though its last sampled token ended a turn.
        finished = bool(len(tokens) and sampled[-1] and tokens[-1] == end_token)
        found.append(
            Sample(
                Problem((), "" if truth is None else str(truth), "", str(sources[row])),
                prompt=prompts[row].tolist(),
                response=Response(tokens, (), finished, sample, observed_spans(sampled)),
                group=group,
                branch=None if place is None else place.branch,
                verdict=verdict_of_score(reward),  # verl grades, and passes on the score only
                reward=reward,
            )
        )
    return found


def _field(data: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return a field without a tensor, one value per response; empty strings if verl does not have it."""
    if name not in data.keys():  # noqa: SIM118  (a TensorDict)
        return [""] * len(data["prompts"].unbind())
    values = data[name]
    return list(values.tolist() if hasattr(values, "tolist") else values)
