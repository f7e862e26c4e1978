"""What of DeepSpeed's insides the trainer reads or replaces, all of it, as it is in DeepSpeed 0.19.

tests/gloo/test_deepspeed_insides.py names what an upgrade took away. Everything else is documented API: initialize, the
engine's backward, step, save_checkpoint and load_checkpoint, GatheredParameters and deepspeed.utils.

    read        the buffer in /dev/shm that ranks on a CPU share; float32 masters without ZeRO
    replaced    what asks for that buffer, where it has no room; how an engine writes and reads its state; its script
                for recovery; its clipping without ZeRO; how its ZeRO stage is pickled
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.pieces import PieceReader

_STATE_TAG = "state"


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

    optimizer, stage: DeepSpeed's own and ZeRO's. Every rank calls it.
    """
    import deepspeed

    own = dict(_masters_without_zero(optimizer)) if stage == 0 else {}
    for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        if parameter.dtype != torch.bfloat16:
            continue
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            masters = make(index, parameter.detach())
        if stage == 3:
            _set_partition(deepspeed.utils, parameter, masters)
        elif stage > 0:
            deepspeed.utils.safe_set_full_fp32_param(parameter, masters)  # each rank its part
        elif parameter in own:
            own[parameter].data.copy_(masters)


def _masters_without_zero(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, master) of DeepSpeed's optimizer in stage 0; none of a float32 model, or where they lie flat."""
    if hasattr(optimizer, "fp32_groups"):
        for halves, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            yield from zip(halves, masters, strict=True)


def _set_partition(utils: Any, parameter: Tensor, masters: Tensor) -> None:
    """This rank's part in stage 3, which ends with zeros where the ranks do not divide the parameter."""
    size = utils.safe_get_local_fp32_param(parameter).numel()
    begin = torch.distributed.get_rank() * size
    own = masters.flatten()[begin : begin + size]
    utils.safe_set_local_fp32_param(parameter, torch.nn.functional.pad(own, (0, size - len(own))))


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
    engine.save_checkpoint(str(folder), tag=_STATE_TAG, save_latest=False, exclude_frozen_parameters=adapters_alone)
    return found


def _without_base(state_dict: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed leaves frozen parameters out, but not the second name of one: the tied head."""
    module = state_dict.get("module") or {}
    return state_dict | {"module": {name: tensor for name, tensor in module.items() if ".lora_" in name}}


def load_state(engine: Any, folder: Path, adapters_alone: bool) -> bool:
    """What state_to_save gave, read without running any code of it. False if there is none for this rank."""
    engine.checkpoint_engine.load = load_without_code
    path, _ = engine.load_checkpoint(str(folder), tag=_STATE_TAG, load_module_strict=not adapters_alone)
    return path is not None


def load_without_code(path: str, map_location: Any = None) -> Any:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]), PieceReader(path) as file:
        return torch.load(file, map_location=map_location, weights_only=True)
