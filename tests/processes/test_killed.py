"""Who killed a process: from files as the kernel writes them, and by the kernel itself where a cgroup may be made."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.killed import Killed, memory_limit, oom_kills, why_killed
from tests.processes import test_supervisor
from tests.processes.test_supervisor import WAITS, Run, first_time
from tests.support.speed import until

MIB = 2**20


def write(root: Path, **files: str) -> None:
    """files: paths below root with __ for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_cgroup(root: Path, kills: int) -> None:
    events = f"low 0\nhigh 0\nmax 7\noom 5\noom_kill {kills}\n"
    write(root, proc__self__cgroup="4:memory:/job\n0::/a/b\n", proc__vmstat="pgfault 9\noom_kill 40\n")
    (root / "sys/fs/cgroup/a/b").mkdir(parents=True, exist_ok=True)
    (root / "sys/fs/cgroup/a/b/memory.events").write_text(events)


def test_the_counter_is_that_of_our_cgroup_and_else_of_the_machine(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None
    write(tmp_path, proc__vmstat="pgfault 9\noom_kill 40\n")
    assert oom_kills(tmp_path) == 40
    make_cgroup(tmp_path, 3)
    assert oom_kills(tmp_path) == 3


def test_in_a_container_the_path_of_the_host_is_looked_for_from_its_end_up(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="0::/host/docker/abc\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.events").write_text("oom_kill 1\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{300 * MIB}\n")
    assert oom_kills(tmp_path) == 1
    assert memory_limit(tmp_path) == f"the limit of the cgroup {tmp_path}/sys/fs/cgroup is 0.29 GiB"


def test_the_limit_is_the_smallest_above_us_and_no_limit_is_the_machines_memory(tmp_path: Path) -> None:
    make_cgroup(tmp_path, 0)
    (tmp_path / "sys/fs/cgroup/a/b/memory.max").write_text("max\n")
    assert memory_limit(tmp_path) == f"the machine's memory is {psutil.virtual_memory().total / 2**30:.2f} GiB"
    (tmp_path / "sys/fs/cgroup/a/memory.max").write_text(f"{500 * MIB}\n")
    assert memory_limit(tmp_path) == f"the limit of the cgroup {tmp_path}/sys/fs/cgroup/a is 0.49 GiB"


@pytest.mark.parametrize(
    ("before", "now", "for_memory"), [(3, 4, True), (3, 3, False), (None, 3, None), (3, None, None)]
)
def test_a_counter_that_has_grown_blames_the_kernel(
    tmp_path: Path, before: int | None, now: int | None, for_memory: bool | None
) -> None:
    if now is not None:
        make_cgroup(tmp_path, now)
    assert why_killed("trainer", before, tmp_path) == Killed("trainer", for_memory, memory_limit(tmp_path))


@pytest.mark.parametrize(
    ("for_memory", "said"),
    [
        (True, ["the kernel's out-of-memory killer", "its limit is 0.02 GiB. ", "less"]),
        (False, ["by SIGKILL from outside, not by the kernel"]),
        (None, ["cannot be read here", "its limit is 0.02 GiB. ", "If it was memory: less"]),
    ],
)
def test_what_people_are_told_and_other_hosts_read(tmp_path: Path, for_memory: bool | None, said: list[str]) -> None:
    one = Killed("sampler on node-3", for_memory, "its limit is 0.02 GiB")
    text = one.text("less")
    assert text.startswith("sampler on node-3 was killed by ") and all(words in text for words in said)
    assert ("less" in text) == (for_memory is not False)
    assert Killed.read(tmp_path / "killed.json") is None
    one.write(tmp_path / "killed.json")
    assert Killed.read(tmp_path / "killed.json") == one


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """One that may hold 200 MiB."""
    folder = Path(f"/sys/fs/cgroup/tandem-test-{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        folder.mkdir()
    if not (folder / "memory.max").exists():
        if folder.exists():
            folder.rmdir()
        pytest.skip("no cgroup with a memory limit can be made here: that takes root and a writable cgroup v2")
    (folder / "memory.max").write_text(str(200 * MIB))
    try:
        yield folder
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


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
    assert lines[0].startswith("tandem: trainer was")
    assert f"the limit of the cgroup {small_cgroup} is 0.20 GiB." in lines[0]
    assert "model.gradient_checkpointing=true" in lines[0]
    assert "restart 1 of 5" in err
    assert "it was killed for it twice without a new step in between" in err


def test_a_sigkill_from_outside_is_called_that(tmp_path: Path) -> None:
    sampler = first_time("crashed", "os.kill(os.getpid(), 9)", "time.sleep(60)")
    trainer = (
        "import os, time\nwhile 'attempt 2' not in open(os.environ['FOLDER'] + '/sampler.log').read(): time.sleep(0.02)"
    )
    code, _, err = Run(tmp_path, sampler, trainer, grace_s=0.2).end()
    assert code == 0
    assert "tandem: sampler was killed by SIGKILL from outside, not by the kernel\n" in err


LEAVES_REPORT = (
    "import os; from pathlib import Path; from launcher.killed import Killed\n"
    "report = Killed('trainer on node-3', True, 'its limit is 8.00 GiB')\n"
    "report.write(Path(os.environ['FOLDER']) / 'killed.json')\nos._exit(247)"
)


def test_the_kernels_kill_on_another_host_is_told_as_that_host_saw_it_and_a_second_one_ends_the_run_with_2(
    tmp_path: Path,
) -> None:
    """What this host knows of its memory and its kernel says nothing of the other's."""
    (tmp_path / "checkpoint").touch()
    code, _, err = Run(tmp_path, WAITS, LEAVES_REPORT, on_another_host=True).end()
    assert code == 2, err
    said = (
        "tandem: trainer on node-3 was killed by the kernel's out-of-memory killer: its limit is 8.00 GiB. "
        "model.gradient_checkpointing=true"
    )
    assert err.count(said) == 2, err
    assert "it was killed for it twice without a new step in between" in err


def test_without_a_report_of_the_other_host_no_guess_is_made_and_an_old_report_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").touch()
    Killed("trainer on node-3", True).write(tmp_path / "killed.json")
    code, _, err = Run(
        tmp_path, WAITS, first_time("killed", "os._exit(247)", "pass"), on_another_host=True, grace_s=0.2
    ).end()
    assert code == 0, err
    line = next(line for line in err.splitlines() if "SIGKILL" in line)
    assert line.startswith("tandem: trainer on another host was killed by SIGKILL, by the kernel for want of memory")
