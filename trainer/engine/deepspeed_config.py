"""Builds the config of deepspeed.initialize from the user's DeepSpeed settings and Tandem's config.

It does not import torch, so a contradiction is reported within milliseconds. A DeepSpeed file that
was written for a different trainer works unchanged: its "auto" values are filled in here, or left
to DeepSpeed where DeepSpeed has a default. If the user's settings and Tandem's config determine the
same value, both must be equal, because nobody can tell which of them was meant.
"""

from dataclasses import dataclass
from typing import Any

from common.config import Config
from common.errors import UserError
from trainer.engine.user_settings import user_settings

# how many numbers of bfloat16 gradients wait to be added up together (flat_gradients.py): 128 MiB
GRADIENTS_AT_ONCE = 1 << 26
_AUTO = "auto"
_FLOAT32 = ("fp32", "float32", "float", "torch.float32")  # DeepSpeed's words for this dtype
# the optimizers that Tandem supports, by lower-case name: bytes of their state per parameter
OPTIMIZERS = {
    "adam": 8,  # two moments
    "adamw": 8,
    "lamb": 8,
    "nadam": 8,
    "radam": 8,
    "adamax": 8,
    "lion": 4,
    "adagrad": 4,
    "rmsprop": 4,
    "sgd": 4,
    "muon": 4,
}


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings in which the policy's optimizer and the critic's differ."""

    section: str  # the config section with learning_rate
    learning_rate: float
    warmup_steps: int
    num_steps: int  # optimizer steps in the whole run


def policy_optimizer(config: Config) -> OptimizerSettings:
    """Returns the settings of the policy's optimizer."""
    trainer = config.trainer
    # in the first critic_warmup_steps steps only the critic learns
    num_steps = trainer.max_steps - config.critic.critic_warmup_steps
    return OptimizerSettings("trainer", trainer.learning_rate, trainer.warmup_steps, num_steps)


def critic_optimizer(config: Config) -> OptimizerSettings:
    """Returns the settings of the critic's optimizer.

    Its learning rate needs no warmup, because the critic's head starts at zero, and the policy does
    not train during critic_warmup_steps.
    """
    rate = config.critic.learning_rate
    return OptimizerSettings("critic", rate, warmup_steps=0, num_steps=config.trainer.max_steps)


def optimizer_settings(config: Config) -> list[OptimizerSettings]:
    """Returns the settings of the policy's optimizer, and of the critic's if there is a critic."""
    optimizers = [policy_optimizer(config)]
    if config.algorithm.needs_critic:
        optimizers.append(critic_optimizer(config))
    return optimizers


def deepspeed_config(
    config: Config, world_size: int, optimizer: OptimizerSettings | None = None
) -> dict[str, Any]:
    """Returns the config of deepspeed.initialize for a model with this optimizer.

    optimizer: by default the policy's. Raises UserError if the user's settings contradict Tandem's.
    """
    if optimizer is None:
        optimizer = policy_optimizer(config)
    settings = user_settings(config)
    _fill_batch_sizes(config, settings, world_size)
    _fill_precision(config, settings)
    _remove_expert_parallel(settings)

    is_float32 = config.model.dtype == "float32"
    # float32 weights need no masters, one rank has nothing to shard, and Muon must not be sharded
    suits_stage_0 = is_float32 and (world_size == 1 or optimizer_of(settings) == "muon")
    zero = _section(settings, "zero_optimization")
    _fill_zero(zero, default_stage=0 if suits_stage_0 else 1)
    if is_offloaded(zero, "offload_optimizer"):
        # by default DeepSpeed refuses torch's AdamW here, although AdamW can also step on a CPU
        settings.setdefault("zero_force_ds_cpu_optimizer", False)
    _fill_accumulation(settings, config.model.dtype)

    _fill_optimizer(config, settings, optimizer)
    _remove_schedule(settings)
    suits_muon = is_float32 and zero["stage"] == 0
    if optimizer_of(settings) == "muon" and not suits_muon:
        raise UserError(
            "deepspeed.optimizer.type Muon: under ZeRO, DeepSpeed would clip the update that Muon "
            "has made orthogonal, and in bfloat16 small steps are lost; set model.dtype=float32 "
            "and deepspeed.zero_optimization.stage=0, or leave deepspeed.optimizer out"
        )

    settings.setdefault("steps_per_print", 10**9)  # never
    # by default DeepSpeed waits for the GPU in every micro-batch, to measure the times it prints
    _section(_section(settings, "timers"), "throughput").setdefault("enabled", False)
    return _without_auto(settings)


def _section(parent: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a section, which is created if missing. Raises UserError if it is not a mapping."""
    section = parent.setdefault(name, {})
    if not isinstance(section, dict):
        raise UserError(
            f"deepspeed.{name} is {section!r}, not a section; "
            "see the DeepSpeed configuration reference"
        )
    return section


def _impose(section: dict[str, Any], setting: str, value: Any, source: str) -> None:
    """Sets a setting to Tandem's value. Raises UserError if the user has set a different value.

    section: where the setting is. setting: its full name, such as deepspeed.bf16.enabled. source:
    what determines Tandem's value, for the message.
    """
    key = setting.rpartition(".")[-1]
    if section.get(key, _AUTO) not in (_AUTO, value):
        raise UserError(
            f"{setting} is {section[key]} but {source} makes it {value}; "
            f'remove it from the DeepSpeed settings or write "auto"'
        )
    section[key] = value


def is_offloaded(zero: dict[str, Any], name: str) -> bool:
    """Returns whether ZeRO keeps parameters or optimizer state off the GPU.

    zero: the section zero_optimization. name: "offload_param" or "offload_optimizer".
    """
    return zero.get(name, {}).get("device", "none") != "none"


def optimizer_of(settings: dict[str, Any]) -> str:
    """Returns the optimizer's name in lower case. Raises UserError if it is not in OPTIMIZERS."""
    name = str(settings.get("optimizer", {}).get("type", "AdamW"))
    if name.lower() not in OPTIMIZERS:
        raise UserError(
            f"deepspeed.optimizer.type {name} is not one of {', '.join(OPTIMIZERS)}, whose state "
            "Tandem can save and estimate; 8-bit optimizers are not supported; "
            "leave deepspeed.optimizer out for AdamW"
        )
    return name.lower()


def _fill_batch_sizes(config: Config, settings: dict[str, Any], world_size: int) -> None:
    """Fills in batch sizes, clipping and tensor parallelism."""
    trainer = config.trainer
    micro_batch = config.groups_at_once
    accumulation = config.micro_batches(world_size)
    # DeepSpeed counts every rank as data-parallel here, also ranks that share a micro-batch
    batch = micro_batch * accumulation * world_size
    micro_batch_source = "trainer.max_tokens_per_micro_batch"
    if trainer.max_tokens_per_micro_batch is None:
        micro_batch_source = "trainer.groups_per_micro_batch"
    batch_source = "trainer.prompts_per_step (in groups, rounded up)"
    max_norm = trainer.max_grad_norm
    _impose(settings, "deepspeed.train_micro_batch_size_per_gpu", micro_batch, micro_batch_source)
    _impose(settings, "deepspeed.gradient_accumulation_steps", accumulation, batch_source)
    _impose(settings, "deepspeed.train_batch_size", batch, batch_source)
    _impose(settings, "deepspeed.gradient_clipping", max_norm, "trainer.max_grad_norm")
    # with False, the training loop and not the engine decides after which micro-batch to step
    _impose(settings, "deepspeed.managed_gradient_accumulation", False, "the training loop")
    if "tensor_parallel" in settings:
        section = _section(settings, "tensor_parallel")
        size = trainer.tensor_parallel_size
        _impose(
            section, "deepspeed.tensor_parallel.autotp_size", size, "trainer.tensor_parallel_size"
        )


def _fill_precision(config: Config, settings: dict[str, Any]) -> None:
    """Fills in whether bfloat16 is on. Raises UserError if the user's settings turn fp16 on."""
    is_bfloat16 = config.model.dtype == "bfloat16"
    _impose(_section(settings, "bf16"), "deepspeed.bf16.enabled", is_bfloat16, "model.dtype")
    fp16 = _section(settings, "fp16")
    if fp16.get("enabled", _AUTO) not in (_AUTO, False):
        raise UserError(
            "deepspeed.fp16 is enabled: its loss scaling hides overflows; "
            "set model.dtype=bfloat16 instead"
        )
    fp16["enabled"] = False


def _remove_expert_parallel(settings: dict[str, Any]) -> None:
    """Removes the section expert_parallel. Raises UserError if it turns expert parallelism on."""
    section = _section(settings, "expert_parallel")
    if section.get("enabled", _AUTO) not in (_AUTO, False):
        raise UserError(
            "deepspeed.expert_parallel is enabled: AutoEP keeps only some experts on each rank, "
            "under names that no checkpoint has, so published versions of the policy would lack "
            "the other experts; remove it, and shard experts by deepspeed.zero_optimization.stage=3"
        )
    settings.pop("expert_parallel")  # its other settings have no effect when it is off


def _fill_zero(zero: dict[str, Any], default_stage: int) -> None:
    """Fills in the ZeRO stage and overlap_comm.

    zero: the section zero_optimization. default_stage: 0 if there is nothing to shard and nothing
    to keep in a higher precision. In such a run, stage 1 would hold a second copy of weights and
    gradients, and copy them in every step.
    """
    if zero.get("stage", _AUTO) == _AUTO:
        zero["stage"] = default_stage
    stage = zero["stage"]
    if stage not in (0, 1, 2, 3):
        raise UserError(f"deepspeed.zero_optimization.stage {stage} is not 0, 1, 2 or 3")
    if stage < 2:
        # gradients stay on their rank until the step, so there is no communication to overlap
        _impose(zero, "deepspeed.zero_optimization.overlap_comm", False, f"stage {stage}")
    elif stage == 3 and zero.get("overlap_comm", _AUTO) == _AUTO:
        zero["overlap_comm"] = False  # as is DeepSpeed's default in stage 2, but not in stage 3


def _fill_accumulation(settings: dict[str, Any], dtype: str) -> None:
    """Makes micro-batches of bfloat16 models add gradients up in float32.

    DeepSpeed's default is bfloat16, in which sums would depend on the number of micro-batches.
    """
    zero = settings["zero_optimization"]
    if dtype != "bfloat16":
        return
    if zero["stage"] == 0:
        raise UserError(
            "deepspeed.zero_optimization.stage 0 with model.dtype bfloat16: DeepSpeed would add "
            "gradients up in bfloat16 and wait for the GPU once for each parameter; "
            "set deepspeed.zero_optimization.stage=1"
        )
    types = _section(settings, "data_types")
    if types.get("grad_accum_dtype", _AUTO) in (_AUTO, *_FLOAT32):
        types["grad_accum_dtype"] = "fp32"  # else the user has chosen a different dtype
    bf16 = settings["bf16"]
    source = "the training loop, which skips steps that are not finite,"
    _impose(bf16, "deepspeed.bf16.check_grad_overflow", True, source)
    has_flat_gradients = zero["stage"] == 1 and not is_offloaded(zero, "offload_optimizer")
    if has_flat_gradients and types["grad_accum_dtype"] == "fp32":
        # flat_gradients.py then adds gradients up while backward runs, so that ranks do not hold a
        # copy of all gradients in bfloat16
        source = "stage 1, which adds gradients up while backward runs,"
        _impose(bf16, "deepspeed.bf16.immediate_grad_update", True, source)


def _fill_optimizer(config: Config, settings: dict[str, Any], optimizer: OptimizerSettings) -> None:
    """Fills in learning rate and weight decay, if the user chose one of DeepSpeed's optimizers.

    All other hyperparameters, such as betas and eps, have the user's values or, by default, those
    of the optimizer.
    """
    if "optimizer" not in settings:
        return
    params = _section(_section(settings, "optimizer"), "params")
    rate = optimizer.learning_rate
    decay = config.trainer.weight_decay
    name = "deepspeed.optimizer.params"
    _impose(params, f"{name}.lr", rate, f"{optimizer.section}.learning_rate")
    _impose(params, f"{name}.weight_decay", decay, "trainer.weight_decay")
    if optimizer_of(settings) == "muon":
        # Muon uses Adam for vectors, and DeepSpeed's own Adam would first have to be compiled
        params.setdefault("torch_adam", True)


def _remove_schedule(settings: dict[str, Any]) -> None:
    """Removes DeepSpeed's learning-rate schedule, which Tandem's schedule replaces.

    Raises UserError if the user has set a parameter of DeepSpeed's schedule.
    """
    params = _section(_section(settings, "scheduler"), "params")
    user_params = {name: value for name, value in params.items() if value != _AUTO}
    if user_params:
        raise UserError(
            f"deepspeed.scheduler.params has {user_params}: the schedule is set by "
            "trainer.lr_scheduler_type, lr_scheduler_kwargs and warmup_steps; set these, and leave "
            "deepspeed.scheduler out"
        )
    settings.pop("scheduler")


def _without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy without the remaining "auto" values, for which DeepSpeed has defaults."""
    completed = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            completed[key] = _without_auto(value)
        elif value != _AUTO:
            completed[key] = value
    return completed
