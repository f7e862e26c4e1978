"""Two DeepSpeed ranks whose disk is full, or that are killed, while a version or a checkpoint is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from common import exits
from tests.support.gloo_data import TRAINER
from tests.support.replay_worker import Life, Stack, sha256_of_run, stack
from tests.support.tier import full
from trainer.save import resume


@pytest.fixture(scope="module")
def trainers() -> Stack:
    return stack()


def train(trainers: Stack, name: str, environment: dict[int, dict[str, str]], staleness: int = 0) -> Life:
    """Three steps on two ranks, from the newest checkpoint if there is one. environment: by rank."""
    run = {"resume": resume.newest_valid(trainers.folder / name / "checkpoints", print) is not None}
    trainer = TRAINER | {"save_steps": 1, "max_staleness": staleness}
    return trainers.run(name, 2, 2, environment, run=run, trainer=trainer)


@cache
def undisturbed(trainers: Stack) -> dict[str, str]:
    assert train(trainers, "undisturbed", {}).codes == [0, 0]
    return sha256_of_run(trainers.folder / "undisturbed")


def require_the_same_after_another_start(trainers: Stack, name: str, staleness: int = 0) -> None:
    life = train(trainers, name, {}, staleness)
    assert life.codes == [0, 0], life.logs[0][-3000:]
    assert sha256_of_run(trainers.folder / name) == undisturbed(trainers)


FULL = [  # rank, its first file operation without room, the newest checkpoint then
    (1, "1", None),  # of version 0
    (0, "100", 1),  # of the second checkpoint
    pytest.param(0, "16", None, marks=full),
    pytest.param(1, "11", 1, marks=full),
]


@pytest.mark.parametrize(("rank", "operation", "saved"), FULL)
def test_a_full_disk_of_either_rank_ends_both_and_another_start_trains_the_same(
    trainers: Stack, figure: Callable[[str, str], None], rank: int, operation: str, saved: int | None
) -> None:
    name = f"full-{rank}-{operation}"
    life = train(trainers, name, {rank: {"TANDEM_FAULT": f"{operation}-1000000:enospc"}})
    assert life.codes == [exits.RETRYABLE] * 2, life.logs
    for log in life.logs:
        assert f"rank {rank}: " in log and "No space left on device" in log and "Make room or repair the disk" in log
    checkpoints = trainers.folder / name / "checkpoints"
    newest = resume.newest_valid(checkpoints, print)
    assert newest == (checkpoints / f"step_{saved:06d}" if saved else None)
    require_the_same_after_another_start(trainers, name)
    figure("R14", "a full disk of a rank while publishing or saving: both end, and go on to the undisturbed state")


# ---- a version that is written behind the next step ---------------------------------------------------------


def test_writing_behind_the_steps_changes_no_bit_of_them(trainers: Stack) -> None:
    require_the_same_after_another_start(trainers, "behind", staleness=1)


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (1, "weights.shard:2:enospc"),
        pytest.param(0, "weights.shard:2:enospc", marks=full),
        (1, "weights.shard:3:kill"),
        pytest.param(0, "weights.shard:3:kill", marks=full),
        pytest.param(0, "weights.manifest:3:kill", marks=full),
    ],
)
def test_a_run_without_room_or_killed_while_a_version_is_written_behind_a_step_resumes_exactly(
    trainers: Stack, rank: int, point: str
) -> None:
    name = f"behind-{rank}-{point.replace(':', '-')}"
    life = train(trainers, name, {rank: {"TANDEM_FAILPOINT": point}}, staleness=1)
    if point.endswith("kill"):
        assert -9 in life.codes
    else:
        assert life.codes == [exits.RETRYABLE] * 2, life.logs
    require_the_same_after_another_start(trainers, name, staleness=1)
