"""Any number of groups on 1, 2 and, with --all, 4 DeepSpeed ranks, one slow, one shard masked: the same gradient."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from common.types import Group
from tests.gloo.test_gloo import BETA1, PLAIN_ROUNDING
from tests.support.gloo_data import TRAINER, group
from tests.support.plain_training import PlainTraining
from tests.support.replay_worker import Seen, Stack, stack
from tests.support.tier import full
from tests.support.tiny import difference
from tests.support.uneven_ranks import RANKS, Case, cases, counts, shard, some


@pytest.fixture(scope="module")
def trainers() -> Stack:
    return stack()


@cache
def seen(trainers: Stack, ranks: int) -> Seen:
    # a new folder for each start: after a failure the next test starts them again
    folder = Path(tempfile.mkdtemp(prefix=f"uneven-{ranks}-", dir=trainers.folder))
    (folder / "model").symlink_to(trainers.folder / "model")
    return trainers.seen("uneven_ranks", folder.name, ranks)


def gradient(of: Seen, name: str) -> dict[str, Tensor]:
    """exp_avg is (1 − beta1) · gradient."""
    return {key: t / (1 - BETA1) for key, t in of.gradients(name).items()}


@pytest.mark.parametrize(
    ("kind", "loss_type", "numbers"),
    [("single", "grpo", counts(max(RANKS))), ("tokens", "dapo", some(max(RANKS)))],
    ids=["single", "tokens"],
)
def test_on_one_rank_every_number_of_groups_gives_the_gradient_of_plain_torch(
    trainers: Stack, kind: str, loss_type: str, numbers: Sequence[int]
) -> None:
    alone = seen(trainers, 1)
    plain = PlainTraining(trainers.folder / "model", steps=0, loss_type=loss_type)
    for count in numbers:
        plain.own.clear()
        loss = plain.backward([group(g) for g in range(count)])
        name = Case(kind, count, ()).name
        expected = {f"gradient/{key}": t for key, t in plain.gradients().items()}
        assert difference(gradient(alone, name), expected) < PLAIN_ROUNDING, name
        assert alone.ranks[0][name]["steps"][0]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_uneven_numbers_of_groups_with_a_slow_rank_and_a_masked_shard_give_the_gradient_of_one_process(
    trainers: Stack, ranks: int, figure: Callable[[str, str], None]
) -> None:
    alone, several = seen(trainers, 1), seen(trainers, ranks)
    differences = []
    for stage, case in cases(ranks):
        name = f"{case.name}-zero{stage}"
        found, expected = gradient(several, name), gradient(alone, case.name)
        (step,) = several.ranks[0][name]["steps"]
        assert all(rank[name]["steps"] == [step] for rank in several.ranks), f"{name}: the ranks disagree"
        assert any("value_gradient" in key for key in found) == (case.kind == "critic")
        assert step["tokens"] == alone.ranks[0][case.name]["steps"][0]["tokens"]
        if step["tokens"]:
            differences.append(difference(found, expected))
        else:  # the masked shard is the whole step
            assert not any(t.any() for t in found.values())
    assert len(differences) > 2 * len(counts(ranks))
    assert max(differences) < 1e-6
    figure(
        "R10",
        f"1 to {2 * ranks + 1} groups on {ranks} ranks, ZeRO 1 to 3: {len(cases(ranks))} steps, gradient at most "
        f"{max(differences):.0e} from one process's",
    )


def test_a_masked_shard_changes_the_gradient_so_that_equal_means_something(trainers: Stack) -> None:
    alone = seen(trainers, 1)
    masked = gradient(alone, Case("single", 5, shard(5, 2)).name)
    assert difference(masked, gradient(alone, Case("single", 5, ()).name)) > 0.1


@full
def test_a_whole_run_with_five_groups_a_step_on_four_ranks_ends_with_the_weights_of_one_rank(trainers: Stack) -> None:
    weights = {}
    for ranks in (1, 4):
        life = trainers.run(f"five-{ranks}", ranks, 1, {}, trainer=TRAINER | {"prompts_per_step": 5})
        assert life.codes == [0] * ranks, life.logs[0][-3000:]
        says = "5 on 4 ranks: some train 2 groups a step, the others 1 and then wait. Even would be"
        assert (says in life.logs[0]) == (ranks == 4)
        weights[ranks] = load_file(Path(trainers.folder, f"five-{ranks}", "final", "model.safetensors"))
    assert difference(weights[4], weights[1]) < 1e-6


def test_a_whole_run_counts_groups_above_the_budget_says_so_once_and_drops_none(trainers: Stack) -> None:
    rows, weights = {}, {}
    for name, ranks, budget in (("roomy", 1, 10_000), ("tight", 2, 20)):
        given = TRAINER | {"prompts_per_step": 5, "max_tokens_per_micro_batch": budget}
        life = trainers.run(name, ranks, 1, {}, trainer=given, algorithm={"loss_type": "dapo"})
        assert life.codes == [0] * ranks, life.logs[0][-3000:]
        assert life.logs[0].count("is above trainer.max_tokens_per_micro_batch 20 and trains alone") == (
            name == "tight"
        )
        lines = (trainers.folder / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
        weights[name] = load_file(trainers.folder / name / "final" / "model.safetensors")
    assert [row["micro_batches"] for row in rows["roomy"]] == [1, 1, 1]
    assert [row["oversized_groups"] for row in rows["roomy"]] == [0, 0, 0]
    for step, row in enumerate(rows["tight"]):
        tokens = [len(g.prompt_ids) + sum(len(r.completion_ids) for r in g.rollouts) for g in groups_of(step)]
        assert row["oversized_groups"] == sum(n > 20 for n in tokens) > 0
        assert row["micro_batches"] >= 3  # a rank has at least three of the five groups, or of their cost
        assert 0 <= row["rank_imbalance"] < 1
    assert difference(weights["tight"], weights["roomy"]) < 1e-6


def groups_of(step: int) -> list[Group]:
    return [group(g) for g in range(5 * step, 5 * step + 5)]
