"""Measures which of a family's weights a sampler's engine can prove, and which damages it finds.

`python -m tools.families.proof FOLDER DTYPE` prints a line of JSON. Every kind of published tensor is damaged on its
way into the engine, in four ways, at a first load and at a later one, and the proof must say so.
"""

import copy
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config import Config
from common.files.weights import TensorInfo
from model.checksum import describe
from model.logprobs import load_causal_lm
from sampler.engine.engine import Engine
from sampler.engine.engine_layout import NUMBER, kind_of
from sampler.engine.engine_tensors import Proof
from trainer.engine.exported import parameters, under_checkpoint_names


def prove_family(folder: Path, dtype: str) -> dict[str, Any]:
    """Returns {proven, unproven, wrong, damages, missed}.

    unproven: a count for each reason. missed: "how, tensor, which load" of each damage that the proof did not find.
    """
    model = load_causal_lm(str(folder), dtype, None, False)  # before vLLM changes classes of transformers
    old, new = _version(model, 0), _version(model, 1)
    sections: dict[str, Any] = {
        "run": {"output_dir": str(folder.parent / "proof")},
        "model": {"path": str(folder), "dtype": dtype},
        "data": {"train": "none.jsonl", "max_prompt_length": 96},
        "sampler": {"num_generations": 4, "max_completion_length": 32, "ignore_eos": True},
    }
    engine = Engine(Config.model_validate(sections), num_gpus=0)
    worker: Any = engine._llm.llm_engine.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    expected = {name: describe(tensor) for name, tensor in new.items()}
    worker.layout = None
    wrong = _load(worker, new, new, expected).wrong
    proof, proofs = _load(worker, new, new, expected), dict[str, Proof]()
    known = copy.deepcopy(worker.layout)
    for name in {kind_of(name): name for name in new}.values():
        for how, brought in damaged(name, old, new):
            for when, layout in (("first", None), ("later", copy.deepcopy(known))):
                worker.layout = layout
                proofs[f"{how}, {name}, {when}"] = _load(worker, brought, new, expected)
    return {
        "proven": len(proof.proven),
        "unproven": Counter(why.partition(": ")[2] for why in proof.unproven.values()),
        "wrong": wrong + proof.wrong,
        "damages": len(proofs),
        "missed": [key for key, each in proofs.items() if not each.wrong],
    }


@torch.no_grad()
def _version(model: Any, seed: int) -> dict[str, Tensor]:
    """Returns the published tensors after every parameter has moved."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.add_((0.02 * torch.randn(p.shape, generator=generator)).to(p.dtype))
    return {t.name: t.make().clone() for t in under_checkpoint_names(model, parameters(model))}


def damaged(name: str, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields (how, the version with one tensor changed)."""
    element, row = new[name].clone(), new[name].clone()
    element.view(-1)[element.numel() // 2] += 0.1
    yield "one element", {**new, name: element}
    if row.ndim:
        row[-1] += 0.1
        yield "one row", {**new, name: row}
    if not torch.equal(old[name].bfloat16(), new[name].bfloat16()):  # else an engine in bfloat16 would see no change
        yield "old", {**new, name: old[name]}
    numbers = NUMBER.findall(name)
    other = f"{name[: name.rindex(numbers[-1])]}0{name.rpartition(numbers[-1])[2]}" if numbers else name
    if other in new and new[other].shape == new[name].shape and not torch.equal(new[other], new[name]):
        yield "two exchanged", {**new, name: new[other], other: new[name]}
    elif "experts" in name and new[name].ndim == 3:
        yield "two exchanged", {**new, name: new[name][[1, 0, *range(2, len(new[name]))]]}


def _load(worker: Any, brought: dict[str, Tensor], given: dict[str, Tensor], expected: dict[str, TensorInfo]) -> Proof:
    """Returns the proof of a load that brings other tensors than those that were checked, `given`."""
    worker._load = lambda _, layout: type(worker)._load(worker, brought, layout)
    try:
        return worker.load_weights_from("nowhere", expected, given)
    finally:
        del worker._load


if __name__ == "__main__":
    print(json.dumps(prove_family(Path(sys.argv[1]), sys.argv[2])))
