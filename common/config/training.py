"""The settings of the trainer's ranks: optimizer, batches, devices, checkpoints, and the critic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.config.sections import Section


class Critic(Section):
    """Only with adv_estimator gae and group_ppo."""

    path: str | None = None
    """Initial value model: a causal or a one-label reward model; null = the initial policy."""
    revision: str | None = None
    """As model.revision."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """null = the policy's."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak of the critic's AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps from 0 to that rate."""
    cliprange_value: float | None = Field(0.5, gt=0)
    """PPO value clip; null = none."""
    critic_warmup_steps: int = Field(0, ge=0)
    """The first n optimizer steps train only the critic."""


class Trainer(Section):
    max_steps: int = Field(200, gt=0)
    """Optimizer steps."""
    prompts_per_step: int = Field(8, gt=0)
    """Groups per optimizer step over all ranks, any number."""
    groups_per_micro_batch: int = Field(1, gt=0)
    """Groups in one forward of a rank: memory and speed, not the update."""
    max_tokens_per_micro_batch: int | None = Field(None, gt=0)
    """Instead: whole groups up to so many packed tokens."""
    packing: Literal["shared", "flat", "off"] = "shared"
    """shared: a prompt once per group, the fastest. flat: once per completion. off: padded."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak of AdamW."""
    lr_scheduler_type: str = "constant_with_warmup"
    """Any name of transformers.get_scheduler."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps from 0 to the peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled, as in AdamW."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    max_grad_norm: float = Field(1.0, gt=0)
    """A step's larger gradient is scaled down to this norm."""
    max_staleness: int = Field(0, ge=0)
    """Batches that sampling may run ahead; 0 = on policy."""
    borrow_cores_after: float | None = Field(None, ge=0, lt=1)
    """After this part of a step also train on the sampler's cores (CPU, max_staleness > 0)."""
    save_steps: int | None = Field(100, gt=0)
    """Checkpoint every n optimizer steps; null = only by save_minutes."""
    save_minutes: float | None = Field(10.0, gt=0)
    """Also n minutes after the last. Both null: only final/, nothing to resume."""
    save_limit: int = Field(2, ge=2)
    """Checkpoints kept; two, because a crash may interrupt the newest."""
    devices: list[int] = []
    """GPUs, one rank each; empty = all that no sampler owns."""
    num_ranks: int | None = Field(None, gt=0)
    """null = one per device, 1 on CPU. Over gloo ranks may share one."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Ranks that share every micro-batch (Ulysses). Must divide ranks and heads."""
    dist_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on GPUs, gloo on CPU. gloo also where NCCL does not work."""
    logprob_chunk_size: int = Field(1024, gt=0)
    """Tokens whose logits exist at once."""
    max_skipped_steps: int = Field(3, ge=1)
    """Non-finite steps in a row that stop the run."""
    max_hours: float | None = Field(None, gt=0)
    """Then save and exit with code 75, to be resumed."""

    @property
    def saves_checkpoints(self) -> bool:
        return self.save_steps is not None or self.save_minutes is not None
