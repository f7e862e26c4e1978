"""Locks of compiled ops, and torch's own wait for them, which has no end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from tests.support.speed import limit
from trainer.engine import build_locks
from trainer.engine.build_locks import no_endless_wait_for_builds, remove_stale_build_locks, stale_build_locks


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(build_locks, "_LOOK_S", 0.02)
    (tmp_path / "op").mkdir()
    return tmp_path / "op" / "lock"


@pytest.fixture
def waiting(lock: Path) -> Iterator[threading.Thread]:
    """torch, which waits for the lock of a process that was killed."""
    lock.touch()
    thread = threading.Thread(target=FileBaton(str(lock)).wait, daemon=True)
    thread.start()
    yield thread
    lock.unlink(missing_ok=True)
    thread.join(limit(20))


def test_a_build_lock_is_stale_exactly_when_no_process_has_it_open(lock: Path) -> None:
    with open(lock, "w"):
        assert stale_build_locks() == []
    assert stale_build_locks() == [lock]
    remove_stale_build_locks()
    assert not lock.exists()


def test_a_lock_that_its_owner_is_about_to_remove_is_not_stale(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch closes it first; if somebody else had removed it by then, torch's own removal would fail."""
    lock.touch()
    monkeypatch.setattr(time, "sleep", lambda _: lock.unlink())
    assert stale_build_locks() == []


def test_a_lock_that_is_taken_anew_between_two_looks_is_not_stale(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.touch()
    monkeypatch.setattr(time, "sleep", lambda _: os.utime(lock, ns=(1, 1)))
    assert stale_build_locks() == []


def test_a_wait_for_nobodys_lock_is_told_and_ended(
    lock: Path, waiting: threading.Thread, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_locks, "_SAYS_AFTER_S", 0.05)
    monkeypatch.setattr(build_locks, "_ENDS_AFTER_S", 0.3)
    with no_endless_wait_for_builds():
        waiting.join(limit(20))
    assert not waiting.is_alive()
    told, removed = capsys.readouterr().err.splitlines()
    assert told.startswith(f"tandem: trainer: waits for {lock}, the lock of a build, which no process of this host has")
    assert told.endswith(f"at once: rm {lock}")
    assert removed == f"tandem: trainer: removed {lock}"


def test_a_build_that_somebody_works_on_is_waited_for(
    lock: Path, waiting: threading.Thread, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_locks, "_SAYS_AFTER_S", 0.05)
    monkeypatch.setattr(build_locks, "_ENDS_AFTER_S", 0.1)
    with open(lock, "w"), no_endless_wait_for_builds():
        waiting.join(0.5)
        assert waiting.is_alive() and lock.exists()
    assert capsys.readouterr().err == ""


def test_one_rank_of_a_host_looks_for_all(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    before = threading.active_count()
    with no_endless_wait_for_builds():
        assert threading.active_count() == before
