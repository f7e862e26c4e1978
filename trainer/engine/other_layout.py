"""Restores a state that a different number of ranks or a different ZeRO stage saved.

Masters (the weights in float32) and Adam's moments are joined from what all ranks saved. Then each
rank takes the part that its own ZeRO stage keeps on it:

    ZeRO 0      all masters and moments
    ZeRO 1, 2   a slice of a flat tensor, which holds all parameters' values one after the other
    ZeRO 3      a shard of every parameter

Tensor-parallel ranks hold, and saved, only their shards of split parameters.

Bits are copied, never computed: weights, masters and moments are those of the checkpoint.
DeepSpeed's universal checkpoints would do the same, but they write four files for each parameter
and unpickle arbitrary objects. Files are memory-mapped, so that ranks on one host share the memory.
Not supported: optimizers whose state is not Adam's.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from common.processes.watchdog import report_progress
from trainer.engine.deepspeed_insides import (
    STATE_TAG,
    load_without_code,
    partition_sizes,
    tp_rank,
)
from trainer.engine.deepspeed_model import DeepSpeedModel
from trainer.engine.optimizer import full_shape, parameter_groups
from trainer.engine.optimizer_state import (
    MOMENTS,
    make_moments,
    set_masters_and_weights,
    set_moment,
)

_MASTERS = ""  # the key of the masters, beside the keys in MOMENTS


def restore(engine: DeepSpeedModel, folder: Path, stage: int, ranks: int, tp_size: int = 1) -> None:
    """Restores weights and optimizer from a different number of ranks or a different ZeRO stage.

    folder: the checkpoint's folder of DeepSpeed states. stage, ranks, tp_size: the saving run's
    ZeRO stage, its number of ranks, and its number of tensor-parallel ranks. Every rank calls it
    before its first step. Raises UserError if the saved state is not Adam's.
    """
    trained = _trained_parameters(engine)
    saved_states = []  # one for each tensor-parallel rank of the saving run
    for tp_index in range(tp_size):
        saved_states.append(
            _SavedState(
                folder / STATE_TAG,
                stage=stage,
                dp_size=ranks // tp_size,
                tp_index=tp_index,
                trained=list(trained),
            )
        )

    tensors = saved_states[0].tensors_of_first_slice()
    saver = f"{folder} was saved by {ranks} ranks at ZeRO stage {stage}"
    has_moments = holds_moments(tensors, saver)
    if has_moments:
        make_moments(engine.optimizer, engine.stage, list(trained.values()), tensors["step"])
    for name, parameter in trained.items():
        report_progress(f"reading {name}")
        masters = _values_for_this_rank(saved_states, name, _MASTERS, parameter)
        set_masters_and_weights(engine.optimizer, engine.stage, parameter, masters)
        if has_moments:
            for moment in MOMENTS:
                values = _values_for_this_rank(saved_states, name, moment, parameter)
                set_moment(engine.optimizer, engine.stage, parameter, moment, values)

    model = saved_states[0].model  # all ranks saved the same schedule and counters
    engine.ds.lr_scheduler.load_state_dict(model["lr_scheduler"])
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine.ds, counter, model[counter])


def _trained_parameters(engine: DeepSpeedModel) -> dict[str, Any]:
    """Returns the trained parameters by their names in DeepSpeed's module, in optimizer order."""
    names = {id(parameter): name for name, parameter in engine.ds.module.named_parameters()}
    trained = {}
    for group in parameter_groups(engine.model, 0.0):
        for parameter in group["params"]:
            trained[names[id(parameter)]] = parameter
    return trained


@dataclass(frozen=True)
class _SavedSlice:
    """The part of one parameter's masters and moments that one rank saved.

    tensors: masters under _MASTERS, moments under MOMENTS and Adam's step count under "step". Each
    tensor may also hold the values of other parameters. The slice is the `numel` values from
    `start` on in a flattened tensor.
    """

    tensors: dict[str, Any]
    start: int
    numel: int

    def values(self, key: str) -> Tensor:
        return self.tensors[key].flatten()[self.start : self.start + self.numel]


class _SavedState:
    """The state saved by all data-parallel ranks that have the same tensor-parallel index.

    folder: has the files of all ranks. dp_size: the number of these data-parallel ranks. trained:
    names of the trained parameters, in optimizer order. model: the content of the ranks' file with
    schedule and counters. slices: each parameter's slices, in the order in which they are joined.
    """

    def __init__(self, folder: Path, stage: int, dp_size: int, tp_index: int, trained: list[str]):
        self.folder = folder
        prefix = "zero_pp_rank_0_" if stage == 3 else ""
        file = folder / f"{prefix}mp_rank_{tp_index:02d}_model_states.pt"
        self.model: dict[str, Any] = load_without_code(str(file), is_mapped=True)
        self.slices: dict[str, list[_SavedSlice]] = {name: [] for name in trained}

        # shapes on this tensor-parallel rank, before ZeRO shards the parameters
        self._shapes: dict[str, torch.Size] = {}
        if stage < 3:
            for name, tensor in self.model["module"].items():
                self._shapes[name] = tensor.shape
        for shapes in self.model["param_shapes"] or ():  # it is None in stage 0
            self._shapes.update(shapes)

        if stage == 0:
            self._read_stage_0()
            return
        for dp_rank in range(dp_size):
            [file] = folder.glob(f"*zero_pp_rank_{dp_rank}_mp_rank_{tp_index:02d}_optim_states.pt")
            optimizer = load_without_code(str(file), is_mapped=True)["optimizer_state_dict"]
            if stage == 3:
                self._read_stage_3(optimizer, dp_rank, dp_size)
            else:
                self._read_stage_1_or_2(optimizer)

    def tensors_of_first_slice(self) -> dict[str, Any]:
        """Returns the tensors of a slice. All slices have the same keys and step count."""
        slices_of_first_parameter = next(iter(self.slices.values()))
        return slices_of_first_parameter[0].tensors

    def _read_stage_0(self) -> None:
        """Adds one slice of every parameter: the whole parameter, as every rank saved it."""
        optimizer = self.model["optimizer"]
        # if there are masters, DeepSpeed wraps Adam, whose state is then one level deeper
        moments = optimizer.get("optimizer_state_dict", optimizer)["state"]
        masters = []
        for group in optimizer.get("fp32_groups", ()):
            masters += group
        for i, (name, slices) in enumerate(self.slices.items()):
            # the weights of a float32 model are also its masters
            tensor = masters[i] if masters else self.model["module"][name]
            tensors = {_MASTERS: tensor, **moments.get(i, {})}
            slices.append(_SavedSlice(tensors, start=0, numel=tensor.numel()))

    def _read_stage_1_or_2(self, optimizer: dict[str, Any]) -> None:
        """Adds a slice of every parameter of which this data-parallel rank saved values.

        The rank's i-th flat tensor holds its slices of the parameters in the i-th parameter group.
        """
        moments = optimizer["base_optimizer_state"]["state"]
        for i, masters in enumerate(optimizer["single_partition_of_fp32_groups"]):
            tensors = {_MASTERS: masters, **moments.get(i, {})}
            for name, fragment in optimizer["param_slice_mappings"][i].items():
                saved_slice = _SavedSlice(tensors, fragment.start, fragment.numel)
                self.slices[name].append(saved_slice)

    def _read_stage_3(self, optimizer: dict[str, Any], dp_rank: int, dp_size: int) -> None:
        """Adds a slice of every parameter: the shard that this data-parallel rank saved.

        Each flattened parameter is cut into dp_size shards of equal size, with padding after its
        last value. A rank's i-th flat tensor holds its shards of the parameters in param_shapes[i],
        one after the other.

            2 ranks, parameters a of 4 values, b of 3:    rank 0   a0 a1 b0 b1
                                                          rank 1   a2 a3 b2 (padding)
        """
        moments = optimizer["optimizer_state_dict"]["state"]
        for i, masters in enumerate(optimizer["fp32_flat_groups"]):
            tensors = {_MASTERS: masters, **moments.get(i, {})}
            start = 0
            for name, shape in self.model["param_shapes"][i].items():
                numel = math.prod(shape)
                shard_size = math.ceil(numel / dp_size)
                remaining = max(0, numel - dp_rank * shard_size)  # values from this shard on
                saved_slice = _SavedSlice(
                    tensors=tensors, start=start, numel=min(shard_size, remaining)
                )
                self.slices[name].append(saved_slice)
                start += shard_size

    def shard(self, name: str, key: str) -> Tensor:
        """Returns a parameter's masters or moment on this tensor-parallel rank, in its shape.

        key: _MASTERS or one of MOMENTS.
        """
        values = [saved_slice.values(key) for saved_slice in self.slices[name]]
        return torch.cat(values).view(self._shapes[name])


def _values_for_this_rank(
    saved_states: list[_SavedState], name: str, key: str, parameter: Any
) -> Tensor:
    """Returns the masters or a moment of a parameter on this tensor-parallel rank, flattened.

    If tensor-parallel ranks split the parameter, these are the values of this rank's shard. key:
    _MASTERS or one of MOMENTS.
    """
    shards = [saved.shard(name, key) for saved in saved_states]
    shape = full_shape(parameter)
    saved_dim = _split_dim(shards[0].shape, shape)
    values = shards[0]
    if saved_dim is not None:
        values = torch.cat(shards, saved_dim)
    assert values.shape == shape, f"{name} has a different shape in {saved_states[0].folder}"

    shape_here = getattr(parameter, "ds_shape", parameter.shape)  # without ZeRO's sharding
    dim_here = _split_dim(shape_here, shape)
    if dim_here is not None:
        values = values.split(partition_sizes(parameter), dim_here)[tp_rank()]
    return values.flatten()


def _split_dim(shard: torch.Size, full: torch.Size) -> int | None:
    """Returns the dimension in which a shard is smaller than the full parameter.

    Returns None if no dimension is smaller, because tensor-parallel ranks do not split it.
    """
    for dim, (shard_size, full_size) in enumerate(zip(shard, full, strict=True)):
        if shard_size != full_size:
            return dim
    return None


def holds_moments(state: Collection[str], saver: str) -> bool:
    """Returns whether an optimizer's state has moments, which the optimizer's first step creates.

    state: keys of the tensors that were saved for a parameter. saver: the beginning of the error
    message, which says who saved the state. Raises UserError if the moments are not Adam's.
    """
    moments = {*state} - {_MASTERS, "step"}
    if moments and moments != {*MOMENTS}:
        raise UserError(
            f"{saver}; an optimizer with the state {', '.join(sorted(moments))} can be restored "
            "only by the same number of ranks at the same ZeRO stage: resume with those, or start "
            "a new run from its weights with model.path"
        )
    return bool(moments)
