"""Who killed a process: from files as the kernel writes them, and by the kernel itself where a cgroup may be made."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.out_of_memory import less_memory
from launcher import killed
from launcher.killed import Killed, Resident, killed_in_log, memory_limit, oom_kills, precise_gib
from tests.processes import test_supervisor
from tests.processes.test_supervisor import WAITS, Run, first_time
from tests.support.speed import limit, until

GIB = 2**30
MIB = 2**20
KILL_LINE = (
    "Memory cgroup out of memory: Killed process {pid} (python) total-vm:68504kB, anon-rss:58240kB, file-rss:6632kB, "
    "shmem-rss:8kB, UID:0 pgtables:184kB oom_score_adj:0"
)


def write(root: Path, **files: str) -> None:
    """files: paths below root with __ for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_v2(root: Path, kills: int) -> None:
    write(root, proc__self__cgroup="0::/a/b\n")
    (root / "sys/fs/cgroup/a/b").mkdir(parents=True, exist_ok=True)
    (root / "sys/fs/cgroup/a/b/memory.events").write_text(f"low 0\nhigh 0\nmax 7\noom 5\noom_kill {kills}\n")


def test_the_counter_is_that_of_our_cgroup_in_both_versions_and_else_of_the_machine(tmp_path: Path) -> None:
    v2, v1, none = tmp_path / "v2", tmp_path / "v1", tmp_path / "none"
    make_v2(v2, 3)
    write(v2, proc__vmstat="pgfault 9\noom_kill 40\n")
    assert oom_kills(v2) == 3
    write(v1, proc__self__cgroup="4:memory:/job\n0::/\n", proc__vmstat="oom_kill 40\n")
    (v1 / "sys/fs/cgroup/memory/job").mkdir(parents=True)
    (v1 / "sys/fs/cgroup/memory/job/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kills(v1) == 2
    assert oom_kills(none) is None
    write(none, proc__vmstat="pgfault 9\noom_kill 40\n")
    assert oom_kills(none) == 40


def test_in_a_container_the_path_of_the_host_is_looked_for_from_its_end_up(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="0::/host/docker/abc\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.events").write_text("oom_kill 1\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{3 * MIB}\n")
    assert oom_kills(tmp_path) == 1
    assert memory_limit(tmp_path) == (3 * MIB, f"the limit of the cgroup {tmp_path}/sys/fs/cgroup")


def test_the_limit_is_the_smallest_above_us_and_no_limit_is_the_machines_memory(tmp_path: Path) -> None:
    make_v2(tmp_path, 0)
    (tmp_path / "sys/fs/cgroup/a/b/memory.max").write_text("max\n")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_limit(tmp_path) == (machine, "the machine's memory")
    (tmp_path / "sys/fs/cgroup/a/memory.max").write_text(f"{5 * MIB}\n")
    assert memory_limit(tmp_path) == (5 * MIB, f"the limit of the cgroup {tmp_path}/sys/fs/cgroup/a")


def test_the_kernels_log_names_the_process_and_an_old_line_of_the_same_number_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, dev__kmsg=f"6,1,5000000,-;{KILL_LINE.format(pid=77)}\n6,2,9000000,-;{KILL_LINE.format(pid=78)}\n")
    assert killed_in_log([77, 78, 79], tmp_path, since=8.0) == {78: (58240 + 6632 + 8) * 1024}


def resident(tmp_path: Path, pid: int, sizes: list[tuple[int, float, int]]) -> Resident:
    """sizes: (pid, second, bytes)"""
    found = Resident("trainer", pid, tmp_path)
    for one, second, size in sizes:
        process = found._processes.setdefault(one, killed._Process(f"trainer rank {one - pid}"))
        process.sizes.append((second, size))
    return found


def test_a_counter_that_has_grown_blames_the_process_that_went_first_and_else_the_largest(tmp_path: Path) -> None:
    make_v2(tmp_path, 0)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").touch()
    found = resident(tmp_path, 50, [(50, 1.0, 4 * GIB), (51, 1.0, 2 * GIB), (50, 9.0, 5 * GIB), (51, 9.0, 3 * GIB)])
    limit = memory_limit(tmp_path)
    assert found.why_killed() == Killed("trainer rank 0 (pid 50)", False, 5 * GIB, (8.0, 4 * GIB), *limit)
    make_v2(tmp_path, 1)
    assert found.why_killed() == Killed("trainer rank 0 (pid 50)", True, 5 * GIB, (8.0, 4 * GIB), *limit)
    found._processes[51].has_ended = True
    assert found.why_killed() == Killed("trainer rank 1 (pid 51)", True, 3 * GIB, (8.0, 2 * GIB), *limit)
    assert found.total == 8 * GIB


def test_what_people_are_told_has_the_size_the_limit_and_the_settings(tmp_path: Path) -> None:
    make_v2(tmp_path, 1)
    (tmp_path / "sys/fs/cgroup/a/b/memory.max").write_text(f"{16 * MIB}\n")
    one = Killed("trainer rank 0 (pid 50)", True, 15 * MIB, (9.0, 12 * MIB), *memory_limit(tmp_path))
    said = one.text(f", the sampler {precise_gib(GIB)}", less_memory("trainer"))
    assert said.startswith(
        "trainer rank 0 (pid 50) was killed by the kernel's out-of-memory killer: it held 0.01 GiB (9 s before: "
        f"0.01 GiB), the sampler 1.00 GiB; the limit of the cgroup {tmp_path}/sys/fs/cgroup/a/b is 0.02 GiB. "
        "model.gradient_checkpointing=true"
    )
    outside = Killed("sampler (pid 7)", False, 2 * GIB, None).text("", less_memory("sampler"))
    assert (
        outside == "sampler (pid 7) was killed by SIGKILL from outside, not by the kernel; it held 2.00 GiB of memory"
    )
    unknown = Killed("sampler (pid 7)", None, 2 * GIB, None).text("", less_memory("sampler"))
    assert "neither its log nor a counter can be read here" in unknown and "If it was memory: a smaller" in unknown


@pytest.mark.parametrize("earlier", [None, (8.0, 4 * GIB)])
def test_what_was_found_on_another_host_is_read_as_it_was_written(
    tmp_path: Path, earlier: tuple[float, int] | None
) -> None:
    assert Killed.read(tmp_path / "killed.json") is None
    found = Killed("trainer rank 0 (pid 50) on node-3", True, 5 * GIB, earlier, 6 * GIB, "the machine's memory")
    found.write(tmp_path / "killed.json")
    assert Killed.read(tmp_path / "killed.json") == found


@pytest.mark.processes
def test_a_child_and_what_it_started_are_seen_with_their_names_and_sizes() -> None:
    grow = "held = bytearray(30_000_000); print(1, flush=True); import sys; sys.stdin.read()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grow!r}, '--local' + '_rank=1'])"
    child = subprocess.Popen(
        [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdin and child.stdout
    child.stdout.readline()
    found = Resident("trainer", child.pid)
    found.sample()
    labels = {process.label: process.sizes[-1][1] for process in found._processes.values()}
    child.stdin.close()
    child.stdout.close()
    child.wait(timeout=limit(20))
    assert set(labels) == {"trainer", "trainer rank 1"}
    assert labels["trainer rank 1"] > 30_000_000


def memory_cgroup() -> Path | None:
    """A folder in which a cgroup with a limit may be made by us; None where there is none."""
    for controller, file in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for folder in killed._cgroup_folders(controller, Path("/"))[-1:]:
            probe = folder / f"tandem-probe-{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):
                probe.mkdir()
                has_limit = (probe / file).exists()
                probe.rmdir()
                if has_limit:
                    return folder
    return None


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """One that may hold 200 MiB."""
    parent = memory_cgroup()
    if parent is None:
        pytest.skip("no cgroup with a memory limit can be made here: that takes root and a writable /sys/fs/cgroup")
    folder = parent / f"tandem-test-{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        name = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
        (folder / name).write_text(str(200 * MIB))
        yield folder
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


@pytest.mark.processes
def test_the_kernels_kill_is_named_and_a_second_one_without_a_step_ends_the_run_with_2(
    tmp_path: Path, small_cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor stands in the cgroup with what it starts; the kernel takes the largest."""
    (tmp_path / "checkpoint").touch()
    driver = f"open({str(small_cgroup / 'cgroup.procs')!r}, 'w').write(str(__import__('os').getpid()))\n"
    monkeypatch.setattr(test_supervisor, "DRIVER", driver + test_supervisor.DRIVER)
    grows = "import time\nheld = []\nwhile True: held.append(bytearray(10**6)); time.sleep(0.01)"
    code, _, err = Run(tmp_path, WAITS, grows).end()
    assert code == 2, err
    lines = [line for line in err.splitlines() if "was killed by the kernel's out-of-memory killer" in line]
    assert len(lines) == 2, err
    assert lines[0].startswith("tandem: trainer (pid ") and "GiB" in lines[0]
    assert f"the limit of the cgroup {small_cgroup} is 0.20 GiB." in lines[0]
    assert "model.gradient_checkpointing=true" in lines[0]
    assert "restart 1 of 5" in err
    assert "it was killed for it twice without a new step in between" in err


@pytest.mark.processes
def test_a_sigkill_from_outside_is_called_that_with_the_size_that_was_held(tmp_path: Path) -> None:
    sampler = first_time("crashed", "time.sleep(1.5); os.kill(os.getpid(), 9)", "time.sleep(60)")
    trainer = (
        "import os, time\nwhile 'attempt 2' not in open(os.environ['FOLDER'] + '/sampler.log').read(): time.sleep(0.02)"
    )
    code, _, err = Run(tmp_path, sampler, trainer, grace_s=0.2).end()
    assert code == 0
    (line,) = [line for line in err.splitlines() if "SIGKILL from outside" in line]
    assert line.startswith("tandem: sampler (pid ") and "not by the kernel; it held 0.0" in line, line


OF_NODE_3 = "Killed('trainer rank 0 (pid 7) on node-3', True, 9 * 2**30, None, 8 * 2**30, \"the machine's memory\")"
LEAVES_REPORT = (
    "import os; from pathlib import Path; from launcher.killed import Killed\n"
    f"{OF_NODE_3}.write(Path(os.environ['FOLDER']) / 'killed.json')\nos._exit(247)"
)


@pytest.mark.processes
def test_the_kernels_kill_on_another_host_is_told_as_that_host_saw_it_and_a_second_one_ends_the_run_with_2(
    tmp_path: Path,
) -> None:
    """What this host knows of its memory and its kernel says nothing of the other's."""
    (tmp_path / "checkpoint").touch()
    code, _, err = Run(tmp_path, WAITS, LEAVES_REPORT, on_another_host=True).end()
    assert code == 2, err
    said = (
        "tandem: trainer rank 0 (pid 7) on node-3 was killed by the kernel's out-of-memory killer: it held 9.00 GiB; "
        "the machine's memory is 8.00 GiB. model.gradient_checkpointing=true"
    )
    assert err.count(said) == 2, err
    assert "it was killed for it twice without a new step in between" in err


@pytest.mark.processes
def test_without_a_report_of_the_other_host_no_guess_is_made_and_an_old_report_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").touch()
    Killed("trainer rank 9 (pid 7) on node-3", True, GIB, None).write(tmp_path / "killed.json")
    killed = first_time("killed", "os._exit(247)", "pass")
    code, _, err = Run(tmp_path, WAITS, killed, on_another_host=True, grace_s=0.2).end()
    assert code == 0, err
    line = next(line for line in err.splitlines() if "SIGKILL" in line)
    assert line.startswith(
        "tandem: trainer on another host was killed by SIGKILL, by the kernel for want of memory or from outside: "
        "neither its log nor a counter can be read here; it held an unknown amount. If it was memory: "
    ), line
