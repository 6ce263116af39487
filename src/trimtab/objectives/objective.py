"""An objective: ratio x surrogate x rules x aggregation, written as a loss to be minimised.

`plan` decides everything about every token over the whole mini-batch; `loss` is then a short function of the new
log-probabilities. Nothing here knows a method by name: the catalog composes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from trimtab.objectives.advantages import DECOUPLED, Groups, Values, compute_advantages
from trimtab.objectives.comm import Comm, gather_batch, gather_rows
from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.normalizers import Normalizer
from trimtab.objectives.plan import REASON_WORDS, Plan, Reason
from trimtab.objectives.plan_builder import Controller, PlanBuilder, TokenRule
from trimtab.objectives.ratios import Ratio, log_ratio
from trimtab.objectives.rules.penalties import Penalty
from trimtab.objectives.surrogates import Surrogate
from trimtab.objectives.token_batch import FIELD_HELP, TokenBatch

Scope = Literal["minibatch", "micro"]
TokenStats = Literal["old", "current"]
Count = Literal["all", "signal"]


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The loss of a plan or micro-batch, differentiable in what `Objective.loss` was given, and 0-d metrics.

    The losses of all micro-batches and ranks add up to the mini-batch's, and so do the metrics (`merge_metrics`).
    Per token, without gradient: `ratio`, `log_rho` and `clipped` (a mask of those whose gradient a clip cuts; None
    where the surrogate has no clip). `inverse_tokens` is 1 / tokens of the mini-batch.
    """

    loss: Tensor
    ratio: Tensor
    log_rho: Tensor
    clipped: Tensor | None
    inverse_tokens: float

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """Ratio statistics and the share of clipped tokens; computed on first access, for few updates log them."""
        clipped = self.ratio.new_zeros(()) if self.clipped is None else self.clipped.sum(dtype=self.ratio.dtype)
        metrics = {
            "update/ratio_mean": self.ratio.sum() * self.inverse_tokens,
            # Of the tokens' own ratios, whatever the method shares or clips: how far the policy moved is comparable.
            "update/approx_kl": (torch.expm1(self.log_rho) - self.log_rho).sum() * self.inverse_tokens,
            "update/clip_share": clipped * self.inverse_tokens,
        }
        if len(self.ratio):  # aminmax of nothing raises
            metrics["update/ratio_min"], metrics["update/ratio_max"] = torch.aminmax(self.ratio)
        return metrics

    @staticmethod
    def concat(outputs: Sequence[LossOutput]) -> LossOutput:
        """Concatenate the outputs of consecutive chunks of one micro-batch, without gradient."""
        # All chunks have one surrogate: they all have a mask, or none does.
        clipped = [out.clipped for out in outputs if out.clipped is not None]
        return LossOutput(
            torch.stack([out.loss.detach() for out in outputs]).sum(),
            torch.cat([out.ratio for out in outputs]),
            torch.cat([out.log_rho for out in outputs]),
            torch.cat(clipped) if clipped else None,
            outputs[0].inverse_tokens,
        )


@dataclass(frozen=True)
class Objective:
    """An RL objective: what `trimtab.objective(name)` builds.

    `scope="micro"` takes quantiles and normalisers over each micro-batch, as other trainers do. `token_stats="current"`
    requires `current_logp` in a batch, `"old"` refuses it; None judges tokens by whichever is there. `count="signal"`
    leaves groups whose advantages are all zero out of the loss and of what means divide by.
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
    count: Count = "all"
    title: str = ""
    paper: str = ""

    @property
    def needs(self) -> frozenset[str]:
        """The optional fields of `TokenBatch` that this objective reads."""
        read = {"segment"} if self.ratio.level == "segment" else set()
        read |= {"current_logp"} if self.token_stats == "current" else set()
        return frozenset(read).union(*(r.needs for r in self.rules), *(p.needs for p in self.penalties))

    @property
    def reads(self) -> frozenset[str]:
        """The optional fields of `TokenBatch` that this objective uses if they are there."""
        groups = frozenset({"group"} if self.count == "signal" else set[str]())
        return groups.union(*(rule.reads for rule in self.rules))

    @property
    def controllers(self) -> dict[str, Controller]:
        """The objects that carry state from one rollout batch to the next, by the name of their rule."""
        return {rule.name: rule.controller for rule in self.rules if rule.controller is not None}

    @property
    def entropy_target(self) -> float | None:
        """The entropy that a controller steers towards: STARE's target, or the floor of trim as it is now."""
        targets = (getattr(controller, "target", None) for controller in self.controllers.values())
        # A floor relative to the first rollout is 0 until there is one.
        return next((target for target in targets if target), None)

    @property
    def reason_words(self) -> dict[Reason, str]:
        """What each `Reason` means under this objective."""
        words = dict(REASON_WORDS)
        if self.count == "signal":
            words[Reason.NO_SIGNAL] += "; not counted if that is so for its whole group"
        for rule in self.rules:
            words |= rule.reason_words
        return words

    @property
    def separate_rewards(self) -> bool:
        """Whether `advantages` wants each of several rewards by itself, and not their sum."""
        return self.advantage in DECOUPLED

    def advantages(
        self, reward: Values, group: Groups, rollout: Groups | None = None, weights: Values | None = None
    ) -> Tensor:
        """Return the advantage that this method is defined with, one value per response.

        With `separate_rewards`, `reward` is (responses, rewards), with one of `weights` for each (without them 1).

        With `rollout` (ids, as in `TokenBatch`) rollouts are compared: a branch has the advantage of its rollout, or if
        its reward is not its rollout's mean, what the rollout would have with that reward.
        """
        return compute_advantages(self.advantage, reward, group, rollout, weights)

    def observe(self, rollout: TokenBatch, comm: Comm | None = None) -> None:
        """Update the controllers with a rollout batch; call it once per batch, before its first plan."""
        if not self.controllers:
            return
        self._check(rollout)
        assert rollout.entropy is not None
        # Sums instead of means of means: ranks may hold different numbers of tokens.
        total = rollout.entropy.sum(dtype=torch.float64)
        sums = torch.stack([total, torch.full_like(total, rollout.tokens)])
        if comm is not None:
            sums = gather_rows(comm, sums).sum(0)
        entropy, tokens = sums.tolist()
        for controller in self.controllers.values():
            controller.observe(entropy / tokens if tokens else float("nan"))

    def plan(self, batch: TokenBatch, comm: Comm | None = None) -> Plan:
        """Plan the mini-batch of all ranks, and return the plan of this rank's tokens."""
        self._check(batch)
        with torch.no_grad():
            return self._plan_micro(batch, comm) if self.scope == "micro" else self._plan_minibatch(batch, comm)

    @property
    def needs_entropy_grad(self) -> bool:
        """Whether the loss has a term of the entropy, so that it must be given entropies with their gradient."""
        return any(rule.entropy_grad for rule in self.rules)

    def loss(self, new_logp: Tensor, plan: Plan, entropy: Tensor | None = None) -> LossOutput:
        """Return the loss of a plan or of one of its micro-batches; gradients reach `new_logp` and nothing else.

        With an objective that `needs_entropy_grad` they reach `entropy` too: the policy's, now, of every token.
        """
        new = plan.check(new_logp)
        log_rho = log_ratio(new, plan.old_logp)
        ratio = self.ratio(new, log_rho, plan)
        terms, clipped = self.surrogate.terms(ratio, new, plan)
        if clipped is not None:  # a token without advantage has no gradient that a clip could cut
            clipped = clipped & (plan.advantage != 0)
        terms = terms * plan.weight
        for penalty in self.penalties:
            terms = terms + penalty.terms(new, plan)
        # The scale includes the normaliser of the whole mini-batch, so micro-batches only have to be added up.
        loss = (terms * plan.scale).sum()
        if plan.entropy_grad is not None:
            loss = loss + (plan.entropy_grad * self._checked(entropy, new, plan)).sum()
        return LossOutput(loss, ratio.detach(), log_rho.detach(), clipped, 1 / max(plan.tokens_in_minibatch, 1))

    def _checked(self, entropy: Tensor | None, new_logp: Tensor, plan: Plan) -> Tensor:
        """Return the entropies that a loss was given; raise if there are none, or if they would train nothing."""
        if entropy is None or (new_logp.requires_grad and not entropy.requires_grad):
            missing = "it is not given" if entropy is None else "it has no gradient"
            raise ValueError(
                f"the loss of {self.name} has a term of the entropy, and {missing}: call loss(new_logp, plan, entropy) "
                "with the entropy of every token under the policy that is trained, with its gradient; or leave out "
                "gradient=exact"
            )
        return plan.check(entropy, "entropy", "entropy")

    def loss_and_grad(self, new_logp: Tensor, plan: Plan) -> tuple[LossOutput, Tensor]:
        """Return the loss without its graph, and d loss / d log-prob: negative where descent raises a probability.

        A term of the entropy is left out: `Plan.entropy_grad` has its derivative.
        """
        plan = replace(plan, entropy_coef=None)
        # Callers may be inside no_grad, and a leaf of its own keeps the gradient from reaching any model.
        with torch.enable_grad():
            leaf = new_logp.detach().requires_grad_()
            out = self.loss(leaf, plan)
            (grad_logp,) = torch.autograd.grad(out.loss, leaf)
        return replace(out, loss=out.loss.detach()), grad_logp

    def explain(self) -> str:
        """Return the formula with this objective's numbers, as text."""
        where = "the mini-batch of all processes" if self.scope == "minibatch" else "each micro-batch (scope = micro)"
        rows = [("advantage", self.advantage), ("ratio", self.ratio.formula), ("surrogate", self.surrogate.formula)]
        rows += [(rule.name, rule.formula) for rule in self.rules]
        rows += [(penalty.name, penalty.formula) for penalty in self.penalties if penalty.formula]
        rows += [("scale", f"{self.normalizer.name}: {self.normalizer.formula}")]
        rows += [("count", "groups whose advantages are all 0 are not counted")] if self.count == "signal" else []
        rows += [("scope", f"quantiles and normalisers over {where}")]
        rows += [("reads", ", ".join(sorted(self.needs)))] if self.needs else []
        lines = [self.name + (f": {self.title}" if self.title else "")]
        lines += [f"  arXiv {self.paper}"] if self.paper else []
        lines += ["  minimise  sum over tokens of  scale x (weight x l + penalties)"]
        return "\n".join(lines + [f"  {name:<11} {text}" for name, text in rows])

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the controllers' state as plain numbers."""
        return {name: controller.state_dict() for name, controller in self.controllers.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore a state that `state_dict` returned; one that is refused changes nothing."""
        controllers = self.controllers
        if set(state) != set(controllers):
            where = f"{self.name} has the controllers {sorted(controllers)}, but the state is of {sorted(state)}"
            raise ValueError(f"{where}: load it into the objective that it was saved from")
        before = self.state_dict()
        try:
            for name, controller in controllers.items():
                controller.load_state_dict(state[name])
        except (ValueError, TypeError, LookupError):
            for name, controller in controllers.items():
                controller.load_state_dict(before[name])
            raise

    def _check(self, batch: TokenBatch) -> None:
        for name in sorted(self.needs):
            if getattr(batch, name) is None:
                advice = FIELD_HELP.get(name, "measure it in the pass that gives old_logp")
                raise ValueError(f"{self.name} reads `{name}`, which this TokenBatch lacks: {advice}")
        if self.token_stats == "old" and batch.current_logp is not None:
            carried = "carries `current_logp` (and so the current policy's entropy)"
            where = f"{self.name} has token_stats='old', but the TokenBatch {carried}"
            raise ValueError(f"{where}: leave it out, or set token_stats='current'")
        if self.scope == "micro" and batch.rollout is not None:
            raise ValueError(
                f"{self.name} has scope='micro', but the TokenBatch has rollouts: a micro-batch may have some of a "
                "rollout's branches, and means over rollouts need them all; leave scope out"
            )

    def _plan_minibatch(self, batch: TokenBatch, comm: Comm | None) -> Plan:
        names = {"old_logp", "advantage", "current_logp", "proxy_logp", *self.needs, *self.reads}
        whole, mine = gather_batch(batch, names, comm)
        plan = self._plan_whole(whole)
        if mine == slice(0, whole.responses):
            return plan
        # `slice` is the position in this rank's mini-batch, not in the whole.
        return replace(plan.select(mine.start, mine.stop), start=0)

    def _plan_whole(self, batch: TokenBatch) -> Plan:
        builder = PlanBuilder(batch, self.surrogate.clip_low, self.surrogate.clip_high, self._coefficient)
        if self.count == "signal":
            builder.leave_out_groups_without_signal()
        for rule in sorted(self.rules, key=lambda rule: rule.last):
            rule.apply(builder)
        return self._built(builder)

    def _coefficient(self, builder: PlanBuilder) -> Tensor:
        surrogate = replace(self, penalties=())  # a penalty moves the entropy too, but no weight changes that
        return -surrogate.loss_and_grad(builder.batch.judged_logp, self._built(builder))[1]

    def _built(self, builder: PlanBuilder) -> Plan:
        batch = builder.batch
        return Plan(
            old_logp=batch.old_logp,
            advantage=builder.advantage,
            weight=builder.weight,
            scale=self.normalizer.scale(builder),
            clip_low=builder.clip_low,
            clip_high=builder.clip_high,
            reason=builder.reason,
            spans=self.ratio.spans(batch),
            penalty=builder.penalty,
            entropy_coef=builder.entropy_coef,
            ref_logp=batch.ref_logp if "ref_logp" in self.needs else None,
            proxy_logp=batch.proxy_logp if builder.penalty is not None else None,
            offsets=batch.offsets,
            tokens_in_minibatch=batch.tokens,
            metrics=builder.metrics,
            reason_words=self.reason_words,
        )

    def _plan_micro(self, batch: TokenBatch, comm: Comm | None) -> Plan:
        """Plan every micro-batch by itself, weighted by its share of the responses."""
        responses = batch.responses
        if comm is not None:
            responses = int(gather_rows(comm, torch.tensor([responses], device=batch.old_logp.device)).sum())

        def replan(first: int, last: int) -> Plan:
            with torch.no_grad():
                plan = self._plan_whole(batch.select(first, last))
            share = (last - first) / max(responses, 1)
            # Metrics divide by `tokens_in_minibatch`, and so are means weighted by this share too.
            tokens = plan.tokens / share if share else 0.0
            return replace(plan, scale=plan.scale * share, start=batch.offsets[first], tokens_in_minibatch=tokens)

        # How the micro-batches are cut is known to `Plan.split` alone, so they are planned there.
        return replace(replan(0, batch.responses), replan=replan)
