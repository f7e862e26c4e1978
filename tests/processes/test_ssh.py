"""Processes on hosts that a real ssh client reaches over a real sshd: what a stand-in for ssh does not show."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common.ports import free_port
from tests.processes.test_hosts import (
    Connections,
    check_that_a_killed_first_host_leaves_nothing,
    check_that_a_signal_reaches_all,
    check_that_one_failure_ends_all,
    ended,
    is_gone,
)
from tests.support.speed import until
from tests.support.ssh_server import ssh_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, int]]:
    with ssh_server(tmp_path / "sshd", "127.0.0.2", free_port()) as found:
        yield found


@pytest.fixture
def hosts(tmp_path: Path, server: tuple[str, int]) -> Connections:
    """Both names reach the one server, by connections of their own. Nothing of our environment goes along."""
    found = Connections(tmp_path)
    found.env = {"TANDEM_SSH": server[0], "PATH": os.environ["PATH"], "NOT_PASSED_ON": "x"}
    return found


def test_output_comes_back_over_ssh_in_an_environment_that_is_the_hosts_own(hosts: Connections) -> None:
    said = "import os; print('SSH_CONNECTION' in os.environ, 'NOT_PASSED_ON' in os.environ)"
    code, out = ended(hosts.start(said, "print('two')"))
    assert (code, sorted(out.splitlines())) == (0, ["True False", "two"])


@pytest.mark.parametrize("code", [2, 75])
def test_an_exit_code_comes_back_over_ssh_and_ends_the_other_host(hosts: Connections, code: int) -> None:
    check_that_one_failure_ends_all(hosts, code)


def test_a_signal_reaches_the_processes_over_ssh(hosts: Connections) -> None:
    check_that_a_signal_reaches_all(hosts)


def test_a_killed_first_host_leaves_nothing_behind_a_real_ssh(hosts: Connections) -> None:
    check_that_a_killed_first_host_leaves_nothing(hosts)


def test_an_ssh_connection_that_the_host_drops_means_start_again(hosts: Connections, server: tuple[str, int]) -> None:
    process = hosts.start(hosts.sleeper(0), hosts.sleeper(1))
    pids = [hosts.pid_of(i) for i in (0, 1)]
    connections = [p for p in psutil.Process(pids[1]).parents() if p.name().startswith("sshd") and p.pid != server[1]]
    for one in connections:
        one.kill()
    code, out = ended(process)
    assert connections and code == 75 and "203.0.113.1: the connection ended" in out
    until(lambda: all(map(is_gone, pids)), 20)


def test_a_host_that_does_not_know_the_key_refuses_at_once_and_says_so(hosts: Connections) -> None:
    (hosts.folder / "sshd" / "user.pub").write_text("")
    code, out = ended(hosts.start("print('one')"))
    assert code == 75 and "Permission denied (publickey)" in out and "203.0.113.0: the connection ended" in out
