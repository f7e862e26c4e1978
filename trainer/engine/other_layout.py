"""Restoring of a state that other ranks or another ZeRO stage saved: joined, then cut anew.

    saved                                                here, on every rank
    ZeRO 0      masters and moments as they are          the same
    ZeRO 1, 2   a slice of all of them, laid flat        its slice
    ZeRO 3      a shard of every parameter               its shards

Tensor-parallel ranks saved all this for their shards of split parameters, which are joined first.

Bits are copied, never computed: weights, masters and Adam's moments are those of the checkpoint.
DeepSpeed's universal checkpoints would do the same through the disk, with four files for each
parameter, but unpickle without a limit. Files are memory-mapped, so that ranks of a host share the
memory. Not supported: optimizers with other state than Adam's.
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

_MASTERS = ""  # stands for the masters among the names of moments


def restore(engine: DeepSpeedModel, folder: Path, stage: int, ranks: int, tp_size: int = 1) -> None:
    """Restores weights and optimizer from a folder that other ranks or another ZeRO stage saved.

    stage, ranks, tp_size: the saving run's ZeRO stage, its number of ranks, and how many of them
    shared each layer. Every rank calls it before its first step. Raises UserError for another
    optimizer than Adam.
    """
    trained = _trained_parameters(engine)
    saved_ranks = []
    for tp_index in range(tp_size):
        saved = _SavedRank(folder / STATE_TAG, stage, ranks // tp_size, tp_index, list(trained))
        saved_ranks.append(saved)
    adam = saved_ranks[0].slices[next(iter(trained))][0].tensors
    has_moments = holds_moments(adam, f"{folder} was saved by {ranks} ranks at ZeRO stage {stage}")
    if has_moments:
        make_moments(engine.optimizer, engine.stage, list(trained.values()), adam["step"])
    for name, parameter in trained.items():
        report_progress(f"reading {name}")
        masters = _values_here(saved_ranks, name, _MASTERS, parameter)
        set_masters_and_weights(engine.optimizer, engine.stage, parameter, masters)
        if has_moments:
            for moment in MOMENTS:
                values = _values_here(saved_ranks, name, moment, parameter)
                set_moment(engine.optimizer, engine.stage, parameter, moment, values)
    model = saved_ranks[-1].model
    engine.ds.lr_scheduler.load_state_dict(model["lr_scheduler"])
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine.ds, counter, model[counter])


def _trained_parameters(engine: DeepSpeedModel) -> dict[str, Any]:
    """Returns the trained parameters by name, in the order of the optimizer."""
    names = {id(parameter): name for name, parameter in engine.ds.module.named_parameters()}
    trained = {}
    for group in parameter_groups(engine.model, 0.0):
        for parameter in group["params"]:
            trained[names[id(parameter)]] = parameter
    return trained


@dataclass(frozen=True)
class _SavedSlice:
    """A slice of a parameter's masters (weights in float32) and of Adam's moments, saved by a rank.

    tensors: saved masters and moments by name, which may also hold other parameters. The slice is
    the numel values of each of them from start on, when it is laid flat.
    """

    tensors: dict[str, Any]
    start: int
    numel: int

    def values(self, name: str) -> Tensor:
        return self.tensors[name].flatten()[self.start : self.start + self.numel]


class _SavedRank:
    """What one tensor-parallel rank saved, joined from the ranks over which ZeRO divided it.

    trained: the names of parameters in the order of the optimizer.
    """

    def __init__(self, folder: Path, stage: int, num_ranks: int, tp_index: int, trained: list[str]):
        self.folder = folder
        prefix = "zero_pp_rank_0_" if stage == 3 else ""
        file = folder / f"{prefix}mp_rank_{tp_index:02d}_model_states.pt"
        self.model: dict[str, Any] = load_without_code(str(file), is_mapped=True)
        self.slices: dict[str, list[_SavedSlice]] = {name: [] for name in trained}
        self._shapes: dict[str, torch.Size] = {}  # of this tensor-parallel rank's shards
        if stage < 3:
            for name, tensor in self.model["module"].items():
                self._shapes[name] = tensor.shape
        for shapes in self.model["param_shapes"] or ():
            self._shapes.update(shapes)
        if stage == 0:
            self._read_stage_0()
            return
        for rank in range(num_ranks):
            [file] = folder.glob(f"*zero_pp_rank_{rank}_mp_rank_{tp_index:02d}_optim_states.pt")
            optimizer = load_without_code(str(file), is_mapped=True)["optimizer_state_dict"]
            if stage == 3:
                self._read_stage_3(optimizer, rank, num_ranks)
            else:
                self._read_stage_1_or_2(optimizer)

    def _read_stage_0(self) -> None:
        optimizer = self.model["optimizer"]
        moments = optimizer.get("optimizer_state_dict", optimizer)["state"]
        masters = []
        for group in optimizer.get("fp32_groups", ()):
            masters += group
        for i, (name, slices) in enumerate(self.slices.items()):
            # a float32 model is its own masters
            tensor = masters[i] if masters else self.model["module"][name]
            tensors = {_MASTERS: tensor, **moments.get(i, {})}
            slices.append(_SavedSlice(tensors, 0, tensor.numel()))

    def _read_stage_1_or_2(self, optimizer: dict[str, Any]) -> None:
        moments = optimizer["base_optimizer_state"]["state"]
        for i, masters in enumerate(optimizer["single_partition_of_fp32_groups"]):
            tensors = {_MASTERS: masters, **moments.get(i, {})}
            for name, fragment in optimizer["param_slice_mappings"][i].items():
                saved_slice = _SavedSlice(tensors, fragment.start, fragment.numel)
                self.slices[name].append(saved_slice)

    def _read_stage_3(self, optimizer: dict[str, Any], rank: int, num_ranks: int) -> None:
        """Adds a slice of every parameter, the shard that one of `num_ranks` ZeRO 3 ranks saved.

        Each parameter, laid flat, is cut into num_ranks shards of equal size, with padding after
        its last value. A rank lays its shards of the parameters in param_shapes[i] one behind the
        other in the i-th flat tensor.

            2 ranks, parameters a of 4 values, b of 3:    rank 0   a0 a1 b0 b1
                                                          rank 1   a2 a3 b2 (padding)
        """
        moments = optimizer["optimizer_state_dict"]["state"]
        for i, masters in enumerate(optimizer["fp32_flat_groups"]):
            tensors = {_MASTERS: masters, **moments.get(i, {})}
            start = 0
            for name, shape in self.model["param_shapes"][i].items():
                numel = math.prod(shape)
                shard_size = math.ceil(numel / num_ranks)
                remaining = max(0, numel - rank * shard_size)  # values from this shard on
                saved_slice = _SavedSlice(
                    tensors=tensors, start=start, numel=min(shard_size, remaining)
                )
                self.slices[name].append(saved_slice)
                start += shard_size

    def shard(self, name: str, key: str) -> Tensor:
        """Returns the masters or a moment of this rank's shard of a parameter, in its shape."""
        values = [saved_slice.values(key) for saved_slice in self.slices[name]]
        return torch.cat(values).view(self._shapes[name])


def _values_here(saved_ranks: list[_SavedRank], name: str, key: str, parameter: Any) -> Tensor:
    """Returns this tensor-parallel rank's masters or moment of a parameter, laid flat."""
    shards = [saved.shard(name, key) for saved in saved_ranks]
    shape = full_shape(parameter)
    dim = _split_dim(shards[0].shape, shape)
    values = shards[0]
    if dim is not None:
        values = torch.cat(shards, dim)
    assert values.shape == shape, f"{name} has another shape in {saved_ranks[0].folder}"
    dim_here = _split_dim(getattr(parameter, "ds_shape", parameter.shape), shape)
    if dim_here is not None:
        values = values.split(partition_sizes(parameter), dim_here)[tp_rank()]
    return values.flatten()


def _split_dim(shard: torch.Size, full: torch.Size) -> int | None:
    """Returns the dimension in which tensor-parallel ranks split a parameter, or None."""
    for dim, (shard_size, full_size) in enumerate(zip(shard, full, strict=True)):
        if shard_size != full_size:
            return dim
    return None


def holds_moments(state: Collection[str], saved: str) -> bool:
    """Returns whether an optimizer's state has moments, as after a first step.

    state: names of tensors. saved: who saved it, for the message. Raises UserError if they are not
    Adam's moments.
    """
    moments = {*state} - {_MASTERS, "step"}
    if moments and moments != {*MOMENTS}:
        raise UserError(
            f"{saved}; an optimizer with the state {', '.join(sorted(moments))} is restored "
            "only by as many ranks at the same stage: resume with those, or start a new run "
            "from its weights by model.path"
        )
    return bool(moments)
