"""Uses of DeepSpeed's internals by the trainer, as they are in DeepSpeed 0.19.

They are all here, in optimizer_state.py and in flat_gradients.py.
tests/gloo/test_deepspeed_insides.py tells by name what an upgrade has removed. Everything else that
the trainer uses is documented API: initialize, the engine's backward, step, save_checkpoint and
load_checkpoint, GatheredParameters and deepspeed.utils.

    read        the buffer in /dev/shm that ranks on a CPU share
    replaced    the function that creates this buffer, where it has no room; an engine's writing and
                reading of its state; its script for recovery; its clipping without ZeRO; the
                pickling of its ZeRO stage
    emptied     the list and the cache that keep the modules of destroyed engines of ZeRO 3
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
    """Unlinks this rank's buffer of 66 MiB in /dev/shm, which DeepSpeed on a CPU never removes.

    Its mapping stays.
    """
    import torch.distributed as dist

    dist.barrier()  # after it every rank has opened every buffer
    address = os.environ["MASTER_ADDR"]
    port = os.environ["MASTER_PORT"]
    rank = os.environ["RANK"]
    buffer = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}")
    buffer.unlink(missing_ok=True)


def without_shared_buffers() -> None:
    """Makes ranks on CPUs communicate only through gloo.

    It replaces the function that builds DeepSpeed's op for shared memory.
    """
    # an import statement would not do, because the attribute deepspeed.comm.torch is torch itself
    module: Any = importlib.import_module("deepspeed.comm.torch")
    module.build_shm_op = lambda: None


def pickle_the_stage_by_value() -> None:
    """Makes DeepSpeed write its ZeRO stage into checkpoints as ZeroStageEnum(2), from now on.

    Early releases of Python 3.11 (Debian 12 has 3.11.2) would write getattr(ZeroStageEnum,
    "gradients"), and a checkpoint that calls getattr is refused when it is loaded.
    """
    from deepspeed.runtime.zero.config import ZeroStageEnum

    ZeroStageEnum.__reduce_ex__ = lambda self, protocol: (type(self), (self.value,))


class Cutting:
    """Cuts a model that is being loaded into the ranks' shards of ZeRO 3, without communication.

    It does what zero.Init does with a module, but one parameter at a time. It replaces F.linear by
    DeepSpeed's, which keeps no gathered weights for the backward pass. settings: DeepSpeed's.
    """

    def __init__(self, settings: dict[str, Any]):
        import deepspeed

        self._init = deepspeed.zero.Init(config_dict_or_path=settings)
        # Init replaces F.linear only when it is given a module or entered as a context. It gets no
        # module here, and as a context it would replace the constructors of all modules, too.
        if settings["zero_optimization"].get("memory_efficient_linear", True):
            self._init._enable_mem_efficient_linear()

    def take(self, parameter: Any) -> None:
        """Replaces a full parameter, which is the same on every rank, by this rank's shard."""
        self._move(parameter)
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()

    def move_rest(self, model: torch.nn.Module) -> None:
        """Moves and casts the tensors that were not cut, as the engine does if nothing is cut."""
        for tensor in (*model.parameters(), *model.buffers()):
            if not hasattr(tensor, "ds_id"):
                self._move(tensor)

    def _move(self, tensor: Tensor) -> None:
        dtype = tensor.dtype
        if isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
            dtype = self._init.dtype
        tensor.data = tensor.data.to(self._init.local_device, dtype)


@contextlib.contextmanager
def as_forward(engine: Any) -> Iterator[None]:
    """Lets the block call modules as the engine's forward does, in which ZeRO 3 gathers weights."""
    engine._forward_prologue((), {})
    yield
    engine._forward_epilogue()


@contextlib.contextmanager
def gathered(parameters: Sequence[Any]) -> Iterator[None]:
    """Gives full parameters to the block, gathered from the shards of all ranks.

    Every rank enters it.
    """
    import deepspeed

    is_cut = any(hasattr(parameter, "ds_id") for parameter in parameters)
    with deepspeed.zero.GatheredParameters(list(parameters), enabled=is_cut):
        split = [parameter for parameter in parameters if is_split(parameter)]
        shards = [parameter.data for parameter in split]
        for parameter in split:
            parameter.gather_params([parameter])
        yield
        for parameter, shard in zip(split, shards, strict=True):
            parameter.data = shard


def destroy(engine: Any) -> None:
    """Destroys an engine of ZeRO 3, and frees its modules.

    DeepSpeed itself never frees them, because it keeps them in a list and in the cache of a
    function.
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
    """Returns whether a parameter is split between tensor-parallel ranks."""
    return getattr(parameter, "tensor_model_parallel", False)


def partition_sizes(parameter: Any) -> list[int]:
    """Returns the sizes of a split parameter's shards on the tensor-parallel ranks.

    They are sizes along the dimension in which it is split.
    """
    return list(parameter.ds_autotp_universal_checkpoint_meta["partition_sizes"])


def tp_rank() -> int:
    """Returns this rank's index among the tensor-parallel ranks that share a model."""
    from deepspeed.utils import groups

    return int(groups.get_tensor_model_parallel_rank())


def total_norm(parameters: Sequence[Any], gradients: Sequence[Tensor]) -> Tensor:
    """Returns the norm of the full model's gradient: a scalar.

    gradients: those of these parameters on this rank, which are shards where a parameter is split.
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
    """Sets missing gradients to zero in ZeRO 1, so that all ranks send the same gradients.

    DeepSpeed would skip a missing gradient, and ranks would then add up gradients of different
    parameters.
    """
    for parameter in itertools.chain(*optimizer.bit16_groups):
        if optimizer.get_gradient_for_reduction(parameter) is None:
            parameter.grad = torch.zeros_like(parameter)
    if optimizer.use_grad_accum_attribute:
        optimizer.fill_grad_accum_attribute()


def require_fused_experts(model: torch.nn.Module, stage: int, world_size: int) -> None:
    """Raises UserError for a list of single experts in ZeRO 3, and in ZeRO 2 on several ranks.

    Each rank runs only the experts that its own tokens choose. ZeRO 3 gathers a module's weights on
    all ranks when the module runs, so ranks would wait for each other without end. ZeRO 2 sends
    gradients while backward runs, so ranks would add up gradients of different experts.
    transformers' own mixtures keep a layer's experts in one module, which every rank runs.
    """
    if stage < 2 or (stage == 2 and world_size == 1):
        return
    for name, module in model.named_modules():
        if name.endswith("experts") and isinstance(module, torch.nn.ModuleList):
            raise UserError(
                f"{name} of {type(model).__name__} is a list of single experts, "
                f"of which each rank runs others, and ranks under ZeRO {stage} would wait for each "
                "other without end or mix the gradients of different experts; "
                "set deepspeed.zero_optimization.stage=1"
            )


def clip_with(engine: Any, clip: Callable[[], None]) -> None:
    """Replaces DeepSpeed's clipping in ZeRO 0 with float32, because it drops the gradient norm."""
    engine.clip_fp32_gradients = clip


def state_to_save(engine: Any, folder: Path, adapters_alone: bool) -> dict[Path, Any]:
    """Returns this rank's shard of an engine's state, by the file that it belongs to.

    Every rank calls it. Nothing is written here, because ranks take different times to write, and
    DeepSpeed's collectives would wait in silence. DeepSpeed's script for recovery is not saved,
    because it unpickles without a limit.
    """
    states: dict[Path, Any] = {}

    def save(state_dict: Any, path: str) -> None:
        if adapters_alone:
            state_dict = _without_base_weights(state_dict)
        states[Path(path)] = state_dict

    engine.checkpoint_engine.save = save
    engine.checkpoint_engine.makedirs = lambda path, exist_ok=True: None
    engine._copy_recovery_script = lambda _: None
    engine.save_checkpoint(
        str(folder), tag=STATE_TAG, save_latest=False, exclude_frozen_parameters=adapters_alone
    )
    return states


def _without_base_weights(state_dict: Any) -> Any:
    """Returns an engine's state with only the adapters' weights.

    DeepSpeed excludes frozen parameters, but for the tied head, which it keeps under its second
    name.
    """
    weights = state_dict.get("module") or {}
    adapters = {name: tensor for name, tensor in weights.items() if ".lora_" in name}
    return state_dict | {"module": adapters}


def load_state(engine: Any, folder: Path, adapters_alone: bool) -> bool:
    """Loads the files of `state_to_save`, without running any code that they hold.

    Returns False if this rank has no state.
    """
    engine.checkpoint_engine.load = load_without_code
    path, _ = engine.load_checkpoint(
        str(folder), tag=STATE_TAG, load_module_strict=not adapters_alone
    )
    return path is not None


def load_without_code(path: str, map_location: Any = None, is_mapped: bool = False) -> Any:
    """Loads a torch file without running any code that it holds.

    is_mapped: tensors are mapped from the file, and read on access.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # the classes in DeepSpeed's files that torch.load would refuse by default
    allowed = [LossScaler, ZeroStageEnum, fragment_address]
    with torch.serialization.safe_globals(allowed), PieceReader(path) as file:
        # torch maps only a file that it opens itself; any other file reports progress as it is read
        source: Any = path if is_mapped else file
        return torch.load(source, map_location=map_location, weights_only=True, mmap=is_mapped)
