"""The settings of the trainer's ranks: optimizer, batches, devices, checkpoints, and the critic."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from common.config.sections import Section

LrSchedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]


class CriticSettings(Section):
    """For adv_estimator gae and group_ppo."""

    path: str | None = None
    """Causal or one-label reward model; null = the initial policy."""
    learning_rate: float = Field(1e-5, gt=0)
    """AdamW's peak."""
    cliprange_value: float | None = Field(0.5, gt=0)
    """PPO value clip."""
    critic_warmup_steps: int = Field(0, ge=0)
    """The first n steps train only the critic."""


class TrainerSettings(Section):
    max_steps: int = Field(200, gt=0)
    """Optimizer steps."""
    epochs: float | None = Field(None, gt=0)
    """Instead: passes over the rows, those included that are left out later; resampling takes more."""
    prompts_per_step: int = Field(8, gt=0)
    """Groups per step over all ranks."""
    groups_per_micro_batch: int = Field(1, gt=0)
    """Groups in a rank's forward; launch.sh run chooses tokens for GPUs of one host."""
    max_tokens_per_micro_batch: int | None = Field(None, gt=0)
    """Instead: whole groups, in tokens."""
    packing: Literal["auto", "shared", "separate"] = "auto"
    """shared: a prompt once per group; separate: per completion, padded; auto: what the model allows."""
    learning_rate: float = Field(1e-6, gt=0)
    """AdamW's peak."""
    lr_scheduler_type: LrSchedule = "constant_with_warmup"
    """Those of transformers that need no metric."""
    lr_scheduler_kwargs: dict[str, Any] = {}
    """As in transformers: {min_lr_rate: 0.1}."""
    warmup_steps: int = Field(0, ge=0)
    """Steps from 0 to the peak; the schedule `constant` has none."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's; other betas: deepspeed.optimizer."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Clips the gradient."""
    max_staleness: int = Field(0, ge=0)
    """Batches sampling may run ahead; 0 = on policy."""
    save_steps: int | None = Field(None, ge=0)
    """Checkpoint every n steps; null = every ten minutes, 0 = never."""
    save_limit: int = Field(2, ge=2)
    """Checkpoints kept."""
    devices: list[int] = []
    """GPUs, a rank each; empty = all that no sampler owns."""
    num_ranks: int | None = Field(None, gt=0)
    """null = one per device, 1 on CPU; gloo ranks may share one."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Ranks per micro-batch (Ulysses); divides ranks and heads."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that share each layer (AutoTP); divides ranks and heads."""
    dist_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on GPUs, else gloo."""
    logprob_chunk_size: int = Field(1024, gt=0)
    """Tokens whose logits exist at once."""
    compile_layers: bool = True
    """On GPUs below ZeRO 3, by torch.compile."""
    max_hours: float | None = Field(None, gt=0)
    """Then save and exit with code 75."""

    def _contradictions(self) -> Iterator[str]:
        if self.epochs is not None and "max_steps" in self.model_fields_set:
            yield "epochs and max_steps are both given; remove one, as in trainer.epochs=null"

    @property
    def saves_checkpoints(self) -> bool:
        return self.save_steps != 0
