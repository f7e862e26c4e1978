"""The settings of the trainer's ranks: optimizer, batches, devices, checkpoints, and the critic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.config.sections import Section


class Critic(Section):
    """Only with adv_estimator gae and group_ppo, on the trainer's ranks, with its optimizer, schedule and clip."""

    path: str | None = None
    """Initial value model: a causal language model, with a new value head of zeros, or a one-label reward model, with
    its head. null = the initial policy. Same tokenizer."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """null = the policy's."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate of the critic's AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps from 0 to that rate."""
    cliprange_value: float | None = Field(0.5, gt=0)
    """PPO value clip: a value this far from its old one has no gradient; null = no clip."""
    critic_warmup_steps: int = Field(0, ge=0)
    """The first n optimizer steps train only the critic. They count in max_steps; the policy version stays."""


class Trainer(Section):
    max_steps: int = Field(200, gt=0)
    """Optimizer steps."""
    prompts_per_step: int = Field(8, gt=0)
    """Groups per optimizer step over all ranks, any number; a mini-batch where algorithm.steps_per_generation > 1."""
    groups_per_micro_batch: int = Field(1, gt=0)
    """Groups in one forward and backward of a rank. Changes memory and speed, not the update."""
    max_tokens_per_micro_batch: int | None = Field(None, gt=0)
    """Instead: as many whole groups as have this many packed tokens, a shared prompt counted once. A larger group
    trains alone. null = groups_per_micro_batch."""
    packing: Literal["shared", "flat", "off"] = "shared"
    """shared: a prompt is computed once per group. flat: once per completion, without padding. off: a padded batch.
    Same update; shared is fastest."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    lr_scheduler_type: str = "constant_with_warmup"
    """Any name of transformers.get_scheduler."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps from 0 to the peak rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled, as in AdamW."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of Adam's mean of gradients."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of Adam's mean of squared gradients."""
    max_grad_norm: float = Field(1.0, gt=0)
    """A larger gradient of the whole step is scaled down to this norm."""
    max_staleness: int = Field(0, ge=0)
    """Batches that sampling may run ahead of training; 0 = on policy."""
    borrow_cores_after: float | None = Field(None, ge=0, lt=1)
    """On CPUs with max_staleness > 0: groups after this fraction of a step also train on the sampler's cores. 0.5 if
    the sampler needs half the trainer's time; null = never."""
    save_steps: int | None = Field(100, gt=0)
    """Checkpoint every n optimizer steps, at the end of a batch of rollouts; null = only by save_minutes."""
    save_minutes: float | None = Field(10.0, gt=0)
    """Also at the end of the first batch done n minutes after the last checkpoint; null = only by save_steps. Both
    null: only final/, nothing to resume from."""
    save_limit: int = Field(2, ge=2)
    """Checkpoints kept; at least two, because a crash may interrupt the newest."""
    devices: list[int] = []
    """GPUs, one rank each; empty = all visible ones that no sampler owns, or the only one."""
    num_ranks: int | None = Field(None, gt=0)
    """null = one per device, 1 on CPU. Over gloo several ranks may share a device."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Ranks that share every micro-batch, each with part of its tokens and attention heads (Ulysses), for groups too
    long for one device. Must divide ranks and heads. 1 = off."""
    dist_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on GPUs, gloo on CPU. gloo also for vGPU clusters, where NCCL does not work."""
    logprob_chunk_size: int = Field(1024, gt=0)
    """Tokens whose [tokens, vocabulary] logits exist at once."""
    max_skipped_steps: int = Field(3, ge=1)
    """Non-finite steps in a row before the run stops."""
    max_hours: float | None = Field(None, gt=0)
    """After so many hours the run saves and exits with code 75, to be resumed. Counted from the start of launch.sh, or
    of the trainer by hand. Stay some minutes below a batch system's limit. null = no limit."""

    @property
    def saves_checkpoints(self) -> bool:
        return self.save_steps is not None or self.save_minutes is not None
