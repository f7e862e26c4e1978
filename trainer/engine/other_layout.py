"""Restoring of a state that other ranks, or another ZeRO stage, saved: joined by parameter, then partitioned anew.

    saved                                        here, on every rank
    ZeRO 0      masters and moments as they are   the same
    ZeRO 1, 2   a slice of them all, laid flat    its slice
    ZeRO 3      a part of every parameter         its parts

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
from trainer.engine.deepspeed_insides import MOMENTS, STATE_TAG, load_without_code, make_moments, set_state
from trainer.engine.deepspeed_model import DeepSpeedModel
from trainer.engine.optimizer import parameter_groups, shape_of

# (flat, start, numel), a saved part of one parameter: numel values from start on in each tensor of flat, "" the masters
_SavedPart = tuple[dict[str, Any], int, int]


def restore(engine: DeepSpeedModel, folder: Path, stage: int, ranks: int) -> None:
    """Restores the state of `ranks` ranks at `stage`. Every rank calls it before its first step. Raises UserError."""
    state, ds = folder / STATE_TAG, engine.ds
    first = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    model = load_without_code(str(state / f"{first}_model_states.pt"), is_mapped=True)
    names = {id(parameter): name for name, parameter in ds.module.named_parameters()}
    trained = [parameter for group in parameter_groups(engine.model, 0.0) for parameter in group["params"]]
    parts: dict[str, list[_SavedPart]] = {names[id(parameter)]: [] for parameter in trained}
    for name, part in _saved(state, model, stage, ranks, list(parts)):
        parts[name].append(part)
    adam, *_ = parts[names[id(trained[0])]][0]
    if has_moments := holds_moments(adam, f"{folder} was saved by {ranks} ranks at ZeRO stage {stage}"):
        make_moments(engine.optimizer, engine.stage, trained, adam["step"])
    for parameter in trained:
        name = names[id(parameter)]
        report_progress(f"reading {name}")
        for key in ("", *MOMENTS) if has_moments else ("",):
            whole = torch.cat([flat[key].flatten()[start : start + numel] for flat, start, numel in parts[name]])
            assert len(whole) == math.prod(shape_of(parameter)), f"{name} has another shape in {folder}"
            set_state(engine.optimizer, engine.stage, parameter, key, whole)
    ds.lr_scheduler.load_state_dict(model["lr_scheduler"])
    for count in ("global_steps", "global_samples", "skipped_steps"):
        setattr(ds, count, model[count])


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
    state: Path, model: dict[str, Any], stage: int, ranks: int, trained: list[str]
) -> Iterator[tuple[str, _SavedPart]]:
    """Yields (parameter, a part of it) in the order of its parts. trained: names in the order of the optimizer."""
    if stage == 0:
        optimizer = model["optimizer"]
        adam = optimizer.get("optimizer_state_dict", optimizer)["state"]
        masters = [master for group in optimizer.get("fp32_groups", ()) for master in group]
        for i, name in enumerate(trained):
            master = masters[i] if masters else model["module"][name]
            yield name, ({"": master, **adam.get(i, {})}, 0, master.numel())
        return
    for rank in range(ranks):
        [path] = state.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
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
