"""Several hosts: the hostfile, the orders, and processes over a stand-in for ssh that ends with nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.errors import UserError
from launcher.hosts import HostCommands, HostLine, passed_on, placement_over, read_hosts, settings_over
from launcher.killed import Killed, memory_limit
from launcher.machine import ROOT
from launcher.over_hosts import is_here, reach
from tests.support.configs import config_in
from tests.support.speed import limit, until


def written(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_a_hostfile_is_deepspeeds_with_samplers_beside_the_slots(tmp_path: Path) -> None:
    text = "# two that train\n10.0.0.1 slots=2\nnode-3 slots=2 samplers=1\n\n10.0.0.4 slots=0 samplers=4\n"
    assert read_hosts(written(tmp_path, text)) == (
        HostLine("10.0.0.1", 2, 0),
        HostLine("node-3", 2, 1),
        HostLine("10.0.0.4", 0, 4),
    )
    assert read_hosts(written(tmp_path, "a slots=1\nb slots=1\n"))[0] == HostLine("a", 1, 1), "somebody must sample"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\n", "hosts:1: 'a' is not a host with its slots; write it as 10.0.0.1 slots=2 samplers=1"),
        ("a slots=1\nb slot=1\n", "hosts:2: 'b slot=1' is not"),
        ("a slots=1; rm -rf slots=1\n", "is not a host with its slots"),
        ("-oProxyCommand=x slots=1\n", "is not a host with its slots"),
        ("a slots=0 samplers=1\nb slots=1\n", "the first host has rank 0"),
        ("a slots=1\na slots=1\n", "a stands there twice"),
        ("", "the first host has rank 0"),
    ],
)
def test_a_wrong_hostfile_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        read_hosts(written(tmp_path, text))
    assert says in str(refused.value)


def test_the_hostfile_counts_the_ranks_and_names_the_address(tmp_path: Path) -> None:
    hosts = (HostLine("10.0.0.1", 2, 0), HostLine("10.0.0.3", 1, 2))
    place = placement_over(hosts, config_in(tmp_path))
    assert (place.num_ranks, place.trainer_place) == (3, "10.0.0.1 × 2, 10.0.0.3 × 1, 3 ranks")
    assert place.sampler_place == "10.0.0.3 × 2"
    with pytest.raises(UserError, match="num_ranks 2 and the hostfile has 3 slots"):
        placement_over(hosts, config_in(tmp_path, trainer={"num_ranks": 2}))
    with pytest.raises(UserError, match=r"trainer.devices \[0\] are of one host"):
        placement_over(hosts, config_in(tmp_path, trainer={"devices": [0]}))
    address, count = settings_over(hosts, config_in(tmp_path))
    assert address.startswith("channel.endpoint=tcp://10.0.0.1:") and count == "sampler.num_samplers=2"
    channel = {"endpoint": "tcp://10.0.0.1:5555"}
    assert settings_over((hosts[0], HostLine("b", 0, 1)), config_in(tmp_path, channel=channel)) == []
    with pytest.raises(UserError, match="num_samplers 3 and the hostfile has 2"):
        settings_over(hosts, config_in(tmp_path, sampler={"num_samplers": 3}))


def test_every_host_gets_its_ranks_and_its_samplers_behind_them(tmp_path: Path) -> None:
    hosts = (HostLine("10.0.0.1", 2, 0), HostLine("10.0.0.3", 1, 2))
    config = config_in(tmp_path, vllm={"tensor_parallel_size": 2})
    commands = HostCommands(tmp_path / "c.yaml", ["a.b=1"], config, placement_over(hosts, config), hosts)
    trainer = json.loads(Path(commands.trainer("x=y").argv[-1]).read_text())
    children = commands.samplers()
    assert [child.name for child in children] == ["sampler.0", "sampler.1"]
    sampler = [order for child in children for order in json.loads(Path(child.argv[-1]).read_text())]
    assert [(o["host"], o["gpus"], o["launcher_depth"]) for o in trainer] == [
        ("10.0.0.1", [0, 2], 2),
        ("10.0.0.3", [0, 1], 2),
    ]
    first, second = (o["argv"] for o in trainer)
    assert first[first.index("--node_rank") + 1] == "0" and second[second.index("--node_rank") + 1] == "1"
    assert first[first.index("--master_addr") + 1] == second[second.index("--master_addr") + 1] == "10.0.0.1"
    assert first[-1] == "x=y" and "a.b=1" in first
    hostfile = Path(first[first.index("--hostfile") + 1]).read_text()
    assert hostfile == "10.0.0.1 slots=2\n10.0.0.3 slots=1\n"
    assert [(o["host"], o["gpus"], o["argv"][-1]) for o in sampler] == [
        ("10.0.0.3", [1, 2], "sampler.0"),
        ("10.0.0.3", [3, 2], "sampler.1"),
    ]
    assert len({o["log"] for o in (*trainer, *sampler)}) == 4


def test_other_hosts_get_settings_of_libraries_and_no_secret() -> None:
    given = {"NCCL_SOCKET_IFNAME": "ib0", "HF_TOKEN": "x", "HF_HOME": "/h", "HOME": "/root", "TANDEM_SSH": "ssh"}
    assert passed_on(given) == {"NCCL_SOCKET_IFNAME": "ib0", "HF_HOME": "/h", "TANDEM_SUPERVISED": "1"}


def test_a_host_is_reached_by_ssh_unless_it_is_this_one() -> None:
    assert is_here("127.0.0.1") and not is_here("203.0.113.7")
    here, there = reach("127.0.0.1", {}), reach("203.0.113.7", {"TANDEM_SSH": "ip netns exec"})
    assert there == ["ip", "netns", "exec", "203.0.113.7", *here]
    assert reach("203.0.113.7", {})[:3] == ["ssh", "-o", "BatchMode=yes"]
    assert here[0] == "env" and here[-1] == "launcher.on_host"


# ---- processes over a stand-in for ssh


class Connections:
    """Orders for hosts that do not exist; what "reaches" them starts the program here."""

    def __init__(self, folder: Path):
        self.folder = folder
        ssh = folder / "ssh"
        ssh.write_text('#!/bin/sh\nshift\nexec "$@"\n')
        ssh.chmod(0o755)
        self.env = os.environ | {"TANDEM_SSH": str(ssh), "PYTHONPATH": str(ROOT)}
        (folder / "proof").touch()

    def start(self, *codes: str, proof: str = "proof", env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """One process a host, each of Python code."""
        orders = [
            {
                "host": f"203.0.113.{i}",
                "name": "trainer",
                "argv": [sys.executable, "-u", "-c", code],
                "env": {},
                "log": str(self.folder / f"host{i}.log"),
                "gpus": [0, 0],
                "scratch": [],
                "processes": 1,
                "launcher_depth": 0,
                "attempt": 1,
                "proof": str(self.folder / proof),
                "kill_report": str(self.folder / "killed.json"),
                "within_s": 0.5,
                "running_s": 1000.0,
            }
            for i, code in enumerate(codes)
        ]
        (self.folder / "orders.json").write_text(json.dumps(orders))
        command = [sys.executable, "-m", "launcher.over_hosts", str(self.folder / "orders.json")]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.env | (env or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def pid_of(self, host: int) -> int:
        """What the process has written down as its own."""
        file = self.folder / f"pid{host}"
        until(lambda: file.exists() and file.read_text(), 20)
        return int(file.read_text())

    def sleeper(self, host: int, before: str = "") -> str:
        file = str(self.folder / f"pid{host}")
        return f"import os, time, signal\n{before}\nopen({file!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"


@pytest.fixture
def hosts(tmp_path: Path) -> Connections:
    return Connections(tmp_path)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=limit(60))
    return process.returncode, out


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# what holds over ssh as well: tests/processes/test_ssh.py


def check_that_one_failure_ends_all(hosts: Connections, code: int) -> None:
    process = hosts.start(hosts.sleeper(0), f"import time, sys; time.sleep(0.3); sys.exit({code})")
    other = hosts.pid_of(0)
    assert ended(process)[0] == code
    until(lambda: is_gone(other), 20)


def check_that_a_signal_reaches_all(hosts: Connections) -> None:
    handler = "signal.signal(signal.SIGINT, lambda *_: os._exit(130))"
    process = hosts.start(hosts.sleeper(0, handler), hosts.sleeper(1, handler))
    hosts.pid_of(0), hosts.pid_of(1)
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130


def check_that_a_killed_first_host_leaves_nothing(hosts: Connections) -> None:
    process = hosts.start(hosts.sleeper(0), hosts.sleeper(1))
    pids = [hosts.pid_of(i) for i in (0, 1)]
    process.kill()
    process.communicate()
    until(lambda: all(map(is_gone, pids)), 20)


@pytest.mark.processes
def test_output_of_every_host_is_shown_in_whole_lines_and_kept_in_its_log(hosts: Connections) -> None:
    code, out = ended(hosts.start("print('one')", "print('two')"))
    assert (code, sorted(out.split())) == (0, ["one", "two"])
    assert [(hosts.folder / f"host{i}.log").read_text().splitlines()[-1] for i in (0, 1)] == ["one", "two"]


@pytest.mark.processes
def test_a_process_counts_its_hours_from_the_start_of_the_run_by_its_own_hosts_clock(hosts: Connections) -> None:
    code, out = ended(
        hosts.start("from common import exits; import time; print(time.monotonic() - exits.started_at())")
    )
    assert code == 0 and 1000 <= float(out) < 1000 + limit(60)


@pytest.mark.processes
@pytest.mark.parametrize("code", [2, 75, 1])
def test_the_first_host_that_fails_says_how_all_end_and_nothing_stays(hosts: Connections, code: int) -> None:
    check_that_one_failure_ends_all(hosts, code)


@pytest.mark.processes
def test_a_signal_reaches_the_process_on_every_host(hosts: Connections) -> None:
    check_that_a_signal_reaches_all(hosts)


@pytest.mark.processes
def test_a_killed_first_host_leaves_nothing_on_the_others(hosts: Connections) -> None:
    check_that_a_killed_first_host_leaves_nothing(hosts)


@pytest.mark.processes
def test_a_host_that_is_lost_means_start_again(hosts: Connections) -> None:
    process = hosts.start(hosts.sleeper(0), hosts.sleeper(1))
    pids = [hosts.pid_of(i) for i in (0, 1)]
    agent = psutil.Process(pids[1]).parent()
    assert agent is not None
    agent.kill()
    code, out = ended(process)
    assert code == 75 and "203.0.113.1: the connection ended" in out
    until(lambda: all(map(is_gone, pids)), 20)


@pytest.mark.processes
def test_a_killed_process_leaves_what_its_own_host_knows_of_it(hosts: Connections) -> None:
    code, out = ended(hosts.start("import os; os.kill(os.getpid(), 9)"))
    assert code == 256 - signal.SIGKILL, out
    killed = Killed.read(hosts.folder / "killed.json")
    assert killed is not None and killed.for_memory is not True
    assert (killed.who, killed.limit) == ("trainer on 203.0.113.0", memory_limit())


@pytest.mark.processes
def test_a_host_that_does_not_see_the_run_folder_is_the_users_to_mend(hosts: Connections) -> None:
    code, out = ended(hosts.start("print('one')", proof="nowhere/proof"))
    assert code == 2 and "203.0.113.0 does not see" in out and "set run.output_dir to a folder that all hosts" in out


@pytest.mark.processes
def test_a_host_without_this_folder_is_the_users_to_mend(hosts: Connections) -> None:
    (hosts.folder / "ssh").write_text("#!/bin/sh\nexit 127\n")
    code, out = ended(hosts.start("print('one')"))
    assert code == 2 and "install this folder on it under the same path: bash launch.sh setup" in out
