"""An objective: ratio x surrogate x rules x aggregation, written as a loss to be minimised.

`plan` decides everything about every token over the whole mini-batch; `loss` is then a short function of the new
log-probabilities. Nothing here knows a method by name: the catalog puts the parts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from trimtab.objectives.advantages import ADVANTAGES, Groups, Values
from trimtab.objectives.comm import Comm, Share, gather_batch, gather_rows
from trimtab.objectives.normalizers import Normalizer
from trimtab.objectives.plan import Plan
from trimtab.objectives.plan_builder import Controller, PlanBuilder, TokenRule
from trimtab.objectives.ratios import Ratio, log_ratio
from trimtab.objectives.rules.penalties import Penalty
from trimtab.objectives.surrogates import Surrogate
from trimtab.objectives.token_batch import TokenBatch, missing_field_help

Scope = Literal["minibatch", "micro"]
TokenStats = Literal["old", "current"]


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The loss of a plan or a part, differentiable in the new log-probabilities alone, and 0-d metrics.

    The losses of all parts and ranks add up to the mini-batch's, and so do the metrics (`merge_metrics`). `ratio` and
    `log_rho` are every token's, without gradient; `clipped` are the tokens whose gradient a clip cuts, where there is a
    clip; `per_token` is what a token counts in a mean over the mini-batch.
    """

    loss: Tensor
    ratio: Tensor
    log_rho: Tensor
    clipped: Tensor | None
    per_token: float

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """How far the ratios are from 1, and the share of clipped tokens: made when somebody asks."""
        clipped = self.ratio.new_zeros(()) if self.clipped is None else self.clipped.sum(dtype=self.ratio.dtype)
        metrics = {
            "update/ratio_mean": self.ratio.sum() * self.per_token,
            "update/approx_kl": (self.ratio - 1 - self.log_rho).sum() * self.per_token,
            "update/clip_share": clipped * self.per_token,
        }
        if len(self.ratio):
            metrics["update/ratio_min"], metrics["update/ratio_max"] = torch.aminmax(self.ratio)
        return metrics

    @staticmethod
    def joined(outputs: Sequence[LossOutput]) -> LossOutput:
        """The pieces of one part, in their order, as that part's, without gradient."""
        clipped = [out.clipped for out in outputs if out.clipped is not None]
        return LossOutput(
            torch.stack([out.loss.detach() for out in outputs]).sum(),
            torch.cat([out.ratio for out in outputs]),
            torch.cat([out.log_rho for out in outputs]),
            torch.cat(clipped) if clipped else None,
            outputs[0].per_token,
        )


@dataclass(frozen=True)
class Objective:
    """What a named method builds. `scope="micro"` takes quantiles and normalisers per part, as other trainers do.

    `token_stats="current"` insists on `current_logp`, `"old"` refuses it; None judges tokens by whichever is there.
    """

    name: str
    ratio: Ratio
    surrogate: Surrogate
    normalizer: Normalizer
    rules: tuple[TokenRule, ...] = ()
    penalties: tuple[Penalty, ...] = ()
    advantage: str = "group_normalized"
    scope: Scope = "minibatch"
    token_stats: TokenStats | None = None
    title: str = ""
    paper: str = ""

    @property
    def needs(self) -> frozenset[str]:
        """The optional fields of `TokenBatch` that this objective reads."""
        read = {"segment"} if self.ratio.level == "segment" else set()
        read |= {"current_logp"} if self.token_stats == "current" else set()
        return frozenset(read).union(*(r.needs for r in self.rules), *(p.needs for p in self.penalties))

    @property
    def controllers(self) -> dict[str, Controller]:
        """What carries state from one rollout batch to the next."""
        return {rule.name: rule.controller for rule in self.rules if rule.controller is not None}

    def advantages(self, reward: Values, group: Groups) -> Tensor:
        """The advantage this method is defined with, one value per response."""
        return ADVANTAGES[self.advantage](reward, group)

    def observe(self, rollout: TokenBatch, comm: Comm | None = None) -> None:
        """Let the controllers look at a rollout batch; call it once per batch, before its first plan."""
        if not self.controllers:
            return
        self._check(rollout)
        assert rollout.entropy is not None
        total = rollout.entropy.sum(dtype=torch.float64)
        sums = torch.stack([total, torch.full_like(total, rollout.tokens)])
        if comm is not None:
            sums = gather_rows(comm, sums).sum(0)
        entropy, tokens = sums.tolist()
        for controller in self.controllers.values():
            controller.observe(entropy / tokens if tokens else float("nan"))

    @torch.no_grad()
    def plan(self, batch: TokenBatch, comm: Comm | None = None) -> Plan:
        """Decide about every token of the mini-batch of all ranks; the plan of this rank's tokens comes back."""
        self._check(batch)
        if self.scope == "micro":
            return self._plan_micro(batch, comm)
        whole, share = gather_batch(batch, {"old_logp", "advantage", "current_logp", "proxy_logp", *self.needs}, comm)
        return self._plan_whole(whole, share)

    def loss(self, new_logp: Tensor, plan: Plan) -> LossOutput:
        """The loss of a plan or of one of its parts. Gradients reach `new_logp` and nothing else."""
        new = plan.check(new_logp)
        log_rho = log_ratio(new, plan.old_logp)
        ratio = self.ratio(new, log_rho, plan)
        terms, clipped = self.surrogate.terms(ratio, new, plan)
        terms = terms * plan.weight
        for penalty in self.penalties:
            terms = terms + penalty.terms(new, plan)
        loss = (terms * plan.scale).sum()
        return LossOutput(loss, ratio.detach(), log_rho.detach(), clipped, 1 / max(plan.tokens_in_minibatch, 1))

    def loss_and_grad(self, new_logp: Tensor, plan: Plan) -> tuple[LossOutput, Tensor]:
        """Return the loss without its graph, and d loss / d log-prob of every token.

        A negative gradient means that descent raises the token's probability.
        """
        with torch.enable_grad():
            leaf = new_logp.detach().requires_grad_()
            out = self.loss(leaf, plan)
            (grad_logp,) = torch.autograd.grad(out.loss, leaf)
        return replace(out, loss=out.loss.detach()), grad_logp

    def explain(self) -> str:
        """The formula with this object's numbers, for people."""
        lines = [self.name + (f": {self.title}" if self.title else "")]
        if self.paper:
            lines.append(f"  arXiv {self.paper}")
        lines.append("  minimise  sum over tokens of  scale x (weight x l + penalties)")
        lines.append(f"  advantage   {self.advantage}")
        lines.append(f"  ratio       {self.ratio.formula}")
        lines.append(f"  surrogate   {self.surrogate.formula}")
        lines += [f"  {rule.name:<11} {rule.formula}" for rule in self.rules]
        lines += [f"  {penalty.name:<11} {penalty.formula}" for penalty in self.penalties if penalty.formula]
        where = "the mini-batch of all processes" if self.scope == "minibatch" else "each part (scope = micro)"
        lines.append(f"  scale       {self.normalizer.name}: {self.normalizer.formula}")
        lines.append(f"  scope       quantiles and normalisers over {where}")
        if self.needs:
            lines.append(f"  reads       {', '.join(sorted(self.needs))}")
        return "\n".join(lines)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The controllers' state, as plain numbers."""
        return {name: controller.state_dict() for name, controller in self.controllers.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore what `state_dict` gave."""
        controllers = self.controllers
        if set(state) != set(controllers):
            raise ValueError(
                f"{self.name} has the controllers {sorted(controllers)}, but the state is of {sorted(state)}: "
                "load it into the objective that it was saved from"
            )
        for name, controller in controllers.items():
            controller.load_state_dict(state[name])

    def _check(self, batch: TokenBatch) -> None:
        for name in sorted(self.needs):
            if getattr(batch, name) is None:
                raise ValueError(f"{self.name} reads `{name}`, which this TokenBatch lacks: {missing_field_help(name)}")
        if self.token_stats == "old" and batch.current_logp is not None:
            raise ValueError(
                f"{self.name} has token_stats='old', but the TokenBatch carries `current_logp` (and so the current "
                "policy's entropy): leave it out, or set token_stats='current'"
            )

    def _plan_whole(self, batch: TokenBatch, share: Share) -> Plan:
        low, high = self.surrogate.clip_low, self.surrogate.clip_high
        like = batch.advantage
        builder = PlanBuilder(
            batch,
            clip_low=like.new_full((), low).expand_as(like),
            clip_high=like.new_full((), high).expand_as(like),
        )
        for rule in self.rules:
            rule.apply(builder)
        reads = self.needs
        plan = Plan(
            old_logp=batch.old_logp,
            advantage=builder.advantage,
            weight=builder.weight,
            scale=self.normalizer.scale(builder),
            clip_low=builder.clip_low,
            clip_high=builder.clip_high,
            reason=builder.reason,
            spans=self.ratio.spans(batch),
            penalty=builder.penalty,
            ref_logp=batch.ref_logp if "ref_logp" in reads else None,
            proxy_logp=batch.proxy_logp if builder.penalty is not None else None,
            offsets=batch.offsets,
            tokens_in_minibatch=batch.tokens,
            metrics=builder.metrics,
        )
        if share.responses == slice(0, batch.responses):
            return plan
        mine = plan._part(share.responses.start, share.responses.stop)
        return replace(mine, start=0)

    def _plan_micro(self, batch: TokenBatch, comm: Comm | None) -> Plan:
        """Every part planned by itself, as trainers do that know no mini-batch; it weighs its share of responses."""
        responses = batch.responses
        if comm is not None:
            responses = int(gather_rows(comm, torch.tensor([responses], device=batch.old_logp.device)).sum())

        @torch.no_grad()
        def replan(first: int, last: int) -> Plan:
            part = batch.select(first, last)
            alone = self._plan_whole(part, Share(slice(0, part.tokens), slice(0, part.responses)))
            share = (last - first) / max(responses, 1)
            return replace(
                alone,
                scale=alone.scale * share,
                start=batch.offsets[first],
                tokens_in_minibatch=part.tokens / share if share else 0.0,
            )

        return replace(replan(0, batch.responses), replan=replan)
