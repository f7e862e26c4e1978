"""Images on some ranks and none on others, on real DeepSpeed ranks: the gradient of one process, and exact resuming."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.files.images import image_format
from model.logprobs import load_causal_lm
from tests.gloo.test_exact_resume import EVERY_FORWARD, TWO_KILLS, require_exact_resume
from tests.support.gloo_data import CONSTANT_RATE, DEAD, GAE, REWARDS, Item, Stream
from tests.support.protocol_helpers import received
from tests.support.rank import Case, Worker
from tests.support.replay_worker import RankReports, Trainers
from tests.support.tier import ALL, full
from tests.support.tiny import difference, random_group
from tests.support.tiny_vision import WORDS, image_prompt, random_image, tiny_vision_model, write_tokenizer
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
    "frozen": (STAGES if ALL else FEW, (2,), EVERYWHERE, {"model": {"freeze_vision_tower": True}}),
    "idle": ((1, 3), (2,), (2,), {}),  # the other rank has nothing to train
    "text": (FEW, (), EVERYWHERE, {}),
    "critic": (FEW, (2,), EVERYWHERE, CRITIC),
    "lora": (FEW, (2,), EVERYWHERE, {"lora": {"r": 4}}),
    "recomputed": ((3,), (2,), EVERYWHERE, RECOMPUTED),
}
LAYOUTS = [(kind, stage) for kind, (stages, *_) in KINDS.items() for stage in stages]


def stream(folder: Path, with_images: tuple[int, ...], alive: tuple[int, ...]) -> Stream:
    """Image tokens among the words: a group that has images has none too few and none too many."""
    form = image_format(str(folder / "model"))

    def at(group_id: int) -> Item:
        rewards = REWARDS[group_id % len(REWARDS)] if group_id in alive else DEAD
        made = random_group(group_id, WORDS, rewards)
        if group_id not in with_images:
            return made
        rng = np.random.default_rng(group_id)
        images = (random_image(rng, form, 2, 3), random_image(rng, form, 1, 2))
        prompt = np.array(image_prompt(rng, images, form, 4), np.int32)
        return dataclasses.replace(made, prompt_ids=prompt, images=images)

    return at


def case_of(folder: Path, kind: str, stage: int) -> Case:
    _, with_images, alive, sections = KINDS[kind]
    ours = {
        "data": {"image_key": "image"},
        "algorithm": {"beta": 0.0},
        "trainer": CONSTANT_RATE | {"max_grad_norm": 1e9},
    }
    both = sections | {name: given | sections.get(name, {}) for name, given in ours.items()}
    return Case(f"{kind}{stage}", stage, stream(folder, with_images, alive), both)


def work(folder: Path) -> None:
    worker = Worker(folder)
    family = json.loads((folder / "model" / "config.json").read_text())["model_type"]
    for kind, stage in LAYOUTS if family == FAMILY else [("mixed", stage) for stage in FEW]:
        if worker.collectives.world_size > 1 or stage == 1 or kind in ("mixed", "recomputed"):
            worker.one_batch(case_of(folder, kind, stage))
    worker.tell()


def write_model(folder: Path, family: str) -> None:
    tiny_vision_model(folder / "model", family)
    write_tokenizer(folder / "model")


@cache
def seen(trainers: Trainers, ranks: int, family: str = FAMILY) -> RankReports:
    folder = trainers.folder / f"{family}-{ranks}"
    write_model(folder, family)
    found = trainers.seen(__name__, folder.name, ranks)
    assert all(rank == found.ranks[0] for rank in found.ranks)
    return found


@pytest.mark.parametrize(("kind", "stage"), LAYOUTS)
def test_ranks_with_and_without_images_have_the_gradient_of_one_process(
    trainers: Trainers, kind: str, stage: int
) -> None:
    alone, name = seen(trainers, 1), f"{kind}{stage}"
    one = f"{kind}{3 if kind == 'recomputed' else 1}"
    found, gradient = seen(trainers, 2).ranks[0][name], seen(trainers, 2).gradients(name)
    assert found["steps"][0]["applied"] and found["steps"][0]["tokens"] == alone.ranks[0][one]["steps"][0]["tokens"]
    assert difference(gradient, alone.gradients(one)) < 1e-6
    tower = {key: t for key, t in gradient.items() if ".visual." in key and key.startswith("gradient/")}
    if kind in ("frozen", "lora"):
        assert not tower
    else:
        assert len(tower) == 42 and all(t.any() == (kind != "text") for t in tower.values())


def test_one_rank_has_the_same_gradient_under_every_stage_recomputed_and_of_a_language_model_alone(
    trainers: Trainers,
) -> None:
    alone = seen(trainers, 1)
    mixed = alone.gradients("mixed1")
    for name in (*(f"mixed{stage}" for stage in STAGES), "recomputed3"):
        assert difference(alone.gradients(name), mixed) < 1e-6
    language = {key: t for key, t in mixed.items() if ".visual." not in key}
    assert difference(alone.gradients("frozen1"), language) < 1e-6
    assert difference(alone.gradients("text1"), mixed) > 0.1  # equal means something


@full  # what a family decides is in the model, not in the engine
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_ranks_of_the_other_families_have_the_gradient_of_one_process(trainers: Trainers, family: str) -> None:
    alone, several = seen(trainers, 1, family).gradients("mixed1"), seen(trainers, 2, family)
    for found in (several.gradients(f"mixed{stage}") for stage in FEW):
        assert difference(found, alone) < 1e-6
        tower = [t for key, t in found.items() if ".visual." in key]
        assert tower and all(t.any() for t in tower)


@cache
def task(trainers: Trainers, family: str) -> Path:
    """A folder with a model and a recording of groups, of which every third has images."""
    folder = trainers.folder / f"{family}-task"
    write_model(folder, family)
    recorder = Recorder(folder / "groups", cursor=0)
    at = stream(folder, with_images=tuple(range(0, 64, 3)), alive=tuple(range(64)))
    recorder.append([received(at(group_id)) for group_id in range(64)])
    recorder.close()
    return folder


@pytest.mark.parametrize(
    ("family", "frozen"),
    [(FAMILY, True), *(pytest.param(family, False, marks=full) for family in (FAMILY, "qwen2_vl", "qwen3_vl"))],
    ids=lambda value: value if isinstance(value, str) else "frozen" if value else "trained",
)
def test_a_run_with_images_interrupted_at_two_points_equals_a_straight_one(
    trainers: Trainers, family: str, frozen: bool
) -> None:
    given = task(trainers, family)
    run, data = {"replay": str(given / "groups")}, {"image_key": "image"}
    model = {"path": str(given / "model"), "freeze_vision_tower": frozen}
    layout, sections = (2, 3 if frozen else 2, "float32"), EVERY_FORWARD | {"run": run, "model": model, "data": data}
    found = require_exact_resume(trainers, f"{family}-{frozen}", layout, TWO_KILLS, **sections)
    name = "preprocessor_config.json"
    assert (found / "final" / name).read_bytes() == (given / "model" / name).read_bytes()
    before, after = (
        dict(load_causal_lm(str(path), "float32", None, False).named_parameters())
        for path in (given / "model", found / "final")
    )
    moved = {name for name in before if not before[name].equal(after[name])}
    tower = {name for name in before if ".visual." in name}
    assert tower.isdisjoint(moved) if frozen else tower <= moved
    assert any("language_model" in name for name in moved)
