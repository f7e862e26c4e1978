"""Completion of the user's DeepSpeed settings by Tandem's. Pure, without torch: a contradiction costs milliseconds.

A file made for other trainers works as it is: its "auto" values are filled in here, or left to DeepSpeed where it has a
default. A value that both sides set must be equal, because there is no telling which of the two was meant.
"""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import Config
from common.errors import UserError
from model.files.engine_models import installed, require_known

GRADIENTS_AT_ONCE = 1 << 26  # numbers in bfloat16 gradients that wait to be added up (flat_gradients.py), 128 MiB
_AUTO = "auto"
_FLOAT32 = ("fp32", "float32", "float", "torch.float32")  # DeepSpeed's words for it
_NAME = re.compile(r"""^    (\w+): |["']([a-z][a-z0-9_]*)["']""", re.MULTILINE)
# DeepSpeed's and torch's optimizers by lower-case name: bytes of state per parameter; 8 are Adam's two moments
OPTIMIZERS = {
    "adam": 8, "adamw": 8, "lamb": 8, "nadam": 8, "radam": 8, "adamax": 8, "lion": 4, "adagrad": 4, "rmsprop": 4,
    "sgd": 4, "muon": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Optimized:
    """The settings in which policy and critic differ; everything else is the same for both."""

    section: str  # the config section with learning_rate
    learning_rate: float
    warmup_steps: int
    num_steps: int  # optimizer steps in the whole run


def policy_of(config: Config) -> Optimized:
    """Returns the policy's settings. The policy makes no step in critic_warmup_steps."""
    trainer = config.trainer
    num_steps = trainer.max_steps - config.critic.critic_warmup_steps
    return Optimized("trainer", trainer.learning_rate, trainer.warmup_steps, num_steps)


def critic_of(config: Config) -> Optimized:
    """Returns the critic's settings, without warmup: its head starts at zero, and critic_warmup_steps give it time."""
    return Optimized("critic", config.critic.learning_rate, 0, config.trainer.max_steps)


def all_optimized(config: Config) -> list[Optimized]:
    return [policy_of(config)] + ([critic_of(config)] if config.algorithm.needs_critic else [])


def deepspeed_config(config: Config, world_size: int, optimized: Optimized | None = None) -> dict[str, Any]:
    """Returns deepspeed.initialize's config, by default the policy's. Raises UserError on a contradiction, naming both.

    DeepSpeed treats ranks that share a micro-batch as data-parallel, too: it adds their gradients up.
    """
    trainer, optimized = config.trainer, optimized or policy_of(config)
    groups_at_once, accumulation = config.groups_at_once, config.micro_batches(world_size)
    groups = "trainer.prompts_per_step (in groups, rounded up)"
    budget = "groups_per_micro_batch" if trainer.max_tokens_per_micro_batch is None else "max_tokens_per_micro_batch"
    given = _user_settings(config)
    _require_known("deepspeed", given)
    _impose(
        given,
        "deepspeed",
        {
            "train_micro_batch_size_per_gpu": (groups_at_once, f"trainer.{budget}"),
            "gradient_accumulation_steps": (accumulation, groups),
            "train_batch_size": (groups_at_once * accumulation * world_size, groups),
            "gradient_clipping": (trainer.max_grad_norm, "trainer.max_grad_norm"),
            "managed_gradient_accumulation": (False, "the training loop"),
        },
    )
    if "tensor_parallel" in given:
        size = trainer.tensor_parallel_size, "trainer.tensor_parallel_size"
        _impose(_section(given, "tensor_parallel"), "deepspeed.tensor_parallel", {"autotp_size": size})
    _impose(_section(given, "bf16"), "deepspeed.bf16", {"enabled": (config.model.dtype == "bfloat16", "model.dtype")})
    if _section(given, "fp16").get("enabled", _AUTO) not in (_AUTO, False):
        raise UserError("deepspeed.fp16 is enabled: its loss scaling hides overflows; set model.dtype=bfloat16 instead")
    given["fp16"]["enabled"] = False
    if _section(given, "expert_parallel").get("enabled", _AUTO) not in (_AUTO, False):
        raise UserError(
            "deepspeed.expert_parallel is enabled: AutoEP leaves every rank a part of the experts, under names that no "
            "checkpoint has, and versions of the policy would be published without the others; remove it, and shard "
            "experts by deepspeed.zero_optimization.stage=3"
        )
    del given["expert_parallel"]
    is_whole = config.model.dtype == "float32" and (world_size == 1 or optimizer_of(given) == "muon")
    _fill_zero(_section(given, "zero_optimization"), default=0 if is_whole else 1)
    if is_offloaded(given["zero_optimization"], "offload_optimizer"):
        given.setdefault("zero_force_ds_cpu_optimizer", False)  # torch's AdamW steps on a CPU, too
    _fill_accumulation(given, config.model.dtype)
    _fill_optimizer(config, given, optimized)
    if optimizer_of(given) == "muon" and not (is_whole and given["zero_optimization"]["stage"] == 0):
        raise UserError(
            "deepspeed.optimizer.type Muon: under ZeRO, DeepSpeed clips what Muon has made orthogonal, and in "
            "bfloat16 small steps are lost; set model.dtype=float32 and deepspeed.zero_optimization.stage=0, or leave "
            "deepspeed.optimizer out"
        )
    given.setdefault("steps_per_print", 10**9)
    # by default DeepSpeed waits for the GPU in every micro-batch, to time what it would print
    _section(_section(given, "timers"), "throughput").setdefault("enabled", False)
    return _without_auto(given)


def _user_settings(config: Config) -> dict[str, Any]:
    """Returns a copy of the user's settings. Raises UserError if they are not a JSON object."""
    given: Any = config.deepspeed
    if isinstance(given, Path):
        try:
            given = json.loads(given.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"deepspeed: {config.deepspeed} cannot be read as JSON: {error}") from None
    if not isinstance(given, dict):
        kind = type(given).__name__
        raise UserError(f'deepspeed: {config.deepspeed} holds a {kind}; write {{"zero_optimization": {{"stage": 1}}}}')
    return json.loads(json.dumps(given))


def _require_known(place: str, given: dict[str, Any]) -> None:
    """Raises UserError for a key, at any depth, that is none of DeepSpeed's settings, with the nearest one.

    The parameters of optimizers and schedules, and the names of groups in compression_training, are free.
    """
    require_known(place, given, _settings_of_deepspeed())
    for name, value in given.items():
        if isinstance(value, dict) and name not in ("params", "different_groups"):
            _require_known(f"{place}.{name}", value)


@functools.cache
def _settings_of_deepspeed() -> frozenset[str] | None:
    """Returns the fields and the quoted names in the files that read DeepSpeed's settings; None without DeepSpeed."""
    folder = installed("deepspeed", "runtime")
    files = [*folder.parent.rglob("*config*.py"), *folder.parent.rglob("constants.py")] if folder else []
    named = (_NAME.findall(file.read_text()) for file in files)
    return frozenset(field or quoted for names in named for field, quoted in names) if folder else None


def _section(parent: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the section of this name, created if missing. Raises UserError if it is no section."""
    section = parent.setdefault(name, {})
    if not isinstance(section, dict):
        raise UserError(f"deepspeed.{name} is {section!r}, not a section; see the DeepSpeed configuration reference")
    return section


def _impose(section: dict[str, Any], name: str, ours: dict[str, tuple[Any, str]]) -> None:
    """Sets Tandem's values in a section. Raises UserError if the user's own value is another."""
    for key, (value, source) in ours.items():
        if section.get(key, _AUTO) not in (_AUTO, value):
            raise UserError(
                f"{name}.{key} is {section[key]} but {source} makes it {value}; "
                f'remove it from the DeepSpeed settings or write "auto"'
            )
        section[key] = value


def is_offloaded(zero: dict[str, Any], name: str) -> bool:
    """Returns whether zero_optimization's settings keep what `name` says, "offload_param" for one, off the device."""
    return zero.get(name, {}).get("device", "none") != "none"


def optimizer_of(settings: dict[str, Any]) -> str:
    """Returns the optimizer's name in OPTIMIZERS, AdamW's if the user gave none. Raises UserError for any other."""
    given = str(settings.get("optimizer", {}).get("type", "AdamW"))
    if given.lower() not in OPTIMIZERS:
        raise UserError(
            f"deepspeed.optimizer.type {given} is none of {', '.join(OPTIMIZERS)}, whose states are saved and priced; "
            "there is none with 8 bits: leave deepspeed.optimizer out for AdamW"
        )
    return given.lower()


def _fill_zero(zero: dict[str, Any], default: int) -> None:
    """Fills in the ZeRO stage and overlap_comm. default: 0 if there is nothing to shard and nothing to keep in a higher
    precision: stage 1 would hold a second copy of weights and gradients, and copy them in every step."""
    if zero.get("stage", _AUTO) == _AUTO:
        zero["stage"] = default
    if zero["stage"] not in (0, 1, 2, 3):
        raise UserError(f"deepspeed.zero_optimization.stage {zero['stage']} is not 0, 1, 2 or 3")
    if zero["stage"] < 2:  # gradients stay local until the step; DeepSpeed refuses to overlap no communication
        _impose(zero, "deepspeed.zero_optimization", {"overlap_comm": (False, f"stage {zero['stage']}")})
    elif zero["stage"] == 3 and zero.get("overlap_comm", _AUTO) == _AUTO:
        zero["overlap_comm"] = False


def _fill_accumulation(given: dict[str, Any], dtype: str) -> None:
    """Makes micro-batches of bfloat16 models add gradients up in float32; DeepSpeed's own default is bfloat16.

    Sums of 8 bits would depend on the number of micro-batches.
    """
    stage = given["zero_optimization"]["stage"]
    if dtype != "bfloat16":
        return
    if stage == 0:
        raise UserError(
            "deepspeed.zero_optimization.stage 0 with model.dtype bfloat16: DeepSpeed would add gradients up in 8 bits "
            "and wait for the GPU once for each parameter; set deepspeed.zero_optimization.stage=1"
        )
    imposed: dict[str, tuple[Any, str]] = {
        "check_grad_overflow": (True, "the training loop, which skips steps that are not finite,")
    }
    types = _section(given, "data_types")
    if types.get("grad_accum_dtype", _AUTO) in (_AUTO, *_FLOAT32):
        types["grad_accum_dtype"] = "fp32"
    is_flat = stage == 1 and not is_offloaded(given["zero_optimization"], "offload_optimizer")
    if is_flat and types["grad_accum_dtype"] == "fp32":
        # gradients are added up while backward runs (flat_gradients.py), which saves a copy of the model
        imposed["immediate_grad_update"] = True, "stage 1, which adds gradients up while backward runs,"
    _impose(given["bf16"], "deepspeed.bf16", imposed)


def _fill_optimizer(config: Config, given: dict[str, Any], optimized: Optimized) -> None:
    """Fills in the hyperparameters of a DeepSpeed optimizer, if the user chose one. The schedule is always Tandem's."""
    trainer = config.trainer
    if "optimizer" in given:
        rate = optimized.learning_rate, f"{optimized.section}.learning_rate"
        params = _section(_section(given, "optimizer"), "params")
        decay = trainer.weight_decay, "trainer.weight_decay"
        _impose(params, "deepspeed.optimizer.params", {"lr": rate, "weight_decay": decay})
        if optimizer_of(given) == "muon":
            params.setdefault("torch_adam", True)  # DeepSpeed's own Adam would be compiled first, also on a CPU
    schedule = _section(_section(given, "scheduler"), "params")
    if own := {name: value for name, value in schedule.items() if value != _AUTO}:
        raise UserError(
            f"deepspeed.scheduler.params has {own}: the schedule is that of trainer.lr_scheduler_type, "
            "lr_scheduler_kwargs and warmup_steps; set those, and leave deepspeed.scheduler out"
        )
    del given["scheduler"]


def _without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    """Removes values that are still "auto": DeepSpeed has defaults for them."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if value != _AUTO
    }
