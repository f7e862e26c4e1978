"""The settings of the trainer's ranks: optimizer, batches, devices, checkpoints, and the critic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.config.sections import Section


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
    borrow_cores_after: float | None = Field(None, ge=0, lt=1)
    """On CPUs with max_staleness > 0: what follows this fraction of a step's groups trains on the sampler's cores too.
    Set it where the sampler waits: 0.5 if its part of a step takes half as long as the trainer's. null = never."""
    save_steps: int | None = Field(100, gt=0)
    """Checkpoint every n optimizer steps, at the end of a batch of rollouts; null = by save_minutes alone."""
    save_minutes: float | None = Field(10.0, gt=0)
    """Checkpoint also at the end of the first batch that is done so many minutes after the last one; null = by
    save_steps alone. With both null there is only final/, and nothing to resume from."""
    save_limit: int = Field(2, ge=2)
    """Checkpoints kept, by steps and by minutes together. Never fewer than two: a crash may interrupt the newest."""
    devices: list[int] = []
    """GPUs of the trainer, one rank each; empty = all visible ones that the sampler does not own, or the only one."""
    num_ranks: int | None = Field(None, gt=0)
    """Ranks that launch.sh starts; null = one per device, 1 on CPU. Over gloo more ranks than devices share them."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Ranks that share every micro-batch, each with a part of its tokens and, in attention, of its heads (Ulysses): for
    groups too long for one device. Must divide the number of ranks and of the model's attention heads. 1 = off."""
    dist_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on GPUs, gloo on CPU. gloo is needed on vGPU clusters, where NCCL does not work."""
    logprob_chunk_size: int = Field(1024, gt=0)
    """Tokens whose [tokens, vocabulary] logits exist at one time."""
    max_skipped_steps: int = Field(3, ge=1)
    """Non-finite steps in a row before the run stops."""
    max_hours: float | None = Field(None, gt=0)
    """After so many hours the run finishes its step, saves a checkpoint and ends with exit code 75, to be resumed.
    Counted from the start of launch.sh, or of the trainer by hand; null = no limit. Set it some minutes below the limit
    of a batch system."""

    @property
    def saves_checkpoints(self) -> bool:
        return self.save_steps is not None or self.save_minutes is not None
