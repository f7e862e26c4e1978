"""Mixtures of experts, and layers that carry a state or convolve, on 1 and 2 DeepSpeed ranks: the same gradient."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import gloo_data
from tests.support.gloo_data import REWARDS, Item
from tests.support.mixtures import mixture_folder
from tests.support.rank import Case, Worker
from tests.support.replay_worker import RankReports, Trainers
from tests.support.tier import ALL
from tests.support.tiny import VOCAB_SIZE, difference, random_group

LAYERS = 4
MIXTURE = "qwen3_moe"
HYBRIDS = ("granitemoehybrid", "lfm2", "qwen3_5_text") if ALL else ("lfm2",)
STAGES = (0, 1, 2) if ALL else ()
UNCLIPPED = {"max_grad_norm": 1e9}
REPLAY = {"router_replay": True, "beta": 0.0}
CRITIC = {"algorithm": {"adv_estimator": "gae"}}
RECOMPUTED = {"model": {"gradient_checkpointing": True}}
Cases = dict[str, tuple[int, dict[str, Any]]]  # by name: the stage of ZeRO, and settings
# what two ranks train; each but the critic equals "alone"
OF_MIXTURE: Cases = {
    "zero3": (3, RECOMPUTED),
    "split": (1, {"trainer": {"sequence_parallel_size": 2}}),
    **{f"zero{stage}": (stage, {}) for stage in STAGES},
}
OF_HYBRIDS: Cases = {
    **{f"zero{stage}": (stage, {}) for stage in range(4)},
    "recomputed": (3, RECOMPUTED),
    "pairs": (1, {"trainer": {"groups_per_micro_batch": 2}}),
    "critic": (3, CRITIC),
}
RUNS = [pytest.param(MIXTURE, name, id=name) for name in OF_MIXTURE]
RUNS += [pytest.param(family, name, id=f"{family}-{name}") for family in HYBRIDS for name in OF_HYBRIDS]


def group(group_id: int) -> Item:
    """Tokens of one group meet experts 0 to 3, those of the next 4 to 7: no expert has work on every rank."""
    made = random_group(group_id, VOCAB_SIZE, REWARDS[group_id % len(REWARDS)], beta=0.0)
    rng = np.random.default_rng(group_id)

    def experts(tokens: int) -> np.ndarray:
        first = rng.integers(0, 4, (tokens, LAYERS, 1))
        return (np.concatenate([first, (first + 1) % 4], -1) + 4 * (group_id % 2)).astype(np.uint8)

    rollouts = tuple(replace(r, routing=experts(len(r.completion_ids) - 1)) for r in made.rollouts)
    return replace(made, rollouts=rollouts, routing=experts(len(made.prompt_ids)))


def work(folder: Path) -> None:
    worker = Worker(folder)
    is_mixture = folder.name.startswith(MIXTURE)
    cases = OF_MIXTURE if is_mixture else OF_HYBRIDS
    if worker.collectives.world_size == 1:
        cases = {"alone": (1, {})}
        if is_mixture:
            cases["own"] = 1, {"algorithm": {"router_replay": False}}
        else:
            cases["critic"] = OF_HYBRIDS["critic"]
    for name, (stage, sections) in cases.items():
        trainer = UNCLIPPED | sections.get("trainer", {})
        algorithm = (REPLAY if is_mixture else {}) | sections.get("algorithm", {})
        stream = group if is_mixture else gloo_data.group
        worker.one_batch(Case(name, stage, stream, sections | {"trainer": trainer, "algorithm": algorithm}))
    worker.tell()


@cache
def seen(trainers: Trainers, family: str, ranks: int) -> RankReports:
    folder = trainers.folder / f"{family}-{ranks}"
    mixture_folder(folder / "model", family)
    return trainers.seen(__name__, folder.name, ranks)


@pytest.mark.parametrize(("family", "name"), RUNS)
def test_two_ranks_step_as_one_rank_does(trainers: Trainers, family: str, name: str) -> None:
    one, two = seen(trainers, family, 1), seen(trainers, family, 2)
    assert difference(two.gradients(name), one.gradients("critic" if name == "critic" else "alone")) < 2e-6


def test_routers_learn_under_the_routing_that_is_replayed(trainers: Trainers) -> None:
    one = seen(trainers, MIXTURE, 1)
    found = one.gradients("alone")
    assert any("gate.weight" in key and t.abs().max() > 1e-6 for key, t in found.items())
    assert difference(found, one.gradients("own")) > 1e-2
