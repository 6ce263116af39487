"""Random batches for the tests: every field, responses of any length, tokens rare and common, segments of any size."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

import trimtab as tt
from trimtab.objectives import METHODS

# Every method, and the attachments in company: what must hold for each of them is tested on all of these.
COMBINATIONS = (
    "sspo + s2t(tau_p=0.2)",
    "gspo + stare(variant=C2)",
    "dapo + s2t(tau_p=0.2, mask=random)",
    "grpo + kl(coef=0.1) + tis",
    "stapo(tau_p=0.2) + stare(variant=C3, share=0.3) + icepop",
    "gmpo + mis(low=0.01, high=100) + top_entropy",
    "cispo + s2t(tau_p=0.2, mask=uncertain) + kl(estimator=k2)",
    "sspo + s2t(tau_p=0.2) + stare(gate=token) + tis(cap=1.5)",
    "gspo + s2t(tau_p=0.2) + stare(gate=none)",
    "sspo(clip_scale=sqrt_length) + stare(gate=none)",
    "dppo(divergence=kl, shift_low=0.02, shift_high=0.02) + s2t(tau_p=0.2)",
    "dppo + stare(variant=C2, gate=none) + kl(corrected=true)",
    "vespo + s2t(tau_p=0.2)",
    "luspo + stare(gate=none)",
    # trim acts after a rollout: entropies of `fields` are at most 0.5, and a drive of 1 acts on tokens of any kind.
    "dapo + trim(floor=9, gain=2)",
    "sspo + trim(floor=0.6) + s2t(tau_p=0.2) + kl(coef=0.1)",
    "gspo + trim(floor=9, gain=2, max_weight=100, phi=estimated) + tis",
    "grpo + trim(floor=0, ceiling=0.01, gain=2, max_weight=1.5)",
    "cispo + trim(floor=2, relative=true, gain=2) + stare(boost=critical, variant=O3, gate=none)",
    "gmpo + stare(boost=critical, variant=C3, share=0.3, gate=none) + icepop",
    "stare(boost=critical, variant=C1, target=9)",
    "vespo + entropy_bonus(coef=0.1, target=9) + trim(floor=9, gain=2)",
    "dapo + entropy_bonus(coef=0.5) + s2t(tau_p=0.2)",
    "gspo + token_baseline(ended=kept) + kl(coef=0.1)",
    "gspo + clip_v(mu=0.3) + clip_b(mu=0.3) + s2t(tau_p=0.2)",
    "sspo + steer(effect=exact) + kl(coef=0.1)",
    "grpo + repo_r(strength_min=0.1, strength_max=0.5) + kl(coef=0.1)",
    "gspo + entrocraft(floor=0.1, ceiling=0.2) + s2t(tau_p=0.2)",
    "entropic(target=9, p_least=0.2) + stare(gate=none) + s2t(tau_p=0.3)",
    "entropic(target=0, gain=9, p_least=0.5) + trim(floor=9, gain=2) + tis",
    "grpo + steer(falloff=exponential) + clip_v(mu=0.5, phi=estimated) + trim(floor=9, gain=2)",
)
EVERY = (*METHODS, *COMBINATIONS)


def fields(seed: int, rows: int = 6, columns: int = 11, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Padded tensors for `TokenBatch.from_padded`: the mask and every field."""
    rng = torch.Generator().manual_seed(seed)

    def uniform() -> torch.Tensor:
        return torch.rand(rows, columns, generator=rng, dtype=dtype)

    lengths = torch.randint(1, columns + 1, (rows,), generator=rng)
    old = -9 * uniform() ** 2
    starts = torch.rand(rows, columns, generator=rng) < 0.3
    sampler, ref, proxy = (old + 0.2 * (uniform() - 0.5) for _ in range(3))
    return {
        "mask": torch.arange(columns) < lengths[:, None],
        "old_logp": old,
        "advantage": torch.randn(rows, generator=rng, dtype=dtype),
        "entropy": uniform() * 0.5,
        "token": torch.randint(0, 100, (rows, columns), generator=rng),
        "segment": starts.cumsum(1),
        "sampler_logp": sampler,
        "ref_logp": ref,
        "proxy_logp": proxy,
        "sum_p2": uniform(),
        "sum_p2_logp": -uniform(),
        "group": torch.arange(rows) // 2,
        "reward": torch.randint(0, 2, (rows,), generator=rng).to(dtype),
    }


def batch(seed: int, **shape: Any) -> tt.TokenBatch:
    """A random batch."""
    return tt.TokenBatch.from_padded(**fields(seed, **shape))


def moved(tokens: tt.TokenBatch, seed: int = 0, by: float = 0.3) -> torch.Tensor:
    """New log-probabilities near the old ones, as a leaf."""
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn(tokens.tokens, generator=rng, dtype=tokens.old_logp.dtype)
    return (tokens.old_logp + by * noise).requires_grad_()


def observed(objective: tt.Objective, tokens: tt.TokenBatch) -> tt.Objective:
    """The objective after it has seen the batch as a rollout."""
    objective.observe(tokens)
    return objective


def loss_and_gradient(
    objective: tt.Objective, tokens: tt.TokenBatch, new_logp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What an update would use."""
    loss = objective.loss(new_logp, objective.plan(tokens)).loss
    (gradient,) = torch.autograd.grad(loss, new_logp)
    return loss.detach(), gradient


def same(one: tt.Objective, other: tt.Objective, tokens: tt.TokenBatch, new_logp: torch.Tensor | None = None) -> None:
    """Two objectives agree bit for bit in loss and gradient."""
    new = moved(tokens) if new_logp is None else new_logp
    for mine, yours in zip(loss_and_gradient(one, tokens, new), loss_and_gradient(other, tokens, new), strict=True):
        assert torch.equal(mine, yours), f"{one.name} and {other.name} differ by {(mine - yours).abs().max()}"


seeds = st.integers(min_value=0, max_value=2**31)
dtypes = st.sampled_from([torch.float32, torch.float64])
