"""AdamW, its learning rate over the steps, and what of both a resumed run takes from its own settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from common.config import Config
from common.errors import UserError
from trainer.engine.deepspeed_config import Optimized


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The same before and after ZeRO-3 has dealt the parameters out."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, others = [p for p in trained if len(shape_of(p)) > 1], [p for p in trained if len(shape_of(p)) <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]  # adapters are all matrices


def shape_of(parameter: torch.nn.Parameter) -> torch.Size:
    """Of the whole, where ZeRO-3 has left a part of it here."""
    return getattr(parameter, "ds_shape", parameter.shape)


def adamw(optimized: Optimized) -> Callable[[Any], torch.optim.Optimizer]:
    """Fused: one pass over the memory, where torch's default keeps temporaries of the size of the parameters."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=optimized.learning_rate, fused=True)


def scheduler(config: Config, optimized: Optimized) -> Callable[[torch.optim.Optimizer], Any]:
    """Raises UserError, when it is called, if the schedule does not take trainer.lr_scheduler_kwargs."""
    from transformers import get_scheduler

    name, more = config.trainer.lr_scheduler_type, config.trainer.lr_scheduler_kwargs

    def make(of: torch.optim.Optimizer) -> Any:
        try:
            return get_scheduler(name, of, optimized.warmup_steps, optimized.num_steps, more)
        except (TypeError, ValueError) as error:
            raise UserError(f"trainer.lr_scheduler_type {name}: {error}; see trainer.lr_scheduler_kwargs") from None

    return make


@contextlib.contextmanager
def keeping_settings(optimizer: Any, schedule: LambdaLR) -> Iterator[None]:
    """Whatever state is loaded meanwhile: learning rate, betas and weight decay stay those of this run's settings.

    With Adam's moments torch saves these, too, and with the number of steps the rate that they began with.
    """
    given = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]
    base_rates = list(schedule.base_lrs)
    yield
    schedule.base_lrs = base_rates
    rates = [r * factor(schedule.last_epoch) for r, factor in zip(base_rates, schedule.lr_lambdas, strict=True)]
    for group, settings, rate in zip(optimizer.param_groups, given, rates, strict=True):
        group |= settings | {"lr": rate}
