"""All patches of DeepSpeed 0.19's internals, which an upgrade of DeepSpeed may break.

The trainer uses DeepSpeed's internals only in this module, optimizer_state.py and
flat_gradients.py. tests/gloo/test_deepspeed_insides.py names each internal that no longer exists.
Everything else that the trainer uses is documented API: initialize, the engine's backward, step,
save_checkpoint and load_checkpoint, GatheredParameters and deepspeed.utils.

    unlinked    each rank's shared buffer in /dev/shm, which ranks on CPUs use for communication
    replaced    the function that creates this buffer, if /dev/shm has no room; the functions with
                which an engine writes and reads its state, copies its recovery script and clips
                gradients without ZeRO; how its ZeRO stage is pickled
    emptied     the list and the cache that keep the modules of destroyed ZeRO 3 engines
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

from common.errors import UserError
from common.files.pieces import PieceReader

STATE_TAG = "state"


def unlink_shared_buffer() -> None:
    """Unlinks this rank's buffer of 66 MiB in /dev/shm, which DeepSpeed on a CPU never does.

    Ranks have mapped the buffer by then and can still use it. The system frees it when they end.
    Every rank calls this function.
    """
    import torch.distributed as dist

    dist.barrier()  # after this barrier every rank has opened every buffer
    address = os.environ["MASTER_ADDR"]
    port = os.environ["MASTER_PORT"]
    rank = os.environ["RANK"]
    buffer = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}")
    buffer.unlink(missing_ok=True)


def without_shared_buffers() -> None:
    """Makes ranks on CPUs communicate only through gloo, without buffers in shared memory.

    Replaces the function that builds DeepSpeed's op for shared memory, so that there is no such op.
    """
    # an import statement would not work, because the attribute deepspeed.comm.torch is torch itself
    module: Any = importlib.import_module("deepspeed.comm.torch")
    module.build_shm_op = lambda: None


def pickle_the_stage_by_value() -> None:
    """Makes DeepSpeed pickle its ZeRO stage by value, as in ZeroStageEnum(2), in later checkpoints.

    Early releases of Python 3.11 (Debian 12 has 3.11.2) would pickle a call of getattr with
    ZeroStageEnum and "gradients", and `load_without_code` refuses a checkpoint that calls getattr.
    """
    from deepspeed.runtime.zero.config import ZeroStageEnum

    ZeroStageEnum.__reduce_ex__ = lambda self, protocol: (type(self), (self.value,))


class Cutting:
    """Cuts each parameter of a model into ZeRO 3 shards as it is loaded, without communication.

    It does with one parameter what zero.Init does with all parameters of a module. Like zero.Init,
    it replaces F.linear with DeepSpeed's version, which does not keep gathered weights for the
    backward pass. settings: the config of deepspeed.initialize.
    """

    def __init__(self, settings: dict[str, Any]):
        import deepspeed

        self._init = deepspeed.zero.Init(config_dict_or_path=settings)
        # Init replaces F.linear only when it is given a module or entered as a context. Here it
        # gets no module, and as a context it would also replace the constructors of all modules.
        if settings["zero_optimization"].get("memory_efficient_linear", True):
            self._init._enable_mem_efficient_linear()

    def take(self, parameter: Any) -> None:
        """Replaces a full parameter, which is the same on every rank, with this rank's shard."""
        self._move(parameter)
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()

    def move_rest(self, model: torch.nn.Module) -> None:
        """Moves the tensors that `take` has not cut to the device, and casts such parameters.

        DeepSpeed's engine does this itself only for a model without shards.
        """
        for tensor in (*model.parameters(), *model.buffers()):
            if not hasattr(tensor, "ds_id"):  # DeepSpeed sets ds_id on the parameters that it cuts
                self._move(tensor)

    def _move(self, tensor: Tensor) -> None:
        dtype = tensor.dtype
        if isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
            dtype = self._init.dtype
        tensor.data = tensor.data.to(self._init.local_device, dtype)


@contextlib.contextmanager
def as_forward(engine: Any) -> Iterator[None]:
    """Makes ZeRO 3 gather the weights of modules that the block calls, as in engine.forward."""
    engine._forward_prologue((), {})
    yield
    engine._forward_epilogue()


@contextlib.contextmanager
def gathered(parameters: Sequence[Any]) -> Iterator[None]:
    """Gathers full parameters from the shards of all ranks for the duration of the block.

    Every rank enters it with the same parameters.
    """
    import deepspeed

    has_zero_3_shards = any(hasattr(parameter, "ds_id") for parameter in parameters)
    with deepspeed.zero.GatheredParameters(list(parameters), enabled=has_zero_3_shards):
        split = [parameter for parameter in parameters if is_split(parameter)]
        shards = [parameter.data for parameter in split]
        for parameter in split:
            parameter.gather_params([parameter])  # replaces its data with the full tensor
        yield
        for parameter, shard in zip(split, shards, strict=True):
            parameter.data = shard


def destroy(engine: Any) -> None:
    """Destroys a ZeRO 3 engine, and frees its modules.

    DeepSpeed itself never frees the modules, because it keeps them in a list and in the cache of a
    method.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    engine.destroy()
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module is not engine.module]
    # a decorator hides the private method's cache, so the cached function is read from its closure
    decorated = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    cached = inspect.getclosurevars(decorated).nonlocals["func"]
    cached.cache_clear()


def is_split(parameter: Any) -> bool:
    """Returns whether a parameter is split between tensor-parallel ranks."""
    return getattr(parameter, "tensor_model_parallel", False)


def partition_sizes(parameter: Any) -> list[int]:
    """Returns a split parameter's size on each tensor-parallel rank, along the split dimension."""
    return list(parameter.ds_autotp_universal_checkpoint_meta["partition_sizes"])


def tp_rank() -> int:
    """Returns this rank's index among the tensor-parallel ranks that share a model."""
    from deepspeed.utils import groups

    return int(groups.get_tensor_model_parallel_rank())


def total_norm(parameters: Sequence[Any], gradients: Sequence[Tensor]) -> Tensor:
    """Returns the L2 norm of the full model's gradient, as a scalar tensor.

    gradients: one for each of the parameters. Where tensor-parallel ranks split a parameter, it is
    the gradient of this rank's shard. Every tensor-parallel rank calls it.
    """
    split_gradients = []
    other_gradients = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if is_split(parameter):
            split_gradients.append(gradient)
        else:
            other_gradients.append(gradient)
    if not split_gradients:
        return torch.nn.utils.get_total_norm(gradients)
    from deepspeed.utils import groups

    split_square = torch.nn.utils.get_total_norm(split_gradients).square()
    torch.distributed.all_reduce(split_square, group=groups.get_tensor_model_parallel_group())
    other_square = torch.nn.utils.get_total_norm(other_gradients).square()
    return (split_square + other_square).sqrt()


def give_every_parameter_a_gradient(optimizer: Any) -> None:
    """Sets missing gradients to zero in ZeRO 1, so that all ranks reduce the same gradients.

    DeepSpeed would skip a missing gradient, and ranks would then add up gradients of different
    parameters.
    """
    for parameter in itertools.chain(*optimizer.bit16_groups):
        if optimizer.get_gradient_for_reduction(parameter) is None:
            parameter.grad = torch.zeros_like(parameter)
    if optimizer.use_grad_accum_attribute:
        # DeepSpeed then reduces this attribute and not `grad`, so the zeros are copied into it
        optimizer.fill_grad_accum_attribute()


def require_fused_experts(model: torch.nn.Module, stage: int, world_size: int) -> None:
    """Raises UserError if ZeRO 2 or 3 cannot train a model whose experts are separate modules.

    Each rank runs only the experts that its own tokens choose. ZeRO 3 gathers a module's weights on
    all ranks when the module runs, so ranks would wait for each other forever. ZeRO 2 reduces
    gradients while backward runs, so ranks would add up gradients of different experts. One rank is
    allowed in ZeRO 2, but not in ZeRO 3, where such a model is untested. The mixtures that come
    with transformers keep a layer's experts in one module, which every rank runs.
    """
    if stage < 2 or (stage == 2 and world_size == 1):
        return
    consequence = "ranks could add up gradients of different experts"
    if stage == 3:
        consequence = "ranks could wait for each other forever"
    for name, module in model.named_modules():
        if name.endswith("experts") and isinstance(module, torch.nn.ModuleList):
            raise UserError(
                f"{name} of {type(model).__name__} is a list of separate experts. Each rank runs "
                f"only the experts that its tokens choose, so under ZeRO {stage} {consequence}; "
                "set deepspeed.zero_optimization.stage=1"
            )


def clip_with(engine: Any, clip: Callable[[], None]) -> None:
    """Replaces DeepSpeed's clipping without ZeRO, which discards the gradient norm, with `clip`."""
    engine.clip_fp32_gradients = clip


def state_to_save(engine: Any, folder: Path, adapters_alone: bool) -> dict[Path, Any]:
    """Returns this rank's shard of an engine's state: what to write with torch.save, by file.

    adapters_alone: leaves out the frozen weights under adapters. Every rank calls it. Nothing is
    written here, because ranks take different times to write, and would block in DeepSpeed's
    collectives without reporting progress. DeepSpeed's recovery script is left out, because it
    unpickles arbitrary objects.
    """
    states: dict[Path, Any] = {}

    def collect(state_dict: Any, path: str) -> None:
        if adapters_alone:
            state_dict = _without_base_weights(state_dict)
        states[Path(path)] = state_dict

    # save_checkpoint calls these three functions to write files
    engine.checkpoint_engine.save = collect
    engine.checkpoint_engine.makedirs = lambda path, exist_ok=True: None
    engine._copy_recovery_script = lambda _: None
    engine.save_checkpoint(
        str(folder), tag=STATE_TAG, save_latest=False, exclude_frozen_parameters=adapters_alone
    )
    return states


def _without_base_weights(state_dict: Any) -> Any:
    """Returns an engine's state with only the adapters' weights.

    DeepSpeed has left out the frozen parameters already, except for a head that is tied to the
    embedding, which it keeps under the head's name.
    """
    weights = state_dict.get("module") or {}
    adapters = {name: tensor for name, tensor in weights.items() if ".lora_" in name}
    return state_dict | {"module": adapters}


def load_state(engine: Any, folder: Path, adapters_alone: bool) -> bool:
    """Loads an engine's state that `state_to_save` returned, without running code from the files.

    Returns whether the folder holds a state for this rank. adapters_alone: as in `state_to_save`.
    Every rank calls it.
    """
    engine.checkpoint_engine.load = load_without_code
    path, _ = engine.load_checkpoint(
        str(folder), tag=STATE_TAG, load_module_strict=not adapters_alone
    )
    return path is not None


def load_without_code(path: str, map_location: Any = None, is_mapped: bool = False) -> Any:
    """Returns what torch.save wrote into a file, without running any code that the file holds.

    is_mapped: maps tensors from the file, so that they are read on access. Raises
    pickle.UnpicklingError if the file needs a function or class that is not allowed.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # DeepSpeed's files need these classes, which torch.load refuses by default
    allowed = [LossScaler, ZeroStageEnum, fragment_address]
    with torch.serialization.safe_globals(allowed), PieceReader(path) as file:
        # torch maps only a file that it opens itself, and PieceReader reports progress as it reads
        source: Any = path if is_mapped else file
        return torch.load(source, map_location=map_location, weights_only=True, mmap=is_mapped)
