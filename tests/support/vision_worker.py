"""What a rank of test_vision_ranks.py does: one step of every case, on groups of which few have images."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.types import Group
from model.images import image_format
from tests.support.gloo_data import CONSTANT_RATE, DEAD, GAE, REWARDS, Item, Stream, settings
from tests.support.rank import Worker, trained
from tests.support.tier import ALL
from tests.support.tiny import random_group
from tests.support.tiny_vision import WORDS, image_prompt, random_image

VISION = {"image_key": "image"}
GROUPS = 4  # of a step


@dataclass(frozen=True)
class Case:
    """One step. with_images: ids of the groups that have some; alive: of those that train."""

    name: str
    stage: int
    with_images: tuple[int, ...] = (2,)
    alive: tuple[int, ...] = (0, 1, 2, 3)
    sections: dict[str, Any] = field(default_factory=dict)


FROZEN = {"model": {"freeze_vision_tower": True}}
CRITIC = {"algorithm": GAE["algorithm"] | {"kl_in_reward": False}, "critic": {"learning_rate": 2e-3}}
LORA = {"lora": {"r": 4}}
STAGES = (0, 1, 2, 3) if ALL else (1, 3)
_OF_MANY = (1, 3) if ALL else (1,)
CASES = (
    *(Case("mixed", stage) for stage in STAGES),
    *(Case("frozen", stage, sections=FROZEN) for stage in (STAGES if ALL else _OF_MANY)),
    *(Case("idle", stage, (2,), (2,)) for stage in (1, 3)),  # the other rank has nothing to train
    *(Case("text", stage, ()) for stage in _OF_MANY),
    *(Case("critic", stage, sections=CRITIC) for stage in _OF_MANY),
    *(Case("lora", stage, sections=LORA) for stage in _OF_MANY),
    Case("recomputed", 3, sections={"model": {"gradient_checkpointing": True}, "trainer": {"packing": "flat"}}),
)
OTHER_FAMILIES = tuple(
    Case("mixed", stage) for stage in _OF_MANY
)  # what a family decides is in the model, not in the engine


def cases_of(family: str) -> tuple[Case, ...]:
    return CASES if family == "qwen2_5_vl" else OTHER_FAMILIES


def stream(folder: Path, case: Case) -> Stream:
    """Image tokens among the words: a group that has images has none too few and none too many."""
    form = image_format(str(folder / "model"))

    def at(group_id: int) -> Item:
        rewards = REWARDS[group_id % len(REWARDS)] if group_id in case.alive else DEAD
        made = random_group(group_id, WORDS, rewards)
        assert isinstance(made, Group)
        if group_id not in case.with_images:
            return made
        rng = np.random.default_rng(group_id)
        images = (random_image(rng, form, 2, 3), random_image(rng, form, 1, 2))
        return dataclasses.replace(
            made, prompt_ids=np.array(image_prompt(rng, images, form, 4), np.int32), images=images
        )

    return at


class VisionWorker(Worker):
    def step(self, case: Case) -> None:
        sections = {"algorithm": {}, "data": {}, "trainer": {}, "model": {}} | case.sections
        trainer = CONSTANT_RATE | {"prompts_per_step": GROUPS, "max_grad_norm": 1e9} | sections["trainer"]
        name = f"{case.name}{case.stage}"
        config = settings(
            self.folder,
            name,
            case.stage,
            **sections | {"trainer": trainer, "data": VISION, "algorithm": {"beta": 0.0} | sections["algorithm"]},
        )
        trainer = self.trainer(config, stream(self.folder, case))
        before = {name: t.clone() for name, t in trainer.engine.full_parameters(lambda _: True)}
        trainer.train_batch()
        after = dict(trainer.engine.full_parameters(lambda _: True))
        self.write_models(name, "gradient", trainer)
        moved = sorted(key for key in before if not before[key].equal(after[key]))
        self.tell_steps(name, trainer, moved=moved, with_gradient=sorted(trained(trainer.engine)))


def work(folder: Path) -> None:
    worker = VisionWorker(folder)
    for case in cases_of(json.loads((folder / "model" / "config.json").read_text())["model_type"]):
        if worker.exchange.world_size > 1 or case.stage == 1 or case.name in ("mixed", "recomputed"):
            worker.step(case)
    worker.tell()
