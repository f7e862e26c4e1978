"""Any number of groups on 1, 2 and, with --all, 4 DeepSpeed ranks, one slow, one shard masked: the same gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from common.types import Group, Tombstone
from report.run_log import read_jsonl
from tests.support.gloo_data import TRAINER, Item, Stream, group
from tests.support.plain_training import BETA1, PLAIN_ROUNDING, PlainTraining
from tests.support.rank import Case, Worker
from tests.support.replay_worker import RankReports, Trainers
from tests.support.tier import ALL, full
from tests.support.tiny import difference

RANKS = (1, 2, 4) if ALL else (1, 2)
BUDGET = {"max_tokens_per_micro_batch": 40}  # one to three of the groups; some are larger
# tokens, critic, exact: the whole step is planned at once, for they wait for all of it
KINDS: dict[str, dict[str, Any]] = {
    "single": {"trainer": {"groups_per_micro_batch": 1}},
    "stream": {"trainer": BUDGET},
    "tokens": {"trainer": BUDGET, "algorithm": {"loss_type": "dapo"}},
    "critic": {"trainer": BUDGET, "algorithm": {"adv_estimator": "gae"}},
    "exact": {
        "trainer": BUDGET,
        "algorithm": {"adv_estimator": "group_ppo", "group_params": {"score": "exact", "segment_loss": "segment"}},
    },
}


@dataclasses.dataclass(frozen=True, order=True)
class Step:
    """One step of `count` groups, of which those of `without` have nothing to train."""

    kind: str
    count: int
    without: tuple[int, ...] = ()
    stage: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind}{self.count}-without-{'.'.join(map(str, self.without))}-zero{self.stage}"

    @property
    def alone(self) -> Step:
        """The same on one rank."""
        return dataclasses.replace(self, stage=1)


def counts(ranks: int) -> range:
    return range(1, 2 * ranks + 2)


def some(ranks: int) -> list[int]:
    return sorted({1, ranks, ranks + 1, 2 * ranks + 1})


def steps(ranks: int) -> list[Step]:
    """A group alone leaves all ranks but one with fillers from the first forward to the last."""
    most = 2 * ranks + 1
    # every ranks-th group, another residue for every count
    shard = {count: tuple(range(count % ranks, count, ranks)) for count in counts(ranks)}
    found = [Step("single", count, without) for count in counts(ranks) for without in ((), shard[count])]
    found += [Step("tokens", count) for count in some(ranks)] + [Step("stream", most)]
    found += [Step("stream", count, shard[count], stage) for stage in (2, 3) for count in some(ranks)]
    found += [Step("critic", most, shard[most], stage) for stage in (1, 3)] + [Step("exact", most, shard[most], 3)]
    return found


def stream(without: tuple[int, ...]) -> Stream:
    """Of these groups half are tombstones, and of the others every completion is truncated, which none trains."""

    def at(group_id: int) -> Item:
        made = group(group_id)
        if group_id not in without:
            return made
        if group_id % 2:
            return Tombstone(group_id, 0, "reward timed out")
        cut = tuple(dataclasses.replace(r, finish_reason="length") for r in made.rollouts)
        return dataclasses.replace(made, rollouts=cut)

    return at


def work(folder: Path) -> None:
    """What each rank does; of several each has its turn to be slow. One alone makes what the others must equal."""
    worker = Worker(folder)
    ranks = worker.collectives.world_size
    several = steps(ranks) if ranks > 1 else sorted({step.alone for n in RANKS[1:] for step in steps(n)})
    for step in several:
        trainer = {"prompts_per_step": step.count, "max_grad_norm": 1e9} | KINDS[step.kind]["trainer"]
        algorithm = {"mask_truncated_completions": True} | KINDS[step.kind].get("algorithm", {})
        sections, slow = {"trainer": trainer, "algorithm": algorithm}, step.count % ranks if ranks > 1 else None
        worker.one_batch(Case(step.name, step.stage, stream(step.without), sections, slow))
    worker.tell()


@cache
def seen(trainers: Trainers, ranks: int) -> RankReports:
    return trainers.seen_anew(__name__, "uneven", ranks)


def gradient(of: RankReports, step: Step) -> dict[str, Tensor]:
    return {key: t / (1 - BETA1) for key, t in of.gradients(step.name).items()}


@pytest.mark.parametrize(("kind", "loss_type"), [("single", "grpo"), ("tokens", "dapo")])
def test_on_one_rank_every_number_of_groups_gives_the_gradient_of_plain_torch(
    trainers: Trainers, kind: str, loss_type: str
) -> None:
    alone = seen(trainers, 1)
    plain = PlainTraining(trainers.folder / "model", loss_type=loss_type)
    for count in some(max(RANKS)):
        plain.own.clear()
        loss = plain.backward([group(g) for g in range(count)])
        step = Step(kind, count)
        expected = {f"gradient/{key}": t for key, t in plain.gradients().items()}
        assert difference(gradient(alone, step), expected) < PLAIN_ROUNDING, step
        assert alone.ranks[0][step.name]["steps"][0]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_uneven_numbers_of_groups_with_a_slow_rank_and_a_masked_shard_give_the_gradient_of_one_process(
    trainers: Trainers, ranks: int, figure: Callable[[str, str], None]
) -> None:
    alone, several = seen(trainers, 1), seen(trainers, ranks)
    differences = []
    for step in steps(ranks):
        found, expected = gradient(several, step), gradient(alone, step.alone)
        (numbers,) = several.ranks[0][step.name]["steps"]
        assert all(rank[step.name]["steps"] == [numbers] for rank in several.ranks), f"{step}: the ranks disagree"
        assert numbers["tokens"] == alone.ranks[0][step.alone.name]["steps"][0]["tokens"]
        differences.append(difference(found, expected))
    assert max(differences) < 1e-6
    figure(
        "R10",
        f"1 to {2 * ranks + 1} groups on {ranks} ranks, ZeRO 1 to 3: {len(steps(ranks))} steps, gradient at most "
        f"{max(differences):.0e} from one process's",
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=full)])
def test_a_whole_run_with_five_groups_a_step_ends_with_the_weights_of_one_rank_and_counts_those_above_the_budget(
    trainers: Trainers, ranks: int
) -> None:
    weights = {}
    for name, count, budget in (("roomy", 1, 10_000), ("tight", ranks, 20)):
        given = TRAINER | {"prompts_per_step": 5, "max_tokens_per_micro_batch": budget}
        life = trainers.run(f"{name}-{ranks}", count, 1, {}, trainer=given, algorithm={"loss_type": "dapo"})
        assert life.codes == [0] * count, life.logs[0][-3000:]
        assert life.logs[0].count("is above trainer.max_tokens_per_micro_batch 20") == (name == "tight")
        weights[name] = load_file(trainers.folder / f"{name}-{ranks}" / "final" / "model.safetensors")
    for step, row in enumerate(read_jsonl(trainers.folder / f"tight-{ranks}" / "metrics.jsonl")):
        tokens = [tokens_of(group(g)) for g in range(5 * step, 5 * step + 5)]
        assert row["oversized_groups"] == sum(n > 20 for n in tokens) > 0
    assert difference(weights["tight"], weights["roomy"]) < 1e-6


def tokens_of(made: Group) -> int:
    return len(made.prompt_ids) + sum(len(r.completion_ids) for r in made.rollouts)
