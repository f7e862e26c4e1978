"""A mixture of experts on 1 and 2 DeepSpeed ranks, whose tokens are sent to different experts: the same gradient."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.types import Group
from tests.support.gloo_data import REWARDS, Item
from tests.support.mixtures import mixture_folder
from tests.support.rank import Case, Worker
from tests.support.replay_worker import RankReports, Trainers
from tests.support.tier import ALL
from tests.support.tiny import VOCAB_SIZE, difference, random_group

LAYERS = 4
REPLAY: dict[str, Any] = {"algorithm": {"router_replay": True, "beta": 0.0}, "trainer": {"max_grad_norm": 1e9}}
# a case's stage of ZeRO, and its settings
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (3, {"model": {"gradient_checkpointing": True}}),
    "split": (1, {"trainer": REPLAY["trainer"] | {"sequence_parallel_size": 2}}),
}
if ALL:
    CASES |= {f"zero{stage}": (stage, {}) for stage in (0, 1, 2)}
    CASES |= {"separate": (1, {"trainer": REPLAY["trainer"] | {"packing": "separate"}})}


def group(group_id: int) -> Item:
    """Tokens of one group meet experts 0 to 3, those of the next 4 to 7: no expert has work on every rank."""
    made = random_group(group_id, VOCAB_SIZE, REWARDS[group_id % len(REWARDS)], beta=0.0)
    assert isinstance(made, Group)
    rng = np.random.default_rng(group_id)

    def experts(tokens: int) -> np.ndarray:
        first = rng.integers(0, 4, (tokens, LAYERS, 1))
        return (np.concatenate([first, (first + 1) % 4], -1) + 4 * (group_id % 2)).astype(np.uint8)

    rollouts = tuple(replace(r, routing=experts(len(r.completion_ids) - 1)) for r in made.rollouts)
    return replace(made, rollouts=rollouts, routing=experts(len(made.prompt_ids)))


def work(folder: Path) -> None:
    worker = Worker(folder)
    if worker.collectives.world_size == 1:
        worker.one_batch(Case("alone", 1, group, REPLAY))
        worker.one_batch(Case("own", 1, group, REPLAY | {"algorithm": {"beta": 0.0}}))
    else:
        for name, (stage, sections) in CASES.items():
            worker.one_batch(Case(name, stage, group, REPLAY | sections))
    worker.tell()


@cache
def seen(trainers: Trainers, ranks: int) -> RankReports:
    folder = trainers.folder / f"mixture-{ranks}"
    mixture_folder(folder / "model", "qwen3_moe")
    return trainers.seen(__name__, folder.name, ranks)


@pytest.mark.parametrize("name", CASES)
def test_ranks_whose_tokens_meet_no_common_expert_step_as_one_rank_does(trainers: Trainers, name: str) -> None:
    one, two = seen(trainers, 1), seen(trainers, 2)
    expected, found = one.gradients("alone"), two.gradients(name)
    assert found.keys() == expected.keys() and any("experts" in key for key in found)
    assert any("gate.weight" in key and t.abs().max() > 1e-6 for key, t in found.items()), "routers learn"
    assert difference(found, expected) < 2e-6
    assert difference(expected, one.gradients("own")) > 1e-2, "replay matters here"
    [ours], [theirs] = two.ranks[0][name]["steps"], one.ranks[0]["alone"]["steps"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
