"""Who killed a process, from files as the kernel writes them."""

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launcher.processes import killed
from launcher.processes.killed import OomKills, oom_kills
from launcher.resources.machine import memory_limit, shared_memory_bytes, usable_cores
from tests.processes import test_supervisor
from tests.processes.test_supervisor import WAITS, Run
from tests.support.own_process import run

MIB = 2**20


def write(root: Path, files: dict[str, str]) -> None:
    """files: texts by path below root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_cgroup(root: Path, kills: int) -> Path:
    """The folder of our cgroup, which stands in another."""
    events = f"low 0\nhigh 0\nmax 7\noom 5\noom_kill {kills}\n"
    write(root, {"proc/self/cgroup": "4:memory:/job\n0::/a/b\n", "proc/vmstat": "pgfault 9\noom_kill 40\n"})
    write(root, {"sys/fs/cgroup/a/b/memory.events": events})
    return root / "sys/fs/cgroup/a/b"


def test_the_counter_is_that_of_our_cgroup_and_else_of_the_machine(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None
    write(tmp_path, {"proc/vmstat": "pgfault 9\noom_kill 40\n"})
    assert oom_kills(tmp_path) == 40
    make_cgroup(tmp_path, 3)
    assert oom_kills(tmp_path) == 3


def test_the_limit_is_the_smallest_above_us_and_no_limit_is_the_machines_memory(tmp_path: Path) -> None:
    folder = make_cgroup(tmp_path, 0)
    (folder / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path) == (psutil.virtual_memory().total, "the machine's memory")
    (folder.parent / "memory.max").write_text(f"{500 * MIB}\n")
    assert memory_limit(tmp_path) == (500 * MIB, f"the limit of the cgroup {folder.parent}")
    write(tmp_path, {"proc/self/cgroup": "0::/a/of/the/host\n"})  # in a container, which does not have it
    assert memory_limit(tmp_path) == (500 * MIB, f"the limit of the cgroup {folder.parent}")


@pytest.mark.parametrize(
    ("files", "memory", "cores"),
    [
        ({"unified/a/memory.max": f"{500 * MIB}", "unified/a/b/cpu.max": "50000 100000"}, 500, 1),
        ({"unified/a/memory.max": f"{500 * MIB}", "unified/a/b/memory.high": f"{400 * MIB}"}, 400, 8),
        ({"memory/job/memory.limit_in_bytes": f"{300 * MIB}", "memory/memory.limit_in_bytes": f"{2**63 - 4096}"},
         300, 8),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "250000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, None, 3),  # of a host's
        ({"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000", "a/b/cpu.max": "max 9"}, None, 8),
        ({"a/cpu.max": "200000 50000", "a/b/cpu.max": "400000 50000"}, None, 4),
    ],
)  # fmt: skip
def test_memory_and_cores_are_those_of_the_container_in_both_kinds_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], memory: int | None, cores: int
) -> None:
    write(tmp_path, {"proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job\n0::/a/b\n"})
    write(tmp_path, {f"sys/fs/cgroup/{name}": text + "\n" for name, text in files.items()})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert len(usable_cores(tmp_path)) == cores and set(usable_cores(tmp_path)) <= set(range(8))
    assert memory_limit(tmp_path)[0] == (psutil.virtual_memory().total if memory is None else memory * MIB)


@contextlib.contextmanager
def a_control_group(controller: str, **files: str) -> Iterator[Path]:
    """A real one, of cgroup v1, into which a process may go."""
    folder = Path(f"/sys/fs/cgroup/{controller}/tandem-test-{os.getpid()}")
    try:
        folder.mkdir()
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)
    except OSError as error:
        pytest.skip(f"needs root and cgroup v1: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


def in_group(folder: Path, code: str) -> str:
    enter = f"import os; open('{folder}/cgroup.procs', 'w').write(str(os.getpid())); {code}"
    return run([sys.executable, "-c", enter])


def test_a_real_limit_is_seen_by_doctor_and_its_kills_are_counted() -> None:
    with a_control_group("memory", memory__limit_in_bytes=str(300 * MIB)) as folder:
        said = in_group(folder, "from launcher import doctor; print(doctor.memory().text, doctor.memory().ok)")
        assert said.startswith("memory: 0.3 GiB, the limit of the cgroup") and said.endswith("False\n")
        lines = """
            import subprocess, sys
            from launcher.processes.killed import OomKills
            kills = OomKills()
            eats = [sys.executable, "-c", "x = bytearray(400 << 20)"]
            assert subprocess.run(eats).returncode == -9
            print(kills.why_killed("trainer", "less"), kills.why_killed("sampler", "less"))
        """
        told = in_group(folder, f"exec({textwrap.dedent(lines)!r})")
        assert '(True, "trainer was killed by the kernel' in told
        assert "(False, 'sampler was killed by SIGKILL from" in told
    with a_control_group("cpu", cpu__cfs_quota_us="50000") as folder:
        assert in_group(folder, "from launcher.resources.machine import usable_cores as f; print(len(f()))") == "1\n"


COMMAND = "os.execv = lambda *_: print(os.sched_getaffinity(0)); import launcher.__main__ as m; m.main(['eval', 'x'])"


def test_every_command_of_a_container_starts_on_the_cores_that_it_may_use() -> None:
    """As vLLM, torch and all others count them: by their affinity."""
    with a_control_group("cpu", cpu__cfs_quota_us="50000") as folder:
        assert in_group(folder, COMMAND) in ("{0}\n", "{1}\n")
    with a_control_group("cpuset", cpuset__cpus="1", cpuset__mems="0") as folder:
        assert in_group(folder, COMMAND) == "{1}\n"


def test_a_limit_above_ours_bounds_what_dev_shm_may_hold_of_it(tmp_path: Path) -> None:
    with a_control_group("memory", memory__limit_in_bytes=str(300 * MIB)) as folder:
        (inner := folder / "inner").mkdir()
        try:
            said = in_group(inner, "from launcher.resources.machine import shared_memory_bytes as f; print(f() >> 20)")
        finally:
            inner.rmdir()
        assert int(said) <= 150
    files = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": f"{300 * MIB}", "dev/shm/x": ""}
    write(tmp_path, files)
    assert shared_memory_bytes(tmp_path) == 150 * MIB
    shutil.rmtree(tmp_path / "dev")
    assert shared_memory_bytes(tmp_path) == 0


@pytest.mark.parametrize(
    ("before", "now", "for_memory", "said"),
    [
        (3, 4, True, "trainer was killed by the kernel's out-of-memory killer: LIMIT. less"),
        (3, 3, False, "trainer was killed by SIGKILL from outside, not by the kernel"),
        (None, 3, False, "cannot be read here. LIMIT. If it was memory: less"),
        (3, None, False, "cannot be read here. LIMIT. If it was memory: less"),
    ],
)
def test_a_counter_that_has_grown_blames_the_kernel(
    tmp_path: Path, before: int | None, now: int | None, for_memory: bool, said: str
) -> None:
    if before is not None:
        make_cgroup(tmp_path, before)
    kills = OomKills(tmp_path)
    if now is not None:
        make_cgroup(tmp_path, now)
    elif before is not None:
        shutil.rmtree(tmp_path / "sys")
        (tmp_path / "proc/vmstat").unlink()
    found, told = kills.why_killed("trainer", "less")
    limit = f"the machine's memory is {psutil.virtual_memory().total / 2**30:.2f} GiB"
    assert found == for_memory and told.endswith(said.replace("LIMIT", limit))


def test_a_kill_explains_one_end_and_only_one_right_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(killed, "time", SimpleNamespace(monotonic=lambda: now))
    make_cgroup(tmp_path, 3)
    kills = OomKills(tmp_path)

    def is_blamed(who: str) -> bool:
        return kills.why_killed(who, "less")[0]

    make_cgroup(tmp_path, 4)  # a rank; DeepSpeed's launcher says so three seconds later
    kills.look()
    now = 3.0
    assert is_blamed("trainer") and not is_blamed("sampler"), "whom somebody killed then"
    make_cgroup(tmp_path, 6)
    assert is_blamed("trainer") and is_blamed("sampler"), "both at once"
    make_cgroup(tmp_path, 7)  # what a reward started, which failed alone
    kills.look()
    now = 100.0
    assert not is_blamed("sampler")


def test_a_counter_that_grows_while_the_trainer_is_killed_ends_the_run_the_second_time_without_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter is the number of bytes in a file, to which the trainer adds one."""
    (tmp_path / "checkpoint").touch()
    (counter := tmp_path / "counter").touch()
    counts = "import os, launcher.processes.killed as killed\n"
    counts += f"killed.oom_kills = lambda _: os.path.getsize({str(counter)!r})\n"
    monkeypatch.setattr(test_supervisor, "DRIVER", counts + test_supervisor.DRIVER)
    trainer = f"import os; open({str(counter)!r}, 'a').write('x'); os.kill(os.getpid(), 9)"
    code, _, err = Run(tmp_path, WAITS, trainer).end()
    assert code == 2, err
    lines = [line for line in err.splitlines() if "was killed by the kernel's out-of-memory killer" in line]
    assert len(lines) == 2 and lines[0].startswith("tandem: trainer was") and "GiB" in lines[0], err
    assert "model.gradient_checkpointing=true" in lines[0]
    assert "restart 1 of 5" in err and "it ran out of memory twice without a new step in between" in err


def test_a_kill_on_another_host_is_explained_by_that_host_alone(tmp_path: Path) -> None:
    """What this host knows of its memory and its kernel says nothing of the other's."""
    code, _, err = Run(tmp_path, WAITS, "import os; os._exit(247)", on_other_hosts=True).end()
    assert code == 1
    assert "a rank was killed by SIGKILL" in err and "by the kernel" not in err
