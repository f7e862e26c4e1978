"""Uses of DeepSpeed's internals by the trainer, all in this module, as they are in DeepSpeed 0.19.

tests/gloo/test_deepspeed_insides.py names what an upgrade took away. Everything else is documented API: initialize, the
engine's backward, step, save_checkpoint and load_checkpoint, GatheredParameters and deepspeed.utils.

    read        the buffer in /dev/shm that ranks on a CPU share; masters and moments
    replaced    what asks for that buffer, where it has no room; how an engine writes and reads its state; its script
                for recovery; its clipping without ZeRO; how its ZeRO stage is pickled
    emptied     what keeps the modules of destroyed engines of ZeRO 3
"""

import contextlib
import importlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files.pieces import PieceReader

STATE_TAG = "state"
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's moments


def unlink_shared_buffer() -> None:
    """Unlinks the 66 MiB buffer per rank that DeepSpeed on CPU leaves in /dev/shm for good. Its mapping stays."""
    import torch.distributed as dist

    dist.barrier()  # after it every rank has opened every buffer
    address, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    buffer = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}")
    buffer.unlink(missing_ok=True)


def without_shared_buffers() -> None:
    """Makes ranks on CPUs communicate through gloo alone, by replacing the function that builds DeepSpeed's op."""
    module: Any = importlib.import_module("deepspeed.comm.torch")  # the attribute deepspeed.comm.torch is torch itself
    module.build_shm_op = lambda: None


def pickle_the_stage_by_value() -> None:
    """Makes DeepSpeed write its ZeRO stage into checkpoints, from now on, as ZeroStageEnum(2).

    Early releases of Python 3.11 (Debian 12 has 3.11.2) would write getattr(ZeroStageEnum, "gradients"), and a
    checkpoint that calls getattr is refused when it is loaded.
    """
    from deepspeed.runtime.zero.config import ZeroStageEnum

    ZeroStageEnum.__reduce_ex__ = lambda self, protocol: (type(self), (self.value,))


class Cutting:
    """Cuts a model that is being loaded into the ranks' parts of ZeRO 3, without communication.

    It does what zero.Init does with a module, one parameter at a time, and replaces F.linear by DeepSpeed's own, which
    keeps no gathered weights for the backward pass. settings: DeepSpeed's.
    """

    def __init__(self, settings: dict[str, Any]):
        import deepspeed

        self._init = deepspeed.zero.Init(config_dict_or_path=settings)
        if settings["zero_optimization"].get("memory_efficient_linear", True):
            self._init._enable_mem_efficient_linear()

    def take(self, parameter: Any) -> None:
        """Leaves this rank's part of a parameter. Every rank has the same whole one."""
        self._place(parameter)
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()

    def place_rest(self, model: torch.nn.Module) -> None:
        """Moves and casts what was not cut, as the engine does with a model of which nothing is cut."""
        for tensor in (*model.parameters(), *model.buffers()):
            if not hasattr(tensor, "ds_id"):
                self._place(tensor)

    def _place(self, tensor: Tensor) -> None:
        is_trained = isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()
        tensor.data = tensor.data.to(self._init.local_device, self._init.dtype if is_trained else tensor.dtype)


@contextlib.contextmanager
def as_forward(engine: Any) -> Iterator[None]:
    """Lets layers read weights of other modules in the context, which ZeRO 3 gathers in the engine's own forward."""
    engine._forward_prologue((), {})
    yield
    engine._forward_epilogue()


@contextlib.contextmanager
def gathered(parameters: Sequence[Any]) -> Iterator[None]:
    """Makes parameters whole in the context, from all ranks' parts of them. Every rank enters it."""
    import deepspeed

    is_cut = any(hasattr(parameter, "ds_id") for parameter in parameters)
    with deepspeed.zero.GatheredParameters(list(parameters), enabled=is_cut):
        split = [(parameter, parameter.data) for parameter in parameters if is_split(parameter)]
        for parameter, _ in split:
            parameter.gather_params([parameter])
        yield
        for parameter, own in split:
            parameter.data = own


def destroy(engine: Any) -> None:
    """Destroys an engine of ZeRO 3, and frees its modules.

    DeepSpeed alone would keep them for good, in a list and in the cache of a function.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    engine.destroy()
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module is not engine.module]
    # a private function with a cache, which a decorator wraps
    decorated = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    cached = inspect.getclosurevars(decorated).nonlocals["func"]
    cached.cache_clear()


def is_split(parameter: Any) -> bool:
    """Returns whether tensor-parallel ranks have a part each of a parameter."""
    return getattr(parameter, "tensor_model_parallel", False)


def partition_sizes(parameter: Any) -> list[int]:
    """Returns the sizes of the tensor-parallel ranks' parts of a split parameter, along the dimension of the split."""
    return list(parameter.ds_autotp_universal_checkpoint_meta["partition_sizes"])


def tp_rank() -> int:
    from deepspeed.utils import groups

    return int(groups.get_tensor_model_parallel_rank())


def total_norm(parameters: Sequence[Any], gradients: Sequence[Tensor]) -> Tensor:
    """Returns the norm of the whole model's gradient. gradients: of these parameters; parts if they are split."""
    parts = [gradient for parameter, gradient in zip(parameters, gradients, strict=True) if is_split(parameter)]
    if not parts:
        return torch.nn.utils.get_total_norm(gradients)
    from deepspeed.utils import groups

    others = [gradient for parameter, gradient in zip(parameters, gradients, strict=True) if not is_split(parameter)]
    square = torch.nn.utils.get_total_norm(parts).square()
    torch.distributed.all_reduce(square, group=groups.get_tensor_model_parallel_group())
    return (square + torch.nn.utils.get_total_norm(others).square()).sqrt()


def give_every_parameter_a_gradient(optimizer: Any) -> None:
    """Sets missing gradients to zero in ZeRO 1, so that all ranks send gradients of the same parameters.

    DeepSpeed would leave the missing ones out, and ranks would add up gradients of different
    parameters.
    """
    for parameter in itertools.chain(*optimizer.bit16_groups):
        if optimizer.get_gradient_for_reduction(parameter) is None:
            parameter.grad = torch.zeros_like(parameter)
    if optimizer.use_grad_accum_attribute:
        optimizer.fill_grad_accum_attribute()


def clip_with(engine: Any, clip: Callable[[], None]) -> None:
    """Replaces DeepSpeed's own clipping in ZeRO 0 with float32, which forgets the gradient norm."""
    engine.clip_fp32_gradients = clip


def set_masters(model: torch.nn.Module, stage: int, make: Callable[[Tensor, int], Tensor]) -> None:
    """Sets the float32 masters of every trained bfloat16 parameter to make(its weights, its index).

    stage: ZeRO's. Every rank calls it; the masters round to the weights.
    """
    import deepspeed

    for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        if parameter.dtype != torch.bfloat16:
            continue
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            masters = make(parameter.detach(), index)
        if stage == 3:
            deepspeed.utils.safe_set_local_fp32_param(parameter, own_part(masters.flatten(), parameter))
        else:
            deepspeed.utils.safe_set_full_fp32_param(parameter, masters)  # each rank sets its part


def own_part(whole: Tensor, parameter: Any) -> Tensor:
    """Returns this rank's part of a flat parameter in stage 3, padded with zeros where the ranks do not divide it."""
    size = parameter.ds_tensor.numel()
    begin = torch.distributed.get_rank(parameter.ds_process_group) * size
    own = whole[begin : begin + size]
    return torch.nn.functional.pad(own, (0, size - len(own)))


def make_moments(optimizer: Any, stage: int, trained: list[Tensor], step: Any) -> None:
    """Creates zero moments as the optimizer does in its first step, with the step count `step`."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for stepped in _stepped(optimizer, stage, trained):
        count = step.clone().to(stepped.device) if isinstance(step, Tensor) else step
        inner.state[stepped] = {"step": count} | {key: torch.zeros_like(stepped) for key in MOMENTS}


def _stepped(optimizer: Any, stage: int, trained: list[Tensor]) -> list[Tensor]:
    """Returns the tensors that the optimizer steps: flat buffers, in stage 0 these parameters."""
    if stage == 0:
        return trained
    names = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
    return list(getattr(optimizer, next(name for name in names if hasattr(optimizer, name))))


def set_state(optimizer: Any, stage: int, parameter: Any, key: str, whole: Tensor) -> None:
    """Sets this rank's part of a parameter's flat moments or, for key "", masters and weights. Every rank calls it."""
    import deepspeed

    inner, utils = getattr(optimizer, "optimizer", optimizer), deepspeed.utils
    if stage == 3:
        own = own_part(whole, parameter)
        args = (own, key) if key else (own,)
        (utils.safe_set_local_optimizer_state if key else utils.safe_set_local_fp32_param)(parameter, *args)
    elif stage == 0:
        (inner.state[parameter][key] if key else parameter.data).copy_(whole.view_as(parameter))
    elif (place := parameter._hp_mapping) is not None:
        stepped = _stepped(optimizer, stage, [])[place.param_group_index]
        target, source = place.hp_fragment_address, place.lp_fragment_address
        own = whole[source.start : source.start + source.numel]
        (inner.state[stepped][key] if key else stepped.data).narrow(0, target.start, target.numel).copy_(own)
    if not key:
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=stage == 3):
            parameter.data.copy_(whole.view_as(parameter))


def state_to_save(engine: Any, folder: Path, adapters_alone: bool) -> dict[Path, Any]:
    """Returns this rank's part of an engine's state, by the file that it belongs to. Every rank calls it.

    Nothing is written here: ranks take different times to write, and DeepSpeed's collectives would wait in silence.
    DeepSpeed's script for recovery is left out, because it unpickles without a limit.
    """
    found: dict[Path, Any] = {}

    def save(state_dict: Any, path: str) -> None:
        if adapters_alone:  # DeepSpeed leaves the tied head in, which is frozen, under its second name
            module = state_dict.get("module") or {}
            state_dict = state_dict | {"module": {name: tensor for name, tensor in module.items() if ".lora_" in name}}
        found[Path(path)] = state_dict

    engine.checkpoint_engine.save = save
    engine.checkpoint_engine.makedirs = lambda path, exist_ok=True: None
    engine._copy_recovery_script = lambda _: None
    engine.save_checkpoint(str(folder), tag=STATE_TAG, save_latest=False, exclude_frozen_parameters=adapters_alone)
    return found


def load_state(engine: Any, folder: Path, adapters_alone: bool) -> bool:
    """Loads what state_to_save returned, without running any code of it. Returns False if this rank has no state."""
    engine.checkpoint_engine.load = load_without_code
    path, _ = engine.load_checkpoint(str(folder), tag=STATE_TAG, load_module_strict=not adapters_alone)
    return path is not None


def load_without_code(path: str, map_location: Any = None, is_mapped: bool = False) -> Any:
    """Loads a torch file without running any code of it. is_mapped: tensors are the file's memory, read on access."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]), PieceReader(path) as file:
        source: Any = path if is_mapped else file
        return torch.load(source, map_location=map_location, weights_only=True, mmap=is_mapped)
