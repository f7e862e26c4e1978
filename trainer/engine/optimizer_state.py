"""Sets the masters and moments in DeepSpeed's optimizers, of which each rank has a shard.

Masters are the float32 copies of bfloat16 weights; moments are Adam's. Where a rank keeps its shard
is an internal of DeepSpeed. In DeepSpeed 0.19:

    ZeRO 0      the optimizer's state has moments for each parameter; float32 weights are also their
                masters
    ZeRO 1, 2   flat buffers, one for each parameter group; a parameter's `_hp_mapping` says which
                fragment of a buffer belongs to the parameter, and is None if this rank has none
    ZeRO 3      a shard of each parameter, which DeepSpeed's own functions set
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")  # the keys of Adam's moments
# attributes of DeepSpeed's optimizers with the flat masters, each for certain ZeRO stages
_FLAT_MASTERS = (
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "single_partition_of_fp32_groups",
)


def set_masters(model: torch.nn.Module, stage: int, make: Callable[[Tensor, int], Tensor]) -> None:
    """Replaces the float32 masters of all trained bfloat16 parameters.

    make: returns a parameter's masters in its full shape, which must round to its weights. It gets
    the weights and the parameter's index among the trained parameters. stage: the ZeRO stage. Every
    rank calls it.
    """
    import deepspeed

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for index, parameter in enumerate(trained):
        if parameter.dtype != torch.bfloat16:
            continue
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            masters = make(parameter.detach(), index)
        if stage == 3:
            shard = _shard_of_stage_3(masters.flatten(), parameter)
            deepspeed.utils.safe_set_local_fp32_param(parameter, shard)
        else:
            # it gets the full masters, and sets only this rank's shard
            deepspeed.utils.safe_set_full_fp32_param(parameter, masters)


def _shard_of_stage_3(values: Tensor, parameter: Any) -> Tensor:
    """Returns this rank's ZeRO 3 shard of a parameter's flattened values.

    The shard is padded with zeros if the values do not fill it.
    """
    size = parameter.ds_tensor.numel()
    begin = torch.distributed.get_rank(parameter.ds_process_group) * size
    shard = values[begin : begin + size]
    return torch.nn.functional.pad(shard, (0, size - len(shard)))


def make_moments(optimizer: Any, stage: int, trained: list[Tensor], step: Any) -> None:
    """Creates zero moments, as the optimizer would do in its first step.

    trained: the trained parameters. step: Adam's step count, a number or a scalar tensor.
    """
    state = _torch_optimizer(optimizer).state
    stepped = trained
    if stage > 0:
        stepped = _flat_masters(optimizer)
    for tensor in stepped:
        count = step
        if isinstance(step, Tensor):
            count = step.clone().to(tensor.device)
        state[tensor] = {"step": count}
        for moment in MOMENTS:
            state[tensor][moment] = torch.zeros_like(tensor)


def _torch_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that DeepSpeed's ZeRO optimizer wraps, or this optimizer in ZeRO 0."""
    return getattr(optimizer, "optimizer", optimizer)


def _flat_masters(optimizer: Any) -> list[Tensor]:
    """Returns this rank's flat masters in ZeRO 1 to 3, for which the optimizer keeps moments.

    In ZeRO 1 and 2 there is one buffer for each parameter group, in this order.
    """
    name = next(name for name in _FLAT_MASTERS if hasattr(optimizer, name))
    return list(getattr(optimizer, name))


def set_masters_and_weights(optimizer: Any, stage: int, parameter: Any, masters: Tensor) -> None:
    """Sets this rank's shard of a parameter's masters, and the weights to the rounded masters.

    masters: those of the full parameter, flattened, also where this rank keeps only a shard. Every
    rank calls it.
    """
    import deepspeed

    if stage == 3:
        shard = _shard_of_stage_3(masters, parameter)
        deepspeed.utils.safe_set_local_fp32_param(parameter, shard)
    elif stage == 0:
        parameter.data.copy_(masters.view_as(parameter))
    elif parameter._hp_mapping is not None:  # else this rank has no fragment of the parameter
        buffer = _flat_masters(optimizer)[parameter._hp_mapping.param_group_index]
        _copy_fragment(parameter._hp_mapping, masters, buffer.data)

    # ZeRO 3 takes the weights from rank 0 (modifier_rank); all ranks have the same masters here
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=stage == 3):
        parameter.data.copy_(masters.view_as(parameter))


def set_moment(optimizer: Any, stage: int, parameter: Any, moment: str, values: Tensor) -> None:
    """Sets this rank's shard of one of a parameter's moments. Every rank calls it.

    moment: one of MOMENTS. values: the full parameter's moment, flattened, also where this rank
    keeps only a shard.
    """
    import deepspeed

    state = _torch_optimizer(optimizer).state
    if stage == 3:
        shard = _shard_of_stage_3(values, parameter)
        deepspeed.utils.safe_set_local_optimizer_state(parameter, shard, moment)
    elif stage == 0:
        state[parameter][moment].copy_(values.view_as(parameter))
    elif parameter._hp_mapping is not None:  # else this rank has no fragment of the parameter
        masters = _flat_masters(optimizer)[parameter._hp_mapping.param_group_index]
        buffer = state[masters][moment]
        _copy_fragment(parameter._hp_mapping, values, buffer)


def _copy_fragment(mapping: Any, values: Tensor, buffer: Tensor) -> None:
    """Copies a fragment of a parameter's flattened values into this rank's flat buffer.

    mapping: the parameter's `_hp_mapping`, which says which fragment, and where it belongs.
    DeepSpeed sets it in ZeRO 1 and 2.
    """
    source = mapping.lp_fragment_address
    target = mapping.hp_fragment_address
    fragment = values[source.start : source.start + source.numel]
    buffer.narrow(0, target.start, target.numel).copy_(fragment)
