"""Images on some ranks and none on others, on real DeepSpeed ranks: the gradient of one process, and exact resuming."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.types import Group
from model.logprobs import load_causal_lm
from tests.gloo.test_exact_resume import EVERY_FORWARD, TWO_KILLS, require_exact_resume
from tests.support.gloo_data import CONSTANT_RATE, DEAD, GAE, REWARDS, Item, Stream
from tests.support.protocol_helpers import received
from tests.support.rank import Case, Worker
from tests.support.replay_worker import RankReports, Trainers
from tests.support.tier import ALL
from tests.support.tiny import difference, random_group
from tests.support.tiny_vision import WORDS, image_prompt, random_image, tiny_vision_model, write_tokenizer
from tests.support.vision import PLAIN
from trainer.link.recording import Recorder

pytestmark = pytest.mark.timeout(600)

FAMILY = "qwen2_5_vl"
STAGES = (0, 1, 2, 3) if ALL else (1, 3)
FEW = (1, 3) if ALL else (1,)
EVERYWHERE = (0, 1, 2, 3)
CRITIC = {"algorithm": GAE["algorithm"] | {"kl_in_reward": False}, "critic": {"learning_rate": 2e-3}}
RECOMPUTED = {"model": {"gradient_checkpointing": True}, "trainer": {"packing": "separate"}}
# name: stages, groups with images, groups that train, settings
KINDS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "mixed": (STAGES, (2,), EVERYWHERE, {}),
    "frozen": (FEW, (2,), EVERYWHERE, {"model": {"freeze_vision_tower": True}}),
    "idle": ((1, 3), (2,), (2,), {}),  # the other rank has nothing to train
    "text": (FEW, (), EVERYWHERE, {}),
    "critic": (FEW, (2,), EVERYWHERE, CRITIC),
    "lora": (FEW, (2,), EVERYWHERE, {"lora": {"r": 4}}),
    "recomputed": ((3,), (2,), EVERYWHERE, RECOMPUTED),
}
LAYOUTS = [(kind, stage) for kind, (stages, *_) in KINDS.items() for stage in stages]
OF_MIXED = ("recomputed", "frozen")  # whose gradient is that of "mixed", or a part of it


def with_images(made: Group) -> Group:
    """Image tokens among the words: a group that has images has none too few and none too many."""
    rng = np.random.default_rng(made.group_id)
    images = (random_image(rng, PLAIN, 2, 3), random_image(rng, PLAIN, 1, 2))
    prompt = np.array(image_prompt(rng, images, PLAIN, 4), np.int32)
    return dataclasses.replace(made, prompt_ids=prompt, images=images)


def stream(seeing: Sequence[int], alive: Sequence[int]) -> Stream:
    """seeing: groups with images. alive: those that train."""

    def at(group_id: int) -> Item:
        rewards = REWARDS[group_id % len(REWARDS)] if group_id in alive else DEAD
        made = random_group(group_id, WORDS, rewards)
        return with_images(made) if group_id in seeing else made

    return at


def case_of(kind: str, stage: int) -> Case:
    _, seeing, alive, sections = KINDS[kind]
    ours = {
        "data": {"image_key": "image"},
        "algorithm": {"beta": 0.0},
        "trainer": CONSTANT_RATE | {"max_grad_norm": 1e9},
    }
    both = sections | {name: given | sections.get(name, {}) for name, given in ours.items()}
    return Case(f"{kind}{stage}", stage, stream(seeing, alive), both)


def work(folder: Path) -> None:
    worker = Worker(folder)
    for kind, stage in LAYOUTS:
        if worker.collectives.world_size > 1 or (stage == 1 and kind not in OF_MIXED):
            worker.one_batch(case_of(kind, stage))
    worker.tell()


@cache
def seen(trainers: Trainers, ranks: int) -> RankReports:
    folder = trainers.folder / f"{FAMILY}-{ranks}"
    write_tokenizer(tiny_vision_model(folder / "model", FAMILY))
    found = trainers.seen(__name__, folder.name, ranks)
    assert all(rank == found.ranks[0] for rank in found.ranks)
    return found


@pytest.mark.parametrize(("kind", "stage"), LAYOUTS)
def test_ranks_with_and_without_images_have_the_gradient_of_one_process(
    trainers: Trainers, kind: str, stage: int
) -> None:
    expected = seen(trainers, 1).gradients("mixed1" if kind in OF_MIXED else f"{kind}1")
    if kind == "frozen":
        expected = {key: t for key, t in expected.items() if ".visual." not in key}
    gradient = seen(trainers, 2).gradients(f"{kind}{stage}")
    assert difference(gradient, expected) < (2e-6 if kind in OF_MIXED else 1e-6)
    tower = {key: t for key, t in gradient.items() if ".visual." in key and key.startswith("gradient/")}
    if kind in ("frozen", "lora"):
        assert not tower
    else:
        assert len(tower) == 42 and all(t.any() == (kind != "text") for t in tower.values())


def test_a_run_with_images_interrupted_at_two_points_equals_a_straight_one(trainers: Trainers) -> None:
    """Of its groups every third has images, and the vision tower is frozen."""
    folder = trainers.folder / "images"
    write_tokenizer(tiny_vision_model(folder / "model", FAMILY))
    recorder = Recorder(folder / "groups", cursor=0)
    at = stream(seeing=range(0, 64, 3), alive=range(64))
    recorder.append([received(at(group_id)) for group_id in range(64)])
    recorder.close()
    sections = EVERY_FORWARD | {
        "run": {"replay": str(folder / "groups")},
        "model": {"path": str(folder / "model"), "freeze_vision_tower": True},
        "data": {"image_key": "image"},
    }
    found = require_exact_resume(trainers, "seeing", (2, 3, "float32"), TWO_KILLS, **sections)
    name = "preprocessor_config.json"
    assert (found / "final" / name).read_bytes() == (folder / "model" / name).read_bytes()
    before, after = (
        dict(load_causal_lm(str(path), "float32", None, False).named_parameters())
        for path in (folder / "model", found / "final")
    )
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved and not any(".visual." in name for name in moved)
