"""AdamW and its learning-rate schedule, and the optimizer settings of a resumed run.

A resumed run takes these settings from its config, not from the checkpoint.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from common.config import Config
from common.errors import UserError
from trainer.engine.deepspeed_config import OptimizerSettings


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the optimizer's parameter groups: matrices with weight decay, and vectors without it.

    Frozen parameters are in no group, and an empty group is left out. ZeRO 3 and tensor parallelism
    do not change the groups, because a parameter counts with its full shape.
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
    if vectors:  # adapters are all matrices
        groups.append({"params": vectors, "weight_decay": 0.0})
    return groups


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Returns a parameter's shape in the whole model, even if this rank holds only a shard."""
    autotp: dict[str, Any] = getattr(parameter, "ds_autotp_universal_checkpoint_meta", {})
    zero_shape = getattr(parameter, "ds_shape", parameter.shape)
    return torch.Size(autotp.get("logical_shape", zero_shape))


def adamw(settings: OptimizerSettings) -> Callable[[Any], torch.optim.Optimizer]:
    """Returns a function that creates AdamW for parameter groups.

    Weight decay comes from the groups, and betas and epsilon are torch's defaults. AdamW is fused,
    because torch's default implementation allocates temporaries as large as the parameters.
    """
    return lambda parameters: torch.optim.AdamW(parameters, lr=settings.learning_rate, fused=True)


def scheduler(
    config: Config, settings: OptimizerSettings
) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Returns a function that creates the learning-rate schedule for an optimizer.

    That function raises UserError if the schedule trainer.lr_scheduler_type does not accept
    trainer.lr_scheduler_kwargs.
    """
    return functools.partial(_create_schedule, config, settings)


def _create_schedule(
    config: Config, settings: OptimizerSettings, optimizer: torch.optim.Optimizer
) -> LambdaLR:
    from transformers import get_scheduler

    name = config.trainer.lr_scheduler_type
    schedule: Any
    try:
        schedule = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=settings.warmup_steps,
            num_training_steps=settings.num_steps,
            scheduler_specific_kwargs=config.trainer.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"trainer.lr_scheduler_type {name}: {error}; see trainer.lr_scheduler_kwargs"
        ) from None
    return schedule


@contextlib.contextmanager
def keeping_settings(optimizer: Any, schedule: LambdaLR) -> Iterator[None]:
    """Keeps this run's learning rate, betas and weight decay while the block loads a saved state.

    Loading replaces them with the settings of the run that saved the state, because torch saves
    these settings with Adam's moments, and the initial learning rate with the schedule's step. They
    are restored when the block has succeeded. The learning rate becomes that of this run's schedule
    at the loaded step.

    optimizer: torch's optimizer or DeepSpeed's around it. schedule: its learning-rate schedule.
    """
    settings_of_groups = []
    for group in optimizer.param_groups:
        settings = dict(group)
        del settings["params"]  # the weights, which the block may replace
        del settings["lr"]  # depends on the step, and is computed below
        settings_of_groups.append(settings)
    base_rates = list(schedule.base_lrs)

    yield

    schedule.base_lrs = base_rates
    # the schedule's factors at the loaded step, which torch calls last_epoch
    factors = [factor_at(schedule.last_epoch) for factor_at in schedule.lr_lambdas]
    for group, settings, base_rate, factor in zip(
        optimizer.param_groups, settings_of_groups, base_rates, factors, strict=True
    ):
        group.update(settings)
        group["lr"] = base_rate * factor
