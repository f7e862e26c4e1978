"""Completion of the user's DeepSpeed settings by Tandem's.

It is pure and without torch, so a contradiction costs milliseconds. A file made for other trainers
works as it is: its "auto" values are filled in here, or left to DeepSpeed where it has a default. A
value that both sides set must be equal, because nobody can tell which of the two was meant.
"""

from dataclasses import dataclass
from typing import Any

from common.config import Config
from common.errors import UserError
from trainer.engine.user_settings import user_settings

# numbers in bfloat16 gradients that wait to be added up (flat_gradients.py), 128 MiB
GRADIENTS_AT_ONCE = 1 << 26
_AUTO = "auto"
_FLOAT32 = ("fp32", "float32", "float", "torch.float32")  # DeepSpeed's words for it
# bytes of state per parameter of DeepSpeed's and torch's optimizers, by lower-case name
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
    """The settings in which the optimizers of policy and critic differ."""

    section: str  # the config section with learning_rate
    learning_rate: float
    warmup_steps: int
    num_steps: int  # optimizer steps in the whole run


def policy_optimizer(config: Config) -> OptimizerSettings:
    """Returns the settings of the policy's optimizer. It makes no step in critic_warmup_steps."""
    trainer = config.trainer
    num_steps = trainer.max_steps - config.critic.critic_warmup_steps
    return OptimizerSettings("trainer", trainer.learning_rate, trainer.warmup_steps, num_steps)


def critic_optimizer(config: Config) -> OptimizerSettings:
    """Returns the settings of the critic's optimizer.

    It has no warmup, because the critic's head starts at zero and critic_warmup_steps give it time.
    """
    return OptimizerSettings("critic", config.critic.learning_rate, 0, config.trainer.max_steps)


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

    optimizer: by default the policy's.
    Raises UserError if the user's settings contradict Tandem's, with the names of both.
    """
    if optimizer is None:
        optimizer = policy_optimizer(config)
    settings = user_settings(config)
    _fill_batch_sizes(config, settings, world_size)
    _fill_precision(config, settings)
    _refuse_expert_parallel(settings)
    is_float32 = config.model.dtype == "float32"
    # such a run has nothing to shard and no masters in a higher precision
    suits_stage_0 = is_float32 and (world_size == 1 or optimizer_of(settings) == "muon")
    zero = _section(settings, "zero_optimization")
    _fill_zero(zero, default_stage=0 if suits_stage_0 else 1)
    if is_offloaded(zero, "offload_optimizer"):
        # by default DeepSpeed refuses torch's AdamW here, although it steps on a CPU, too
        settings.setdefault("zero_force_ds_cpu_optimizer", False)
    _fill_accumulation(settings, config.model.dtype)
    _fill_optimizer(config, settings, optimizer)
    _refuse_schedule(settings)
    is_stage_0 = suits_stage_0 and zero["stage"] == 0
    if optimizer_of(settings) == "muon" and not is_stage_0:
        raise UserError(
            "deepspeed.optimizer.type Muon: under ZeRO, DeepSpeed clips what Muon has made "
            "orthogonal, and in bfloat16 small steps are lost; set model.dtype=float32 and "
            "deepspeed.zero_optimization.stage=0, or leave deepspeed.optimizer out"
        )
    settings.setdefault("steps_per_print", 10**9)
    # by default DeepSpeed waits for the GPU in every micro-batch, to time what it would print
    _section(_section(settings, "timers"), "throughput").setdefault("enabled", False)
    return _without_auto(settings)


def _section(parent: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the section of this name, created if missing. Raises UserError for another value."""
    section = parent.setdefault(name, {})
    if not isinstance(section, dict):
        raise UserError(
            f"deepspeed.{name} is {section!r}, not a section; "
            "see the DeepSpeed configuration reference"
        )
    return section


def _impose(section: dict[str, Any], setting: str, value: Any, source: str) -> None:
    """Sets Tandem's value of a setting. Raises UserError if the user's value differs.

    setting: the full name, such as deepspeed.bf16.enabled. source: what determines the value.
    """
    key = setting.rpartition(".")[-1]
    if section.get(key, _AUTO) not in (_AUTO, value):
        raise UserError(
            f"{setting} is {section[key]} but {source} makes it {value}; "
            f'remove it from the DeepSpeed settings or write "auto"'
        )
    section[key] = value


def is_offloaded(zero: dict[str, Any], name: str) -> bool:
    """Returns whether ZeRO keeps something off the device.

    zero: the section zero_optimization. name: the section in it, such as "offload_param".
    """
    return zero.get(name, {}).get("device", "none") != "none"


def optimizer_of(settings: dict[str, Any]) -> str:
    """Returns the optimizer's name, by default AdamW's. Raises UserError if not in OPTIMIZERS."""
    name = str(settings.get("optimizer", {}).get("type", "AdamW"))
    if name.lower() not in OPTIMIZERS:
        raise UserError(
            f"deepspeed.optimizer.type {name} is none of {', '.join(OPTIMIZERS)}, whose states "
            "Tandem can save and estimate; optimizers with 8 bits are not supported; "
            "leave deepspeed.optimizer out for AdamW"
        )
    return name.lower()


def _fill_batch_sizes(config: Config, settings: dict[str, Any], world_size: int) -> None:
    """Fills in batch sizes, clipping and parallelism.

    DeepSpeed treats ranks that share a micro-batch as data-parallel, too, and adds their gradients.
    """
    trainer = config.trainer
    micro_batch = config.groups_at_once
    accumulation = config.micro_batches(world_size)
    batch = micro_batch * accumulation * world_size
    budget = "trainer.max_tokens_per_micro_batch"
    if trainer.max_tokens_per_micro_batch is None:
        budget = "trainer.groups_per_micro_batch"
    groups = "trainer.prompts_per_step (in groups, rounded up)"
    max_norm = trainer.max_grad_norm
    _impose(settings, "deepspeed.train_micro_batch_size_per_gpu", micro_batch, budget)
    _impose(settings, "deepspeed.gradient_accumulation_steps", accumulation, groups)
    _impose(settings, "deepspeed.train_batch_size", batch, groups)
    _impose(settings, "deepspeed.gradient_clipping", max_norm, "trainer.max_grad_norm")
    _impose(settings, "deepspeed.managed_gradient_accumulation", False, "the training loop")
    if "tensor_parallel" in settings:
        section = _section(settings, "tensor_parallel")
        size = trainer.tensor_parallel_size
        _impose(
            section, "deepspeed.tensor_parallel.autotp_size", size, "trainer.tensor_parallel_size"
        )


def _fill_precision(config: Config, settings: dict[str, Any]) -> None:
    is_bfloat16 = config.model.dtype == "bfloat16"
    _impose(_section(settings, "bf16"), "deepspeed.bf16.enabled", is_bfloat16, "model.dtype")
    fp16 = _section(settings, "fp16")
    if fp16.get("enabled", _AUTO) not in (_AUTO, False):
        raise UserError(
            "deepspeed.fp16 is enabled: its loss scaling hides overflows; "
            "set model.dtype=bfloat16 instead"
        )
    fp16["enabled"] = False


def _refuse_expert_parallel(settings: dict[str, Any]) -> None:
    section = _section(settings, "expert_parallel")
    if section.get("enabled", _AUTO) not in (_AUTO, False):
        raise UserError(
            "deepspeed.expert_parallel is enabled: AutoEP leaves every rank only some experts, "
            "under names that no checkpoint has, and published versions of the policy would lack "
            "the other experts; remove it, and shard experts by deepspeed.zero_optimization.stage=3"
        )
    del settings["expert_parallel"]


def _fill_zero(zero: dict[str, Any], default_stage: int) -> None:
    """Fills in the ZeRO stage and overlap_comm.

    default_stage: 0 if there is nothing to shard and nothing to keep in a higher precision, because
    stage 1 would hold a second copy of weights and gradients, and copy them in every step.
    """
    if zero.get("stage", _AUTO) == _AUTO:
        zero["stage"] = default_stage
    stage = zero["stage"]
    if stage not in (0, 1, 2, 3):
        raise UserError(f"deepspeed.zero_optimization.stage {stage} is not 0, 1, 2 or 3")
    if stage < 2:
        # gradients stay local until the step, and DeepSpeed refuses to overlap communication that
        # does not happen
        _impose(zero, "deepspeed.zero_optimization.overlap_comm", False, f"stage {stage}")
    elif stage == 3 and zero.get("overlap_comm", _AUTO) == _AUTO:
        zero["overlap_comm"] = False


def _fill_accumulation(settings: dict[str, Any], dtype: str) -> None:
    """Makes micro-batches of bfloat16 models add gradients up in float32.

    Sums of 8 bits, DeepSpeed's default, would depend on the number of micro-batches.
    """
    zero = settings["zero_optimization"]
    if dtype != "bfloat16":
        return
    if zero["stage"] == 0:
        raise UserError(
            "deepspeed.zero_optimization.stage 0 with model.dtype bfloat16: DeepSpeed would add "
            "gradients up in 8 bits and wait for the GPU once for each parameter; "
            "set deepspeed.zero_optimization.stage=1"
        )
    types = _section(settings, "data_types")
    if types.get("grad_accum_dtype", _AUTO) in (_AUTO, *_FLOAT32):
        types["grad_accum_dtype"] = "fp32"
    bf16 = settings["bf16"]
    loop = "the training loop, which skips steps that are not finite,"
    _impose(bf16, "deepspeed.bf16.check_grad_overflow", True, loop)
    is_flat = zero["stage"] == 1 and not is_offloaded(zero, "offload_optimizer")
    if is_flat and types["grad_accum_dtype"] == "fp32":
        # gradients are added up while backward runs (flat_gradients.py), which saves a copy of the
        # model
        reason = "stage 1, which adds gradients up while backward runs,"
        _impose(bf16, "deepspeed.bf16.immediate_grad_update", True, reason)


def _fill_optimizer(config: Config, settings: dict[str, Any], optimizer: OptimizerSettings) -> None:
    """Fills in the hyperparameters of a DeepSpeed optimizer, if the user chose one."""
    if "optimizer" not in settings:
        return
    params = _section(_section(settings, "optimizer"), "params")
    rate = optimizer.learning_rate
    decay = config.trainer.weight_decay
    name = "deepspeed.optimizer.params"
    _impose(params, f"{name}.lr", rate, f"{optimizer.section}.learning_rate")
    _impose(params, f"{name}.weight_decay", decay, "trainer.weight_decay")
    if optimizer_of(settings) == "muon":
        # DeepSpeed's own Adam would be compiled first, also on a CPU
        params.setdefault("torch_adam", True)


def _refuse_schedule(settings: dict[str, Any]) -> None:
    """Raises UserError if DeepSpeed's schedule is set, because the schedule is always Tandem's."""
    params = _section(_section(settings, "scheduler"), "params")
    user_params = {name: value for name, value in params.items() if value != _AUTO}
    if user_params:
        raise UserError(
            f"deepspeed.scheduler.params has {user_params}: the schedule is set by "
            "trainer.lr_scheduler_type, lr_scheduler_kwargs and warmup_steps; set these, and leave "
            "deepspeed.scheduler out"
        )
    del settings["scheduler"]


def _without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings without values "auto", for which DeepSpeed has defaults."""
    completed = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            completed[key] = _without_auto(value)
        elif value != _AUTO:
            completed[key] = value
    return completed
