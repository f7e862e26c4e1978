"""Restoring of a state that other ranks, or another ZeRO stage, saved: joined by parameter, then partitioned anew.

    saved                                        here, on every rank
    ZeRO 0      masters and moments as they are   the same
    ZeRO 1, 2   a slice of them all, laid flat    its slice
    ZeRO 3      a part of every parameter         its parts

Tensor-parallel ranks saved all this for their parts of split parameters, which are joined before they are cut anew.

Bits are copied, never computed: weights, masters and Adam's moments are those of the checkpoint. DeepSpeed's universal
checkpoints would do the same through the disk, four files for each parameter, but unpickle without a limit. Files are
memory-mapped, so that ranks of a host share the memory. Left out: optimizers with other state than Adam's.
"""

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.processes.watchdog import report_progress
from trainer.engine.deepspeed_insides import (
    MOMENTS,
    STATE_TAG,
    load_without_code,
    make_moments,
    partition_sizes,
    set_state,
    tp_rank,
)
from trainer.engine.deepspeed_model import DeepSpeedModel
from trainer.engine.optimizer import parameter_groups, full_shape

# (flat, start, numel), a saved part of one parameter: numel values from start on in each tensor of flat, "" the masters
_SavedPart = tuple[dict[str, Any], int, int]


def restore(engine: DeepSpeedModel, folder: Path, stage: int, ranks: int, tp_size: int = 1) -> None:
    """Restores what `ranks` ranks saved at `stage`, of which tp_size shared each layer.

    Every rank calls it before its first step. Raises UserError.
    """
    state, ds = folder / STATE_TAG, engine.ds
    names = {id(parameter): name for name, parameter in ds.module.named_parameters()}
    trained = [parameter for group in parameter_groups(engine.model, 0.0) for parameter in group["params"]]
    # of each tensor-parallel rank: the parts of its part of a parameter, and the shape of that
    parts: list[dict[str, list[_SavedPart]]] = []
    shapes: list[dict[str, torch.Size]] = []
    for place in range(tp_size):
        first = ("zero_pp_rank_0_" if stage == 3 else "") + f"mp_rank_{place:02d}"
        model = load_without_code(str(state / f"{first}_model_states.pt"), is_mapped=True)
        parts.append({names[id(parameter)]: [] for parameter in trained})
        for name, part in _saved(state, model, stage, ranks // tp_size, place, list(parts[-1])):
            parts[-1][name].append(part)
        of_modules = {name: tensor.shape for name, tensor in model["module"].items()} if stage < 3 else {}
        shapes.append(of_modules | {name: shape for of in model["param_shapes"] or () for name, shape in of.items()})
    adam, *_ = parts[0][names[id(trained[0])]][0]
    if has_moments := holds_moments(adam, f"{folder} was saved by {ranks} ranks at ZeRO stage {stage}"):
        make_moments(engine.optimizer, engine.stage, trained, adam["step"])
    for parameter in trained:
        name = names[id(parameter)]
        report_progress(f"reading {name}")
        for key in ("", *MOMENTS) if has_moments else ("",):
            of_ranks = []
            for of_rank, shape in zip(parts, shapes, strict=True):
                flat = [flat[key].flatten()[start : start + numel] for flat, start, numel in of_rank[name]]
                of_ranks.append(torch.cat(flat).view(shape[name]))
            whole = _joined(of_ranks, full_shape(parameter))
            assert whole.shape == full_shape(parameter), f"{name} has another shape in {folder}"
            set_state(engine.optimizer, engine.stage, parameter, key, _own(whole, parameter).flatten())
    ds.lr_scheduler.load_state_dict(model["lr_scheduler"])
    for count in ("global_steps", "global_samples", "skipped_steps"):
        setattr(ds, count, model[count])


def _split_along(part: torch.Size, whole: torch.Size) -> int | None:
    """Returns the dimension along which tensor-parallel ranks split a parameter; None if each has it whole."""
    return next((dim for dim, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b), None)


def _joined(parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Joins the tensor-parallel ranks' parts to a parameter of this shape."""
    dim = _split_along(parts[0].shape, shape)
    return parts[0] if dim is None else torch.cat(parts, dim)


def _own(whole: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Returns this tensor-parallel rank's part of a parameter."""
    own = getattr(parameter, "ds_shape", parameter.shape)
    dim = _split_along(own, whole.shape)
    return whole if dim is None else whole.split(partition_sizes(parameter), dim)[tp_rank()]


def holds_moments(state: Collection[str], saved: str) -> bool:
    """Returns whether a state has moments, as after a first step. Raises UserError if they are not Adam's."""
    found = {*state} - {"", "step"}
    if found and found != {*MOMENTS}:
        raise UserError(
            f"{saved}; an optimizer with the state {', '.join(sorted(found))} is restored only by as many ranks at the "
            "same stage: resume with those, or start a new run from its weights by model.path"
        )
    return bool(found)


def _saved(
    state: Path, model: dict[str, Any], stage: int, ranks: int, tp_index: int, trained: list[str]
) -> Iterator[tuple[str, _SavedPart]]:
    """Yields (parameter, a part of it) in the order of its parts. trained: names in the order of the optimizer.

    tp_index: a tensor-parallel rank. ranks: those over which ZeRO divided its state.
    """
    if stage == 0:
        optimizer = model["optimizer"]
        adam = optimizer.get("optimizer_state_dict", optimizer)["state"]
        masters = [master for group in optimizer.get("fp32_groups", ()) for master in group]
        for i, name in enumerate(trained):
            master = masters[i] if masters else model["module"][name]
            yield name, ({"": master, **adam.get(i, {})}, 0, master.numel())
        return
    for rank in range(ranks):
        [path] = state.glob(f"*zero_pp_rank_{rank}_mp_rank_{tp_index:02d}_optim_states.pt")
        optimizer = load_without_code(str(path), is_mapped=True)["optimizer_state_dict"]
        adam = optimizer["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["state"]
        masters = optimizer["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
        for i, master in enumerate(masters):
            flat, start = {"": master, **adam.get(i, {})}, 0
            if stage == 3:
                for name, shape in model["param_shapes"][i].items():
                    size = math.ceil(math.prod(shape) / ranks)
                    yield name, (flat, start, max(0, min(size, math.prod(shape) - rank * size)))
                    start += size
            else:
                for name, place in optimizer["param_slice_mappings"][i].items():
                    yield name, (flat, place.start, place.numel)
