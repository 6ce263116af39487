"""verl's synchronous v1 trainer with a plan: `trainer.v1.trainer_mode=trimtab`.

When verl has computed the advantages, the driver has the whole batch. It plans every mini-batch as verl will split it
and adds the plan to the batch as fields, which the loss on the workers reads.

With `+trimtab.record=FOLDER` it also records batch and plans. The forward passes of the updates stay on the workers, so
the columns `new_logp` and `clipped` are missing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import validate_config
from verl.utils.debug import marked_timer

from trimtab.data import Problem, Response, Sample
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
from trimtab.engines.verl.planning import METRIC_PREFIX, SENT_COLUMNS, PlannedLoss, PlannedStep, fields_read, plan_step
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
        _start_tools(config, self.options)
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

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with marked_timer("trimtab_plan", self.timing_raw, color="brown"):
            batch = self._plan(batch, metrics)
        batch = super()._update_actor(batch, metrics)
        _rename_loss_metrics(metrics)  # also checks that our loss was used
        return batch

    def _plan(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Plan the updates of a batch, and add the plans to its fields."""
        actor = self.config.actor_rollout_ref.actor
        rollout = self.config.actor_rollout_ref.rollout
        # verl has no public way to learn over how many data-parallel ranks it will split the batch.
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        recorded = self._recorded_columns()
        fields = [*fields_read({*self.objective.needs, *recorded}), *(FIELDS if self.recorder else ())]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        size = actor.ppo_mini_batch_size * rollout.n
        planned = plan_step(self.objective, data, size, ranks, self.tokenizer, recorded)
        metrics.update(planned.metrics)
        self._count_missing(batch, metrics)
        if self.recorder:
            end_token = int(self.tokenizer.eos_token_id)
            record_step(self.recorder, self.global_steps, planned, data, self.objective, end_token)
        # As fields of the batch they are split and padded with the responses they belong to.
        put = TensorDict(planned.fields, batch_size=len(batch.keys))
        batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=put)
        batch.extra_info[SENT_COLUMNS] = planned.sent
        return batch

    def _count_missing(self, batch: Any, metrics: dict[str, Any]) -> None:
        """Count the responses that verl lost. It logs the error of a tool, agent loop or reward, pads and goes on."""
        wanted = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        missing = max(0, wanted - sum(not tag.get("is_padding", False) for tag in batch.tags))
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


def _start_tools(config: DictConfig, options: EngineOptions) -> None:
    """Try trimtab's tools, if the run has any, and tell the workers where the driver looks for their modules."""
    if options.has_tools:
        # Now: an error in a worker would only lose its conversations, one after another.
        assert options.tool_set.names
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
    recorder: Recorder, step: int, planned: PlannedStep, data: Any, objective: Objective, end_token: int
) -> None:
    """Record a step that the driver has planned."""
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
        samples(planned, data, end_token),
        updates,
        observed_entropy=observed_entropy(planned.tokens),
        controllers=objective.state_dict(),
    )


def samples(planned: PlannedStep, data: Mapping[str, Any], end_token: int) -> list[Sample]:
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
        # One that ends with the reply of a tool was cut there, though its last sampled token ended a turn.
        finished = bool(len(tokens) and sampled[-1] and tokens[-1] == end_token)
        found.append(
            Sample(
                Problem((), "" if truth is None else str(truth), "", str(sources[row])),
                prompt=prompts[row].tolist(),
                response=Response(tokens, (), finished, counts[group], observed_spans(sampled)),
                group=group,
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
