"""Images on some ranks and none on others, on real DeepSpeed ranks: the gradient of one process, and exact resuming."""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from common.run_folder import step_dir
from model.logprobs import load_causal_lm
from tests.gloo.test_exact_resume import history, sha256_of_tree, steps_saved
from tests.support.gloo_data import GROUP_PPO
from tests.support.protocol_helpers import received
from tests.support.replay_worker import Life, Seen, Stack, stack
from tests.support.tier import full
from tests.support.tiny import difference
from tests.support.tiny_vision import tiny_vision_model, write_tokenizer
from tests.support.vision_worker import CASES, OTHER_FAMILIES, STAGES, VISION, Case, stream
from trainer.link.recording import Recorder

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def trainers() -> Stack:
    return stack()


def write_model(folder: Path, family: str) -> None:
    tiny_vision_model(folder / "model", family)
    write_tokenizer(folder / "model")


@cache
def seen(trainers: Stack, ranks: int, family: str = "qwen2_5_vl") -> Seen:
    folder = trainers.folder / f"{family}-{ranks}"
    write_model(folder, family)
    found = trainers.seen("vision_worker", folder.name, ranks)
    assert all(rank == found.ranks[0] for rank in found.ranks)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-zero{case.stage}")
def test_ranks_with_and_without_images_have_the_gradient_of_one_process(trainers: Stack, case: Case) -> None:
    alone, name = seen(trainers, 1), f"{case.name}{case.stage}"
    one = f"{case.name}{3 if case.name == 'recomputed' else 1}"
    found, gradient = seen(trainers, 2).ranks[0][name], seen(trainers, 2).gradients(name)
    assert found["steps"][0]["applied"] and found["steps"][0]["tokens"] == alone.ranks[0][one]["steps"][0]["tokens"]
    assert difference(gradient, alone.gradients(one)) < 1e-6
    tower = {key: t for key, t in gradient.items() if ".visual." in key and key.startswith("gradient/")}
    if case.name in ("frozen", "lora"):
        assert not tower and found["moved"]
        assert not any(".visual." in key for key in found["moved"] + found["with_gradient"])
    else:
        assert len(tower) == 42 and all(t.any() == bool(case.with_images) for t in tower.values())


def test_one_rank_has_the_same_gradient_under_every_stage_and_recomputed(trainers: Stack) -> None:
    alone = seen(trainers, 1)
    for name in (*(f"mixed{stage}" for stage in STAGES), "recomputed3"):
        assert difference(alone.gradients(name), alone.gradients("mixed1")) < 1e-6


@full  # what a family decides is in the model, not in the engine
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_ranks_of_the_other_families_have_the_gradient_of_one_process(trainers: Stack, family: str) -> None:
    alone, several = seen(trainers, 1, family).gradients("mixed1"), seen(trainers, 2, family)
    for found in (several.gradients(f"{case.name}{case.stage}") for case in OTHER_FAMILIES):
        assert difference(found, alone) < 1e-6
        tower = [t for key, t in found.items() if ".visual." in key]
        assert tower and all(t.any() for t in tower)


def test_a_frozen_tower_leaves_the_language_models_gradient_as_it_is(trainers: Stack) -> None:
    alone = seen(trainers, 1)
    language = {key: t for key, t in alone.gradients("mixed1").items() if ".visual." not in key}
    assert difference(alone.gradients("frozen1"), language) < 1e-6


def test_without_the_images_the_gradient_is_another_so_that_equal_means_something(trainers: Stack) -> None:
    alone = seen(trainers, 1)
    assert difference(alone.gradients("text1"), alone.gradients("mixed1")) > 0.1


# ---- resuming

STEPS, RANKS = 10, 2
# with the log-probs of a reference, values and score norms: every forward there is
SECTIONS: dict[str, Any] = {
    "data": VISION,
    "reference": {"on": "trainer"},
    "algorithm": GROUP_PPO["algorithm"] | {"num_iterations": 2, "kl_in_reward": False},
    "critic": {"learning_rate": 2e-3},
    "trainer": {"max_steps": STEPS, "save_steps": 1, "save_limit": STEPS},
}


@cache
def task(trainers: Stack, family: str) -> Path:
    """A folder with a model and a recording of groups, of which every third has images."""
    folder = trainers.folder / f"{family}-task"
    write_model(folder, family)
    recorder = Recorder(folder / "groups", cursor=0)
    at = stream(folder, Case("resume", 1, with_images=tuple(range(0, 64, 3)), alive=tuple(range(64))))
    recorder.append([received(at(group_id)) for group_id in range(64)])
    recorder.close()
    return folder


def train(trainers: Stack, name: str, family: str, armed: dict[int, str], frozen: bool) -> Life:
    run = {"replay": str(task(trainers, family) / "groups"), "resume": bool(steps_saved(trainers.folder / name))}
    model = {"path": str(task(trainers, family) / "model"), "freeze_vision_tower": frozen}
    environment = {rank: {"TANDEM_FAILPOINT": point} for rank, point in armed.items()}
    return trainers.run(name, RANKS, 3 if frozen else 2, environment, run=run, model=model, **SECTIONS)


@pytest.mark.parametrize(
    ("family", "frozen"),
    [
        pytest.param("qwen2_5_vl", False, marks=full),
        ("qwen2_5_vl", True),
        pytest.param("qwen2_vl", False, marks=full),
        pytest.param("qwen3_vl", False, marks=full),
    ],
    ids=lambda value: value if isinstance(value, str) else "frozen" if value else "trained",
)
def test_a_run_with_images_interrupted_at_two_points_equals_a_straight_one(
    trainers: Stack, family: str, frozen: bool
) -> None:
    straight, broken = f"{family}-straight-{frozen}", f"{family}-broken-{frozen}"
    life = train(trainers, straight, family, {}, frozen)
    assert life.codes == [0] * RANKS, life.logs[0][-3000:]
    for armed in ({1: "trainer.micro_batch:6:kill"}, {0: "checkpoint.committed:2:kill"}, {}):
        life = train(trainers, broken, family, armed, frozen)
        assert (-signal.SIGKILL in life.codes) == bool(armed), f"{armed}: {life.codes}\n{life.logs[0][-3000:]}"
    found, expected = trainers.folder / broken, trainers.folder / straight
    for step in steps_saved(expected):
        trees = [sha256_of_tree(step_dir(run / "checkpoints", step)) for run in (found, expected)]
        assert trees[0] == trees[1], f"step {step}"
    assert sha256_of_tree(found / "final") == sha256_of_tree(expected / "final")
    assert history(found / "metrics.jsonl") == history(expected / "metrics.jsonl")
    assert (found / "final" / "preprocessor_config.json").read_bytes() == (
        task(trainers, family) / "model" / "preprocessor_config.json"
    ).read_bytes()
    before, after = (
        dict(load_causal_lm(str(path), "float32", None, False).named_parameters())
        for path in (task(trainers, family) / "model", found / "final")
    )
    moved = {name for name in before if not before[name].equal(after[name])}
    tower = {name for name in before if ".visual." in name}
    assert tower.isdisjoint(moved) if frozen else tower <= moved
    assert any("language_model" in name for name in moved)
