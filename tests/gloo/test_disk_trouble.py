"""Two DeepSpeed ranks whose disk is full, or that are killed, while a version or a checkpoint is written."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from common.processes import exits
from tests.support.gloo_data import TRAINER
from tests.support.plain_policy import OneRank
from tests.support.replay_worker import RankEnds, Trainers, sha256_of_run
from tests.support.speed import limit
from tests.support.tier import full
from trainer.save import resume


def train(
    trainers: Trainers, name: str, environment: dict[int, dict[str, str]], staleness: int = 0, **sections: Any
) -> RankEnds:
    """Three steps on two ranks, from the newest checkpoint if there is one. environment: by rank."""
    run = {"resume": resume.newest_valid(trainers.folder / name / "checkpoints", OneRank(), print) is not None}
    trainer = TRAINER | {"save_steps": 1, "max_staleness": staleness}
    return trainers.run(name, 2, 2, environment, run=run, trainer=trainer, **sections)


@cache
def undisturbed(trainers: Trainers) -> dict[str, str]:
    assert train(trainers, "undisturbed", {}).codes == [0, 0]
    return sha256_of_run(trainers.folder / "undisturbed")


def require_as_undisturbed(trainers: Trainers, name: str, life: RankEnds) -> None:
    assert life.codes == [0, 0], life.logs[0][-3000:]
    assert sha256_of_run(trainers.folder / name) == undisturbed(trainers)


def waits(life: RankEnds) -> list[str]:
    return [line for line in life.logs[0].splitlines() if "waits for the disk" in line]


FULL = [  # rank, its file operations without room, what it is doing then
    (1, "1-2:enospc", "version 0"),
    (0, "98-102:enospc", "step_000001"),
]


@pytest.mark.parametrize(("rank", "fault", "what"), FULL)
def test_a_full_disk_of_either_rank_delays_publishing_and_checkpoints_and_changes_nothing(
    trainers: Trainers, figure: Callable[[str, str], None], rank: int, fault: str, what: str
) -> None:
    name = f"full-{rank}-{fault.partition('-')[0]}"
    life = train(trainers, name, {rank: {"TANDEM_FAULT": fault}})
    assert waits(life), f"no pause at file operations {fault} of rank {rank}"
    for line in waits(life):
        assert line.startswith(f"tandem: {what} waits for the disk: rank {rank}: ") and "No space left" in line
    require_as_undisturbed(trainers, name, life)
    figure("R14", "a full disk of a rank while publishing or saving: both ranks pause, final state as undisturbed")


def test_a_disk_that_stays_full_ends_both_ranks_retryable_and_the_run_resumes_when_there_is_room(
    trainers: Trainers,
) -> None:
    name = "stays-full"
    fault = {1: {"TANDEM_FAULT": "23-1000000:enospc"}}  # from the second checkpoint on
    life = train(trainers, name, fault, channel={"stall_timeout_s": limit(2)})
    assert life.codes == [exits.RETRYABLE] * 2, life.logs
    for log in life.logs:
        assert "rank 1: " in log and "No space left on device" in log and "Make room or repair the disk" in log
    checkpoints = trainers.folder / name / "checkpoints"
    assert resume.newest_valid(checkpoints, OneRank(), print) == checkpoints / "step_000001"
    require_as_undisturbed(trainers, name, train(trainers, name, {}))


# ---- a version that is written behind the next step ---------------------------------------------------------


def test_a_rank_without_room_behind_a_step_pauses_both_and_changes_nothing(trainers: Trainers) -> None:
    name = "behind-full"
    life = train(trainers, name, {1: {"TANDEM_FAILPOINT": "weights.shard:2:enospc"}}, staleness=1)
    (line,) = waits(life)
    assert line.startswith("tandem: version 1 waits for the disk: rank 1: ")
    require_as_undisturbed(trainers, name, life)


@pytest.mark.parametrize(
    ("rank", "point"), [(1, "weights.shard:3:kill"), pytest.param(0, "weights.manifest:3:kill", marks=full)]
)
def test_a_run_killed_while_a_version_is_written_behind_a_step_resumes_exactly(
    trainers: Trainers, rank: int, point: str
) -> None:
    name = f"behind-{rank}-{point.replace(':', '-')}"
    assert -9 in train(trainers, name, {rank: {"TANDEM_FAILPOINT": point}}, staleness=1).codes
    require_as_undisturbed(trainers, name, train(trainers, name, {}, staleness=1))
