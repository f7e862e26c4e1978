"""Locks of compiled ops that killed processes leave, for which torch would wait without end."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from common.errors import UserError
from common.paths import ROOT
from tests.support.speed import limit
from trainer.engine.build_locks import KernelLock, guard_ops, require_ops_folder

BUILT = Path(os.environ.get("TORCH_EXTENSIONS_DIR", ROOT / ".venv/torch_extensions")) / "deepspeed_shm_comm"
LOAD = (ROOT / "launch.sh").read_text().partition("build_cpu_op()")[2].split("'")[1]  # as the setup does


def test_who_waits_for_a_killed_builder_knows_it_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (reads, writes), path = os.pipe(), str(tmp_path / "lock")
    builder = os.fork()
    if not builder:
        KernelLock(path).try_acquire()
        os.write(writes, b"has it")
        time.sleep(60)
    os.read(reads, 10)
    waiting = [os.fork() for _ in range(2)]
    if 0 in waiting:
        lock = KernelLock(path)
        assert lock.try_acquire()
        lock.release()
        os._exit(7)
    time.sleep(0.1)
    assert os.waitpid(waiting[0], os.WNOHANG) == (0, 0), "it waits"
    os.kill(builder, signal.SIGKILL)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (*waiting, builder)] == [7, 7, -9]
    who = f"waiting for pid {builder} of {os.uname().nodename}, which compiles or loads DeepSpeed's op: {path}.kernel"
    assert capfd.readouterr().err.count(who) >= 2


def test_a_lock_is_open_for_writing_unless_it_is_another_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, opened = KernelLock(str(tmp_path / "lock")), os.open
    assert lock.try_acquire()
    assert int(Path(f"/proc/self/fdinfo/{lock._file}").read_text().split("flags:")[1].split()[0], 8) & os.O_RDWR
    lock.release()

    def refused(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(path)
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", refused)
    assert lock.try_acquire()
    lock.release()


@pytest.mark.skipif(not BUILT.is_dir(), reason="DeepSpeed's op for CPUs is not built here")
def test_torchs_own_lock_that_somebody_left_holds_nobody_up(tmp_path: Path) -> None:
    shutil.copytree(BUILT, tmp_path / BUILT.name)
    (tmp_path / BUILT.name / "lock").touch()
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", LOAD], cwd=ROOT, env=environment) for _ in range(2)]
    assert [one.wait(limit(60)) for one in both] == [0, 0]


@pytest.mark.skipif(not BUILT.is_dir(), reason="DeepSpeed's op for CPUs is not built here")
def test_an_environment_that_is_reached_by_another_path_compiles_nothing_anew(tmp_path: Path) -> None:
    shutil.copytree(BUILT, tmp_path / BUILT.name)
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


@pytest.mark.parametrize("name", ["a b", "it's (ü) & #1 %2;x[3]*"])
def test_the_linker_takes_a_folder_with_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (folder := tmp_path / name).mkdir()
    libraries = ("c10", "torch_cpu", "torch", "torch_python")  # empty ones in torch's place
    for library in libraries:
        subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", folder / f"lib{library}.so"], check=True)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(folder))
    monkeypatch.setattr(cpp_extension, "FileBaton", cpp_extension.FileBaton)
    for _ in range(2):
        guard_ops()
    flags = cpp_extension._prepare_ldflags([], *[False] * 4)
    subprocess.run(f"g++ -shared -o linked.so {' '.join(flags)}", shell=True, check=True, cwd=tmp_path)
    assert all(f"-l{library}" in flags for library in libraries)
