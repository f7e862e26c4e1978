"""What of DeepSpeed's insides the trainer reads or replaces, all of it, as it is in DeepSpeed 0.19.

tests/gloo/test_deepspeed_insides.py names what an upgrade took away. Everything else is documented API: initialize, the
engine's backward, step, save_checkpoint and load_checkpoint, GatheredParameters and deepspeed.utils.

    read        the buffer in /dev/shm that ranks on a CPU share; masters and moments
    replaced    what asks for that buffer, where it has no room; how an engine writes and reads its state; its script
                for recovery; its clipping without ZeRO; how its ZeRO stage is pickled
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.pieces import PieceReader

STATE_TAG = "state"
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's


def unlink_shared_buffer() -> None:
    """DeepSpeed on CPU makes a 66 MiB buffer per rank in /dev/shm for good. The mapping outlives the name."""
    import torch.distributed as dist

    dist.barrier()  # every rank has opened every buffer by now
    address, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    buffer = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}")
    buffer.unlink(missing_ok=True)


def without_shared_buffers() -> None:
    """Ranks on CPUs exchange by gloo alone. DeepSpeed asks for its op in this function."""
    module: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute this is torch itself
    module.build_shm_op = lambda: None


def pickle_the_stage_by_value() -> None:
    """DeepSpeed writes its ZeRO stage into checkpoints, from now on as ZeroStageEnum(2).

    Early releases of Python 3.11 (Debian 12 has 3.11.2) would write getattr(ZeroStageEnum, "gradients"), and a
    checkpoint that calls getattr is refused when it is loaded.
    """
    from deepspeed.runtime.zero.config import ZeroStageEnum

    ZeroStageEnum.__reduce_ex__ = lambda self, protocol: (type(self), (self.value,))


def clip_with(engine: Any, clip: Callable[[], None]) -> None:
    """In ZeRO 0 and float32 DeepSpeed clips by itself, and forgets the norm."""
    engine.clip_fp32_gradients = clip


def set_masters(model: torch.nn.Module, optimizer: Any, stage: int, make: Callable[[int, Tensor], Tensor]) -> None:
    """Gives every trained bfloat16 parameter the float32 masters that make(its index, its weights) returns.

    They round to its weights. optimizer, stage: DeepSpeed's own and ZeRO's. Every rank calls it.
    """
    import deepspeed

    for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        if parameter.dtype == torch.bfloat16:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                masters = make(index, parameter.detach())
            set_state(optimizer, stage, parameter, "", masters.flatten())


def masters_without_zero(optimizer: Any) -> dict[Tensor, Tensor]:
    """By parameter, of DeepSpeed's optimizer in stage 0; none of a float32 model, or where they lie flat."""
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    halves, masters = (itertools.chain(*groups) for groups in (optimizer.fp16_groups, optimizer.fp32_groups))
    return dict(zip(halves, masters, strict=True))


def own_part(whole: Tensor, size: int) -> Tensor:
    """This rank's of a flat parameter in stage 3, which ends with zeros where the ranks do not divide it."""
    begin = torch.distributed.get_rank() * size
    own = whole[begin : begin + size]
    return torch.nn.functional.pad(own, (0, size - len(own)))


def make_moments(optimizer: Any, stage: int, trained: list[Tensor], step: Any) -> None:
    """As the optimizer does in its first step, after `step` steps."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for stepped in _stepped(optimizer, stage, trained):
        taken = step.clone().to(stepped.device) if isinstance(step, Tensor) else step
        inner.state[stepped] = {"step": taken} | {key: torch.zeros_like(stepped) for key in MOMENTS}


def _stepped(optimizer: Any, stage: int, trained: list[Tensor]) -> list[Tensor]:
    """What it steps: flat buffers, or masters of these parameters."""
    if stage == 0:
        masters = masters_without_zero(optimizer)
        return [masters.get(parameter, parameter) for parameter in trained]
    names = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
    return list(getattr(optimizer, next(name for name in names if hasattr(optimizer, name))))


def set_state(optimizer: Any, stage: int, parameter: Any, key: str, whole: Tensor) -> None:
    """This rank's part of a parameter's flat moments or, under "", of its masters and weights. Every rank calls it."""
    import deepspeed

    inner, utils = getattr(optimizer, "optimizer", optimizer), deepspeed.utils
    if stage == 3:
        own = own_part(whole, parameter.ds_tensor.numel())
        args = (own, key) if key else (own,)
        (utils.safe_set_local_optimizer_state if key else utils.safe_set_local_fp32_param)(parameter, *args)
    elif stage == 0:
        [stepped] = _stepped(optimizer, 0, [parameter])
        (inner.state[stepped][key] if key else stepped.data).copy_(whole.view_as(parameter))
    elif (place := parameter._hp_mapping) is not None:
        stepped = _stepped(optimizer, stage, [])[place.param_group_index]
        here, there = place.hp_fragment_address, place.lp_fragment_address
        own = whole[there.start : there.start + there.numel]
        (inner.state[stepped][key] if key else stepped.data).narrow(0, here.start, here.numel).copy_(own)
    if not key:
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=stage == 3):
            parameter.data.copy_(whole.view_as(parameter))


def state_to_save(engine: Any, folder: Path, adapters_alone: bool) -> dict[Path, Any]:
    """This rank's part of an engine's state by the file that it belongs into. Every rank calls it.

    Nothing is written: ranks take different times for that, and DeepSpeed's collectives would wait without a word.
    Without its script for recovery, which unpickles without a limit.
    """
    found: dict[Path, Any] = {}

    def save(state_dict: Any, path: str) -> None:
        found[Path(path)] = _without_base(state_dict) if adapters_alone else state_dict

    engine.checkpoint_engine.save = save
    engine.checkpoint_engine.makedirs = lambda path, exist_ok=True: None
    engine._copy_recovery_script = lambda _: None
    engine.save_checkpoint(str(folder), tag=STATE_TAG, save_latest=False, exclude_frozen_parameters=adapters_alone)
    return found


def _without_base(state_dict: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed leaves frozen parameters out, but not the second name of one: the tied head."""
    module = state_dict.get("module") or {}
    return state_dict | {"module": {name: tensor for name, tensor in module.items() if ".lora_" in name}}


def load_state(engine: Any, folder: Path, adapters_alone: bool) -> bool:
    """What state_to_save gave, read without running any code of it. False if there is none for this rank."""
    engine.checkpoint_engine.load = load_without_code
    path, _ = engine.load_checkpoint(str(folder), tag=STATE_TAG, load_module_strict=not adapters_alone)
    return path is not None


def load_without_code(path: str, map_location: Any = None, is_mapped: bool = False) -> Any:
    """is_mapped: its tensors are the file's memory, read when they are."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]), PieceReader(path) as file:
        source: Any = path if is_mapped else file
        return torch.load(source, map_location=map_location, weights_only=True, mmap=is_mapped)
