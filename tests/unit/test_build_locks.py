"""Locks of compiled ops that killed processes leave, for which torch would wait without end."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from trainer.engine.build_locks import loading_ops


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    (tmp_path / "ops" / "py311" / "op").mkdir(parents=True)
    return tmp_path / "ops" / "py311" / "op" / "lock"


def test_a_lock_stays_while_others_are_loading_and_is_removed_when_nobody_is(lock: Path) -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(loading_ops())
    lock.touch()
    second.enter_context(loading_ops())
    first.close()
    with loading_ops():
        assert lock.exists(), "the second is not done yet"
    second.close()
    with loading_ops():
        assert not lock.exists()


def test_what_a_process_leaves_that_is_killed_while_it_loads_holds_nobody_up(lock: Path) -> None:
    if not (pid := os.fork()):
        with loading_ops():
            lock.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert lock.exists()
    with loading_ops():
        assert not lock.exists()


def test_a_folder_that_cannot_be_written_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ops").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    with loading_ops():
        pass
