"""Every setting, with its meaning under it. Both processes read the same YAML file.

Key names follow TRL where TRL has one. `load` reads the file, applies `key=value` overrides, checks everything
once and reports all errors together, with file, line and "did you mean". Nothing here imports torch, so a typo
costs milliseconds, not the start of two processes.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from common.errors import UserError

MAX_SOCKET_PATH = 107  # bytes, of sockaddr_un
MAX_TOP_K = 1024  # tokens that travel with every sampled one
TIES = 16  # more tokens than top_k may be kept: all that are as likely as the last of them


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class Run(Section):
    output_dir: Path = Path("runs/run")
    """Run folder: metrics.jsonl, samples.jsonl, eval.jsonl, curves.png, report.html, logs/, checkpoints/, final/."""
    seed: int = 0
    """Seeds problem order, sampling and everything random in the trainer."""
    report_to: list[Literal["tensorboard", "wandb", "trackio", "swanlab", "mlflow"]] = ["tensorboard"]
    """Sinks beside metrics.jsonl, which is always written. They get numbers and settings, never samples."""
    resume: bool = False
    """Continue from the newest valid checkpoint in output_dir. Without one this is an error, never a fresh start."""
    record: bool = False
    """Append every group that is trained to output_dir/groups.recording. Ignored while replaying one."""
    replay: Path | None = None
    """Train from such a recording, without a sampler: the same weights, bit for bit."""
    log_samples: int = Field(2, ge=0)
    """Groups written to samples.jsonl per step: the best and the worst completion of each."""


class Model(Section):
    path: str
    """Hub id or folder of the policy's start."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null = the default branch."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Weights and compute; with bfloat16 the optimizer keeps float32 master weights."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model. Only for models you trust as you trust your own code."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third slower."""


class Reference(Section):
    path: str | None = None
    """Frozen reference of the KL term; null = the policy's own start. Any size, same tokenizer. Unused at beta 0."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null = the default branch."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """null = the policy's."""
    on: Literal["sampler", "trainer", "auto"] = "sampler"
    """Which process scores it. sampler: groups carry its log-probs. trainer: every rank holds a whole copy and scores
    its own groups. auto: launch.sh gives it to the side that has more time, by the estimate of `launch.sh plan`."""


MAX_LORA_RANK = 512  # of vLLM


class Lora(Section):
    """Low-rank adapters beside frozen weights (arXiv 2106.09685); docs/lora.md. Off unless r is given."""

    r: int = Field(0, ge=0)
    """Rank of the adapters, for example 16: only they are trained. 0 = off, every weight is trained."""
    alpha: int | None = Field(None, gt=0)
    """An adapter counts alpha / r times. null = 2 · r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Inputs of adapters dropped in training. The sampler drops none: above 0 the trainer's log-probs are those of
    another network than the sampler's, so that ratios differ from 1 before the first step, and mismatch/* shows it."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Names of the layers that get adapters, such as [q_proj, v_proj]. all-linear: all but the output head."""
    sync: Literal["adapter", "merged"] = "adapter"
    """adapter: publish adapters alone, which vLLM applies beside the base weights. merged: publish whole weights with
    the adapters added, for models whose adapters vLLM cannot apply."""

    @property
    def scale(self) -> int:
        """alpha, as given or by default."""
        return 2 * self.r if self.alpha is None else self.alpha

    @property
    def publishes_adapters(self) -> bool:
        return self.r > 0 and self.sync == "adapter"

    @model_validator(mode="after")
    def _options_fit_together(self) -> Lora:
        if self.r == 0:
            given = sorted(name for name in self.model_fields_set if name != "r")
            if changed := [n for n in given if getattr(self, n) != type(self).model_fields[n].default]:
                raise ValueError(f"{changed[0]} does nothing without adapters; set lora.r=16, or remove it")
            return self
        names = self.target_modules if isinstance(self.target_modules, list) else ["all-linear"]
        if not names:
            raise ValueError("target_modules is empty; write target_modules: all-linear, or [q_proj, v_proj]")
        if tied := [name for name in names if name.split(".")[-1] in ("embed_tokens", "lm_head", "wte")]:
            raise ValueError(
                f"target_modules {tied[0]}: embedding and output head get no adapters (they are often one matrix, and "
                "the head runs in chunks); remove it"
            )
        if self.sync == "adapter" and self.r > MAX_LORA_RANK:
            raise ValueError(f"vLLM applies adapters up to rank {MAX_LORA_RANK}, r is {self.r}; set lora.sync=merged")
        return self


class Data(Section):
    train: str | list[str]
    """`openai/gsm8k:main@train[:512]`, a .jsonl, .json or .parquet file, a folder, a save_to_disk folder, or a list."""
    eval: str | list[str] | None = None
    """Held-out problems in the same notation; null = no evaluation."""
    prompt_key: str = "question"
    """Column with the problem: text, or a list of chat messages. `extra_info.question` looks inside a column."""
    answer_key: str | None = "answer"
    """Column that reward functions receive as `answer`; may look inside, too. null = no reward needs one."""
    rename: dict[str, str] = {}
    """New column names, {problem: question}, before everything else; the old name may look inside a column."""
    max_prompt_length: int = Field(512, gt=0)
    """Tokens. Longer prompts are filtered once at the start and counted."""
    eval_size: int | None = Field(None, gt=0)
    """Use only the first n held-out problems."""
    shuffle: bool = True
    """A new permutation per epoch, a pure function of (seed, epoch)."""


class PromptTemplate(Section):
    system: str | None = None
    """System message put before every problem."""
    format_prompt: Path | None = None
    """A Jinja file that writes the user's message: `content` is the problem, the other columns have their names."""
    chat_template: Path | None = None
    """A Jinja file used instead of the tokenizer's own chat template; needed for base models."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the chat template, for example {enable_thinking: false}."""


class Sampler(Section):
    num_generations: int = Field(8, ge=2)
    """G: completions per problem, the size of a group."""
    temperature: float = Field(1.0, ge=0.01)
    """Training samples; the trainer divides its logits by the same number. vLLM raises anything below 0.01 to it."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the most likely tokens that have this probability together. 1 = all; less needs
    return_sampling_mask."""
    top_k: int | None = Field(None, ge=-1)
    """Draw from the k most likely tokens. null, 0 or -1 = all; more needs return_sampling_mask."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Draw from tokens at least this likely relative to the most likely one. 0 = all; more needs
    return_sampling_mask."""
    return_sampling_mask: bool = False
    """Send the tokens that top_p, top_k and min_p kept with every sample; the trainer then takes its softmax over them
    alone, as the sampler did. Needs top_k, which bounds their number."""
    max_completion_length: int = Field(256, gt=0)
    """Tokens, end-of-sequence included."""
    ignore_eos: bool = False
    """Sample to max_completion_length whatever comes: for measurements, where every step must cost the same."""
    devices: list[int] = []
    """GPUs of the sampler, by index; empty = all visible ones, or the CPU."""

    @property
    def max_sampling_mask(self) -> int:
        """Most tokens that one sample may be drawn from; 0 = the whole vocabulary."""
        return (self.top_k or 0) + TIES if self.return_sampling_mask else 0

    @model_validator(mode="after")
    def _a_truncated_distribution_needs_its_mask(self) -> Sampler:
        k = self.top_k or 0
        if self.return_sampling_mask:
            if not 0 < k <= MAX_TOP_K:
                raise ValueError(
                    f"return_sampling_mask sends up to top_k tokens with every sample, and top_k is {self.top_k}; set "
                    f"sampler.top_k=50 (at most {MAX_TOP_K}), or for all tokens sampler.return_sampling_mask=false"
                )
            return self
        cuts = {"top_p": self.top_p if self.top_p < 1 else None, "top_k": k if k > 0 else None}
        cuts["min_p"] = self.min_p if self.min_p > 0 else None
        if cut := [f"{name} {value}" for name, value in cuts.items() if value is not None]:
            top_k = "" if k > 0 else " sampler.top_k=50"
            raise ValueError(
                f"{', '.join(cut)} samples from a truncated distribution: its log-probs are renormalised over the kept "
                "tokens, while the trainer's softmax is over all: every ratio would be too small by the probability "
                f"that was cut away. Set sampler.return_sampling_mask=true{top_k}, so that both sides use the kept tokens, or "
                "sample at full support: sampler.top_p=1 sampler.top_k=-1 sampler.min_p=0"
            )
        return self


class Eval(Section):
    steps: int | None = Field(None, gt=0)
    """Evaluate every n policy versions; null = only before and after."""
    before: bool = True
    """Evaluate the policy's start, before the first step."""
    after: bool = True
    """Evaluate the final policy."""
    temperature: float = Field(0.0, ge=0)
    """0 = greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the most likely tokens that together have this probability. 1 = all."""
    top_k: int | None = Field(None, ge=-1)
    """Draw from the k most likely tokens. null, 0 or -1 = all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Draw from tokens at least this likely relative to the most likely one. 0 = all."""
    num_generations: int = Field(1, ge=1)
    """Completions per held-out problem."""
    max_completion_length: int | None = Field(None, gt=0)
    """null = the sampler's."""
    metric_for_best_model: str | None = None
    """`answer/accuracy` or `answer/mean` of any reward function: the policy with the best one is kept in best/."""
    greater_is_better: bool = True
    """Whether more of that metric is better."""
    early_stopping_patience: int | None = Field(None, gt=0)
    """Stop after this many evaluations in a row without a better metric; null = never."""
    early_stopping_threshold: float = Field(0.0, ge=0)
    """A metric is better only if it is better by more than this."""
    load_best_model_at_end: bool = False
    """final/ is the best policy instead of the last one."""
    val_only: bool = False
    """`launch.sh run` evaluates the model, or with run.resume its newest checkpoint, and trains nothing."""

    @model_validator(mode="after")
    def _the_best_has_a_metric(self) -> Eval:
        for name in ("early_stopping_patience", "early_stopping_threshold", "load_best_model_at_end"):
            if getattr(self, name) and self.metric_for_best_model is None:
                raise ValueError(f"{name} needs a metric; set eval.metric_for_best_model=answer/accuracy")
        if self.early_stopping_patience is not None and self.steps is None:
            raise ValueError("early_stopping_patience counts evaluations while training; set eval.steps=20")
        return self


def reward_name(spec: str) -> str:
    """`my_rewards.py:length` and `package.module.length` are both called "length"."""
    return spec.rsplit(":", 1)[-1].rsplit(".", 1)[-1]


class Rewards(Section):
    reward_funcs: list[str] = ["answer", "format"]
    """Built-in names, `package.module.function`, or `file.py:function`."""
    reward_weights: list[float] | None = None
    """One per function; null = 1.0 each."""
    reward_kwargs: dict[str, dict[str, Any]] = {}
    """Arguments for single functions: {cosine_length: {max_len: 512}}. They stand above a column of the same name."""
    full_marks: dict[str, float] = {}
    """Score from which a completion counts as right in accuracies, by function; default: 1.25 for format, 0.5 for
    cosine_length, else 1.0."""
    timeout_s: float = Field(10.0, gt=0)
    """A reward call that takes longer is killed, and its group becomes a tombstone."""
    max_memory_gib: float = Field(8.0, gt=0)
    """A reward process that wants more gets a MemoryError, and its group becomes a tombstone. Linux only."""
    max_tombstone_fraction: float = Field(0.01, ge=0, le=1)
    """The run stops with the reason once more than this share of groups (and more than 3) are tombstones."""

    @property
    def weights(self) -> list[float]:
        return self.reward_weights if self.reward_weights is not None else [1.0] * len(self.reward_funcs)

    @property
    def names(self) -> list[str]:
        """Short names of the functions, for metrics: the part after the last colon or dot."""
        return [reward_name(spec) for spec in self.reward_funcs]

    def full_mark(self, name: str) -> float:
        return self.full_marks.get(name, {"format": 1.25, "cosine_length": 0.5}.get(name, 1.0))

    @model_validator(mode="after")
    def _one_weight_per_function(self) -> Rewards:
        if not self.reward_funcs:
            raise ValueError("reward_funcs is empty; write reward_funcs: [answer, format]")
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"reward_funcs has two functions named {twice[0]!r}; rename one, their metrics would mix")
        for option in ("reward_kwargs", "full_marks"):
            for name in set(getattr(self, option)) - set(self.names):
                raise ValueError(
                    f"{option} names {name!r}, and reward_funcs gives {', '.join(self.names)}; use one of them"
                )
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            n, m = len(self.reward_weights), len(self.reward_funcs)
            raise ValueError(f"reward_weights has {n} numbers for {m} reward_funcs; write {[1.0] * m}")
        return self


class GroupParams(Section):
    """Segments of GROUP PPO. Read only with adv_estimator group_ppo."""

    group_variance_threshold: float = Field(1.0, gt=0)
    """τ: a segment of n tokens shares one advantage while its variance is at most τ · n times that of n advantages."""
    group_max_size: int | None = Field(16, ge=1)
    """Tokens in a segment, at most; null = no limit. 1 is PPO with a critic."""
    group_epsilon: float = Field(1e-6, gt=0)
    """Added to the variance that is divided by: where no token has an advantage, segments grow."""
    adaptive_threshold: bool = True
    """Move τ after every step until sharing neither adds nor removes variance on average."""
    threshold_lr: float = Field(0.01, gt=0)
    """Step of log τ."""
    min_threshold: float = Field(0.1, gt=0)
    """Lower bound of the moving τ."""
    max_threshold: float = Field(10.0, gt=0)
    """Upper bound of the moving τ."""
    segment_rule: Literal["grow", "literal"] = "grow"
    """grow: as long as sharing pays. literal: close as soon as it does, which is PPO wherever τ is 1 or more."""
    segment_loss: Literal["endpoint", "segment"] = "endpoint"
    """endpoint: only a segment's last token trains and enters the head. segment: every token, with its segment's
    advantage."""
    score: Literal["sampled", "exact"] = "sampled"
    """Squared norm of a token's score: (1 − p)² from the sampler's log-probs, or exactly, by one more forward."""

    @model_validator(mode="after")
    def _options_fit_together(self) -> GroupParams:
        if problems := list(self._contradictions()):
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        low, start, high = self.min_threshold, self.group_variance_threshold, self.max_threshold
        if not self.adaptive_threshold:
            for name in ("threshold_lr", "min_threshold", "max_threshold"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    yield f"{name} does nothing without adaptive_threshold; remove it, or set adaptive_threshold=true"
        elif not low <= start <= high:
            yield f"group_variance_threshold {start} is outside min_threshold {low} … max_threshold {high}; move one"
        if self.adaptive_threshold and self.segment_rule == "literal":
            yield "segment_rule literal closes earlier the higher τ is, so τ cannot adapt; set adaptive_threshold=false"


class Algorithm(Section):
    beta: float = Field(0.0, ge=0)
    """Weight of the KL term to the reference. 0 loads no reference model and scores nothing with it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The KL term of a token, x = log π_ref − log π_θ: k1 = −x, k2 = x²/2, k3 = exp(x) − x − 1."""
    kl_in_reward: bool = False
    """Subtract beta · Σ (log π_old − log π_ref) from each reward, and nothing from the loss."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: beta is only the start; after each batch it moves so that the KL of a completion tends to kl_target."""
    kl_target: float | None = Field(None, gt=0)
    """Mean KL of a whole completion that the adaptive controller holds, in nats, for example 6.0."""
    kl_horizon: int = Field(10000, gt=0)
    """Completions over which the adaptive controller moves beta by a fifth at most."""
    use_bias_correction_kl: bool = False
    """Multiply the KL term by the ratio, which makes the expected gradient of k3 that of KL(π_θ ‖ π_ref)."""
    epsilon: float = Field(0.2, gt=0, lt=1)
    """Clip range below 1; cispo has none."""
    epsilon_high: float | None = Field(None, gt=0)
    """Clip range above 1; null = epsilon. With loss_type cispo the cap of the ratio itself, for example 5.0."""
    delta: float | None = Field(None, gt=1)
    """Cap of the ratio where the advantage is negative (dual clip), above 1 + epsilon_high; null = none."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """token: a ratio per token. sequence: one per completion, normalised by its length (GSPO)."""
    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo", "cispo"] = "grpo"
    """grpo: mean of sequence means. dapo, bnpo: mean over all tokens of the step. dr_grpo: sum / (sequences · max
    length). cispo: mean over all tokens of capped ratio · advantage · log-prob."""
    adv_estimator: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "group_ppo"
    ] = "grpo"
    """grpo: (r − mean) / std of the group. dr_grpo: without std. rloo: minus the mean of the others.
    reinforce_plus_plus(_baseline): r (− mean), whitened over the tokens of the batch. gae: PPO with a critic.
    group_ppo: the same, with one advantage for each segment of a completion."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Standard deviation (n − 1) to divide by: the group's, the whole batch's, or none. null = group for adv_estimator
    grpo, none for the others."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """normalize_then_sum: every reward function's scores are normalised in the group before the weighted sum."""
    whiten_advantages: bool | None = None
    """Also (A − mean) / std over the completions of the whole batch of rollouts; with a critic over its tokens.
    null = only with a critic."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus in the objective, at the sampling temperature. 0: entropies are metrics only."""
    mask_truncated_completions: bool = False
    """Completions that reached max_completion_length keep their reward but get weight 0."""
    soft_punish_cache: int = Field(0, ge=0)
    """The last n tokens before max_completion_length lower the reward, evenly from 0 to −1. 0 = off."""
    vllm_importance_sampling_mode: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = None
    """Weighs tokens or completions by π_own / π_vllm, π_own the policy when it first trains on them: cut to clip_max,
    or 0 above it."""
    vllm_importance_sampling_clip_max: float = Field(3.0, ge=1)
    """Where that weight is cut or masked."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of GAE, per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's λ: 1 = return − value, without bias; smaller trusts the critic more, for less variance."""
    group_params: GroupParams = GroupParams()
    """Where group_ppo cuts completions into segments, and which tokens train."""
    num_iterations: int = Field(1, ge=1)
    """Passes over each batch of rollouts (μ in the GRPO paper)."""
    steps_per_generation: int = Field(1, ge=1)
    """Mini-batches in a batch of rollouts: optimizer steps in one pass over it. A batch of rollouts then holds
    prompts_per_step · steps_per_generation groups: verl's train_batch_size, and prompts_per_step its mini-batch."""
    dead_groups: Literal["keep", "skip", "resample"] = "keep"
    """Groups whose rewards are all equal. keep: they count in denominators, and KL and entropy train them. skip: they
    are left out of everything. resample: left out, and the next groups of the stream take their seats."""
    max_resamples: int = Field(1, ge=1)
    """With dead_groups resample, further batches' worth of groups taken for one batch; seats may then stay empty."""
    shuffle_mini_batches: bool = False
    """Deal a batch's groups to its mini-batches anew in every pass, by (seed, batch, pass), instead of in order."""

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps on each batch of rollouts."""
        return self.num_iterations * self.steps_per_generation

    @property
    def resamples(self) -> int:
        return self.max_resamples if self.dead_groups == "resample" else 0

    @property
    def has_group_baseline(self) -> bool:
        """Equal rewards in a group mean that nothing is to be learned from it."""
        return self.adv_estimator in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")

    @property
    def clip_high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def reward_scale(self) -> str:
        return self.scale_rewards or ("group" if self.adv_estimator == "grpo" else "none")

    @property
    def whitens_tokens(self) -> bool:
        return self.adv_estimator.startswith("reinforce_plus_plus")

    @property
    def needs_critic(self) -> bool:
        return self.adv_estimator in ("gae", "group_ppo")

    @property
    def trains_endpoints(self) -> bool:
        """Of each segment only the last token."""
        return self.adv_estimator == "group_ppo" and self.group_params.segment_loss == "endpoint"

    @property
    def whitens(self) -> bool:
        """The advantages of the step, over tokens or over completions."""
        return self.whitens_tokens or (self.needs_critic if self.whiten_advantages is None else self.whiten_advantages)

    @property
    def always_has_gradient(self) -> bool:
        """Also where the advantage is zero."""
        return self.entropy_coef > 0 or (self.beta > 0 and not self.kl_in_reward)

    @model_validator(mode="after")
    def _options_fit_together(self) -> Algorithm:
        if problems := list(self._contradictions()):
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        """What has no meaning, or would silently do nothing."""
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
        if self.vllm_importance_sampling_mode is None and self.vllm_importance_sampling_clip_max != 3:
            yield "vllm_importance_sampling_clip_max does nothing without algorithm.vllm_importance_sampling_mode"
        if self.dead_groups != "keep" and not self.has_group_baseline:
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
        if self.beta == 0 and self.kl_estimator != "k3":
            yield "kl_estimator without beta does nothing; set algorithm.beta=0.04, or remove kl_estimator"
        if self.use_bias_correction_kl and (self.beta == 0 or self.kl_in_reward):
            yield "use_bias_correction_kl without a KL term in the loss does nothing; remove it, or set algorithm.beta"
        if self.use_bias_correction_kl and self.importance_sampling_level == "sequence":
            yield "use_bias_correction_kl weighs a token's KL; set algorithm.importance_sampling_level=token"
        if self.kl_in_reward and self.beta == 0:
            yield "kl_in_reward without beta does nothing; set algorithm.beta=0.04"
        if self.kl_in_reward and self.kl_estimator != "k3":
            yield "kl_in_reward always sums log π_old − log π_ref; remove algorithm.kl_estimator, which is the loss's"
        if self.kl_controller == "adaptive":
            if not self.kl_in_reward:
                yield "kl_controller adaptive moves the KL in the reward; set algorithm.kl_in_reward=true"
            if self.kl_target is None:
                yield "kl_controller adaptive needs a target; set algorithm.kl_target=6.0"
        elif self.kl_target is not None or self.kl_horizon != 10000:
            yield "kl_target and kl_horizon belong to the adaptive controller; set algorithm.kl_controller=adaptive"

    def _contradictions_of_advantages(self) -> Iterator[str]:
        if self.adv_estimator != "grpo" and self.reward_scale != "none":
            yield f"adv_estimator {self.adv_estimator} divides by no deviation; set algorithm.scale_rewards=null"
        if self.whitens_tokens and self.whiten_advantages:
            yield f"adv_estimator {self.adv_estimator} whitens already; set algorithm.whiten_advantages=false"
        if not self.needs_critic and (self.gamma != 1 or self.lam != 1):
            yield f"adv_estimator {self.adv_estimator} has no gamma and no lam; remove them, or set adv_estimator=gae"
        if self.multi_objective_aggregation == "normalize_then_sum":
            if self.adv_estimator != "grpo" or self.reward_scale != "group":
                yield "normalize_then_sum scales by group; set algorithm.adv_estimator=grpo and scale_rewards=group"
            if self.kl_in_reward or self.soft_punish_cache:
                yield "kl_in_reward and soft_punish_cache change the sum that normalize_then_sum does not form"


class Critic(Section):
    """Used with adv_estimator gae and group_ppo, on the trainer's ranks, with its optimizer, schedule and clip."""

    path: str | None = None
    """Start of the value model: a causal language model, which gets a value head of zeros, or a reward model with one
    label, whose head is kept. null = the policy's start. Same tokenizer as the policy."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null = the default branch."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """null = the policy's."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate of the critic's own AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which that rate rises from 0 to its peak."""
    cliprange_value: float | None = Field(0.5, gt=0)
    """A value that has moved further than this from what it was before the batch has no gradient; null = no clip."""
    critic_warmup_steps: int = Field(0, ge=0)
    """The first n optimizer steps move only the critic. They count in max_steps; the policy's version stays."""


class Trainer(Section):
    max_steps: int = Field(200, gt=0)
    """Optimizer steps."""
    prompts_per_step: int = Field(8, gt=0)
    """Groups per optimizer step over all ranks, any number: a mini-batch where algorithm.steps_per_generation > 1."""
    groups_per_micro_batch: int = Field(1, gt=0)
    """Whole groups in one forward and backward of one rank. Does not change the update, only memory and speed."""
    max_tokens_per_micro_batch: int | None = Field(None, gt=0)
    """Instead of groups_per_micro_batch: as many whole groups as have this many tokens as packed, with a shared prompt
    counted once. A larger group trains alone. null = groups_per_micro_batch."""
    packing: Literal["shared", "flat", "off"] = "shared"
    """shared: a prompt is computed once for its whole group. flat: once per completion, without padding. off: a dense
    padded batch. The update is the same; shared is the fastest."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    lr_scheduler_type: str = "constant_with_warmup"
    """Any name of transformers.get_scheduler."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the learning rate rises from 0 to its peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled, as in AdamW."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of Adam's mean of gradients."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of Adam's mean of squared gradients."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient of the whole step is scaled down to this norm if it is larger."""
    max_staleness: int = Field(0, ge=0)
    """Batches the sampler may run ahead. 0 = on-policy: training starts on groups as they arrive, equal to waiting."""
    save_steps: int | None = Field(100, gt=0)
    """Checkpoint every n optimizer steps, at the end of a batch of rollouts; null = only final/."""
    save_limit: int = Field(2, ge=2)
    """Checkpoints kept. Never fewer than two: the newest may be the one a crash interrupts."""
    devices: list[int] = []
    """GPUs of the trainer, one rank each; empty = all visible ones that the sampler does not own."""
    num_ranks: int | None = Field(None, gt=0)
    """Ranks that launch.sh starts; null = one per device, 1 on CPU."""
    dist_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on GPUs, gloo on CPU. gloo is needed on vGPU clusters and for two ranks on one GPU."""
    logprob_chunk_size: int = Field(1024, gt=0)
    """Tokens whose [tokens, vocabulary] logits exist at one time."""
    max_skipped_steps: int = Field(3, ge=1)
    """Non-finite steps in a row before the run stops."""


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme == "ipc":
        return bool(parts.path) and len(text.removeprefix("ipc://").encode()) <= MAX_SOCKET_PATH
    names_a_host = parts.hostname not in (None, "*", "0.0.0.0")  # samplers connect to the same text
    return parts.scheme == "tcp" and names_a_host and bool(port) and not parts.path


class Channel(Section):
    endpoint: str | None = None
    """null = ipc:// in a private folder of this host. Several hosts: tcp://10.0.0.1:5555, bound by trainer rank 0."""
    connect_timeout_s: float = Field(600.0, gt=0)
    """How long either side waits for the other's first word."""
    lost_after_s: float = Field(10.0, gt=0)
    """Silence after which a peer is reported lost and its leases go to others."""
    stall_timeout_s: float = Field(1800.0, gt=0)
    """Silence or no progress for this long ends the process with exit code 75."""
    max_message_mib: int = Field(64, gt=0)
    """A larger message is refused and its sender disconnected."""

    @property
    def rank_patience_s(self) -> float:
        """How long the other ranks wait for rank 0, which may itself wait for a sampler and then for its groups."""
        return self.connect_timeout_s + self.stall_timeout_s + 60

    @field_validator("endpoint")
    @classmethod
    def _both_sides_can_use_it(cls, value: str | None) -> str | None:
        if value is not None and not _is_address(value):
            raise ValueError("not an address that both sides can use; write tcp://10.0.0.1:5555, or null on one host")
        return value


class Weights(Section):
    dir: Path | None = None
    """Where versions are published; null = memory (/dev/shm) on one host, output_dir/weights otherwise."""
    keep: int = Field(2, ge=2)
    """Versions kept beside those that a live sampler still uses."""
    publish_every: Literal["batch", "step"] = "batch"
    """batch: the sampler gets new weights when a batch of rollouts is done. step: after each of its optimizer steps,
    with leases for as many groups as that step was the last to train; only with max_staleness above 0."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Largest log-prob difference between trainer and engine on the canary; null = 1e-3 in float32, 0.5 in bfloat16."""


class Config(Section):
    run: Run = Run()
    model: Model
    lora: Lora = Lora()
    reference: Reference = Reference()
    data: Data
    prompt: PromptTemplate = PromptTemplate()
    sampler: Sampler = Sampler()
    eval: Eval = Eval()
    rewards: Rewards = Rewards()
    algorithm: Algorithm = Algorithm()
    critic: Critic = Critic()
    trainer: Trainer = Trainer()
    channel: Channel = Channel()
    weights: Weights = Weights()
    deepspeed: dict[str, Any] | Path = {}
    """Your DeepSpeed JSON, inline or as a path. Absent fields are filled in; contradictions are refused."""
    vllm: dict[str, Any] = {}
    """Passed to vllm.LLM unchanged: gpu_memory_utilization, max_model_len, tensor_parallel_size, …"""

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        shared = sorted(set(self.sampler.devices) & set(self.trainer.devices))
        if shared:
            raise ValueError(
                f"GPU {shared[0]} is in sampler.devices {self.sampler.devices} and in trainer.devices "
                f"{self.trainer.devices}; give each process its own"
            )
        if self.vllm.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
            raise ValueError(
                f"vllm.logprobs_mode {self.vllm['logprobs_mode']!r} are not the log-probs of the sampled distribution, "
                "which the ratio needs; remove it, processed_logprobs is given to vLLM"
            )
        tokens = self.sampler.num_generations * self.sampler.max_completion_length
        group_mib = 4 * tokens * (3 + self.sampler.max_sampling_mask) / 2**20
        if self.sampler.return_sampling_mask and group_mib > 0.9 * self.channel.max_message_mib:
            raise ValueError(
                f"a group of {tokens} tokens with {self.sampler.max_sampling_mask} kept ones each takes "
                f"{group_mib:.0f} MiB; set channel.max_message_mib={math.ceil(group_mib / 0.9)}, or a smaller "
                "sampler.top_k"
            )
        if self.algorithm.soft_punish_cache > self.sampler.max_completion_length:
            raise ValueError(
                f"algorithm.soft_punish_cache {self.algorithm.soft_punish_cache} is longer than a completion; set it "
                f"to at most sampler.max_completion_length {self.sampler.max_completion_length}"
            )
        if self.reference.on == "trainer" and self.algorithm.kl_in_reward:
            raise ValueError(
                "algorithm.kl_in_reward changes the rewards that advantages are made of, before a trainer rank has "
                "scored its groups; set reference.on=sampler"
            )
        self._check_kl_horizon()
        self._check_publishing()
        self._check_evaluation()
        self._check_lengths()
        self._check_critic()
        self._check_lora()
        if self.trainer.max_steps % self.algorithm.steps_per_batch:
            n, m = self.trainer.max_steps, self.algorithm.steps_per_batch
            raise ValueError(
                f"trainer.max_steps {n} does not divide by algorithm.num_iterations {self.algorithm.num_iterations} × "
                f"steps_per_generation {self.algorithm.steps_per_generation}, the steps of a batch of rollouts; "
                f"set trainer.max_steps={math.ceil(n / m) * m}"
            )
        return self

    def _check_publishing(self) -> None:
        if self.weights.publish_every == "batch":
            return
        if self.algorithm.steps_per_batch == 1:
            raise ValueError(
                "weights.publish_every step differs from batch only where a batch has several steps; set "
                "algorithm.steps_per_generation=4, or remove weights.publish_every"
            )
        if self.trainer.max_staleness == 0:
            raise ValueError(
                "weights.publish_every step with trainer.max_staleness 0 publishes weights that sample nothing: the "
                "next groups start when the batch is done; set trainer.max_staleness=1, or weights.publish_every=batch"
            )

    def _check_lora(self) -> None:
        if not self.lora.publishes_adapters:
            return
        for name in ("enable_lora", "max_loras", "max_cpu_loras"):
            if name in self.vllm:
                raise ValueError(f"vllm.{name} follows from lora.r; remove it")
        rank = self.vllm.get("max_lora_rank", self.lora.r)
        if not (isinstance(rank, int) and rank >= self.lora.r):
            raise ValueError(f"vllm.max_lora_rank {rank} is below lora.r {self.lora.r}; remove it, it follows from r")

    def _check_kl_horizon(self) -> None:
        n = self.prompts_per_batch * self.sampler.num_generations
        if self.algorithm.kl_controller == "adaptive" and self.algorithm.kl_horizon < n:
            raise ValueError(
                f"algorithm.kl_horizon {self.algorithm.kl_horizon} is shorter than a batch of {n} completions, which "
                f"would move beta by more than a fifth at once; set algorithm.kl_horizon={10 * n}"
            )

    def _check_lengths(self) -> None:
        completion = max(self.sampler.max_completion_length, self.eval.max_completion_length or 0)
        longest, limit = self.data.max_prompt_length + completion, self.vllm.get("max_model_len")
        if limit is not None and not (isinstance(limit, int) and limit >= longest):
            raise ValueError(
                f"data.max_prompt_length {self.data.max_prompt_length} + max_completion_length {completion} = "
                f"{longest} tokens > vllm.max_model_len {limit}; set vllm.max_model_len={longest}, or remove it"
            )

    def require_training(self) -> None:
        """Raises UserError where there is nothing to train."""
        if self.eval.val_only:
            raise UserError(
                "eval.val_only evaluates without a trainer: bash launch.sh run CONFIG eval.val_only=true, or "
                "bash launch.sh eval CHECKPOINT"
            )

    @property
    def reference_on(self) -> Literal["sampler", "trainer"] | None:
        """The process that loads the reference model; None at beta 0. `auto` must be decided."""
        if self.algorithm.beta == 0:
            return None
        return "trainer" if self.reference.on == "trainer" else "sampler"

    def require_reference_side(self) -> None:
        """Raises UserError while reference.on is auto: two processes started by hand could decide differently."""
        if self.reference.on == "auto" and self.algorithm.beta > 0:
            raise UserError(
                "reference.on is auto, which launch.sh decides for both processes; where they are started one by one "
                "give both the same: reference.on=sampler or reference.on=trainer (bash launch.sh plan names one)"
            )

    def _check_critic(self) -> None:
        if self.critic != Critic() and not self.algorithm.needs_critic:
            raise ValueError(
                f"the section critic does nothing with algorithm.adv_estimator {self.algorithm.adv_estimator}; "
                "remove it, or set algorithm.adv_estimator=gae"
            )
        if self.critic.revision is not None and self.critic.path is None:
            raise ValueError("critic.revision without critic.path names nothing; set critic.path, or remove revision")
        if self.critic.critic_warmup_steps >= self.trainer.max_steps:
            raise ValueError(
                f"critic.critic_warmup_steps {self.critic.critic_warmup_steps} leaves the policy none of "
                f"trainer.max_steps {self.trainer.max_steps}; make max_steps larger"
            )

    def _check_evaluation(self) -> None:
        metric = self.eval.metric_for_best_model
        if (metric is not None or self.eval.val_only) and self.data.eval is None:
            name = "eval.val_only" if metric is None else "eval.metric_for_best_model"
            raise ValueError(f"{name} needs held-out problems; set data.eval=openai/gsm8k:main@test")
        known = [f"{name}/{kind}" for name in self.rewards.names for kind in ("accuracy", "mean")]
        if metric is not None and metric not in known:
            near = difflib.get_close_matches(metric, known, n=1, cutoff=0) or known
            raise ValueError(
                f"eval.metric_for_best_model {metric!r} is none of {', '.join(known)}; "
                f"set eval.metric_for_best_model={near[0]}"
            )

    @property
    def num_batches(self) -> int:
        """Batches of rollouts in the whole run; each gives steps_per_batch optimizer steps."""
        return self.trainer.max_steps // self.algorithm.steps_per_batch

    @property
    def prompts_per_batch(self) -> int:
        """Groups in a batch of rollouts, over all its mini-batches."""
        return self.trainer.prompts_per_step * self.algorithm.steps_per_generation

    @property
    def window(self) -> int:
        """Groups that may exist outside the trainer: a batch of rollouts, and those the sampler may run ahead."""
        return self.prompts_per_batch * (1 + self.trainer.max_staleness)

    def micro_batches(self, world_size: int) -> int:
        """Micro-batches per optimizer step on each rank; with a budget of tokens, of the longest groups possible."""
        return math.ceil(self.trainer.prompts_per_step / (world_size * self.groups_at_once))

    @property
    def groups_at_once(self) -> int:
        """Groups in one micro-batch; with a budget of tokens, of the longest possible."""
        budget = self.trainer.max_tokens_per_micro_batch
        return self.trainer.groups_per_micro_batch if budget is None else max(1, budget // self.longest_group)

    @property
    def longest_group(self) -> int:
        """Tokens of the longest group there can be, as packed."""
        count, completion = self.sampler.num_generations, self.sampler.max_completion_length
        return (1 if self.trainer.packing == "shared" else count) * self.data.max_prompt_length + count * completion

    def uneven_work(self, world_size: int) -> str | None:
        """What to say when some ranks have a group more than others and those wait. The update is the same."""
        prompts = self.trainer.prompts_per_step
        if prompts % world_size == 0:
            return None
        least, even = prompts // world_size, math.ceil(prompts / world_size) * world_size
        near = " or ".join(str(n) for n in (even - world_size, even) if n)
        return (
            f"trainer.prompts_per_step {prompts} on {world_size} ranks: some train {least + 1} groups a step, the "
            f"others {least} and then wait. Even would be trainer.prompts_per_step={near}"
        )


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """The checked configuration. Raises UserError naming every problem at once."""
    path = Path(path)
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise UserError(f"config {path} is not text; give a YAML file such as configs/quickstart.yaml") from None
    except OSError as error:
        near = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        hint = difflib.get_close_matches(path.name, near, n=1)
        raise UserError(
            f"config {path}: {error.strerror or error}."
            + (f" Did you mean {path.parent / hint[0]}?" if hint else f" Files there: {', '.join(near) or 'none'}")
        ) from None
    try:
        lines = _line_numbers(yaml.compose(text, Loader=_Loader), path)
        settings = _parse(text) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected sections such as `model:` and `data:`, got {type(settings).__name__}")
    settings = {name: {} if value is None else value for name, value in settings.items()}  # `eval:` with no lines
    for override in overrides:
        _apply(settings, override)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise UserError("\n".join(_explain(e, path, lines) for e in error.errors())) from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-6 as text; here it is a number, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+"), list("-+.0123456789")
)


def _parse(text: str) -> Any:
    return _Loader(text).get_single_data()


def _apply(settings: dict[str, Any], override: str) -> None:
    """`trainer.max_steps=20` sets settings["trainer"]["max_steps"] = 20; the value is YAML."""
    key, sep, value = override.partition("=")
    if not sep or not key:
        raise UserError(f"override {override!r} is not key=value; write for example trainer.max_steps=20")
    *parents, leaf = key.split(".")
    node: Any = settings
    for parent in parents:
        node = node.setdefault(parent, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise UserError(f"override {override!r}: {'.'.join(parents)} is not a section")
    try:
        node[leaf] = _parse(value)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value is not valid YAML") from None


def _line_numbers(node: yaml.Node | None, path: Path, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    """Line of every key. Raises UserError for a key given twice, of which YAML would silently drop the first."""
    lines: dict[tuple[str, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            where, line = (*prefix, str(key.value)), key.start_mark.line + 1
            if where in lines:
                raise UserError(f"{path}:{line}: {'.'.join(where)} stands in line {lines[where]} already; join them")
            lines[where] = line
            lines.update(_line_numbers(value, path, where))
    return lines


def _explain(error: Any, path: Path, lines: dict[tuple[str, ...], int]) -> str:
    where = tuple(str(part) for part in error["loc"])
    line = next((lines[where[:n]] for n in range(len(where), 0, -1) if where[:n] in lines), None)
    place = f"{path}:{line}" if line and where in lines else str(path)
    name = ".".join(where)
    if error["type"] == "extra_forbidden":
        known = _known_keys()
        elsewhere = [k for k in known if k.split(".")[-1] == where[-1]]
        near = elsewhere or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        return f"{place}: {name}: no such option." + (f" Did you mean {near[0]}?" if near else "")
    if error["type"] == "missing":
        return f"{place}: {name} is required; add it to the file or give {name}=… on the command line"
    message = error["msg"].removeprefix("Value error, ")
    return f"{place}: {name}: {message}, got {error['input']!r}" if where else f"{place}: {message}"


def _known_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys += _known_keys(field.annotation, f"{prefix}{name}.")
    return keys


def world_size() -> int:
    """Ranks of this job, from the launcher's environment; 1 when started without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))
