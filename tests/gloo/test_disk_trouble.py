"""Two DeepSpeed ranks whose disk is full, or that are killed, while a version or a checkpoint is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from common import exits
from tests.support.gloo_data import TRAINER
from tests.support.replay_worker import Life, Stack, sha256_of_run, stack
from tests.support.speed import limit
from tests.support.tier import full
from trainer.save import resume


@pytest.fixture(scope="module")
def trainers() -> Stack:
    return stack()


def train(trainers: Stack, name: str, faults: dict[int, str], **sections: Any) -> Life:
    """Three steps on two ranks. faults: TANDEM_FAULT by rank."""
    environment = {rank: {"TANDEM_FAULT": fault} for rank, fault in faults.items()}
    return trainers.run(name, 2, 2, environment, trainer={**TRAINER, "save_steps": 1}, **sections)


@cache
def undisturbed(trainers: Stack) -> dict[str, str]:
    assert train(trainers, "undisturbed", {}).codes == [0, 0]
    return sha256_of_run(trainers.folder / "undisturbed")


FULL = [  # rank, its file operations without room, what it is doing then
    (1, "1-4:enospc", "publishing version 0"),
    (0, "50-85:enospc", "checkpoint step_000001"),
    pytest.param(0, "16-30:enospc", "publishing version 0", marks=full),
    pytest.param(1, "3-6:enospc", "checkpoint step_000001", marks=full),
]


@pytest.mark.parametrize(("rank", "fault", "what"), FULL)
def test_a_full_disk_on_either_rank_delays_publishing_and_checkpoints_and_changes_nothing(
    trainers: Stack, figure: Callable[[str, str], None], rank: int, fault: str, what: str
) -> None:
    name = f"full-{rank}-{fault.partition('-')[0]}"
    life = train(trainers, name, {rank: fault})
    assert life.codes == [0, 0], life.logs[rank][-3000:]
    waits = [line for line in life.logs[0].splitlines() if "waits for the disk" in line]
    assert waits, f"no pause at file operations {fault} of rank {rank}"
    for line in waits:
        assert line.startswith(f"{what} waits for the disk: rank {rank}: ") and "No space left on device" in line
    assert sha256_of_run(trainers.folder / name) == undisturbed(trainers)
    figure("R14", "a full disk of a rank while publishing or saving: both ranks pause, final state as undisturbed")


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=full)])
def test_a_disk_that_stays_full_ends_both_ranks_retryable_and_the_run_resumes_when_there_is_room(
    trainers: Stack, rank: int
) -> None:
    name, first = f"stays-full-{rank}", (103, 11)[rank]  # in the second checkpoint
    life = train(trainers, name, {rank: f"{first}-1000000:enospc"}, channel={"stall_timeout_s": limit(2)})
    assert life.codes == [exits.RETRYABLE] * 2, life.logs
    for log in life.logs:
        assert "Make room or repair the disk, then start again" in log
        assert f"rank {rank}: " in log and "No space left on device" in log
    checkpoints = trainers.folder / name / "checkpoints"
    assert resume.newest_valid(checkpoints, print) == checkpoints / "step_000001"
    assert train(trainers, name, {}, run={"resume": True}).codes == [0, 0]
    assert sha256_of_run(trainers.folder / name) == undisturbed(trainers)


# ---- a version that is written behind the next step ---------------------------------------------------------


def train_behind(trainers: Stack, name: str, armed: dict[int, str], staleness: int = 1, **sections: Any) -> Life:
    environment = {rank: {"TANDEM_FAILPOINT": point} for rank, point in armed.items()}
    trainer = TRAINER | {"save_steps": 1, "max_staleness": staleness}
    return trainers.run(name, 2, 2, environment, trainer=trainer, **sections)


@cache
def on_policy(trainers: Stack) -> dict[str, str]:
    assert train_behind(trainers, "publisher-on-policy", {}, staleness=0).codes == [0, 0]
    return sha256_of_run(trainers.folder / "publisher-on-policy")


def test_writing_behind_the_steps_changes_no_bit_of_them(trainers: Stack) -> None:
    assert train_behind(trainers, "behind", {}).codes == [0, 0]
    assert sha256_of_run(trainers.folder / "behind") == on_policy(trainers)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=full)])
def test_a_rank_without_room_behind_a_step_pauses_both_and_changes_nothing(
    trainers: Stack, rank: int, figure: Callable[[str, str], None]
) -> None:
    life = train_behind(trainers, f"behind-full-{rank}", {rank: "weights.shard:2:enospc"})
    assert life.codes == [0, 0], life.logs[rank][-3000:]
    (line,) = [line for line in life.logs[0].splitlines() if "waits for the disk" in line]
    assert line.startswith(f"publishing version 1 waits for the disk: rank {rank}: ")
    assert sha256_of_run(trainers.folder / f"behind-full-{rank}") == on_policy(trainers)
    figure("R14", "either rank without room behind a step: waited for, weights equal")


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        pytest.param(0, "weights.shard:3:kill", marks=full),
        (1, "weights.shard:3:kill"),
        pytest.param(0, "weights.manifest:3:kill", marks=full),
    ],
)
def test_a_run_killed_while_a_version_is_written_behind_a_step_resumes_exactly(
    trainers: Stack, rank: int, point: str
) -> None:
    name = f"behind-killed-{rank}-{point.replace(':', '-')}"
    assert -9 in train_behind(trainers, name, {rank: point}).codes
    life = train_behind(
        trainers, name, {}, run={"resume": True}
    )  # version 2 died behind step 3: step 1 at least is saved
    assert life.codes == [0, 0], life.logs[0][-3000:]
    assert sha256_of_run(trainers.folder / name) == on_policy(trainers)
