"""What a rank of test_lora_training.py does: trains adapters, straight and from the checkpoint before the last."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from common import run_folder
from common.config import Config
from tests.support.gloo_data import NUM_STEPS, Stream
from tests.support.rank import Worker
from tests.support.tier import ALL

LORA = {"lora": {"r": 4, "alpha": 12}}
ZERO_3 = {"deepspeed": {"zero_optimization": {"stage": 3}}}
# settings of three steps, by name: what differs from plain LoRA with ZeRO-1
VARIANTS: dict[str, dict[str, Any]] = {
    "zero3": ZERO_3,
    "half": {"model": {"dtype": "bfloat16"}},
    "two_modules": {"lora": LORA["lora"] | {"target_modules": ["q_proj", "down_proj"]}},
    "critic": {"algorithm": {"adv_estimator": "group_ppo"}},
    "merged": {"lora": LORA["lora"] | {"sync": "merged"}, "model": {"gradient_checkpointing": True}},
}
if ALL:
    VARIANTS |= {
        "zero0": {"deepspeed": {"zero_optimization": {"stage": 0}}},
        "zero1": {},
        "zero2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
        "flat": {"trainer": {"packing": "flat"}},
        "off": {"trainer": {"packing": "off"}},
        "recomputed3": {"model": {"gradient_checkpointing": True}} | ZERO_3,
        "merged3": VARIANTS["merged"] | ZERO_3,
    }
RUNS = [(2, name) for name in VARIANTS] + [(1, name) for name in VARIANTS if ALL and name.startswith("zero")]
RESUMED_LIKE_ZERO_1 = ("flat", "off", "recomputed3", "two_modules", "merged3")  # nothing else to restore


class LoraWorker(Worker):
    base = ""  # of the newest trainer, at its start

    def trainer(self, config: Config, stream: Stream, *more: Any) -> Any:
        trainer = super().trainer(config, stream, *more)
        self.base = base_hash(trainer.engine)
        return trainer

    def straight(self, name: str) -> None:
        trainer = self.train(name, 1, **LORA | VARIANTS[name])
        self.write(f"{name}/adapters", dict(trainer.engine.whole(trainer.engine.adapters(), lambda _: True)))
        self.seen[name] |= {
            "base": [self.base, base_hash(trainer.engine)],
            "reference_is_base": trainer.engine.stage == 3 or scores_as_a_copy(trainer),
        }

    def resumed(self, name: str) -> None:
        found = run_folder.step_dir(self.folder / name / "checkpoints", NUM_STEPS - 1)
        trainer = self.resume(name, 1, found, **LORA | VARIANTS[name])
        self.seen[name]["base"].append(base_hash(trainer.engine))


def base_hash(engine: Any) -> str:
    """SHA-256 of every weight that is not an adapter."""
    import deepspeed

    digest = hashlib.sha256()
    for name, p in engine.model.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=engine.stage == 3):
            if not p.requires_grad:
                digest.update(name.encode() + p.detach().float().numpy().tobytes())
    return digest.hexdigest()


def scores_as_a_copy(trainer: Any) -> bool:
    """Whether the trained model without its adapters scores as a reference of its own does, to the bit."""
    from model.packing import pack
    from model.reference import Reference

    row, device = pack([([1, 2, 3], [[4, 5], [6]])]), trainer.engine.device
    shared = Reference(trainer.config, device, trainer.engine.model)
    return torch.equal(shared.score(row), Reference(trainer.config, device).score(row))


def work(folder: Path) -> None:
    worker = LoraWorker(folder)
    for name in [name for ranks, name in RUNS if ranks == worker.exchange.world_size]:
        worker.straight(name)
        if name not in RESUMED_LIKE_ZERO_1:
            worker.resumed(name)
    worker.tell()
