"""Locks of compiled ops that killed processes leave, for which torch would wait without end."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from common.errors import UserError
from common.paths import ROOT
from tests.support.speed import limit, until
from trainer.engine.build_locks import KernelLock, guard_ops, require_ops_folder

BUILT = Path(os.environ.get("TORCH_EXTENSIONS_DIR", ROOT / ".venv/torch_extensions")) / "deepspeed_shm_comm"
LOAD = (ROOT / "launch.sh").read_text().partition("build_cpu_op()")[2].split("'")[1]  # as the setup does


def test_who_waits_for_a_killed_builder_knows_it_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "lock")
    reads, writes = os.pipe()
    builder = os.fork()
    if not builder:
        KernelLock(path).try_acquire()
        os.write(writes, b"has it")
        signal.pause()
    os.read(reads, 10)
    waiter = os.fork()
    if not waiter:
        lock = KernelLock(path)
        assert lock.try_acquire()
        lock.release()
        os._exit(7)
    who = f"waiting for pid {builder} of {os.uname().nodename}, which compiles or loads DeepSpeed's op: {path}.kernel"
    try:
        until(lambda: who in capfd.readouterr().err)
        assert os.waitpid(waiter, os.WNOHANG) == (0, 0), "it waits"
    finally:
        os.kill(builder, signal.SIGKILL)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (waiter, builder)] == [7, -9]


def test_another_users_lock_is_taken_for_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = KernelLock(str(tmp_path / "lock"))
    (tmp_path / "lock.kernel").touch()
    opened = os.open

    def refused(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(path)
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", refused)
    assert lock.try_acquire()
    lock.release()


@pytest.mark.skipif(not BUILT.is_dir(), reason="DeepSpeed's op for CPUs is not built here")
def test_torchs_own_lock_and_another_path_to_python_hold_nobody_up(
    tmp_path: Path,
) -> None:
    shutil.copytree(BUILT, tmp_path / BUILT.name)
    (tmp_path / BUILT.name / "lock").touch()
    (tmp_path / "linked").symlink_to(sys.prefix)
    builds = []
    for python in (sys.executable, tmp_path / "linked/bin/python"):
        environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
        subprocess.run([python, "-c", LOAD], cwd=ROOT, env=environment, check=True, timeout=limit(60))
        builds.append((tmp_path / BUILT.name / ".ninja_log").read_text())
    assert builds[0] == builds[1]


def test_an_unwritable_folder_is_named_with_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ops").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    with pytest.raises(UserError, match=r"ops.* File exists.*; export TORCH_EXTENSIONS_DIR=/a/folder/of/yours"):
        require_ops_folder()


def test_a_shell_gives_the_linker_a_folder_with_spaces_and_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's (ü) & #1 %2;x[3]*"
    folder.mkdir()
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(folder))
    monkeypatch.setattr(cpp_extension, "FileBaton", cpp_extension.FileBaton)
    guard_ops()
    guard_ops()
    flags = cpp_extension._prepare_ldflags([], *[False] * 4)
    assert f"-L{folder}" in shlex.split(" ".join(flags))
