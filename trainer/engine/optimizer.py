"""AdamW, its learning-rate schedule, and the settings that a resumed run takes from its config."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from common.config import Config
from common.errors import UserError
from trainer.engine.deepspeed_config import OptimizerSettings


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the optimizer's parameter groups: matrices with weight decay, then vectors without.

    A group without parameters is left out. The groups are the same before and after ZeRO 3 has
    partitioned the parameters.
    """
    matrices = []
    vectors = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if len(full_shape(parameter)) > 1:
            matrices.append(parameter)
        else:
            vectors.append(parameter)
    groups = []
    if matrices:
        groups.append({"params": matrices, "weight_decay": weight_decay})
    if vectors:  # adapters have none
        groups.append({"params": vectors, "weight_decay": 0.0})
    return groups


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Returns a parameter's shape in the model, also if this rank holds only a shard of it."""
    autotp: dict[str, Any] = getattr(parameter, "ds_autotp_universal_checkpoint_meta", {})
    zero_shape = getattr(parameter, "ds_shape", parameter.shape)
    return torch.Size(autotp.get("logical_shape", zero_shape))


def adamw(settings: OptimizerSettings) -> Callable[[Any], torch.optim.Optimizer]:
    """Returns a factory of AdamW.

    It is fused, because torch's default keeps temporaries of the size of the parameters.
    """
    return lambda parameters: torch.optim.AdamW(parameters, lr=settings.learning_rate, fused=True)


def scheduler(
    config: Config, settings: OptimizerSettings
) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Returns a factory of the learning-rate schedule.

    The factory raises UserError if the schedule does not take trainer.lr_scheduler_kwargs.
    """
    from transformers import get_scheduler

    name = config.trainer.lr_scheduler_type
    kwargs = config.trainer.lr_scheduler_kwargs

    def make(optimizer: torch.optim.Optimizer) -> Any:
        try:
            return get_scheduler(name, optimizer, settings.warmup_steps, settings.num_steps, kwargs)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"trainer.lr_scheduler_type {name}: {error}; see trainer.lr_scheduler_kwargs"
            ) from None

    return make


@contextlib.contextmanager
def keeping_settings(optimizer: Any, schedule: LambdaLR) -> Iterator[None]:
    """Restores this run's learning rate, betas and weight decay after the block has loaded a state.

    The block would replace them by those of the run that saved the state: torch saves them with
    Adam's moments, and the initial learning rate with the number of steps.
    """
    settings_of_groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "lr")}
        settings_of_groups.append(settings)
    base_rates = list(schedule.base_lrs)
    yield
    schedule.base_lrs = base_rates
    factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
    for group, settings, base_rate, factor in zip(
        optimizer.param_groups, settings_of_groups, base_rates, factors, strict=True
    ):
        group |= settings
        group["lr"] = base_rate * factor
