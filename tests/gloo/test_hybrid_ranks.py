"""Layers that carry a state or convolve, in separate rows, on 1 and 2 DeepSpeed ranks at every stage: one gradient."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo_data import group
from tests.support.mixtures import mixture_folder
from tests.support.rank import Case, Worker
from tests.support.replay_worker import RankReports, Trainers
from tests.support.tier import ALL
from tests.support.tiny import difference

FAMILIES = ("granitemoehybrid", "lfm2", "qwen3_5_text") if ALL else ("lfm2",)
UNCLIPPED = {"trainer": {"max_grad_norm": 1e9}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {f"zero{stage}": (stage, {}) for stage in range(4)} | {
    "recomputed": (3, {"model": {"gradient_checkpointing": True}}),
    "pairs": (1, {"trainer": UNCLIPPED["trainer"] | {"groups_per_micro_batch": 2}}),
    "critic": (3, {"algorithm": {"adv_estimator": "gae"}}),
}


def work(folder: Path) -> None:
    worker = Worker(folder)
    cases = CASES if worker.collectives.world_size == 2 else {"alone": (1, {}), "critic": CASES["critic"]}
    for name, (stage, sections) in cases.items():
        worker.one_batch(Case(name, stage, group, UNCLIPPED | sections))
    worker.tell()


@cache
def seen(trainers: Trainers, family: str, ranks: int) -> RankReports:
    folder = trainers.folder / f"{family}-{ranks}"
    mixture_folder(folder / "model", family)
    return trainers.seen(__name__, folder.name, ranks)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_step_as_one_does(trainers: Trainers, family: str, name: str) -> None:
    one, two = seen(trainers, family, 1), seen(trainers, family, 2)
    expected, found = one.gradients("critic" if name == "critic" else "alone"), two.gradients(name)
    state = [t for key, t in expected.items() if "conv" in key or "A_log" in key or "in_proj" in key]
    assert all(t.any() for t in state) or name == "critic"  # whose head starts at zero
    assert difference(found, expected) < 2e-6
