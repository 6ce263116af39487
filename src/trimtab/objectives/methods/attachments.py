"""Attachments: rules and penalties that can be added to any method, by name (`"sspo + s2t"`) or by keyword."""

from __future__ import annotations

from typing import Literal

from trimtab.objectives.methods.registry import attachment
from trimtab.objectives.plan_builder import TokenRule
from trimtab.objectives.rules import corrections, entropy, penalties
from trimtab.objectives.rules.controllers import EntropyGate
from trimtab.objectives.rules.penalties import Estimator, Penalty
from trimtab.objectives.rules.s2t import Mask, Population, silence_spurious
from trimtab.objectives.rules.stare import GateScope, Threshold, steer_entropy

StareVariant = Literal["O1", "O2", "O3", "O4", "C1", "C2", "C3", "C4"]


@attachment("s2t", paper="2602.15620")
def s2t(
    tau_p: float = 0.002,
    quantile: float = 0.75,
    population: Population = "candidates",
    mask: Mask = "spurious",
    seed: int = 0,
) -> TokenRule:
    """Silence spurious tokens (rare, confident, rewarded) and renormalise over the rest.

    The quantile is taken over the rare tokens of rewarded responses, as in version 4 of the paper. Earlier versions
    silence "the bottom 80 %" without naming the population; we read that as population=all, quantile=0.8. The paper's
    ablations are mask=rare (rare and rewarded, whatever the entropy), mask=uncertain (rare, rewarded, high entropy) and
    mask=random (as many random rewarded tokens).
    """
    return silence_spurious(tau_p, quantile, population, mask, seed)


@attachment("stare", paper="2606.19236")
def stare(
    variant: StareVariant = "O1",
    share: float = 0.1,
    boost: float = 1.1,
    damp: float = 0.9,
    target: float = 0.3,
    gate: GateScope = "batch",
    threshold: Threshold = "quantile",
    p_threshold: float = 0.1,
    adaptive: bool = False,
    rate: float = 0.01,
) -> TokenRule:
    """Reweight the tokens that decide the entropy, behind a gate that closes once the entropy is on target.

    Call `observe` with every rollout batch: it updates the gate. The authors' code takes the quantile per micro-batch
    and rank; ours is over the mini-batch and all ranks. For models of 14B and more the paper has boost 1.05, damp 0.95.
    """
    controller = EntropyGate(target, boost, damp, rate if adaptive else 0.0)
    return steer_entropy(controller, variant, share, gate, threshold, p_threshold)


@attachment("top_entropy", paper="2506.01939")
def top_entropy(share: float = 0.2, renormalize: bool = False) -> TokenRule:
    """Train on the tokens with the highest entropy alone.

    The denominator is all tokens; renormalize=true makes it the kept ones, as some trainers do.
    """
    return entropy.keep_top_entropy(share, renormalize)


@attachment("tis")
def tis(cap: float = 2.0) -> TokenRule:
    """Truncated importance sampling: weight every token by p_old / p_sampler, capped."""
    return corrections.truncated(cap)


@attachment("icepop")
def icepop(low: float = 0.5, high: float = 5.0, renormalize: bool = False) -> TokenRule:
    """Weight tokens by p_old / p_sampler and drop those outside a band."""
    return corrections.banded(low, high, renormalize)


@attachment("mis")
def mis(low: float = 0.5, high: float = 2.0, geometric: bool = False, renormalize: bool = False) -> TokenRule:
    """Masked importance sampling: drop responses whose p_old / p_sampler leaves a band.

    A response's ratio is the product over its tokens; kept responses keep weight 1 (add tis to weight their tokens).
    """
    return corrections.drop_responses(low, high, geometric, renormalize)


@attachment("kl", paper="2402.03300")
def kl(coef: float = 0.001, estimator: Estimator = "k3") -> Penalty:
    """Penalise the KL divergence from a reference model, token by token."""
    return penalties.reference_kl(coef, estimator)
