"""trimtab's objectives inside TRL's GRPOTrainer: the plan where the rollout batch exists, the loss where TRL's was.

`TrimtabTrainer` is TRL's trainer in everything else: data sets, reward functions, vLLM, tools, accelerate, DeepSpeed,
LoRA. A plan is made over all processes and all micro-batches of an optimizer step, before the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.engines.common import (
    LOSS_METRICS,
    announcement,
    check_version,
    load_state,
    make_objective,
    missing_engine,
    objective_table,
    over_ranks,
    save_state,
)
from trimtab.engines.trl.batch import (
    ENTROPY,
    PLAN,
    REWARD,
    ROW,
    SEGMENT,
    Ranks,
    Table,
    advantages,
    forward_inputs,
    segments,
    token_batch,
    trained,
)
from trimtab.engines.trl.options import TrimtabConfig, check_sampler, check_settled, with_reference
from trimtab.engines.trl.recording import Recording, Rollouts, start_recording
from trimtab.objectives import LossOutput, Plan, TokenBatch, kl_estimate
from trimtab.policy import Policy
from trimtab.record import Settings

try:
    from accelerate.utils import gather_object
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from trl import GRPOTrainer
    from trl.models.utils import disable_gradient_checkpointing
except ImportError as error:
    raise missing_engine("trl", error) from error

__all__ = ["TrimtabConfig", "TrimtabTrainer"]

check_version("trl")

# Sums over the tokens of a part, for TRL's own `entropy` and `kl`.
_SUMS = ("tokens", "entropy", "kl")


class TrimtabTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` with the loss of an objective: see `TrimtabConfig.objective`."""

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: TrimtabConfig | None = None, *more: Any, **options: Any
    ) -> None:
        if not isinstance(args, TrimtabConfig):
            raise TypeError(
                f"args is {type(args).__name__}: give a trimtab.engines.trl.TrimtabConfig, which is TRL's GRPOConfig "
                "with an `objective`"
            )
        check_settled(args)
        self.objective_table = objective_table(args.objective)
        self.objective = make_objective(self.objective_table)
        self._passes: list[tuple[Tensor, Tensor]] | None = None
        super().__init__(model, reward_funcs, with_reference(args, self.objective), *more, **options)
        check_sampler(self.objective, self.use_vllm, self.rollout_func is not None)
        self._comm = Ranks(self.accelerator) if self.accelerator.num_processes > 1 else None
        self._rewards: Tensor = torch.empty(0)
        self._mean_reward = 0.0  # of the present rollout batch
        self._rollouts = 0  # rollout batches so far
        self._updates = 0  # updates on the present one so far
        self._parts: dict[int, Plan] = {}  # by micro-step: of the update that is under way
        self._outputs: list[tuple[LossOutput, Tensor]] = []
        self._sums: list[dict[str, Tensor]] = []
        self._losses = 0
        self._recording: Recording | None = None
        self.accelerator.print(announcement(self.objective))

    def train(self, *args: Any, **options: Any) -> Any:
        """TRL's `train`; records are complete when it returns."""
        try:
            return super().train(*args, **options)
        finally:
            if self._recording is not None:
                self._recording.close()
                self._recording = None

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, compute_entropy: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's forward pass. While TRL scores a rollout, what its policy gives is kept with the entropy."""
        keep = self._passes is not None and model is self.model
        logps, entropies, aux = super()._get_per_token_logps_and_entropies(
            model, *args, compute_entropy=compute_entropy or keep, **options
        )
        if keep and self._passes is not None:
            self._passes.append((logps, entropies))
        return logps, entropies, aux

    def _calculate_rewards(self, *args: Any, **options: Any) -> Tensor:
        """The rewards of all processes, kept for the advantages."""
        self._rewards = super()._calculate_rewards(*args, **options)
        return self._rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's rollout batch of this process, with the columns that planning reads."""
        self._passes = []
        try:
            table: dict[str, Any] = super()._generate_and_score_completions(inputs)
            passes = self._passes
        finally:
            self._passes = None
        first = self.accelerator.process_index * len(inputs)
        mine = slice(first, first + len(inputs))
        reward = self._total_reward()
        if self.args.advantages == "objective":
            samples = self.num_generations if self.model.training else self.num_generations_eval
            ours = advantages(self.objective, reward, samples)
            self._show_advantages(ours)
            table["advantages"] = ours[mine]
        table["old_per_token_logps"], table[ENTROPY] = self._old(table, passes)
        table[REWARD] = reward[mine]
        table[ROW] = torch.arange(mine.start, mine.stop, device=reward.device)
        if "segment" in self.objective.needs:
            table[SEGMENT] = segments(table, self._tokenizer)
        if self.model.training:
            self._rollouts, self._updates = self._rollouts + 1, 0
            self._mean_reward = float(reward.nanmean())
        return table

    def _total_reward(self) -> Tensor:
        """One reward per response of all processes; NaN where no function gave one."""
        weighted: Tensor = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(dim=1)
        return weighted.masked_fill(self._rewards.isnan().all(dim=1), torch.nan)

    def _show_advantages(self, ours: Tensor) -> None:
        """Put our advantages into TRL's table of completions, in place of its own."""
        shown = self._logs["advantages"]
        for _ in range(min(len(ours), len(shown))):
            shown.pop()
        shown.extend(ours.tolist())

    def _old(self, table: Table, passes: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies under the policy that sampled; from TRL's own pass where it made one."""
        for logps, entropies in passes:
            if logps is table.get("old_per_token_logps"):
                return logps, entropies
        return self._measure(table)

    @torch.no_grad()
    def _measure(self, table: Table) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies under the policy as it is now, micro-batch by micro-batch."""
        training = self.model.training
        rows = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            logps, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model, **forward_inputs(table), batch_size=rows, compute_entropy=True
            )
        assert entropies is not None
        return logps, entropies

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """TRL's micro-batch with its part of the plan of the update it belongs to."""
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return {**inputs, PLAN: self.objective.plan(token_batch([inputs], self.objective), self._comm)}
        if self._step not in self._parts:
            self._begin_update()
        return {**inputs, PLAN: self._parts[self._step]}

    def _begin_update(self) -> None:
        """Plan the update whose first micro-batch comes now."""
        first, count = self._step % self.args.steps_per_generation, self.current_gradient_accumulation_steps
        tables = self._buffered_inputs[first : first + count]
        if len(tables) < count:
            raise RuntimeError(
                f"an update of {count} micro-batches starts at the {first + 1}. of {len(self._buffered_inputs)} of its "
                "rollout batch, so its plan cannot be made: let the data set hold whole rollout batches"
            )
        if not self._updates and self.objective.controllers:
            self.objective.observe(token_batch(self._buffered_inputs, self.objective), self._comm)
        now = None
        if self._updates and "current_logp" in self.objective.needs:
            now = tuple(torch.cat(pair) for pair in zip(*map(self._measure, tables), strict=True))
        batch = token_batch(tables, self.objective, now)  # type: ignore[arg-type]
        plan = self.objective.plan(batch, self._comm)
        sizes = [len(table["completion_ids"]) for table in tables]
        self._parts = dict(enumerate(plan.split(sizes), start=self._step))
        self._outputs, self._sums = [], []
        self._record(batch, plan, tables)
        self._updates += 1

    def _compute_loss(self, model: Any, inputs: Table) -> Tensor:
        """The objective's loss of one micro-batch; summed over an update and all processes it is the mini-batch's."""
        logps, entropies, aux = self._get_per_token_logps_and_entropies(
            model, **forward_inputs(inputs), compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        mask, part = trained(inputs), inputs[PLAN]
        new_logp = logps[mask]
        out = self.objective.loss(new_logp, part)
        self._losses += 1
        self._note(out, new_logp.detach(), entropies[mask].detach(), inputs)  # type: ignore[index]
        # Gradients are averaged over processes; TRL and accelerate divide by nothing else.
        loss = out.loss if self._comm is None else out.loss * self.accelerator.num_processes
        if aux is not None:
            steps = self.current_gradient_accumulation_steps if self.model.training else 1
            loss = loss + self.router_aux_loss_coef * aux / steps
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux).mean().item())
        return loss

    def _note(self, out: LossOutput, new_logp: Tensor, entropy: Tensor, inputs: Table) -> None:
        """Keep what a part tells; with the last part of an update, put its metrics beside TRL's."""
        part: Plan = inputs[PLAN]
        sums = {"tokens": entropy.new_tensor(float(len(entropy))), "entropy": entropy.sum()}
        if part.ref_logp is not None:
            sums["kl"] = kl_estimate(new_logp, part.ref_logp).sum()
        if not self.model.training:
            self._show("eval", part, [out.metrics | sums])
            return
        self._sums.append(out.metrics | sums)
        if self._recording is not None:
            self._outputs.append((out, new_logp))
        if self._step + 1 not in self._parts:
            shown = self._show("train", part, self._sums)
            if self._recording is not None:
                self._recording.finish(self._rollouts, self._outputs, shown | {"reward/mean": self._mean_reward})
            self._outputs = []

    def _show(self, mode: str, plan: Plan, parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """The metrics of an update of all processes, in TRL's log."""
        names = (*LOSS_METRICS, *_SUMS)
        values = over_ranks(parts, names, self._comm)
        tokens = max(values.pop("tokens"), 1.0)
        shown = {name: value / tokens if name in _SUMS else value for name, value in values.items()}
        if plan.ref_logp is None:
            del shown["kl"]
        shown |= {name: float(value) for name, value in plan.metrics.items()}
        for name, value in shown.items():
            self._metrics[mode][name].append(value)
        return shown

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        """TRL's; a step whose loss was not the objective's ends the run."""
        before = self._losses
        loss: Tensor = super().training_step(*args, **options)
        if self._losses == before:
            raise RuntimeError(
                "this training step did not use the objective's loss: something replaces TRL's `compute_loss` "
                "(a kernel, a patch or a subclass); trimtab would have had no effect"
            )
        return loss

    def _record(self, batch: TokenBatch, plan: Plan, tables: Sequence[Table]) -> None:
        """Tell the recorder of an update, and of a rollout batch with the first of its updates."""
        if self.args.record_to is None:
            return
        if self._recording is None:
            self._recording = self._start_recording()
        if not self._updates:
            self._recording.begin_step(self._rollouts, self._buffered_inputs)
        self._recording.begin(self._updates, batch, plan, tables)

    def _start_recording(self) -> Recording:
        """A recording that goes on after the rollout batches before the present one."""
        args = self.args
        layout = Rollouts(
            updates=args.steps_per_generation // args.gradient_accumulation_steps,
            samples=self.num_generations,
            prompts=args.generation_batch_size // self.num_generations,
            ends=frozenset(self.eos_token_ids),
        )
        gather = gather_object if self._comm is not None else list
        device = self.accelerator.device
        return start_recording(
            Path(args.record_to),
            self._rollouts - 1,
            self.objective_table,
            Recording(layout, self.objective, device.type, gather),
            Policy(self.accelerator.unwrap_model(self.model), self._tokenizer, device),
            Settings(args.record_every, max_megabytes=args.record_max_megabytes),
            main=self.accelerator.is_main_process,
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """TRL's checkpoint and, before it is complete, the controllers' state in it."""
        if self._recording is not None:
            self._recording.flush()
        if self.args.should_save:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            save_state(Path(self._get_output_dir(trial=trial)) / name, self.objective, rollouts=self._rollouts)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """TRL's and, from a checkpoint, the controllers' state."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._rollouts = load_state(Path(checkpoint), self.objective).get("rollouts", 0)
