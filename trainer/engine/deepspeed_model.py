"""A model in DeepSpeed, and one step of its optimizer.

Gradients accumulate over all `backward` calls until `step` (managed_gradient_accumulation: false). A loss already
carries the denominators of the whole step, so DeepSpeed's own averaging over ranks is undone by multiplying with their
number. Sequence-parallel ranks share a row: each has a part of its gradient, and DeepSpeed adds the parts up as it
does those of data-parallel ranks.

In ZeRO 3 each parameter is cut as it is loaded, so that no rank ever holds the model. Below, ranks of a host share the
pages of mapped files until they train them.
"""

import abc
import contextlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from common import bfloat16
from common.config import Config
from common.errors import Retryable, UserError
from common.files.shared_memory import NO_BUFFERS
from common.processes.exits import say
from common.processes.watchdog import waiting_for
from common.wire.ports import free_port
from model import devices
from model.checksum import all_finite
from model.compiled import compile_layers
from model.files.folder import expert_counts
from model.files.tensor_parallel import layer_specs
from model.layout import packing_of
from model.packing import PackedRow, Packing, SequenceGroup
from model.sequence_parallel import shard
from model.transformers_internals import decoder_of, showing_layers_with_adapters, taking_each_parameter
from model.vision import VisionLayout, freeze_tower, with_vision
from trainer.algorithm.sums import Sums
from trainer.data.tensors import filler_row
from trainer.engine.build_locks import guard_ops, require_ops_folder
from trainer.engine.deepspeed_config import OptimizerSettings, deepspeed_config
from trainer.engine.deepspeed_insides import (
    Cutting,
    as_forward,
    clip_with,
    gathered,
    give_every_parameter_a_gradient,
    pickle_the_stage_by_value,
    set_masters,
    total_norm,
    unlink_shared_buffer,
    without_shared_buffers,
)
from trainer.engine.exported import Exported
from trainer.engine.flat_gradients import FlatGradients, add_up_in_buckets
from trainer.engine.master_weights import dither_master_weights
from trainer.engine.optimizer import adamw, parameter_groups, scheduler
from trainer.engine.ranks import collective_timeout

ToHost = Callable[[str, Tensor], Any]  # (name, tensor on its device) -> tensor on the CPU, or what is wanted of it


@dataclass(frozen=True)
class StepResult:
    applied: bool  # False: something was not finite, and no model moved
    grad_norm: float  # the norm of the whole step, before clipping
    learning_rate: float  # the rate in this step
    critic_only: bool = False  # within critic_warmup_steps: grad_norm and learning_rate are the critic's

    @property
    def new_versions(self) -> int:
        """Returns by how much this step raises policy_version: 0 or 1."""
        return int(self.applied and not self.critic_only)


def init_distributed(config: Config) -> None:
    """Creates one process group over all ranks, also when started without the deepspeed launcher (one rank)."""
    import deepspeed

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())
    local_rank = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = str(devices.use(int(local_rank)))  # DeepSpeed reads its device's index there
    capability = devices.compute_capability(devices.first())
    bfloat16.require("model.dtype", config.model.dtype, "this rank's GPU", capability)
    chosen = devices.collectives() if config.trainer.dist_backend == "auto" else config.trainer.dist_backend
    guard_ops()
    if not devices.count():
        devices.add_in_order()
        require_ops_folder() if NO_BUFFERS not in os.environ else without_shared_buffers()
    timeout = max(collective_timeout(config), timedelta(seconds=2 * config.channel.connect_timeout_s))  # imports may take long
    try:
        with waiting_for("all ranks to start", timeout.total_seconds(), is_said=local_rank == "0"):
            deepspeed.init_distributed(dist_backend=chosen, timeout=timeout, verbose=False)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise Retryable(f"the ranks did not find each other: {error}") from None
    if not devices.count():
        unlink_shared_buffer()


class DeepSpeedModel(abc.ABC):
    """A model, the policy or the critic, with an optimizer of its own. Frozen parameters have no optimizer state."""

    adapter_settings: bytes | None = None  # adapter_config.json, if only adapters are trained
    layout: VisionLayout | None = None  # None: the model sees no images
    sequence_group: SequenceGroup | None = None  # the ranks that share this rank's rows
    tensors: Sequence[Exported]  # the tensors of versions and checkpoints, from `start` on
    _sums: Sequence[str]  # names of the sums over micro-batches

    def __init__(
        self, config: Config, world_size: int, optimized: OptimizerSettings | None, sequence_group: SequenceGroup | None
    ):
        """Loads the model. optimized: None for a model that is not trained."""
        assert (sequence_group.size if sequence_group else 1) == config.trainer.sequence_parallel_size
        self.config, self.world_size, self.sequence_group = config, world_size, sequence_group
        self._optimized, self._ds_config = optimized, deepspeed_config(config, world_size, optimized)
        self.stage: int = self._ds_config["zero_optimization"]["stage"]
        is_cut = self.stage == 3 and self.tp_size == 1  # AutoTP cuts pages of a mapped file
        self._cutting = Cutting(self._ds_config) if is_cut else None
        with taking_each_parameter(self._cutting.take) if self._cutting else contextlib.nullcontext():
            self._forward = self._load()  # the module whose call DeepSpeed's hooks see
        self.model = model = self._forward.model
        if (size := self.tp_size) > 1:
            del self._ds_config["train_batch_size"]  # DeepSpeed would count all ranks in one place, and some in another
            self._ds_config["tensor_parallel"] = {
                "autotp_size": size,
                "vocab_parallel_lm_head": False,
                "partition_config": {"use_default_specs": False, "layer_specs": layer_specs(model.config, size)},
            }
        require_fused_experts(model, self.stage, world_size)
        if config.model.freeze_vision_tower:
            freeze_tower(model)

    @abc.abstractmethod
    def _load(self) -> Any:
        """Loads a transformers model, and returns a module that has it as `model`."""

    @abc.abstractmethod
    def _arrange(self) -> None:
        """Chooses how the model's rows are laid out. Every rank calls it, and all choose alike."""

    @abc.abstractmethod
    def _exported(self) -> Sequence[Exported]:
        """Returns the tensors of versions and checkpoints."""

    def start(self) -> Self:
        """Joins the other ranks: each calls it once, before anything else. Returns self."""
        import deepspeed

        pickle_the_stage_by_value()
        add_up_in_buckets()
        if self._cutting:
            self._cutting.place_rest(self.model)
        else:  # on the CPU, where it was loaded
            self._arrange()
        given: dict[str, Any] = {}
        if self._optimized:
            given = {
                "model_parameters": parameter_groups(self.model, self.config.trainer.weight_decay),
                "optimizer": None if "optimizer" in self._ds_config else adamw(self._optimized),
                "lr_scheduler": scheduler(self.config, self._optimized),
            }
        searched = showing_layers_with_adapters() if self.tp_size > 1 else contextlib.nullcontext()
        with searched, contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's prints about memory belong in the log
            self.ds, self.optimizer, *_ = deepspeed.initialize(model=self._forward, config=self._ds_config, **given)
        if self.tp_size > 1:
            self.ds.first_dataloader_check.remove()  # it compares and pickles rows, which all ranks have from rank 0
        if self._cutting:
            with as_forward(self.ds):
                self._arrange()
        if self.sequence_group and self.packing == "separate":
            raise UserError(
                f"trainer.sequence_parallel_size {self.sequence_group.size} splits shared rows, and the layers of a "
                f"{type(self.model).__name__} cannot share a prompt; set trainer.sequence_parallel_size=1"
            )
        self.tensors = self._exported()
        if self._optimized:
            self._prepare_training()
        return self

    def _prepare_training(self) -> None:
        if self.config.model.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        set_masters(self.model, self.stage, dither_master_weights)
        clip_with(self.ds, self._clip)
        self._clipped_norm = math.nan
        self._not_finite = torch.zeros((), dtype=torch.bool, device=self.device)
        self.sums = Sums(self._sums)
        if self.config.trainer.compile_layers and devices.is_accelerator(self.device):
            self._compile_layers()
        self.ds.train()

    def _largest(self, value: float) -> float:
        """Returns the largest of all ranks' values. Every rank calls it."""
        found = torch.tensor(float(value), device="cpu" if dist.get_backend() == "gloo" else devices.first())
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()

    def _compile_layers(self) -> None:
        """Compiles the layers of a dense text decoder, and says so; other layers run as they are."""
        capability = devices.compute_capability(devices.first())
        reasons = {
            "ZeRO 3 gathers the weights of each module as it runs": self.stage == 3,
            "ranks share its rows": self.sequence_group is not None,
            "ranks share each of them": self.config.trainer.tensor_parallel_size > 1,
            "its layers cannot share a prompt": self.packing == "separate",
            "it has experts": expert_counts(self.config.model) is not None,
            "its GPU is older than compute capability 8.0": bfloat16.is_missing(capability),
        }
        reason = next((reason for reason, applies in reasons.items() if applies), None)
        if reason is None:
            compile_layers(decoder_of(self.model))
        if dist.get_rank() == 0:
            what = f"of a {type(self.model).__name__} are"
            say(f"the layers {what} {f'not compiled, because {reason}' if reason else 'compiled as they first run'}")

    @property
    def tp_size(self) -> int:
        return self.config.trainer.tensor_parallel_size

    @property
    def packing(self) -> Packing:
        return packing_of(self.model)

    @property
    def device(self) -> torch.device:
        return self.ds.device

    def row_on_device(self, row: PackedRow) -> PackedRow:
        """Returns the row on this device, with images in the model's form; only this rank's part if ranks share it."""
        return shard(with_vision(row, self.layout), self.sequence_group).to(self.device)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    @torch.no_grad()
    def evaluate(self, row: PackedRow, *arguments: Any) -> Tensor:
        """Returns `forward`'s output for a row, without gradient, on the CPU. Every rank calls it (ZeRO-3 gathers)."""
        self.ds.eval()
        found = self.ds(self.row_on_device(row), *arguments)
        self.ds.train(self._optimized is not None)
        return found.cpu()

    def accumulate(self, loss: Tensor) -> None:
        """Runs backward of this rank's share of the step's loss."""
        # ZeRO checks gradients only, and an infinite loss may leave them finite: this makes them NaN
        averaged = self.world_size // self.tp_size
        self.ds.backward(loss * (averaged + 0.0 * loss.detach()), scale_wrt_gas=False)

    def step(self) -> StepResult:
        """Steps the optimizer with all gradients since the last step. Not applied if a loss or gradient is not finite.

        ZeRO 1–3 find a non-finite gradient and skip by themselves; ZeRO 0 would write it into the weights, so its
        gradients are dropped here first.
        """
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        if self.stage == 0 and not self.gradients_are_finite():
            self.ds.zero_grad()
            return StepResult(False, math.nan, learning_rate)
        if self.stage == 1 and not isinstance(self.optimizer, FlatGradients):
            give_every_parameter_a_gradient(self.optimizer)
        self.ds.step()
        norm = self.ds.get_global_grad_norm()
        norm = self._clipped_norm if norm is None else float(norm)
        return StepResult(self.ds.was_step_applied(), norm, learning_rate)

    def watch_gradients(self) -> None:
        """Lets `gradients_are_finite` answer before the step, whatever ZeRO does with gradients until then.

        Each gradient is checked once per backward, where autograd hands it over.
        """
        seen = self._not_finite

        def look(gradient: Tensor) -> None:
            seen.logical_or_(~all_finite(gradient))

        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(look)

    def gradients_are_finite(self) -> bool:
        """Returns whether gradients on all ranks were finite since the last step. Every rank calls it."""
        if self.stage == 0:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self._not_finite.logical_or_(~torch.stack([all_finite(g) for g in gradients]).all())
        flag = self._not_finite.to(torch.uint8)
        self._not_finite.zero_()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return not flag.item()

    @property
    def can_drop_gradients(self) -> bool:
        """Returns whether `drop_gradients` works: ranks have sent nothing before the step."""
        return self.stage == 0 or isinstance(self.optimizer, FlatGradients)

    def drop_gradients(self) -> None:
        """Drops gradients and sums since the last step, also those of a backward pass that was not finished."""
        self.ds.zero_grad()
        if self.stage:
            self.optimizer.zero_grad()
            self.optimizer.exit_backward()
        self._not_finite.zero_()
        self.sums.drain()

    def poison(self) -> None:
        """Makes the gradients of this step NaN, so that `step` skips it as DeepSpeed skips any other NaN."""
        self.accumulate(self.ds(self.row_on_device(filler_row()))[0].sum() * math.nan)
        self._not_finite.zero_()  # the bad gradient has been reported already

    def _clip(self) -> None:
        trained = [p for p in self.model.parameters() if p.grad is not None]
        norm = total_norm(trained, [p.grad for p in trained])
        torch.nn.utils.clip_grads_with_norm_(trained, self.config.trainer.max_grad_norm, norm)
        self._clipped_norm = float(norm)

    def gathered_tensors(
        self, tensors: Sequence[Exported], wanted: Callable[[str], bool], to_host: ToHost | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Yields (name, whole CPU tensor) of wanted tensors, which are made of this model's parameters.

        Every rank iterates to the end (ZeRO-3 gathers). to_host: gets each on its device, and makes what is yielded.
        """
        for _, found in itertools.groupby(tensors, key=lambda tensor: [id(p) for p in tensor.parameters]):
            group = list(found)  # the experts of one parameter, which is gathered once for them all
            with gathered(group[0].parameters):
                for tensor in group:
                    if wanted(tensor.name):
                        on_device = tensor.make()
                        on_host = to_host(tensor.name, on_device) if to_host else on_device.cpu()
                        yield tensor.name, on_host.clone() if self.stage == 3 and on_host is on_device else on_host


def require_fused_experts(model: torch.nn.Module, stage: int, world_size: int) -> None:
    """Raises UserError for a list of single experts in ZeRO 3, and in ZeRO 2 on several ranks.

    Each rank runs only the experts that its own tokens choose. ZeRO 3 gathers a module's weights on
    all ranks when the module runs, so ranks would wait for each other without end. ZeRO 2 sends
    gradients while backward runs, so ranks would send those of different experts.
    transformers' own mixtures keep a layer's experts in one module, which every rank runs.
    """
    if stage < 2 or (stage == 2 and world_size == 1):
        return
    for name, module in model.named_modules():
        if name.endswith("experts") and isinstance(module, torch.nn.ModuleList):
            raise UserError(
                f"{name} of {type(model).__name__} is a list of single experts, of which each rank runs others, and "
                f"ranks under ZeRO {stage} would wait for each other without end or mix the gradients of different "
                "experts; set deepspeed.zero_optimization.stage=1"
            )
