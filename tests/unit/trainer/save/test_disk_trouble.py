"""A disk in trouble pauses a run with the reason and never corrupts it; only a deadline ends it.

With the stand-ins of the checkpoint tests; tests/gloo/test_disk_trouble.py has real DeepSpeed ranks.
"""

import errno
import itertools
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common import durable, failpoints
from common.errors import Interrupted, UserError
from common.files import weights
from common.paths import ROOT
from common.processes import exits
from sampler.engine.verify import checked_tensors
from tests.support.configs import config_of
from tests.support.plain_policy import OneRank, PlainPolicy
from tests.support.raising import raising
from tests.support.tiny import tiny_model
from tests.unit.trainer.save.test_checkpoint_faults import ONE_RANK, armed, resumed_step, save
from trainer.save import disk
from trainer.save.disk import DiskTrouble, retry_on_disk_trouble, sharing_disk_trouble


@contextmanager
def files_end_at(size: int = 1024) -> Iterator[None]:
    """A real limit of the kernel, which torch and the model's writer meet in their ways."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


TROUBLES = {
    "No space left on device": partial(armed, "10-1000000:enospc"),
    "Disk quota exceeded": partial(armed, "10-1000000:edquot"),
    "Read-only file system": partial(armed, "10-1000000:erofs"),
    "Input/output error": partial(armed, "10-1000000:eio"),
    "File too large": files_end_at,
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seconds slept; nothing else takes time."""
    slept = [0]

    def sleep(seconds: int) -> None:
        slept[0] += seconds

    monkeypatch.setattr(disk, "time", SimpleNamespace(monotonic=lambda: slept[0], sleep=sleep))
    return slept


@pytest.mark.parametrize("reason", TROUBLES)
def test_a_save_waits_for_the_disk_with_the_reason_and_only_its_deadline_ends_the_run(
    tmp_path: Path,
    clock: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    figure: Callable[[str, str], None],
    reason: str,
) -> None:
    monkeypatch.setattr(ONE_RANK, "stall_timeout_s", 1800.0)
    save(tmp_path / "checkpoints", 1)
    with TROUBLES[reason](), pytest.raises(DiskTrouble, match=f"rank 0: .*{reason}"):
        save(tmp_path / "checkpoints", 2)
    assert 1740 < clock[0] <= 1800
    if reason == "File too large":  # where deleting works
        assert [*tmp_path.glob("checkpoints/.*")] == [], "what a failed attempt wrote keeps the disk full"
    assert resumed_step(tmp_path) == 1
    with ExitStack() as trouble:
        trouble.enter_context(TROUBLES[reason]())
        monkeypatch.setattr(disk, "report_progress", lambda _: trouble.close())  # room after the first attempt

        def slow_attempt(ranks: Any) -> Any:
            clock[0] += 1800
            return sharing_disk_trouble(ranks)

        monkeypatch.setattr(disk, "sharing_disk_trouble", slow_attempt)
        save(tmp_path / "checkpoints", 2)
    assert resumed_step(tmp_path) == 2
    waits = [line for line in capsys.readouterr().err.splitlines() if "step_000002 waits for the disk" in line]
    assert [int(line.split()[-2]) for line in waits[:8]] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert all("rank 0: " in line and reason in line for line in waits)
    figure("R14", f"{', '.join(TROUBLES)}: waited for, then saved; after channel.stall_timeout_s the run ends with 75")


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("what", ["a checkpoint", "a version"])
def test_whichever_file_operation_fails_once_the_next_attempt_writes_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(OneRank, "stall_timeout_s", 60.0)
    policy = PlainPolicy(tiny_model(tmp_path / "model"))
    for step in itertools.count(1):
        with armed(f"{step}:eio"):
            if what == "a checkpoint":
                save(tmp_path / "checkpoints", step)
                assert resumed_step(tmp_path) == step
            else:
                published = policy.publish(tmp_path / "weights", step)
                checked_tensors(Path(published.weights_dir), weights.read_manifest(published), config_of())
            if failpoints._operations < step:
                break
    assert step > 10, "it has more operations than that"


def test_a_full_disk_is_locked_all_the_same(tmp_path: Path) -> None:
    with files_end_at(0), durable.lock(tmp_path / "lock", UserError):
        pass


def test_ctrl_c_ends_the_pause(monkeypatch: pytest.MonkeyPatch, clock: list[int]) -> None:
    monkeypatch.setattr(disk, "interrupted", lambda: True)
    ranks: Any = SimpleNamespace(rank=0, world_size=1, stall_timeout_s=60.0, agree=bool, any_rank=bool)
    with pytest.raises(Interrupted):
        retry_on_disk_trouble(ranks, "it", raising(DiskTrouble("rank 0: full")))
    assert clock == [1]


def hidden(trouble: OSError) -> Exception:
    error = RuntimeError("unexpected pos 704 vs 598")
    error.__context__ = trouble  # torch raises without `from`
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (hidden(OSError(errno.EDQUOT, "quota")), errno.EDQUOT),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (OSError(errno.EACCES, "x"), None),
        (RuntimeError("failed (os error 13)"), None),
        (ValueError("28"), None),
    ],
)
def test_trouble_that_may_pass_is_told_from_errors_that_waiting_does_not_cure(error: Any, expected: Any) -> None:
    assert durable.disk_trouble(error) == expected


def test_an_error_that_waiting_does_not_cure_is_raised_as_it_is() -> None:
    def attempt() -> None:
        with sharing_disk_trouble(ONE_RANK):
            raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        retry_on_disk_trouble(ONE_RANK, "it", attempt)


def test_a_process_that_meets_a_full_disk_anywhere_else_ends_retryable_with_the_reason() -> None:
    code = "import os; from common.processes import exits; file = os.open('/dev/full', 1)\n"
    code += "os._exit(exits.run('x', lambda: os.write(file, b'1')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == exits.RETRYABLE
    assert "No space left on device: make room" in done.stderr
