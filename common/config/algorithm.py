"""The settings of the objective. Each contradiction inside the section is refused with what to write instead."""

from collections.abc import Iterator
from typing import Literal, get_args

from pydantic import Field, field_validator

from common.config.estimators import ESTIMATORS, OWN, Estimator
from common.config.sections import Section, require_own_function

LossType = Literal["grpo", "dapo", "dr_grpo", "bnpo", "cispo"]


class GroupParams(Section):
    """Segments of GROUP PPO (docs/group_ppo.md)."""

    group_variance_threshold: float = Field(1.0, gt=0)
    """τ: how much variance sharing may cost."""
    group_max_size: int | None = Field(16, ge=1)
    """Most tokens in a segment."""
    threshold_lr: float = Field(0.01, ge=0)
    """Step of log τ; 0 = τ stays."""
    segment_rule: Literal["grow", "literal"] = "grow"
    """grow: while sharing pays; literal: until it does."""
    segment_loss: Literal["endpoint", "segment"] = "endpoint"
    """Train a segment's last token, or all."""
    score: Literal["sampled", "exact"] = "sampled"
    """Norms of scores from log-probs, or another forward."""

    def _contradictions(self) -> Iterator[str]:
        if self.threshold_lr and self.segment_rule == "literal":
            yield "segment_rule literal closes earlier the higher τ is, so τ cannot adapt; set threshold_lr=0"


class Algorithm(Section):
    beta: float = Field(0.0, ge=0)
    """KL weight; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Form of KL."""
    kl_in_reward: bool = False
    """KL in rewards, not the loss."""
    use_bias_correction_kl: bool = False
    """Multiply KL by the ratio."""
    epsilon: float = Field(0.2, gt=0)
    """Clip range below 1."""
    epsilon_high: float | None = Field(None, gt=0)
    """Clip range above 1; null = epsilon. cispo: the cap, such as 5.0."""
    delta: float | None = Field(None, gt=1)
    """Dual clip: cap at negative advantages."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """sequence: one ratio per completion (GSPO)."""
    loss_type: LossType = "grpo"
    """Denominator; cispo also an objective."""
    loss: str | None = None
    """Your objective, `file.py:function`."""
    adv_estimator: str = "grpo"
    """Also dr_grpo, rloo, gigpo (turns), reinforce_plus_plus, reinforce_plus_plus_baseline, gae (PPO), group_ppo,
    `file.py:function`."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Deviation to divide by; null = group for grpo and gigpo, else none."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """For several reward functions."""
    whiten_advantages: bool | None = None
    """Over the batch; null = with a critic."""
    entropy_coef: float = Field(0.0, ge=0)
    """Entropy bonus."""
    mask_truncated_completions: bool = False
    """Completions cut by length get weight 0."""
    soft_punish_cache: int = Field(0, ge=0)
    """The last n tokens before the limit cost up to 1 of reward."""
    vllm_importance_sampling_mode: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = None
    """Weigh by π_own/π_vllm."""
    vllm_importance_sampling_clip_max: float = Field(3.0, ge=1)
    """Cap of that weight."""
    vllm_importance_sampling_clip_min: float = Field(0.0, ge=0, le=1)
    """Its floor; 0.5 with token_mask and a cap of 5: IcePop."""
    router_replay: bool = False
    """The trainer sends tokens of a mixture to the experts that the sampler chose (R3)."""
    gamma: float = Field(1.0, gt=0, le=1)
    """GAE's discount; gigpo's of a turn."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's λ; 1 has no bias."""
    group_params: GroupParams = GroupParams()
    """Where group_ppo cuts completions into segments, and which tokens train."""
    num_iterations: int = Field(1, ge=1)
    """Passes over each batch (μ)."""
    steps_per_generation: int = Field(1, ge=1)
    """Optimizer steps in a pass."""
    dead_groups: Literal["keep", "skip", "resample"] = "keep"
    """Of equal rewards: count, leave out, or replace (DAPO)."""
    max_resamples: int = Field(1, ge=1)
    """Most extra batches."""
    shuffle_mini_batches: bool = False
    """Deal groups anew in every pass."""

    @property
    def steps_per_batch(self) -> int:
        """Returns the number of optimizer steps on each batch of rollouts."""
        return self.num_iterations * self.steps_per_generation

    @property
    def resamples(self) -> int:
        return self.max_resamples if self.dead_groups == "resample" else 0

    @property
    def estimator(self) -> Estimator:
        """Returns the properties of the advantage estimator that other settings depend on."""
        return ESTIMATORS.get(self.adv_estimator, OWN)

    @property
    def clip_high(self) -> float:
        """Returns the clip range above 1; with cispo the cap itself."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def beta_of_loss(self) -> float:
        """Returns the weight of the KL term in the loss; 0 = the KL is a metric, or in the reward."""
        return 0.0 if self.kl_in_reward else self.beta

    @property
    def beta_of_rewards(self) -> float:
        """Returns the weight of the KL in the reward; 0 = the reward has no KL."""
        return self.beta if self.kl_in_reward else 0.0

    @property
    def reward_scale(self) -> str:
        return self.scale_rewards or self.estimator.reward_scale

    @property
    def sums_last(self) -> bool:
        """Returns whether the rewards of several functions are normalized one by one, and then summed."""
        return self.multi_objective_aggregation == "normalize_then_sum"

    @property
    def needs_critic(self) -> bool:
        return self.estimator.needs_critic

    @property
    def trains_endpoints(self) -> bool:
        """Returns whether only the last token of each segment is trained."""
        return self.adv_estimator == "group_ppo" and self.group_params.segment_loss == "endpoint"

    @property
    def whitens(self) -> bool:
        """Returns whether the advantages of the step are whitened, over tokens or over completions."""
        chosen = self.needs_critic if self.whiten_advantages is None else self.whiten_advantages
        return chosen or self.estimator.whitens_tokens

    @property
    def charges_kl_by_token(self) -> bool:
        """Returns whether the KL in the reward of a token is that from this token on, not the completion's."""
        return self.estimator.whitens_tokens and self.kl_in_reward

    @property
    def has_token_advantages(self) -> bool:
        """Returns whether the tokens of a completion have advantages of their own."""
        return self.needs_critic or self.estimator.by_turn or self.charges_kl_by_token

    @property
    def always_has_gradient(self) -> bool:
        """Returns whether tokens have a gradient even if their advantage is zero."""
        return self.loss is not None or self.entropy_coef > 0 or self.beta_of_loss > 0

    @field_validator("adv_estimator")
    @classmethod
    def _names_an_estimator(cls, value: str) -> str:
        require_own_function(value, ESTIMATORS)
        return value

    @field_validator("loss")
    @classmethod
    def _names_a_loss(cls, value: str | None) -> str | None:
        if value in get_args(LossType):
            raise ValueError(f"loss is for a function of your own; set algorithm.loss_type={value}, and remove loss")
        if value is not None:
            require_own_function(value)
        return value

    def _contradictions(self) -> Iterator[str]:
        if self.loss_type == "cispo":
            if self.epsilon_high is None or self.epsilon_high <= 1:
                yield "loss_type cispo caps the ratio at epsilon_high itself; set algorithm.epsilon_high=5.0"
            if self.importance_sampling_level == "sequence":
                yield "loss_type cispo weighs tokens; set algorithm.importance_sampling_level=token"
            if self.delta is not None:
                yield "loss_type cispo has one cap, epsilon_high; set algorithm.delta=null"
            if self.epsilon != 0.2:
                yield "loss_type cispo has no lower clip; remove algorithm.epsilon"
        elif self.delta is not None and self.delta <= 1 + self.clip_high:
            yield f"delta {self.delta} must be above 1 + epsilon_high = {1 + self.clip_high}; set algorithm.delta=3.0"
        if self.loss_type == "cispo" and self.loss is not None:
            yield "loss takes the place of cispo's objective; set algorithm.loss_type=dapo, the same mean over tokens"
        bounds = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if self.vllm_importance_sampling_mode is None and bounds != (0, 3):
            yield "vllm_importance_sampling_clip_… does nothing without algorithm.vllm_importance_sampling_mode"
        if self.dead_groups != "keep" and not self.estimator.has_group_baseline:
            yield f"adv_estimator {self.adv_estimator} learns from equal rewards too; set algorithm.dead_groups=keep"
        if self.dead_groups != "resample" and self.max_resamples != 1:
            yield "max_resamples bounds resampling; set algorithm.dead_groups=resample, or remove max_resamples"
        if self.shuffle_mini_batches and self.steps_per_generation == 1:
            yield "shuffle_mini_batches needs several mini-batches; set algorithm.steps_per_generation=4, or remove it"
        yield from self._contradictions_of_kl()
        yield from self._contradictions_of_advantages()
        yield from self._contradictions_of_segments()

    def _contradictions_of_segments(self) -> Iterator[str]:
        if self.adv_estimator != "group_ppo" and self.group_params != GroupParams():
            yield f"group_params does nothing with adv_estimator {self.adv_estimator}; remove it, or set group_ppo"
        if not self.trains_endpoints:
            return
        remedy = "set algorithm.group_params.segment_loss=segment"
        if self.loss_type == "dr_grpo":
            yield f"loss_type dr_grpo divides by tokens of which only segment ends train; use grpo or dapo, or {remedy}"
        if self.importance_sampling_level == "sequence":
            yield f"importance_sampling_level sequence needs the ratio of every token, not of segment ends; {remedy}"
        if (self.vllm_importance_sampling_mode or "").startswith("sequence"):
            yield f"vllm_importance_sampling_mode sequence_… needs the ratio of every token; use token_…, or {remedy}"

    def _contradictions_of_kl(self) -> Iterator[str]:
        for name in ("kl_estimator", "use_bias_correction_kl"):
            if self.beta_of_loss == 0 and self.changes(name):
                yield f"{name} without a KL term in the loss does nothing; remove it, or set algorithm.beta"
        if self.use_bias_correction_kl and self.kl_estimator == "k2":
            yield "use_bias_correction_kl makes k1 and k3 exact, and k2 wrong; set algorithm.kl_estimator=k3"
        if self.use_bias_correction_kl and self.importance_sampling_level == "sequence":
            yield "use_bias_correction_kl weighs a token's KL; set algorithm.importance_sampling_level=token"
        if self.kl_in_reward and self.beta == 0:
            yield "kl_in_reward without beta does nothing; set algorithm.beta=0.04"

    def _contradictions_of_advantages(self) -> Iterator[str]:
        if self.estimator.reward_scale == "none" and self.reward_scale != "none":
            yield f"adv_estimator {self.adv_estimator} divides by no deviation; set algorithm.scale_rewards=null"
        if self.estimator.whitens_tokens and self.whiten_advantages:
            yield f"adv_estimator {self.adv_estimator} whitens already; set algorithm.whiten_advantages=false"
        if self.estimator.by_turn and (self.reward_scale == "batch" or self.whiten_advantages or self.sums_last):
            yield (
                f"adv_estimator {self.adv_estimator} compares turns within a group; set algorithm.scale_rewards=group "
                "or none, whiten_advantages=null and multi_objective_aggregation=sum_then_normalize"
            )
        if self.estimator.by_turn and self.lam != 1:
            yield f"adv_estimator {self.adv_estimator} has no lam; remove it"
        if not self.needs_critic and not self.estimator.by_turn and (self.gamma != 1 or self.lam != 1):
            yield f"adv_estimator {self.adv_estimator} has no gamma and no lam; remove them, or set adv_estimator=gae"
        if self.sums_last:
            if self.adv_estimator != "grpo" or self.reward_scale != "group":
                yield "normalize_then_sum scales by group; set algorithm.adv_estimator=grpo and scale_rewards=group"
            if self.kl_in_reward or self.soft_punish_cache:
                yield "kl_in_reward and soft_punish_cache change the sum that normalize_then_sum does not form"
