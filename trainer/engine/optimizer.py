"""AdamW, its learning-rate schedule, and the settings of both that a resumed run takes from its own config."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from common.config import Config
from common.errors import UserError
from trainer.engine.deepspeed_config import Optimized


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the optimizer's parameter groups, the same before and after ZeRO-3 has partitioned the parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, others = [p for p in trained if len(shape_of(p)) > 1], [p for p in trained if len(shape_of(p)) <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]  # adapters are all matrices


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """Returns the whole parameter's shape, also if ZeRO-3 or AutoTP has left only a part of it on this rank."""
    split: dict[str, Any] = getattr(parameter, "ds_autotp_universal_checkpoint_meta", {})
    return torch.Size(split.get("logical_shape", getattr(parameter, "ds_shape", parameter.shape)))


def adamw(optimized: Optimized) -> Callable[[Any], torch.optim.Optimizer]:
    """Returns a factory of fused AdamW, because torch's default keeps temporaries of the size of the parameters."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=optimized.learning_rate, fused=True)


def scheduler(config: Config, optimized: Optimized) -> Callable[[torch.optim.Optimizer], Any]:
    """Returns a factory of the schedule, which raises UserError if it does not take trainer.lr_scheduler_kwargs."""
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
    """Keeps this run's learning rate, betas and weight decay while a saved state is loaded.

    torch saves these with Adam's moments, too, and the initial learning rate with the number of steps.
    """
    given = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]
    base_rates = list(schedule.base_lrs)
    yield
    schedule.base_lrs = base_rates
    rates = [r * factor(schedule.last_epoch) for r, factor in zip(base_rates, schedule.lr_lambdas, strict=True)]
    for group, settings, rate in zip(optimizer.param_groups, given, rates, strict=True):
        group |= settings | {"lr": rate}
