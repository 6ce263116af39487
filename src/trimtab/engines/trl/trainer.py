"""TRL's `GRPOTrainer` with the loss of a trimtab objective.

Everything else is TRL's: data sets, reward functions, vLLM, tools, accelerate, DeepSpeed, LoRA. A plan is made over all
processes and all micro-batches of an optimizer step, before its first forward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.engines import check_version, common, missing_engine
from trimtab.engines.conversations import ReplyText
from trimtab.engines.options import objective_table
from trimtab.engines.trl import padded
from trimtab.engines.trl.agents import FAILED, AgentRollouts
from trimtab.engines.trl.options import TrimtabConfig, check_replaced, check_sampler, with_reference
from trimtab.engines.trl.padded import PaddedBatch
from trimtab.engines.trl.recording import PlannedUpdate, RolloutShape, TrlRecording, start_recorder
from trimtab.insight.alarms import AlarmMonitor, DetectorInput
from trimtab.objectives import METHODS, LossOutput, Plan, TokenBatch, kl_estimate
from trimtab.record import Manifest, RecordSettings
from trimtab.text import slug
from trimtab.trainer.config import AlarmsConfig, build_objective
from trimtab.trainer.train import AlarmHandler, RunFolder, tokenizer_vocabulary

try:
    from accelerate.utils import gather_object
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from trl import GRPOTrainer
    from trl.models.utils import disable_gradient_checkpointing
except ImportError as error:
    raise missing_engine("trl", error) from error

check_version("trl")

# Sums over the tokens of a micro-batch, from which TRL's own metrics `entropy` and `kl` are made.
_TOKEN_SUMS = ("tokens", "entropy", "kl")


class TrimtabTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` with the loss of an objective: see `TrimtabConfig.objective`."""

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: TrimtabConfig | None = None, *more: Any, **options: Any
    ) -> None:
        if not isinstance(args, TrimtabConfig):
            raise TypeError(
                f"args is {type(args).__name__}: pass a trimtab.engines.trl.TrimtabConfig, which is TRL's GRPOConfig "
                "with an `objective`"
            )
        check_replaced(args, built=True)
        self.objective_table = objective_table(args.objective)
        self.objective = build_objective(self.objective_table)
        self._scored: list[tuple[Tensor, Tensor]] | None = None  # while TRL scores a rollout batch
        super().__init__(model, reward_funcs, with_reference(args, self.objective), *more, **options)
        check_sampler(self.objective, self.use_vllm, self.rollout_func is not None, args.top_p, args.top_k or 0)
        self._comm = padded.AcceleratorComm(self.accelerator) if self.accelerator.num_processes > 1 else None
        self._rewards: Tensor = torch.empty(0)
        self._mean_reward = 0.0  # of the present rollout batch
        self._rollouts = 0  # rollout batches so far
        self._updates = 0  # updates on the present one so far
        self._plans: dict[int, Plan] = {}  # of the present update's micro-batches, by micro-step
        self._outputs: list[tuple[LossOutput, Tensor]] = []
        self._sums: list[dict[str, Tensor]] = []
        self._losses = 0
        self._recording: TrlRecording | None = None
        self._reply_text = ReplyText(self._tokenizer)
        self.rows: Sequence[Mapping[str, Any]] = ()  # of the data set, whose completions are being made
        self.accelerator.print(common.startup_message(self.objective))

    def train(self, *args: Any, **options: Any) -> Any:
        """Train as TRL does; the records are complete when it returns."""
        try:
            return super().train(*args, **options)
        finally:
            if self._recording is not None:
                self._recording.close()
                self._recording = None
            if isinstance(self.rollout_func, AgentRollouts):
                self.rollout_func.close()

    @property
    def tokenizer_of_text(self) -> Any:
        """The tokenizer, also where the processor has more."""
        return self._tokenizer

    @property
    def rollouts_so_far(self) -> int:
        """The number of rollout batches before the present one."""
        return self._rollouts

    def log_agents(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of this process's agents to TRL's log, as means over all processes."""
        values = torch.tensor([list(metrics.values())], device=self.accelerator.device)
        means = self.accelerator.gather(values).mean(0).tolist()
        for name, value in zip(metrics, means, strict=True):
            self._metrics["train" if self.model.training else "eval"][name].append(value)

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, compute_entropy: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run TRL's forward pass; keep what the policy returns while TRL scores a rollout batch, entropy included."""
        # The old policy's entropy comes from the pass that TRL makes anyway: one of our own would cost as much again.
        keep = self._scored is not None and model is self.model
        logps, entropies, aux = super()._get_per_token_logps_and_entropies(
            model, *args, compute_entropy=compute_entropy or keep, **options
        )
        if keep and self._scored is not None:
            self._scored.append((logps, entropies))
        return logps, entropies, aux

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        """Tokenize the replies of tools as TRL does, with chat markup in them as plain text."""
        plain = [
            {**message, "content": self._reply_text(message["content"])}
            if isinstance(message["content"], str)
            else message
            for message in tool_messages
        ]
        ids: list[int] = super()._get_tool_suffix_ids(plain)
        return ids

    def _calculate_rewards(self, inputs: Any, *args: Any, **options: Any) -> Tensor:
        """Compute the rewards of all processes, and keep them for the advantages; a failed rollout has none."""
        rewards: Tensor = super()._calculate_rewards(inputs, *args, **options)
        if isinstance(self.rollout_func, AgentRollouts):
            failed = torch.tensor([bool(row.get(FAILED)) for row in inputs], device=rewards.device)
            rewards = rewards.masked_fill(self.accelerator.gather(failed)[:, None], torch.nan)
        self._rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Make this process's rollout batch as TRL does, and add the keys that a plan reads."""
        self._scored, self.rows = [], inputs
        try:
            batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
            scored = self._scored
        finally:
            self._scored = None
        # TRL gathers rewards over all processes, in rank order; this process's responses are a slice of them.
        first = self.accelerator.process_index * len(inputs)
        local = slice(first, first + len(inputs))
        reward = self._total_reward()
        if self.args.advantage == "method":
            samples = self.num_generations if self.model.training else self.num_generations_eval
            ours = padded.advantages(self.objective, reward, samples, self._rewards, self.reward_weights)
            self._log_advantages(ours)
            batch["advantages"] = ours[local]
        batch["old_per_token_logps"], batch[padded.ENTROPY] = self._old_logps(batch, scored)
        batch[padded.REWARD] = reward[local]
        batch[padded.REWARDS] = self._rewards[local]
        batch[padded.RESPONSE_INDEX] = torch.arange(local.start, local.stop, device=reward.device)
        # A record whose responses have holes has segments that end there, whatever the objective.
        recorded_holes = self.args.record is not None and batch.get("tool_mask") is not None
        if "segment" in self.objective.needs or recorded_holes:
            batch[padded.SEGMENT] = padded.segments(batch, self._tokenizer)
        if self.model.training:
            self._rollouts, self._updates = self._rollouts + 1, 0
            self._mean_reward = float(reward.nanmean())
        return batch

    def _total_reward(self) -> Tensor:
        """Return one reward per response of all processes; NaN if no reward function returned one."""
        weighted: Tensor = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(dim=1)
        return weighted.masked_fill(self._rewards.isnan().all(dim=1), torch.nan)

    def _log_advantages(self, ours: Tensor) -> None:
        """Replace TRL's advantages by ours in its log of completions."""
        logged = self._logs["advantages"]
        for _ in range(min(len(ours), len(logged))):
            logged.pop()
        logged.extend(ours.tolist())

    def _old_logps(self, batch: PaddedBatch, scored: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies under the policy that sampled, from TRL's own pass if it made one."""
        # TRL skips its pass where old and new policy are the same, and has others for the reference model.
        for logps, entropies in scored:
            if logps is batch.get("old_per_token_logps"):
                return logps, entropies
        return self._score(batch)

    @torch.no_grad()
    def _score(self, batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies under the current policy, micro-batch by micro-batch."""
        training = self.model.training
        rows = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            logps, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model, **padded.forward_inputs(batch), batch_size=rows, compute_entropy=True
            )
        assert entropies is not None
        return logps, entropies

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return TRL's micro-batch with its slice of the update's plan."""
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            plan = self.objective.plan(padded.token_batch([inputs], self.objective), self._comm)
            return {**inputs, padded.PLAN: plan}
        if self._step not in self._plans:
            self._begin_update()
        return {**inputs, padded.PLAN: self._plans[self._step]}

    def _begin_update(self) -> None:
        """Plan the update whose first micro-batch is next."""
        first, count = self._step % self.args.steps_per_generation, self.current_gradient_accumulation_steps
        micro_batches = self._buffered_inputs[first : first + count]
        if len(micro_batches) < count:
            raise RuntimeError(
                f"an update of {count} micro-batches starts at micro-batch {first + 1} of the "
                f"{len(self._buffered_inputs)} of its rollout batch and cannot be planned: make the data set a "
                "multiple of the rollout batch"
            )
        # Once per rollout batch, and over all of it: controllers must not see a batch twice.
        if not self._updates and self.objective.controllers:
            self.objective.observe(padded.token_batch(self._buffered_inputs, self.objective), self._comm)
        current = None
        if self._updates and "current_logp" in self.objective.needs:
            current = tuple(torch.cat(pair) for pair in zip(*map(self._score, micro_batches), strict=True))
        batch = padded.token_batch(micro_batches, self.objective, current)  # type: ignore[arg-type]
        plan = self.objective.plan(batch, self._comm)
        sizes = [len(batch["completion_ids"]) for batch in micro_batches]
        self._plans = dict(enumerate(plan.split(sizes), start=self._step))
        self._outputs, self._sums = [], []
        self._record(batch, plan, micro_batches)
        self._updates += 1

    def _compute_loss(self, model: Any, inputs: PaddedBatch) -> Tensor:
        """Return the loss of a micro-batch; those of an update on all processes add up to the mini-batch's loss."""
        logps, entropies, aux = self._get_per_token_logps_and_entropies(
            model, **padded.forward_inputs(inputs), compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        mask = padded.sampled_mask(inputs)
        new_logp = logps[mask]
        entropy: Tensor = entropies[mask]  # type: ignore[index]
        out = self.objective.loss(new_logp, inputs[padded.PLAN], entropy)
        self._losses += 1
        self._collect(out, new_logp.detach(), entropy.detach(), inputs)
        # Gradients are averaged over processes, and our losses add up; TRL and accelerate divide by nothing else.
        loss = out.loss if self._comm is None else out.loss * self.accelerator.num_processes
        if aux is not None:
            steps = self.current_gradient_accumulation_steps if self.model.training else 1
            loss = loss + self.router_aux_loss_coef * aux / steps
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux).mean().item())
        return loss

    def _collect(self, out: LossOutput, new_logp: Tensor, entropy: Tensor, inputs: PaddedBatch) -> None:
        """Collect the metrics of a micro-batch; after the last one of an update, log the update's metrics."""
        plan: Plan = inputs[padded.PLAN]
        sums = {"tokens": entropy.new_tensor(float(len(entropy))), "entropy": entropy.sum()}
        sums["update/loss"] = out.loss.detach()
        if plan.ref_logp is not None:
            sums["kl"] = kl_estimate(new_logp, plan.ref_logp).sum()
        if not self.model.training:
            self._log_metrics("eval", plan, [out.metrics | sums])
            return
        self._sums.append(out.metrics | sums)
        if self._recording is not None:
            self._outputs.append((out, new_logp))
        if self._step + 1 not in self._plans:  # the last micro-batch of the update
            metrics = self._log_metrics("train", plan, self._sums) | {"reward/mean": self._mean_reward}
            if self._recording is not None:
                self._recording.finish_update(self._rollouts, self._outputs, metrics)
            self._outputs = []

    def _log_metrics(self, mode: str, plan: Plan, micro_batches: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Add the metrics of an update over all processes to TRL's log, and return them."""
        names = (*common.LOSS_METRICS, "update/loss", *_TOKEN_SUMS)
        values = common.reduce_metrics(micro_batches, names, self._comm)
        tokens = max(values.pop("tokens"), 1.0)
        logged = {name: value / tokens if name in _TOKEN_SUMS else value for name, value in values.items()}
        if plan.ref_logp is None:
            del logged["kl"]
        logged |= {name: float(value) for name, value in plan.metrics.items()}
        for name, value in logged.items():
            self._metrics[mode][name].append(value)
        return logged

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        """Run TRL's training step, and stop the run if its loss was not the objective's."""
        # Liger kernels, patches and subclasses can bypass `_compute_loss`, and TRL's own loss would train unnoticed.
        before = self._losses
        loss: Tensor = super().training_step(*args, **options)
        if self._losses == before:
            raise RuntimeError(
                "this training step did not use the objective's loss: something replaces TRL's `compute_loss` "
                "(a kernel, a patch or a subclass); trimtab would have had no effect"
            )
        return loss

    def _record(self, batch: TokenBatch, plan: Plan, micro_batches: Sequence[PaddedBatch]) -> None:
        """Pass an update that has been planned to the recording; the first of a rollout batch starts a step."""
        if self.args.record is None:
            return
        if self._recording is None:
            self._recording = self._start_recording()
        if not self._updates:
            self._recording.begin_step(self._rollouts, self._buffered_inputs)
        self._recording.begin_update(PlannedUpdate(self._updates, batch, plan, micro_batches))

    def _start_recording(self) -> TrlRecording:
        """Start a recording that continues after the rollout batches before the present one."""
        args = self.args
        shape = RolloutShape(
            updates=args.steps_per_generation // args.gradient_accumulation_steps,
            samples=self.num_generations,
            prompts=args.generation_batch_size // self.num_generations,
            end_tokens=frozenset(self.eos_token_ids),
            rewards=tuple(self.reward_func_names),
            weights=tuple(self.reward_weights.tolist()),
        )
        recorder = None
        if self.accelerator.is_main_process:
            settings = RecordSettings(args.record_every, args.record_group_share, args.record_max_megabytes)
            manifest = Manifest(self.objective_table, self.objective.advantage, settings)
            size = self.accelerator.unwrap_model(self.model).get_output_embeddings().weight.shape[0]
            vocabulary = tokenizer_vocabulary(self._tokenizer, size)
            device = self.accelerator.device.type
            recorder = start_recorder(Path(args.record), self._rollouts - 1, manifest, vocabulary, device)
        gather = gather_object if self._comm is not None else list
        return TrlRecording(shape, self.objective, gather, recorder, None if recorder is None else self._alarms())

    def _alarms(self) -> AlarmHandler:
        """Return what passes the metrics of a step to the alarms; it has seen those of a run that is resumed."""
        folder = RunFolder(Path(self.args.record))
        monitor = AlarmMonitor(DetectorInput(entropy_target=self.objective.entropy_target))
        alarms = AlarmHandler(monitor, AlarmsConfig(), folder, lambda text: warnings.warn(text, stacklevel=2))
        alarms.replay(folder.records())
        return alarms

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *more: Any, **options: Any) -> None:
        """Note gradient norm and learning rate of an optimizer step before TRL logs or saves."""
        if self._recording is not None:
            rate = options.get("learning_rate")
            rate = self._get_learning_rate() if rate is None else rate
            self._recording.finish_optimizer_step(None if grad_norm is None else float(grad_norm), float(rate))
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *more, **options)

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        """Write TRL's model card with the objective's name and paper instead of GRPO's."""
        self._name = f"trimtab's {self.objective.name}"
        method = METHODS.get(self.objective.name.partition("+")[0].strip())
        self._paper = {"id": method.paper, "title": f"the paper of {method.name}"} if method and method.paper else {}
        self._tag_names = ["trl", "trimtab", slug(self.objective.name)]
        super().create_model_card(*arguments, **options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save TRL's checkpoint with the state of the controllers in it."""
        # Ours first: TRL marks the checkpoint as complete.
        if self._recording is not None:
            self._recording.flush()
        if self.args.should_save:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            common.save_state(Path(self._get_output_dir(trial=trial)) / name, self.objective, rollouts=self._rollouts)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load TRL's state and, from a checkpoint, that of the controllers."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._rollouts = common.load_state(Path(checkpoint), self.objective).get("rollouts", 0)
