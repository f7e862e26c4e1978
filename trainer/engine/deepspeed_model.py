"""A model in DeepSpeed, and one step of its optimizer.

Gradients accumulate until `step`, because managed_gradient_accumulation is false in DeepSpeed's
settings. A loss is already divided by the denominator of the whole step. It is multiplied by the
number of ranks, because DeepSpeed averages gradients over them. Sequence-parallel ranks share a
row, and each computes a term of its gradient. DeepSpeed also adds these terms over ranks.

In ZeRO 3 each parameter is cut into shards as soon as it is loaded, so no rank ever holds the full
model. In lower stages, weights are mapped from their files, and ranks of a host share these pages.
"""

import abc
import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from common import bfloat16
from common.config import Config
from common.errors import UserError
from common.processes.exits import say
from model import devices
from model.checksum import all_finite
from model.compiled import compile_layers
from model.files.folder import expert_counts
from model.files.tensor_parallel import layer_specs
from model.layout import packing_of
from model.packing import PackedRow, Packing, SequenceGroup
from model.sequence_parallel import shard
from model.transformers_internals import (
    decoder_of,
    showing_layers_with_adapters,
    taking_each_parameter,
)
from model.vision import VisionLayout, freeze_tower, with_vision
from trainer.algorithm.sums import Sums
from trainer.data.tensors import filler_row
from trainer.engine.deepspeed_config import OptimizerSettings, deepspeed_config
from trainer.engine.deepspeed_insides import (
    Cutting,
    as_forward,
    clip_with,
    gathered,
    give_every_parameter_a_gradient,
    pickle_the_stage_by_value,
    require_fused_experts,
    total_norm,
)
from trainer.engine.exported import Exported
from trainer.engine.flat_gradients import FlatGradientOptimizer, add_up_in_buckets
from trainer.engine.master_weights import dither_master_weights
from trainer.engine.optimizer import adamw, parameter_groups, scheduler
from trainer.engine.optimizer_state import set_masters
from trainer.engine.step_result import StepResult

# (name, tensor on its device) -> the tensor on the CPU, or any result that is wanted instead
ToHost = Callable[[str, Tensor], Any]


class DeepSpeedModel(abc.ABC):
    """The policy or the critic in DeepSpeed, with an optimizer for its trained parameters."""

    adapter_settings: bytes | None = None  # adapter_config.json, if only adapters are trained
    layout: VisionLayout | None = None  # None: the model sees no images
    sequence_group: SequenceGroup | None = None  # the ranks that share this rank's rows
    tensors: Sequence[Exported]  # the tensors of published versions and checkpoints; set by `start`
    _sums: Sequence[str]  # names of the sums over micro-batches

    def __init__(
        self,
        config: Config,
        world_size: int,
        optimizer_settings: OptimizerSettings | None,
        sequence_group: SequenceGroup | None,
    ):
        """Loads the model. optimizer_settings: None for a model that is not trained."""
        sequence_parallel_size = sequence_group.size if sequence_group else 1
        assert sequence_parallel_size == config.trainer.sequence_parallel_size
        self.config = config
        self.world_size = world_size
        self.sequence_group = sequence_group
        self._optimizer_settings = optimizer_settings
        self._ds_config = deepspeed_config(config, world_size, optimizer_settings)
        self.stage: int = self._ds_config["zero_optimization"]["stage"]
        self._cutting: Cutting | None = None
        cutting_context: Any = contextlib.nullcontext()
        if self.stage == 3 and self.tp_size == 1:  # AutoTP takes its shards from mapped files
            self._cutting = Cutting(self._ds_config)
            cutting_context = taking_each_parameter(self._cutting.take)
        with cutting_context:
            self._forward = self._load()  # the module that DeepSpeed wraps
        self.model = self._forward.model
        if self.tp_size > 1:
            self._configure_tensor_parallel()
        require_fused_experts(self.model, self.stage, world_size)
        if config.model.freeze_vision_tower:
            freeze_tower(self.model)

    def _configure_tensor_parallel(self) -> None:
        # Removed because DeepSpeed counts all ranks in one check of it, and fewer in another.
        del self._ds_config["train_batch_size"]
        specs = layer_specs(self.model.config, self.tp_size)
        self._ds_config["tensor_parallel"] = {
            "autotp_size": self.tp_size,
            "vocab_parallel_lm_head": False,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        }

    @abc.abstractmethod
    def _load(self) -> Any:
        """Loads a transformers model, and returns a module for DeepSpeed that has it as `model`."""

    @abc.abstractmethod
    def _arrange(self) -> None:
        """Chooses the layout of the rows that the model takes. Every rank must call it."""

    @abc.abstractmethod
    def _exported(self) -> Sequence[Exported]:
        """Returns the tensors of published versions and checkpoints, with their names there."""

    def start(self) -> Self:
        """Creates a DeepSpeed engine for the loaded model, and returns self.

        Every rank must call it once, before any other method. Raises UserError if rows are split
        over ranks (trainer.sequence_parallel_size), but the model's layers cannot take rows in
        which completions share a prompt.
        """
        pickle_the_stage_by_value()
        add_up_in_buckets()
        if self._cutting is None:
            self._arrange()  # on the CPU, where the model was loaded
        else:
            self._cutting.move_rest(self.model)  # tensors that were not cut into shards
        self._initialize_deepspeed()
        if self._cutting is not None:
            with as_forward(self.ds):
                self._arrange()
        if self.sequence_group and self.packing == "separate":
            raise UserError(
                f"trainer.sequence_parallel_size {self.sequence_group.size} splits shared rows, "
                f"but the layers of a {type(self.model).__name__} cannot share a prompt; "
                "set trainer.sequence_parallel_size=1"
            )
        self.tensors = self._exported()
        if self._optimizer_settings is not None:
            self._prepare_training()
        return self

    def _initialize_deepspeed(self) -> None:
        """Creates DeepSpeed's engine `ds` and, for a trained model, its optimizer."""
        import deepspeed

        arguments: dict[str, Any] = {}
        settings = self._optimizer_settings
        if settings is not None:
            groups = parameter_groups(self.model, self.config.trainer.weight_decay)
            arguments["model_parameters"] = groups
            if "optimizer" not in self._ds_config:
                arguments["optimizer"] = adamw(settings)
            arguments["lr_scheduler"] = scheduler(self.config, settings)
        autotp_context: Any = contextlib.nullcontext()
        if self.tp_size > 1:
            autotp_context = showing_layers_with_adapters()
        # DeepSpeed's prints about memory belong in the log
        with autotp_context, contextlib.redirect_stdout(sys.stderr):
            self.ds, self.optimizer, *_ = deepspeed.initialize(
                model=self._forward, config=self._ds_config, **arguments
            )
        if self.tp_size > 1:
            # It would pickle the first row to check that ranks which share a model have the same.
            self.ds.first_dataloader_check.remove()

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
        """Returns the largest of the values on all ranks. Every rank must call it."""
        device = "cpu" if dist.get_backend() == "gloo" else devices.first()
        largest = torch.tensor(float(value), device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.item()

    def _compile_layers(self) -> None:
        """Compiles the layers of a dense text decoder, unless there is an obstacle to it.

        Rank 0 prints whether the layers are compiled, and if not, the first obstacle.
        """
        capability = devices.compute_capability(devices.first())
        obstacles = {
            # A compiled layer would contain DeepSpeed's hooks, which gather and free the weights.
            "ZeRO 3 gathers the weights of each module as it runs": self.stage == 3,
            # Attention exchanges tokens with the other ranks in the middle of a layer.
            "sequence parallelism is on": self.sequence_group is not None,
            # Ranks add up their parts of the output in the middle of a layer.
            "tensor parallelism is on": self.config.trainer.tensor_parallel_size > 1,
            # Such layers run the model's own attention. Only the attention of model/attention.py
            # is written to be compiled.
            "its layers cannot share a prompt": self.packing == "separate",
            # The number of tokens that an expert gets depends on the data.
            "it has experts": expert_counts(self.config.model) is not None,
            # model/compiled.py compiles nothing on a GPU without bfloat16.
            "its GPU is older than compute capability 8.0": bfloat16.is_missing(capability),
        }
        reasons = [reason for reason, applies in obstacles.items() if applies]
        if reasons:
            outcome = f"not compiled, because {reasons[0]}"
        else:
            compile_layers(decoder_of(self.model))
            outcome = "compiled as they first run"
        if dist.get_rank() == 0:
            say(f"the layers of a {type(self.model).__name__} are {outcome}")

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
        """Returns a row on this rank's device, in the form that the model takes.

        It includes the vision tower's inputs. If ranks share rows, it is only this rank's part.
        """
        return shard(with_vision(row, self.layout), self.sequence_group).to(self.device)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    @torch.no_grad()
    def evaluate(self, row: PackedRow, *arguments: Any) -> Tensor:
        """Returns the model's output for a row, without gradient, on the CPU.

        arguments: passed to `forward` after the row. Every rank must call it, as ZeRO 3 gathers.
        """
        self.ds.eval()
        output = self.ds(self.row_on_device(row), *arguments)
        self.ds.train(self._optimizer_settings is not None)
        return output.cpu()

    def accumulate(self, loss: Tensor) -> None:
        """Runs backward for this rank's term of the step's loss, which is a sum over ranks."""
        num_averaged = self.world_size // self.tp_size  # ranks whose gradients DeepSpeed averages
        # ZeRO checks only gradients, and those of an infinite loss may be finite; 0.0 · inf is NaN
        factor = num_averaged + 0.0 * loss.detach()
        self.ds.backward(loss * factor, scale_wrt_gas=False)

    def step(self) -> StepResult:
        """Steps the optimizer with all gradients since the last step. Every rank must call it.

        The step is not applied if a loss or gradient is not finite. DeepSpeed skips such a step by
        itself in ZeRO 1 to 3, but not in ZeRO 0, where it is skipped here.
        """
        # read before the step, because the step advances the schedule
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        if self.stage == 0 and not self.gradients_are_finite():
            self.ds.zero_grad()
            return StepResult(applied=False, grad_norm=math.nan, learning_rate=learning_rate)
        if self.stage == 1 and not isinstance(self.optimizer, FlatGradientOptimizer):
            # ZeRO 1 needs a gradient of every parameter; FlatGradientOptimizer zeroes missing ones
            give_every_parameter_a_gradient(self.optimizer)
        self.ds.step()
        norm = self.ds.get_global_grad_norm()
        if norm is None:  # DeepSpeed does not know the norm if `_clip` has replaced its clipping
            norm = self._clipped_norm
        return StepResult(
            applied=self.ds.was_step_applied(),
            grad_norm=float(norm),
            learning_rate=learning_rate,
        )

    def watch_gradients(self) -> None:
        """Makes `gradients_are_finite` work before the step, in every ZeRO stage.

        A hook checks each gradient in every backward, before ZeRO reduces or frees the gradient.
        """
        check = functools.partial(_note_if_not_finite, self._not_finite)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(check)

    def gradients_are_finite(self) -> bool:
        """Returns whether all gradients since the last step are finite, on all ranks.

        Every rank must call it. In ZeRO 1 to 3, `watch_gradients` must have been called before.
        """
        if self.stage == 0:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            are_finite = torch.stack([all_finite(gradient) for gradient in gradients])
            self._not_finite.logical_or_(~are_finite.all())
        flag = self._not_finite.to(torch.uint8)
        self._not_finite.zero_()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return not flag.item()

    @property
    def can_drop_gradients(self) -> bool:
        """Returns whether `drop_gradients` works: ranks must not have reduced gradients yet."""
        return self.stage == 0 or isinstance(self.optimizer, FlatGradientOptimizer)

    def drop_gradients(self) -> None:
        """Drops gradients and metric sums since the last step, even if a backward has failed."""
        self.ds.zero_grad()
        if self.stage > 0:
            self.optimizer.zero_grad()
            self.optimizer.exit_backward()  # a backward that failed did not get to this call
        self._not_finite.zero_()
        self.sums.drain()

    def make_gradients_nan(self) -> None:
        """Makes the gradients NaN, so that `step` is skipped. Every rank must call it."""
        output = self.ds(self.row_on_device(filler_row()))
        self.accumulate(output[0].sum() * math.nan)
        self._not_finite.zero_()  # so that these gradients do not count in the next step

    def _clip(self) -> None:
        """Clips the gradients in ZeRO 0, and keeps their norm, which DeepSpeed would drop."""
        with_gradient = [p for p in self.model.parameters() if p.grad is not None]
        norm = total_norm(with_gradient, [p.grad for p in with_gradient])
        torch.nn.utils.clip_grads_with_norm_(with_gradient, self.config.trainer.max_grad_norm, norm)
        self._clipped_norm = float(norm)

    def gathered_tensors(
        self,
        tensors: Sequence[Exported],
        wanted: Callable[[str], bool],
        convert: ToHost | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """Yields the name and the full value of each wanted tensor, on the CPU.

        Every rank must iterate to the end, because ZeRO 3 gathers parameters. wanted: takes a name,
        and returns whether this rank wants the tensor. convert: takes a name and the tensor on its
        device, and returns what is yielded instead of the tensor on the CPU.
        """
        # A parameter may hold many experts, which are adjacent tensors. It is gathered only once.
        for _, group in itertools.groupby(tensors, key=_parameter_ids):
            tensors_of_parameters = list(group)
            with gathered(tensors_of_parameters[0].parameters):
                for tensor in tensors_of_parameters:
                    if wanted(tensor.name):
                        yield tensor.name, self._on_host(tensor, convert)

    def _on_host(self, tensor: Exported, convert: ToHost | None) -> Any:
        on_device = tensor.make()
        on_host = convert(tensor.name, on_device) if convert else on_device.cpu()
        if self.stage == 3 and on_host is on_device:  # the device is the CPU, so nothing was copied
            return on_host.clone()  # the gathered parameter itself is freed after the `with` block
        return on_host


def _note_if_not_finite(not_finite: Tensor, gradient: Tensor) -> None:
    not_finite.logical_or_(~all_finite(gradient))


def _parameter_ids(tensor: Exported) -> list[int]:
    return [id(parameter) for parameter in tensor.parameters]
