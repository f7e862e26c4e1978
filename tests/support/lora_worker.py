"""Trains adapters on hand-made groups under the real `deepspeed` launcher over gloo, for test_lora_training.py.

    deepspeed --num_gpus 2 --module tests.support.lora_worker <folder> first

Straight runs and resumed ones in one start, because a start costs ten seconds: a second trainer in the same process
takes nothing from the first but its checkpoint.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common import exits, run_folder
from tests.support.gloo_data import NUM_STEPS, group, settings
from tests.support.gloo_worker import Worker, moments, state_hash
from tests.support.tier import ALL

LORA = {"r": 4, "alpha": 12}
# settings of three steps of two ranks, by name: what differs from plain LoRA with ZeRO-1
VARIANTS: dict[str, dict[str, Any]] = {
    "recomputed": {"model": {"gradient_checkpointing": True}},
    "half": {"model": {"dtype": "bfloat16"}},
    "two_modules": {"lora": LORA | {"target_modules": ["q_proj", "down_proj"]}},
    "critic": {"algorithm": {"adv_estimator": "group_ppo"}},
    "merged": {"lora": LORA | {"sync": "merged"}},
}
if ALL:
    ZERO_3 = {"deepspeed": {"zero_optimization": {"stage": 3}}}
    VARIANTS |= {
        "flat": {"trainer": {"packing": "flat"}},
        "off": {"trainer": {"packing": "off"}},
        "recomputed3": VARIANTS["recomputed"] | ZERO_3,
        "merged3": VARIANTS["merged"] | ZERO_3,
    }

RESUMED_LIKE_ZERO_1 = ("flat", "off", "recomputed", "recomputed3", "two_modules", "merged3")  # nothing else to restore
LORA_STAGES = (0, 1, 2, 3) if ALL else (1, 3)
HANGS_AFTER_S = 180


def trained(engine: Any) -> Any:
    """The engine as the helpers of gloo_worker read it, with no other parameters than the adapters'."""
    named = [(name, p) for name, p in engine.model.named_parameters() if p.requires_grad]
    seen = {name: getattr(engine, name) for name in ("stage", "optimizer", "ds", "learning_rate")}
    model = SimpleNamespace(named_parameters=lambda: named)
    return SimpleNamespace(model=model, full_parameters=lambda w: engine.whole(engine.adapters(), w), **seen)


def both_hashes(trainer: Any) -> str:
    """Of the adapters and, where there is one, of the critic, which has none."""
    return state_hash(trained(trainer.engine)) + (state_hash(trainer.critic) if trainer.critic else "")


def base_hash(engine: Any) -> str:
    """SHA-256 of every weight that is not an adapter."""
    import deepspeed

    digest = hashlib.sha256()
    for name, p in engine.model.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=engine.stage == 3):
            if not p.requires_grad:
                digest.update(name.encode() + p.detach().float().numpy().tobytes())
    return digest.hexdigest()


def straight(worker: Worker, name: str, stage: int, sections: dict[str, Any]) -> None:
    """Three steps with a checkpoint after each, and a published version at the end."""
    trainer = worker.trainer(settings(worker.folder, name, stage, **sections), group)
    base, hashes = base_hash(trainer.engine), []
    for step in range(NUM_STEPS):
        trainer.train_batch()
        if step == 0:
            worker.write(f"{name}/gradient", published_names(moments(trained(trainer.engine), "exp_avg")))
        trainer.saver.save_if_due(trainer.progress)
        hashes.append(both_hashes(trainer))
    worker.write(f"{name}/adapters", dict(trainer.engine.whole(trainer.engine.adapters(), lambda _: True)))
    trainer.publish(evaluate=False)
    worker.seen[name] = {
        "steps": trainer.results,
        "hashes": hashes,
        "base": [base, base_hash(trainer.engine)],
        "reference_is_base": stage == 3 or scores_as_a_copy(trainer),
        "published": dataclasses.asdict(trainer.publisher.published),
    }


def scores_as_a_copy(trainer: Any) -> bool:
    """Whether the trained model without its adapters scores as a reference of its own does, to the bit."""
    from model.packing import pack
    from model.reference import Reference

    row, device = pack([([1, 2, 3], [[4, 5], [6]])]), trainer.engine.device
    shared = Reference(trainer.config, device, trainer.engine.model)
    return torch.equal(shared.score(row), Reference(trainer.config, device).score(row))


def resumed(worker: Worker, name: str, stage: int, sections: dict[str, Any]) -> None:
    """The checkpoint before the last, and the last step again."""
    from trainer.save import checkpoint, resume

    trainer = worker.trainer(settings(worker.folder, name, stage, **sections), group)
    found = run_folder.step_dir(worker.folder / name / "checkpoints", NUM_STEPS - 1)
    trainer.progress = resume.read_progress(found, worker.exchange.world_size, trainer.engine.stage, {})
    checkpoint.restore(trainer.engine, found, trainer.critic)
    hashes, base = [both_hashes(trainer)], base_hash(trainer.engine)
    trainer.train_batch()
    hashes.append(both_hashes(trainer))
    worker.seen[f"{name}/resumed"] = {"steps": trainer.results, "hashes": hashes, "base": base}


def published_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from model.lora import published_name

    return {str(published_name(name)): tensor for name, tensor in tensors.items()}


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    torch.set_num_threads(1)
    worker = Worker(folder)
    runs = [(f"zero{stage}", stage, {"lora": LORA}) for stage in LORA_STAGES]
    if worker.exchange.world_size > 1:
        runs += [(name, 1, {"lora": LORA} | sections) for name, sections in VARIANTS.items()]
    for name, stage, sections in runs:
        straight(worker, name, stage, sections)
        if name not in RESUMED_LIKE_ZERO_1:
            resumed(worker, name, stage, sections)
    path = folder / f"first-rank{worker.exchange.rank}.json"
    path.write_text(json.dumps(worker.seen, indent=1))
    worker.exchange.barrier()
    exits.leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[-2]))
