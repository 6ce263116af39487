"""The catalog of named methods.

To add one, write a function here whose keyword arguments are its options, and a test; the command line and the docs
read the registry.
"""

from __future__ import annotations

from typing import Any

from trimtab.objectives.methods.registry import method
from trimtab.objectives.normalizers import (
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
)
from trimtab.objectives.objective import Objective
from trimtab.objectives.ratios import (
    clipped_response_ratio,
    response_ratio,
    segment_ratio,
    token_ratio,
    token_ratio_in_response,
)
from trimtab.objectives.rules import covariance, entropy, penalties
from trimtab.objectives.rules.s2t import s2t
from trimtab.objectives.rules.stare import stare as stare_rule
from trimtab.objectives.surrogates import (
    Divergence,
    gamma_weight,
    geometric_clip,
    log_prob,
    ppo_clip,
    probability_mask,
    soft_gate,
    weighted_log_prob,
)


@method(paper="2402.03300")
def grpo(clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Objective:
    """PPO's clip with a group's rewards as the baseline; every response weighs the same.

    The KL to a reference model is an attachment: "grpo + kl".
    """
    return Objective("grpo", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), seq_mean_token_mean)


@method(paper="2503.14476")
def dapo(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0) -> Objective:
    """Clip-higher PPO; every token weighs the same.

    Its dynamic sampling and overlong penalty concern prompts and rewards: they are the trainer's.
    """
    return Objective("dapo", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), token_mean)


@method(paper="2503.20783")
def dr_grpo(
    clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, length: float = 3000.0
) -> Objective:
    """GRPO without its two biases: no division by the deviation, none by a response's own length.

    Set `length` to the response limit of the run; the default is that of the paper's runs.
    """
    surrogate, normalizer = ppo_clip(clip_low, clip_high, dual_clip), seq_mean_token_sum_norm(length)
    return Objective("dr_grpo", token_ratio, surrogate, normalizer, advantage="group_centered")


@method(paper="2507.18071")
def gspo(clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float | None = None) -> Objective:
    """One ratio per response: the geometric mean over its tokens."""
    return Objective("gspo", response_ratio, ppo_clip(clip_low, clip_high, dual_clip), seq_mean_token_mean)


@method(paper="2602.05261")
def luspo(clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float | None = None) -> Objective:
    """GSPO without the division by a response's length: a token weighs the same in long and short responses."""
    return Objective("luspo", response_ratio, ppo_clip(clip_low, clip_high, dual_clip), seq_mean_token_sum)


@method(paper="2506.13585")
def cispo(clip_low: float = 0.2, clip_high: float = 0.28, upper_only: bool = False) -> Objective:
    """Clip the importance weight instead of the token: no token loses its gradient.

    The cap is 1 + clip_high (verl's reading; in TRL the option is the cap itself).
    """
    return Objective("cispo", token_ratio, weighted_log_prob(clip_low, clip_high, upper_only), token_mean)


@method(paper="2511.20347")
def sapo(tau_positive: float = 1.0, tau_negative: float = 1.05) -> Objective:
    """A soft gate around ratio 1 instead of a hard clip."""
    return Objective("sapo", token_ratio, soft_gate(tau_positive, tau_negative), seq_mean_token_mean)


@method(paper="2507.20673")
def gmpo(clip_low: float = 0.4, clip_high: float = 0.4) -> Objective:
    """Geometric-mean ratio per response over token ratios that are clipped one by one.

    The clip options are limits of the log ratio, on the side that the advantage pushes to.
    """
    return Objective("gmpo", clipped_response_ratio, geometric_clip(clip_low, clip_high), seq_mean_token_mean)


@method(paper="2602.04879")
def dppo(
    divergence: Divergence = "tv", shift_low: float = 0.2, shift_high: float = 0.2, cap: float = 20.0
) -> Objective:
    """Cut the gradient of tokens whose probability (not ratio) has moved too far in the advantage's direction.

    A rare token may move by a large ratio and a common one by a small one. divergence=kl measures the move by the KL
    divergence of the old from the new policy, this token against all others; there 1 - p counts as at least 1e-8,
    because fp32 rounds p to 1 (verl adds 1e-8 to it). verl takes the cap from clip_ratio_c, whose default is 3.
    """
    return Objective("dppo", token_ratio, probability_mask(divergence, shift_low, shift_high, cap), token_mean)


@method(paper="2602.10693")
def vespo(k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0) -> Objective:
    """Weight a response smoothly by the product of its token ratios, in place of a clip.

    The weight phi is 1 at w = 1, largest at w = k / lambda, and falls to 0 on both sides; no division by length. TRL
    multiplies the sampler's correction into w; here tis and icepop weight tokens, as in every method.
    """
    surrogate = gamma_weight(k_pos, lambda_pos, k_neg, lambda_neg)
    return Objective("vespo", token_ratio_in_response, surrogate, token_mean)


@method(paper="2506.01939", rule=entropy.top_entropy)
def top_entropy(
    clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0, **options: Any
) -> Objective:
    """20-Entropy: DAPO on the fifth of the tokens with the highest entropy.

    The denominator is all tokens; renormalize=true makes it the kept ones.
    """
    rule = entropy.top_entropy(**options)
    return Objective("top_entropy", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), token_mean, (rule,))


@method(paper="2512.16649")
def justrl(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0) -> Objective:
    """DAPO's clip and mean and nothing else: no KL, no entropy term, no dynamic sampling."""
    return Objective("justrl", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), token_mean)


@method(paper="2505.22617")
def clip_cov(
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    seed: int = 0,
) -> Objective:
    """Drop a random few of the tokens whose log-probability and advantage move together.

    The random choice is a pure function of the seed and the batch, so a plan can be made again from its record.
    """
    rule = covariance.drop_covariant(share, cov_low, cov_high, seed)
    return Objective("clip_cov", token_ratio, ppo_clip(clip_low, clip_high), token_mean, (rule,))


@method(paper="2505.22617")
def kl_cov(share: float = 2e-3, coef: float = 1.0, clip_low: float = 1.0, clip_high: float = 1.0) -> Objective:
    """Hold the tokens whose log-probability and advantage move together most near the old policy."""
    rule, surrogate = covariance.penalize_covariant(share, coef), ppo_clip(clip_low, clip_high)
    return Objective("kl_cov", token_ratio, surrogate, token_mean, (rule,), (penalties.distance_from_old,))


@method(paper="2506.14758")
def entropy_advantage(
    coef: float = 0.4,
    entropy_cap: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
) -> Objective:
    """DAPO with a bonus on the advantage of uncertain tokens, too small to change its sign."""
    rule = entropy.entropy_shaped_advantage(coef, entropy_cap)
    return Objective("entropy_advantage", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), token_mean, (rule,))


@method(paper="2510.03222")
def lp_reg(
    share: float = 0.01,
    coef: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
) -> Objective:
    """Keep improbable tokens of punished responses from being driven out.

    A penalty holds them to q, the old policy without its noise (tokens under 0.02 of the most probable one removed):
    give it as `proxy_logp`. Without it nothing counts as noise and q is the old policy.
    """
    rule, surrogate = penalties.penalize_improbable(share, coef), ppo_clip(clip_low, clip_high, dual_clip)
    return Objective("lp_reg", token_ratio, surrogate, token_mean, (rule,), (penalties.below_proxy,))


@method()
def reinforce() -> Objective:
    """The plain policy gradient: no ratio, no clip. For on-policy updates."""
    return Objective("reinforce", token_ratio, log_prob, token_mean)


@method(paper="2602.15620", rule=s2t)
def stapo(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0, **options: Any) -> Objective:
    """Clip-higher PPO in which rare, confident, rewarded tokens are silenced and the rest renormalised.

    The paper does not state its dual clip; ours is JustRL's, on which it builds. The quantile's population is that of
    its version 4; for earlier ones we read population=all with quantile=0.8. mask=rare, uncertain and random are the
    paper's ablations: rare tokens of any entropy, rare tokens of high entropy, random rewarded tokens.
    """
    surrogate = ppo_clip(clip_low, clip_high, dual_clip)
    return Objective("stapo", token_ratio, surrogate, token_mean, (s2t(**options),))


@method(paper="2606.19236", rule=stare_rule)
def stare(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0, **options: Any) -> Objective:
    """Clip-higher PPO that reweights the tokens which decide the entropy, until the entropy is on target.

    Weights do not enter the denominator. The authors' code takes the quantile per micro-batch and rank; ours is over
    the mini-batch and all ranks. For models of 14B and more the paper has boost 1.05 and damp 0.95.
    """
    surrogate = ppo_clip(clip_low, clip_high, dual_clip)
    return Objective("stare", token_ratio, surrogate, token_mean, (stare_rule(**options),))


@method(paper="2511.04256")
def sspo(
    clip_low: float = 0.02,
    clip_high: float = 0.028,
    dual_clip: float | None = None,
    widen_low: float = 0.5,
    widen_high: float = 1.5,
    clip_scale: entropy.ClipScale = "fixed",
) -> Objective:
    """One ratio per subsentence, with a clip range that follows the subsentence's entropy.

    No formulas are public. We take h as the segment's mean entropy over the mean segment entropy of the mini-batch,
    and multiply both clip distances by clip(h, widen_low, widen_high). A mean over n tokens moves about 1 / sqrt(n) as
    far as one token does, so a token's range of 0.2 and 0.28 hardly ever clips a subsentence; runs with it broke first
    (docs/study.md). The default is a tenth of it. clip_scale=sqrt_length with a token's range divides that by sqrt(n)
    instead, which leaves it to subsentences of one token; in the study it did less well.
    """
    rule = entropy.widen_by_entropy(widen_low, widen_high, clip_scale)
    return Objective("sspo", segment_ratio, ppo_clip(clip_low, clip_high, dual_clip), seq_mean_token_mean, (rule,))
