"""Processes on several hosts: all end as the first that fails, with nothing left behind.

Over a stand-in for ssh, and where there is an sshd over a real client and server: all but what the environment keeps.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common.ports import free_port
from launcher.machine import ROOT
from tests.support.speed import is_gone, limit, until
from tests.support.ssh_server import ssh_server

# Whoever does not follow the first that fails is waited for 2 s instead of 15.
PROGRAM = (
    "import sys; from launcher import over_hosts; over_hosts._FOLLOW_S = 2.0; sys.exit(over_hosts.main(sys.argv[1:]))"
)


class Connections:
    """Orders for hosts that do not exist; what "reaches" them starts the program here."""

    def __init__(self, folder: Path):
        self.folder = folder
        ssh = folder / "ssh"
        ssh.write_text('#!/bin/sh\nshift\nexec "$@"\n')
        ssh.chmod(0o755)
        self.env = os.environ | {"TANDEM_SSH": str(ssh)}
        (folder / "proof").touch()

    def start(self, *codes: str, proof: str = "proof") -> subprocess.Popen[str]:
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
                "within_s": 0.5,
                "running_s": 1000.0,
            }
            for i, code in enumerate(codes)
        ]
        (self.folder / "orders.json").write_text(json.dumps(orders))
        command = [sys.executable, "-c", PROGRAM, str(self.folder / "orders.json")]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def pid_of(self, host: int) -> int:
        """What the process has written down as its own."""
        file = self.folder / f"pid{host}"
        until(lambda: file.exists() and file.read_text(), 20)
        return int(file.read_text())

    def sleeper(self, host: int, before: str = "") -> str:
        file = str(self.folder / f"pid{host}")
        return f"import os, time, signal\n{before}\nopen({file!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"


@pytest.fixture(params=["stand-in", "sshd"])
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connections]:
    """Over sshd both names reach the one server by connections of their own; nothing of our environment goes along."""
    found = Connections(tmp_path)
    if request.param == "sshd":
        with ssh_server(tmp_path / "sshd", "127.0.0.2", free_port()) as ssh:
            found.env = {"TANDEM_SSH": ssh, "PATH": os.environ["PATH"], "NOT_PASSED_ON": "x"}
            yield found
    else:
        yield found


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=limit(60))
    return process.returncode, out


@pytest.mark.parametrize(
    ("codes", "code", "shown"),
    [
        (["print('one')", "import os; print('two' * ('NOT_PASSED_ON' not in os.environ))"], 0, "one\ntwo"),
        # its hours count from the start of the run, by its own host's clock
        (["from common import exits; import time; print((time.monotonic() - exits.started_at()) // 100)"], 0, "10.0"),
        (["import os; os.kill(os.getpid(), 9)"], 247, "tandem: trainer on 203.0.113.0 was killed by SIGKILL"),
    ],
    ids=["output", "clock", "killed"],
)
def test_output_of_every_host_is_shown_in_whole_lines_and_kept_in_its_log(
    hosts: Connections, codes: list[str], code: int, shown: str
) -> None:
    found, out = ended(hosts.start(*codes))
    assert found == code and shown in "\n".join(sorted(out.splitlines()))
    if code == 0:
        logs = [(hosts.folder / f"host{i}.log").read_text().split()[-1] for i in range(len(codes))]
        assert logs == shown.split()


@pytest.mark.parametrize("code", [2, 75, 1])
def test_the_first_host_that_fails_says_how_all_end_and_nothing_stays(hosts: Connections, code: int) -> None:
    process = hosts.start(hosts.sleeper(0), f"import time, sys; time.sleep(0.3); sys.exit({code})")
    other = hosts.pid_of(0)
    assert ended(process)[0] == code
    until(lambda: is_gone(other), 20)


def test_a_signal_reaches_the_process_on_every_host(hosts: Connections) -> None:
    handler = "signal.signal(signal.SIGINT, lambda *_: os._exit(130))"
    process = hosts.start(hosts.sleeper(0, handler), hosts.sleeper(1, handler))
    hosts.pid_of(0), hosts.pid_of(1)
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130


def test_a_killed_first_host_leaves_nothing_on_the_others(hosts: Connections) -> None:
    process = hosts.start(hosts.sleeper(0), hosts.sleeper(1))
    pids = [hosts.pid_of(i) for i in (0, 1)]
    process.kill()
    process.communicate()
    until(lambda: all(map(is_gone, pids)), 20)


def test_a_connection_that_is_lost_or_never_made_means_start_again(hosts: Connections) -> None:
    process = hosts.start(hosts.sleeper(0), hosts.sleeper(1))
    pids = [hosts.pid_of(i) for i in (0, 1)]
    agent = psutil.Process(pids[1]).parent()
    assert agent is not None
    agent.kill()
    code, out = ended(process)
    assert code == 75 and "203.0.113.1: the connection ended" in out
    until(lambda: all(map(is_gone, pids)), 20)


def test_a_host_that_does_not_know_the_key_refuses_at_once_and_says_so(hosts: Connections) -> None:
    if (hosts.folder / "sshd").is_dir():
        (hosts.folder / "sshd" / "user.pub").write_text("")
    else:
        (hosts.folder / "ssh").write_text("#!/bin/sh\necho 'Permission denied (publickey)'\nexit 255\n")
    code, out = ended(hosts.start("print('one')"))
    assert code == 75 and "Permission denied (publickey)" in out and "203.0.113.0: the connection ended" in out


def test_a_host_that_lacks_the_run_folder_or_ours_is_the_users_to_mend(hosts: Connections) -> None:
    code, out = ended(hosts.start("print('one')", proof="nowhere/proof"))
    assert code == 2 and "203.0.113.0 does not see" in out and "set run.output_dir to a folder that all hosts" in out
    (hosts.folder / "lacks").write_text("#!/bin/sh\nexit 127\n")
    (hosts.folder / "lacks").chmod(0o755)
    hosts.env |= {"TANDEM_SSH": str(hosts.folder / "lacks")}
    code, out = ended(hosts.start("print('one')"))
    assert code == 2 and "install this folder on it under the same path: bash launch.sh setup" in out
