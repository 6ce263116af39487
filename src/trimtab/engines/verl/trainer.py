"""verl's synchronous v1 trainer with a plan: `trainer.v1.trainer_mode=trimtab`.

When verl has computed the advantages, the driver has the whole batch. It plans every mini-batch as verl will split it
and adds the plan to the batch as fields, which the loss on the workers reads.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import validate_config
from verl.utils.debug import marked_timer

from trimtab.engines.common import load_state, save_state, startup_message
from trimtab.engines.options import EngineOptions
from trimtab.engines.verl import agent_loop, recording  # noqa: F401  (registers the agent loop in every process)
from trimtab.engines.verl.options import check_config, read_options, reward_warning
from trimtab.engines.verl.planning import METRIC_PREFIX, SENT_COLUMNS, PlannedLoss, fields_read, plan_step
from trimtab.own_parts import module_folders
from trimtab.trainer.config import build_objective


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
        self.recorder = recording.start_recording(self.options, self.objective, self.tokenizer, self.global_steps)
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
        fields = [*fields_read({*self.objective.needs, *recorded}), *(recording.FIELDS if self.recorder else ())]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        size = actor.ppo_mini_batch_size * rollout.n
        planned = plan_step(self.objective, data, size, ranks, self.tokenizer, recorded)
        metrics.update(planned.metrics)
        self._count_missing(batch, metrics)
        if self.recorder:
            end_token = int(self.tokenizer.eos_token_id)
            recording.record_step(self.recorder, self.global_steps, planned, data, self.objective, end_token)
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
