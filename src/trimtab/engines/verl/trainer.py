"""verl's synchronous v1 trainer with a plan: `trainer.v1.trainer_mode=trimtab`.

After verl has computed the advantages, the driver sees the whole batch. It plans every mini-batch as verl will cut it
and puts what was decided beside the data, as columns that travel to the workers; the loss there reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import validate_config
from verl.utils.debug import marked_timer

from trimtab.engines.common import announcement, load_state, make_objective, save_state
from trimtab.engines.verl import recording
from trimtab.engines.verl.columns import SENT
from trimtab.engines.verl.loss import PlannedLoss
from trimtab.engines.verl.options import check, read_options
from trimtab.engines.verl.planning import METRICS, fields_read, plan_step


@register_trainer("trimtab")
class TrimtabTrainer(PPOTrainerSync):
    """verl's sync trainer whose actor updates follow trimtab's plan."""

    def __init__(self, config: DictConfig) -> None:
        section = OmegaConf.to_container(config.trimtab, resolve=True) if "trimtab" in config else None
        self.options = read_options(section)
        self.objective = make_objective(self.options.objective)
        check(config, self.options, self.objective)
        if "ref_logp" in self.objective.needs:
            _load_reference(config)
        super().__init__(config)
        print(announcement(self.objective), flush=True)  # noqa: T201  (how verl itself speaks on the driver)

    def _build_replay_buffer(self) -> Any:
        # verl asks for this name wherever sync and async runs differ, and asks first here.
        self.trainer_mode = "sync"
        return super()._build_replay_buffer()

    def on_init_end(self) -> None:
        """Give every worker the loss that reads the plan."""
        self.actor_rollout_wg.set_loss_fn(PlannedLoss(self.options.objective))
        self.recording = recording.start_recording(self.options, self.objective, self.tokenizer, self.global_steps)
        super().on_init_end()

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's training loop; at its end, however it comes, the record is closed."""
        try:
            super().fit(agent_loop_manager)
        finally:
            if self.recording:
                self.recording.close()

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with marked_timer("trimtab_plan", self.timing_raw, color="brown"):
            batch = self._plan(batch, metrics)
        batch = super()._update_actor(batch, metrics)
        _claim(metrics)
        return batch

    def _plan(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Plan the updates of a batch, and put the plans beside its data."""
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        more = self._recorded_fields()
        fields = [*fields_read({*self.objective.needs, *more}), *(recording.FIELDS if self.recording else ())]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        size = actor.ppo_mini_batch_size * rollout.n
        planned = plan_step(self.objective, data, size, ranks, self.tokenizer, more)
        metrics.update(planned.metrics)
        if self.recording:
            self.recording.step(self.global_steps, planned, data, self.objective)
        put = TensorDict(planned.fields, batch_size=len(batch.keys))
        batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=put)
        batch.extra_info[SENT] = planned.sent
        return batch

    def _recorded_fields(self) -> list[str]:
        """What a record holds of the batch, of what this run measures."""
        if not self.recording:
            return []
        correction = self.config.algorithm.get("rollout_correction") or {}
        measured = [] if correction.get("bypass_mode") else ["entropy"]
        sampler = ["sampler_logp"] if self.config.actor_rollout_ref.rollout.calculate_log_probs else []
        return ["token", *measured, *sampler]

    def _save_checkpoint(self) -> None:
        # Before verl names this step the latest, so that no checkpoint is ever without its state and its record.
        if self.recording:
            self.recording.recorder.flush()
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


def _claim(metrics: dict[str, Any]) -> None:
    """The loss's metrics under their own names; without them it was not our loss that ran."""
    mine = [name for name in metrics if name.startswith(f"actor/{METRICS}")]
    if not mine:
        raise RuntimeError(
            "trimtab: the update was made with another loss than trimtab's, so the run stops: something else calls "
            "set_loss_fn, or the workers' trimtab is not the driver's"
        )
    for name in mine:
        metrics[name.removeprefix("actor/")] = metrics.pop(name)


def _load_reference(config: DictConfig) -> None:
    """Make verl load and score with the reference model; its own KL goes with its loss."""
    with open_dict(config):
        config.actor_rollout_ref.actor.use_kl_loss = True
    validate_config(config=config, use_reference_policy=True, use_critic=False)
