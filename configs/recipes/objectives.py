"""Objectives and an estimator of papers, for `algorithm.loss` and `algorithm.adv_estimator`: copy what you change.

Objectives are maximised. They get a micro-batch's N tokens, completion after completion, with the `lengths` of these.
r = π_θ / π_old, where π_old is the sampler's, or with a mismatch correction the trainer's own; sg = stop gradient.
docs/recipes.md has the settings around them.
"""

import torch

SAPO_POSITIVE, SAPO_NEGATIVE = 1.0, 1.05  # τ
VESPO_POSITIVE, VESPO_NEGATIVE = (2.0, 3.0), (3.0, 2.0)  # (k, λ)
DPPO_CAP = 20.0
OFF_POLICY_LIMIT = 0.1  # δ, which the paper does not give


def _ratio(log_ratio):
    return log_ratio.clamp(max=20).exp()  # exp(89) is infinite in float32


def _where(condition, yes, no, like):
    return torch.where(condition, like.new_tensor(yes), like.new_tensor(no))


def _of_completions(values, lengths, combine):
    return torch.cat([combine(part).expand(len(part)) for part in values.split(lengths)])


def sapo(logprobs, old_logprobs, advantages):
    """Returns Soft Adaptive Policy Optimization's objective, arXiv 2511.20347: a gate in the place of the clip.

    J_t = 4/τ · σ(τ · (r_t − 1)) · A        τ = 1 where A > 0, else 1.05
    """
    ratio = _ratio(logprobs - old_logprobs)
    tau = _where(advantages > 0, SAPO_POSITIVE, SAPO_NEGATIVE, ratio)
    return torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


def vespo(logprobs, old_logprobs, advantages, lengths):
    """Returns Variational Sequence-Level Soft Policy Optimization's objective, arXiv 2602.10693; with loss_type dapo.

    J_t = sg(φ(w)) · A · log π_θ(t)        w = Π_s r_s over the completion
    φ(w) = w^k · e^(λ·(1 − w))             k = 2, λ = 3 where A ≥ 0, else k = 3, λ = 2
    """
    log_w = _of_completions((logprobs - old_logprobs).detach(), lengths, torch.sum)
    (k, lam), (k_negative, lam_negative) = VESPO_POSITIVE, VESPO_NEGATIVE
    k, lam = _where(advantages >= 0, k, k_negative, log_w), _where(advantages >= 0, lam, lam_negative, log_w)
    return (k * log_w + lam * (1 - log_w.exp())).exp() * advantages * logprobs


def dppo(logprobs, old_logprobs, advantages, settings):
    """Returns Divergence PPO's objective, binary total variation, arXiv 2602.04879: bounds probabilities, not ratios.

    J_t = M_t · sg(min(r_t, 20)) · A · log π_θ(t)
    M_t = 0 where A > 0 and π_θ(t) − π_old(t) > epsilon_high, or A ≤ 0 and π_old(t) − π_θ(t) > epsilon; else 1
    """
    moved = logprobs.detach().exp() - old_logprobs.exp()
    stays = torch.where(advantages > 0, moved <= settings.clip_high, -moved <= settings.epsilon)
    return stays * _ratio(logprobs - old_logprobs).clamp(max=DPPO_CAP).detach() * advantages * logprobs


def off_policy_mask(logprobs, old_logprobs, advantages, lengths, settings):
    """Returns GRPO's objective without completions that are too far off-policy: DeepSeek-V3.2, arXiv 2512.02556, eq. 9.

    J_t = M_i · min(r_t · A, clip(r_t, 1 − epsilon, 1 + epsilon_high) · A)
    M_i = 0 where A < 0 and 1/|o_i| · Σ_s −log r_s > δ, else 1
    """
    log_ratio = logprobs - old_logprobs
    left = (advantages < 0) & (_of_completions(-log_ratio.detach(), lengths, torch.mean) > OFF_POLICY_LIMIT)
    ratio = _ratio(log_ratio)
    clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.clip_high)
    return ~left * torch.minimum(ratio * advantages, clipped * advantages)


def maxrl(rewards):
    """Returns MaxRL advantages, arXiv 2602.02710, of rewards 0 and 1: hard problems weigh more, as in ∇ log p(right).

    A_i = (r_i − mean(r)) / mean(r)        0 where no completion is right
    """
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else 0 * rewards
