"""The catalog of named methods, and at its end of attachments: what can be added to any method (`"sspo + s2t"`).

To add a method, write a function here whose keyword arguments are its options, and a test; the command line and the
docs read the registry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trimtab.objectives.methods.registry import ATTACHMENTS, entry, method
from trimtab.objectives.normalizers import (
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
)
from trimtab.objectives.objective import Objective
from trimtab.objectives.plan_builder import TokenRule
from trimtab.objectives.ratios import (
    clipped_response_ratio,
    response_ratio,
    segment_ratio,
    token_ratio,
    token_ratio_in_response,
)
from trimtab.objectives.rules import entropy, entropy_controllers, entropy_effect, penalties
from trimtab.objectives.rules.s2t import s2t
from trimtab.objectives.rules.stare import stare as stare_rule
from trimtab.objectives.rules.token_baseline import token_baseline
from trimtab.objectives.rules.trim import trim
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
    """PPO's clipped loss with the group's mean reward as the baseline; every response has the same weight.

    There is no KL penalty by default. To add one, attach it: "grpo + kl".
    """
    return Objective("grpo", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), seq_mean_token_mean)


@method(paper="2503.14476")
def dapo(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0) -> Objective:
    """PPO with a higher upper clip limit (clip-higher); every token has the same weight.

    This is DAPO's loss. Its dynamic sampling and its overlong penalty are settings of the trainer:
    rollout.dynamic_sampling and reward.overlong_buffer.
    """
    return Objective("dapo", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), token_mean)


@method(paper="2503.20783")
def dr_grpo(
    clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, length: float = 3000.0
) -> Objective:
    """GRPO without its two biases: it divides neither by the rewards' standard deviation nor by the response length.

    Set `length` to the run's maximum response length. The default is the one that the paper used.
    """
    surrogate, normalizer = ppo_clip(clip_low, clip_high, dual_clip), seq_mean_token_sum_norm(length)
    return Objective("dr_grpo", token_ratio, surrogate, normalizer, advantage="group_centered")


@method(paper="2602.02710")
def maxrl(clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Objective:
    """GRPO with rewards divided by the group's mean: the rarer success is, the more it counts (maximum likelihood).

    With rewards of 0 and 1 its expected gradient is that of ln(pass rate), up to the number of samples. Rewards below 0
    are refused. We found the formula of the advantage alone; the loss around it is GRPO's, with the mean over tokens.
    """
    surrogate = ppo_clip(clip_low, clip_high, dual_clip)
    return Objective("maxrl", token_ratio, surrogate, token_mean, advantage="mean_normalized")


@method(paper="2601.05242")
def gdpo(
    clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, whiten: bool = True
) -> Objective:
    """GRPO for several rewards: each is normalised in its group by itself before they are added up.

    So two responses with the same sum of different rewards differ in advantage, and a reward with a small spread is not
    lost beside another. With a single reward the order of advantages is GRPO's. whiten=true also divides the sum by its
    deviation over the rollout batch, so that more rewards do not mean larger updates.
    """
    surrogate = ppo_clip(clip_low, clip_high, dual_clip)
    advantage = "decoupled_whitened" if whiten else "decoupled"
    return Objective("gdpo", token_ratio, surrogate, seq_mean_token_mean, advantage=advantage)


@method(paper="2507.18071")
def gspo(clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float | None = None) -> Objective:
    """One importance ratio per response: the geometric mean of its token ratios."""
    return Objective("gspo", response_ratio, ppo_clip(clip_low, clip_high, dual_clip), seq_mean_token_mean)


@method(paper="2602.05261")
def luspo(clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float | None = None) -> Objective:
    """GSPO without dividing by the response length: a token has the same weight in long and short responses."""
    return Objective("luspo", response_ratio, ppo_clip(clip_low, clip_high, dual_clip), seq_mean_token_sum)


@method(paper="2506.13585")
def cispo(clip_low: float = 0.2, clip_high: float = 0.28, upper_only: bool = False) -> Objective:
    """Clip the importance weight instead of the token's loss, so that every token keeps a gradient.

    The cap is 1 + clip_high, as in verl. In TRL the option is the cap itself.
    """
    return Objective("cispo", token_ratio, weighted_log_prob(clip_low, clip_high, upper_only), token_mean)


@method(paper="2511.20347")
def sapo(tau_positive: float = 1.0, tau_negative: float = 1.05) -> Objective:
    """A smooth sigmoid around ratio 1 instead of a hard clip."""
    return Objective("sapo", token_ratio, soft_gate(tau_positive, tau_negative), seq_mean_token_mean)


@method(paper="2507.20673")
def gmpo(clip_low: float = 0.4, clip_high: float = 0.4) -> Objective:
    """One ratio per response, like GSPO, but every token ratio is clipped before the geometric mean is taken.

    clip_low and clip_high limit the log ratio: from above if the advantage is positive, from below if it is negative.
    A token's weight (of an attachment such as s2t) multiplies the token's own gradient, as in GSPO.
    """
    return Objective("gmpo", clipped_response_ratio, geometric_clip(clip_low, clip_high), seq_mean_token_mean)


@method(paper="2602.04879")
def dppo(
    divergence: Divergence = "tv", shift_low: float = 0.2, shift_high: float = 0.2, cap: float = 20.0
) -> Objective:
    """Cut the gradient of tokens whose probability (not ratio) has moved too far in the advantage's direction.

    So a rare token may change by a large ratio, and a common token only by a small one. divergence=kl measures the
    change by the binary KL divergence between the old and the new policy: this token against all others. In it, 1 - p
    is at least 1e-8, because fp32 can round p to 1 (verl adds 1e-8 instead). In verl the cap is clip_ratio_c, which is
    3 by default.
    """
    return Objective("dppo", token_ratio, probability_mask(divergence, shift_low, shift_high, cap), token_mean)


@method(paper="2602.10693")
def vespo(k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0) -> Objective:
    """Weight each response smoothly by the product of its token ratios, instead of clipping.

    The weight phi is 1 at w = 1, has its maximum at w = k / lambda, and falls to 0 on both sides. It is not divided by
    the length. TRL multiplies the correction for the sampler into w. Here tis and icepop weight the tokens, as in every
    other method.
    """
    surrogate = gamma_weight(k_pos, lambda_pos, k_neg, lambda_neg)
    return Objective("vespo", token_ratio_in_response, surrogate, token_mean)


@method(paper="2506.01939", rule=entropy.top_entropy)
def top_entropy(
    clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0, **options: Any
) -> Objective:
    """DAPO on the 20 % of tokens with the highest entropy ("20-Entropy").

    The mean still divides by the number of all tokens. With renormalize=true it divides by the kept ones.
    """
    rule = entropy.top_entropy(**options)
    return Objective("top_entropy", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), token_mean, (rule,))


@method(paper="2512.16649")
def justrl(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0) -> Objective:
    """Another name of dapo: DAPO's clip and token mean, and nothing else.

    What JustRL does without are settings of the trainer: leave rollout.dynamic_sampling and reward.overlong_buffer off.
    """
    return replace(dapo(clip_low, clip_high, dual_clip), name="justrl")


@method(paper="2505.22617")
def clip_cov(
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    seed: int = 0,
) -> Objective:
    """Drop a few random tokens whose log-prob and advantage have a high covariance.

    The random choice depends only on the seed and the batch, so a replay makes the same choice.
    """
    rule = entropy.drop_covariant(share, cov_low, cov_high, seed)
    return Objective("clip_cov", token_ratio, ppo_clip(clip_low, clip_high), token_mean, (rule,))


@method(paper="2505.22617")
def kl_cov(share: float = 2e-3, coef: float = 1.0, clip_low: float = 1.0, clip_high: float = 1.0) -> Objective:
    """Penalise moving away from the old policy on the tokens with the highest covariance of log-prob and advantage."""
    rule = entropy.penalize_covariant(share, coef)
    surrogate = ppo_clip(clip_low, clip_high, unclipped=penalties.penalized)
    return Objective("kl_cov", token_ratio, surrogate, token_mean, (rule,), (penalties.distance_from_old,))


@method(paper="2506.14758")
def entropy_advantage(
    coef: float = 0.4,
    entropy_cap: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
) -> Objective:
    """DAPO with a bonus on the advantage of high-entropy tokens, which by default never changes its sign."""
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
    """Keep low-probability tokens of responses with a negative advantage from disappearing.

    A penalty holds these tokens close to a proxy q: the old policy after removing noise, which means all tokens with
    less than 0.02 times the probability of the most probable one. Pass q as `proxy_logp`. Without it, q is the old
    policy itself.
    """
    rule = penalties.penalize_improbable(share, coef)
    surrogate = ppo_clip(clip_low, clip_high, dual_clip, penalties.penalized_below_proxy)
    return Objective("lp_reg", token_ratio, surrogate, token_mean, (rule,), (penalties.below_proxy,))


@method(paper="2602.07078", rule=token_baseline)
def otb(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0, **options: Any) -> Objective:
    """DAPO's loss with the optimal token baseline: each token has a baseline of its own, with the least variance.

    The baseline is the mean reward of the group, weighted by the squared gradient norms of each response up to the
    token. We found the formula of the advantage alone, so the loss around it is our choice. What becomes of responses
    that have ended before the token is our reading. ended=left_out ignores them, as verl does. ended=kept counts them
    with the weight of their last token. Where no other response is as long, the baseline is the group's mean.
    """
    surrogate, rule = ppo_clip(clip_low, clip_high, dual_clip), token_baseline(**options)
    return Objective("otb", token_ratio, surrogate, token_mean, (rule,), advantage="group_centered")


@method()
def reinforce() -> Objective:
    """The plain policy gradient, without ratio and clip. Use it for on-policy updates only."""
    return Objective("reinforce", token_ratio, log_prob, token_mean)


@method(paper="2602.15620", rule=s2t)
def stapo(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0, **options: Any) -> Objective:
    """Clip-higher PPO that silences spurious tokens (rare, confident, rewarded) and averages over the rest.

    A silenced token gets weight 0 and is not counted in the mean. The paper does not state its dual clip, so we use the
    one of JustRL, on which it builds. The quantile is taken over the tokens that version 4 of the paper names. For its
    earlier versions, set population=all and quantile=0.8. The masks rare, uncertain and random are the paper's
    ablations: rare tokens of any entropy, rare tokens with high entropy, and random rewarded tokens.
    """
    surrogate = ppo_clip(clip_low, clip_high, dual_clip)
    return Objective("stapo", token_ratio, surrogate, token_mean, (s2t(**options),))


@method(paper="2602.03392", rule=entropy_effect.clip_b)
def clip_b(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0, **options: Any) -> Objective:
    """DAPO that drops the punished tokens that would lower the entropy most, compared within the mini-batch.

    The token's effect is p (ln p + H), less the mean over the mini-batch. We found the rule alone; the loss around it
    is our choice, and so is the deviation, which is that over all tokens.
    """
    rule = entropy_effect.clip_b(**options)
    return Objective("clip_b", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), token_mean, (rule,))


@method(paper="2602.03392", rule=entropy_effect.clip_v)
def clip_v(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0, **options: Any) -> Objective:
    """DAPO that drops the punished tokens that would lower the entropy most, compared with their own distribution.

    The token's effect is STARE's Phi. It is exact if the batch has the moments of its distributions, and else estimated
    from ln p and H. Loss and deviation are chosen as for clip_b.
    """
    rule = entropy_effect.clip_v(**options)
    return Objective("clip_v", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), token_mean, (rule,))


@method(paper="2510.10150", rule=entropy_effect.steer)
def steer(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0, **options: Any) -> Objective:
    """DAPO with a weight on every token that is the smaller, the more the token changes the entropy.

    effect=paper is the paper's approximation of the change; effect=exact computes it from the moments of the
    distributions. We found the weights alone; the loss around them is our choice. falloff=exponential is our reading
    of a form whose constant we did not find: weight_low to the power of the effect, relative to the largest.
    """
    rule = entropy_effect.steer(**options)
    return Objective("steer", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), token_mean, (rule,))


@method(paper="2603.11682", rule=entropy_controllers.repo_r)
def repo_r(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0, **options: Any) -> Objective:
    """DAPO that raises the advantages of rare rewarded tokens and lowers those of rare punished ones, or the reverse.

    Which of the two, and by how much, follows from the entropy of every rollout. In your own training loop, call
    `observe` with it. We found the rule alone. The loss around it is our choice, and so is the start at strength_min.
    """
    rule = entropy_controllers.repo_r(**options)
    return Objective("repo_r", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), token_mean, (rule,))


@method(paper="2511.15248")
def entropic(
    target: float = 0.3,
    gain: float = 1.0,
    integral_gain: float = 0.01,
    p_least: float = 0.95,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
) -> Objective:
    """DAPO with a term on probable tokens that pushes them up or down, to hold the entropy at a target ("EntroPIC").

    A PI controller sets the term's coefficient after every rollout. In your own training loop, call `observe` with it.
    The term is not clipped. We found its form, but no constants: target, gains and p_least are our choice. The term's
    mean is over the probable tokens if the aggregation is token-mean.
    """
    rule = entropy_controllers.push_probable(target, gain, integral_gain, p_least)
    surrogate, push = ppo_clip(clip_low, clip_high, dual_clip), entropy_controllers.probable_push
    return Objective("entropic", token_ratio, surrogate, token_mean, (rule,), (push,))


@method(paper="2604.26326", rule=entropy_controllers.entrocraft)
def entrocraft(
    clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0, **options: Any
) -> Objective:
    """DAPO that holds the entropy in a falling band: outside it, it trains on the responses that lead back alone.

    Below the band these are the punished responses, above it the rewarded ones. In your own training loop, call
    `observe` with every rollout. The ends of the band are the paper's. The number of rollouts in which it falls, and
    the loss around the rule, are our choice.
    """
    rule = entropy_controllers.entrocraft(**options)
    return Objective("entrocraft", token_ratio, ppo_clip(clip_low, clip_high, dual_clip), token_mean, (rule,))


@method(paper="2606.19236", rule=stare_rule)
def stare(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0, **options: Any) -> Objective:
    """Clip-higher PPO that reweights the tokens with the largest effect on entropy while it is below a target.

    The weights do not change what the mean divides by. The authors' code takes the quantile per micro-batch and rank.
    Here it is taken over the mini-batch of all ranks. For models of 14B and more the paper uses boost 1.05 and damp
    0.95.
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
    """One ratio per subsentence, with a clip range that grows with the subsentence's entropy.

    The authors have not published formulas, so this is our reading. h is the mean entropy of the subsentence divided by
    the mean over all subsentences of the mini-batch. Both clip distances are multiplied by clip(h, widen_low,
    widen_high). The ratio of n tokens moves only about 1 / sqrt(n) as far as the ratio of one token. So the usual token
    range of 0.2 and 0.28 hardly ever clips a subsentence, and runs with it broke first (docs/study.md). The default is
    a tenth of that range. Alternatively, clip_scale=sqrt_length with a token's range divides the range by sqrt(n),
    which did less well in the study: at 3e-5 one of its two runs broke, and the default kept all three.
    """
    rule = entropy.widen_by_entropy(widen_low, widen_high, clip_scale)
    return Objective("sspo", segment_ratio, ppo_clip(clip_low, clip_high, dual_clip), seq_mean_token_mean, (rule,))


# With the paper of each.
_ATTACHED: dict[Callable[..., TokenRule | penalties.Penalty], str] = {
    s2t: "2602.15620",
    token_baseline: "2602.07078",
    stare_rule: "2606.19236",
    entropy.top_entropy: "2506.01939",
    entropy_effect.clip_b: "2602.03392",
    entropy_effect.clip_v: "2602.03392",
    entropy_effect.steer: "2510.10150",
    entropy_controllers.repo_r: "2603.11682",
    entropy_controllers.entrocraft: "2604.26326",
    penalties.tis: "",
    penalties.icepop: "",
    penalties.mis: "",
    penalties.kl: "2402.03300",
    entropy.entropy_bonus: "2505.22312",
    trim: "",
}
ATTACHMENTS |= {build.__name__: entry(build, paper) for build, paper in _ATTACHED.items()}
