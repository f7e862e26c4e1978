"""Masters and moments inside DeepSpeed's optimizers, where each rank has a shard of them.

Where they lie is an internal of DeepSpeed, described here as it is in DeepSpeed 0.19:

    ZeRO 0      moments by parameter in the optimizer's state; the parameters are their own masters
    ZeRO 1, 2   flat buffers, in which `_hp_mapping` of a parameter names its fragment
    ZeRO 3      a shard of each parameter, set by DeepSpeed's own functions
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's moments


def set_masters(model: torch.nn.Module, stage: int, make: Callable[[Tensor, int], Tensor]) -> None:
    """Sets the float32 masters of every trained bfloat16 parameter to make(its weights, its index).

    The masters must round to the weights. stage: ZeRO's. Every rank calls it.
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
            deepspeed.utils.safe_set_full_fp32_param(parameter, masters)  # each rank sets its shard


def _shard_of_stage_3(values: Tensor, parameter: Any) -> Tensor:
    """Returns this rank's shard of a parameter's flat values.

    It is padded with zeros where the number of ranks does not divide the size.
    """
    size = parameter.ds_tensor.numel()
    begin = torch.distributed.get_rank(parameter.ds_process_group) * size
    shard = values[begin : begin + size]
    return torch.nn.functional.pad(shard, (0, size - len(shard)))


def make_moments(optimizer: Any, stage: int, trained: list[Tensor], step: Any) -> None:
    """Creates zero moments as the optimizer does in its first step, with the step count `step`."""
    state = _torch_optimizer(optimizer).state
    for tensor in _stepped_tensors(optimizer, stage, trained):
        count = step
        if isinstance(step, Tensor):
            count = step.clone().to(tensor.device)
        state[tensor] = {"step": count}
        for moment in MOMENTS:
            state[tensor][moment] = torch.zeros_like(tensor)


def _torch_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that DeepSpeed's ZeRO optimizer wraps, or this optimizer in stage 0."""
    return getattr(optimizer, "optimizer", optimizer)


def _stepped_tensors(optimizer: Any, stage: int, trained: list[Tensor]) -> list[Tensor]:
    """Returns the tensors that the optimizer steps: flat buffers, or in stage 0 the parameters."""
    if stage == 0:
        return trained
    names = (
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
        "single_partition_of_fp32_groups",
    )
    name = next(name for name in names if hasattr(optimizer, name))
    return list(getattr(optimizer, name))


def set_masters_and_weights(optimizer: Any, stage: int, parameter: Any, masters: Tensor) -> None:
    """Sets a parameter, and this rank's shard of its masters, to its flat masters.

    Every rank calls it.
    """
    import deepspeed

    if stage == 3:
        shard = _shard_of_stage_3(masters, parameter)
        deepspeed.utils.safe_set_local_fp32_param(parameter, shard)
    elif stage == 0:
        parameter.data.copy_(masters.view_as(parameter))
    elif parameter._hp_mapping is not None:
        stepped = _stepped_tensors(optimizer, stage, [])
        buffer = stepped[parameter._hp_mapping.param_group_index].data
        _copy_fragment(parameter._hp_mapping, masters, buffer)
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=stage == 3):
        parameter.data.copy_(masters.view_as(parameter))


def set_moment(optimizer: Any, stage: int, parameter: Any, moment: str, values: Tensor) -> None:
    """Sets this rank's shard of a parameter's flat moment. Every rank calls it.

    moment: its name, one of MOMENTS.
    """
    import deepspeed

    state = _torch_optimizer(optimizer).state
    if stage == 3:
        shard = _shard_of_stage_3(values, parameter)
        deepspeed.utils.safe_set_local_optimizer_state(parameter, shard, moment)
    elif stage == 0:
        state[parameter][moment].copy_(values.view_as(parameter))
    elif parameter._hp_mapping is not None:
        stepped = _stepped_tensors(optimizer, stage, [])
        buffer = state[stepped[parameter._hp_mapping.param_group_index]][moment]
        _copy_fragment(parameter._hp_mapping, values, buffer)


def _copy_fragment(mapping: Any, values: Tensor, buffer: Tensor) -> None:
    """Copies the fragment of a parameter's flat values that lies in this rank's flat buffer.

    mapping: DeepSpeed's, from a parameter to its fragment in the buffer, in stages 1 and 2.
    """
    source = mapping.lp_fragment_address
    target = mapping.hp_fragment_address
    fragment = values[source.start : source.start + source.numel]
    buffer.narrow(0, target.start, target.numel).copy_(fragment)
