"""A disk in trouble pauses a run with the reason and never corrupts it; only a deadline ends it.

With the stand-ins of the checkpoint tests; tests/gloo/test_disk_trouble.py has real DeepSpeed ranks.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common import durable, exits, failpoints
from common.errors import Interrupted, Retryable
from tests.support.speed import limit
from tests.unit.test_checkpoint_faults import ONE_RANK, leftovers, resumed_step, save
from trainer.save import disk
from trainer.save.disk import Disk, DiskTrouble, together


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(failpoints, "_operations", 0)


# ---- one rank ----------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
REASONS = {
    "enospc": "No space left on device",
    "edquot": "Disk quota exceeded",
    "erofs": "Read-only file system",
    "eio": "Input/output error",
}


@pytest.mark.usefixtures("no_pause")
def test_a_save_waits_for_the_disk_with_the_reason_and_then_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str, str], None]
) -> None:
    for trouble, reason in REASONS.items():
        run, said = tmp_path / trouble, []
        save(run / "checkpoints", 1)
        monkeypatch.setattr(failpoints, "_operations", 0)
        monkeypatch.setenv("TANDEM_FAULT", f"10-60:{trouble}")
        patience = save(run / "checkpoints", 2, said.append)
        monkeypatch.delenv("TANDEM_FAULT")
        assert patience.retries == len(said) >= 2
        assert all(line.startswith("checkpoint step_000002 waits for the disk: rank 0: ") for line in said)
        assert all(reason in line for line in said)
        assert resumed_step(run) == 2
        assert leftovers(run / "checkpoints") == []
    figure("R14", f"{', '.join(REASONS)}: waited for, then saved")


@pytest.mark.usefixtures("no_pause")
def test_a_real_limit_of_the_kernel_is_waited_for_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may not grow beyond 1 kB until the third attempt; torch and the model's writer meet it in their ways."""
    save(tmp_path / "checkpoints", 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        assert leftovers(tmp_path / "checkpoints") == [], "what a failed attempt wrote keeps the disk full"
        if len(said) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
        save(tmp_path / "checkpoints", 2, say)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(said) == 2
    assert "File too large" in said[0]
    assert resumed_step(tmp_path) == 2


@pytest.mark.usefixtures("no_pause")
def test_room_is_looked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has one float32 parameter: 2 · 4 bytes of model and 12 of AdamW, and a fifth more, are 24 bytes."""
    save(tmp_path / "checkpoints", 1)
    free, said, operations = [23], [], []
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    monkeypatch.setattr(durable, "file_operation", lambda name, path: operations.append(name))

    def say(text: str) -> None:
        said.append(text)
        assert "write" not in operations
        free[0] = 24

    assert save(tmp_path / "checkpoints", 2, say).retries == 1
    assert "No space left on device: needs 0.00 GB, 0.00 GB are free" in said[0]
    assert resumed_step(tmp_path) == 2


@pytest.mark.usefixtures("no_pause")
def test_after_the_deadline_the_run_ends_retryable_with_the_reason_and_the_last_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "checkpoints", 1)
    monkeypatch.setenv("TANDEM_FAULT", "10-1000000:enospc")
    monkeypatch.setattr(disk, "_FIRST_PAUSE_S", 0.01)
    with pytest.raises(Retryable, match=r"checkpoint step_000002 failed for .*No space left on device.* Make room"):
        save(tmp_path / "checkpoints", 2, patience_s=0.1)
    monkeypatch.delenv("TANDEM_FAULT")
    assert resumed_step(tmp_path) == 1


def test_pauses_double_up_to_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(disk.time, "sleep", slept.append)
    attempts = iter([OSError(errno.ENOSPC, "full")] * 9 + [None])

    def attempt() -> str:
        error = next(attempts)

        def work() -> None:
            if error:
                raise error

        together(ONE_RANK, work)
        return "done"

    assert Disk(ONE_RANK, 1000.0, lambda _: None).persist("it", attempt) == "done"
    assert slept == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_ctrl_c_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "interrupted", lambda: True)

    def attempt() -> None:
        raise DiskTrouble("rank 0: full")

    with pytest.raises(Interrupted):
        Disk(ONE_RANK, 1000.0, lambda _: None).persist("it", attempt)


def test_an_old_checkpoint_that_cannot_be_deleted_is_said_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path / "checkpoints", step)
    remove_dir, said = durable.remove_dir, []

    def failing(path: Path) -> None:
        if path.name == "step_000001":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        remove_dir(path)

    monkeypatch.setattr(durable, "remove_dir", failing)
    assert save(tmp_path / "checkpoints", 3, said.append).retries == 0
    assert len(said) == 1 and "an old checkpoint stays for now" in said[0]
    assert resumed_step(tmp_path) == 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "x"), errno.ENOSPC),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (OSError(errno.EACCES, "x"), None),
        (FileNotFoundError(errno.ENOENT, "x"), None),
        (RuntimeError("failed (os error 13)"), None),
        (ValueError("28"), None),
        (None, None),
    ],
)
def test_trouble_that_may_pass_is_told_from_errors_that_waiting_does_not_cure(error: Any, expected: Any) -> None:
    assert durable.disk_trouble(error) == expected


def test_trouble_is_found_under_the_error_that_hides_it() -> None:
    try:
        try:
            raise OSError(errno.EDQUOT, "quota")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 - as torch does
    except RuntimeError as error:
        assert durable.disk_trouble(error) == errno.EDQUOT


def test_an_error_that_waiting_does_not_cure_is_raised_as_it_is() -> None:
    def work() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        Disk(ONE_RANK, 1000.0, print).persist("it", lambda: together(ONE_RANK, work))


def test_a_process_that_meets_a_full_disk_anywhere_else_ends_retryable_with_the_reason() -> None:
    code = (
        "import os; from common import exits; os._exit(exits.run('x', lambda: os.write(os.open('/dev/full', 1), b'1')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == exits.RETRYABLE
    assert done.stderr == (
        "tandem: x: [Errno 28] No space left on device: make room or repair the disk, then start again\n"
    )


# ---- several ranks -----------------------------------------------------------------------------------------


class ThreadRanks:
    """An Exchange among threads."""

    def __init__(self, world_size: int):
        self.barrier, self.parts = threading.Barrier(world_size, timeout=limit(10)), [[0.0]] * world_size

    def of(self, rank: int) -> Any:
        def add(values: list[float]) -> list[float]:
            self.parts[rank] = values
            self.barrier.wait()
            total = [sum(column) for column in zip(*self.parts, strict=True)]
            self.barrier.wait()
            return total

        def agree(value: bool) -> bool:
            return bool(add([float(value and rank == 0)])[0])

        return SimpleNamespace(rank=rank, world_size=len(self.parts), add=add, agree=agree)


def test_when_one_rank_meets_a_full_disk_all_of_them_retry_together_and_rank_0_says_whose_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk, "_FIRST_PAUSE_S", 0.0)
    ranks, tried, said = ThreadRanks(3), [0, 0, 0], []

    def live(rank: int) -> None:
        me = ranks.of(rank)

        def write() -> None:
            tried[rank] += 1
            if rank == 2 and tried[rank] <= 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        Disk(me, 1000.0, said.append if rank == 0 else lambda _: None).persist("it", lambda: together(me, write))

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=limit(20))
    assert tried == [3, 3, 3]
    assert said == ["it waits for the disk: rank 2: No space left on device; trying again in 0 s"] * 2
