"""A disk in trouble ends a run with the reason, to be started again, and never corrupts it.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common import durable, exits, failpoints
from common.errors import Retryable
from tests.support.speed import limit
from tests.unit.test_checkpoint_faults import ONE_RANK, leftovers, resumed_step, save
from trainer.save.disk import together

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def files_end_at_1_kb() -> Iterator[None]:
    """A real limit of the kernel, which torch and the model's writer meet in their ways."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def failing(trouble: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "_operations", 0)
        patch.setenv("TANDEM_FAULT", f"10-1000000:{trouble}")
        yield


TROUBLES = {
    "No space left on device": lambda: failing("enospc"),
    "Disk quota exceeded": lambda: failing("edquot"),
    "Read-only file system": lambda: failing("erofs"),
    "Input/output error": lambda: failing("eio"),
    "File too large": files_end_at_1_kb,
}


@pytest.mark.parametrize("reason", TROUBLES)
def test_a_save_that_the_disk_does_not_take_ends_retryable_with_the_reason_and_the_last_checkpoint_whole(
    tmp_path: Path, figure: Callable[[str, str], None], reason: str
) -> None:
    save(tmp_path / "checkpoints", 1)
    with TROUBLES[reason](), pytest.raises(Retryable, match=f"rank 0: .*{reason}.*start again"):
        save(tmp_path / "checkpoints", 2)
    if reason == "File too large":  # where deleting works
        assert leftovers(tmp_path / "checkpoints") == [], "what a failed attempt wrote keeps the disk full"
    assert resumed_step(tmp_path) == 1
    save(tmp_path / "checkpoints", 2)
    assert resumed_step(tmp_path) == 2
    figure("R14", f"{', '.join(TROUBLES)}: the run ends with 75, the checkpoint before stays whole")


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


def test_an_error_that_another_start_does_not_cure_is_raised_as_it_is() -> None:
    def work() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        together(ONE_RANK, work)


def test_a_process_that_meets_a_full_disk_anywhere_else_ends_retryable_with_the_reason() -> None:
    code = (
        "import os; from common import exits; os._exit(exits.run('x', lambda: os.write(os.open('/dev/full', 1), b'1')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == exits.RETRYABLE
    assert done.stderr == (
        "tandem: x: [Errno 28] No space left on device: make room or repair the disk, then start again\n"
    )


def test_when_one_rank_meets_a_full_disk_all_of_them_end_and_say_whose_it_is() -> None:
    barrier, parts, ended = threading.Barrier(3, timeout=limit(10)), [[0.0]] * 3, [""] * 3

    def live(rank: int) -> None:
        def add(values: list[float]) -> list[float]:
            parts[rank] = values
            barrier.wait()
            return [sum(column) for column in zip(*parts, strict=True)]

        def write() -> None:
            if rank == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "here")

        try:
            together(SimpleNamespace(rank=rank, world_size=3, add=add), write)
        except Retryable as error:
            ended[rank] = str(error)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=limit(20))
    advice = "Make room or repair the disk, then start again"
    assert ended == [
        *[f"rank 2: No space left on device. {advice}"] * 2,
        f"rank 2: [Errno 28] No space left on device: 'here'. {advice}",
    ]
