"""Processes on several hosts: all end as the first that fails, with nothing left behind.

Over a stand-in for ssh, and where there is an sshd over a real client and server: all but what the environment keeps.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common.errors import Retryable
from common.paths import ROOT
from common.wire.ports import free_port
from launcher.hosts.over_hosts import answers
from tests.support.speed import is_gone, limit, overdue, until
from tests.support.ssh_server import ssh_server

# Whoever does not follow the first that fails is waited for 2 s instead of 15.
PROGRAM = (
    "import sys; from launcher.hosts import over_hosts; over_hosts.FOLLOW_S = 2.0; "
    "sys.exit(over_hosts.main(sys.argv[1:]))"
)


Started = subprocess.Popen[str]
CONNECTS = 'shift; exec "$@"'


class Connections:
    """Orders for hosts that do not exist; what "reaches" them, a script for ssh, starts the program here."""

    def __init__(self, folder: Path, ssh: str = CONNECTS):
        self.folder = folder
        (folder / "ssh").write_text(f"#!/bin/sh\n{ssh}\n")
        (folder / "ssh").chmod(0o755)
        self.env = os.environ | {"TANDEM_SSH": f"{folder}/ssh"}
        (folder / "proof").touch()

    def start(self, *codes: str, proof: str = "proof", within_s: float = 0.5, root: Path = ROOT) -> Started:
        """One process a host, each of Python code."""
        orders = [
            {
                "host": f"203.0.113.{i}",
                "name": "trainer",
                "argv": [sys.executable, "-u", "-c", code],
                "env": {},
                "defaults": {},
                "log": str(self.folder / f"host{i}.log"),
                "gpus": [0, 0],
                "scratch": [],
                "processes": 1,
                "attempt": 1,
                "proof": str(self.folder / proof),
                "within_s": within_s,
                "running_s": 1000.0,
            }
            for i, code in enumerate(codes)
        ]
        (self.folder / "orders.json").write_text(json.dumps(orders))
        python = sys.executable if root == ROOT else str(root / ".venv/bin/python")
        command = [python, "-c", PROGRAM, str(self.folder / "orders.json")]
        return subprocess.Popen(
            command, cwd=root, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def pid_of(self, host: int) -> int:
        """What the process has written down as its own."""
        file = self.folder / f"pid{host}"
        until(lambda: file.exists() and file.read_text(), 20)
        return int(file.read_text())

    def sleeper(self, host: int, before: str = "") -> str:
        file = str(self.folder / f"pid{host}")
        return f"import os, time, signal\n{before}\nopen({file!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"

    def two_sleepers(self, before: str = "") -> tuple[Started, list[int]]:
        """What has started them, and their pids."""
        process = self.start(self.sleeper(0, before), self.sleeper(1, before))
        return process, [self.pid_of(i) for i in (0, 1)]


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


def ended(process: Started) -> tuple[int, str]:
    out, _ = process.communicate(timeout=limit(60))
    return process.returncode, out


@pytest.mark.parametrize(
    ("codes", "code", "shown"),
    [
        (["print('one')", "import os; print('two' * ('NOT_PASSED_ON' not in os.environ))"], 0, "one\ntwo"),
        # its hours count from the start of the run, by its own host's clock
        (
            ["from common.processes import exits; import time; print((time.monotonic() - exits.started_at()) // 100)"],
            0,
            "10.0",
        ),
        (
            ["import os; os.kill(os.getpid(), 9)"],
            247,
            "tandem: 203.0.113.0: trainer on 203.0.113.0 was killed by SIGKILL",
        ),
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


def test_a_killed_first_host_leaves_nothing_on_the_others(hosts: Connections) -> None:
    process, pids = hosts.two_sleepers()
    process.kill()
    process.communicate()
    until(lambda: all(map(is_gone, pids)), 20)


def test_a_connection_that_is_lost_or_never_made_means_start_again(hosts: Connections) -> None:
    process, pids = hosts.two_sleepers()
    agent = psutil.Process(pids[1]).parent()
    assert agent is not None
    agent.kill()
    code, out = ended(process)
    assert code == 75 and "203.0.113.1: the connection ended" in out
    until(lambda: all(map(is_gone, pids)), 20)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("me@h: Permission denied (publickey).", 2, "ssh-copy-id, or name user and key"),
        ("Host key verification failed.", 2, "connect once by hand"),
        ("ssh: Could not resolve hostname h: Name or service not known", 2, "write its address in the hostfile"),
        ("command-line: line 0: Bad configuration option: port", 2, "mend it, until this works here"),
        ("ssh: connect to host h port 22: Connection refused", 75, ""),
        ("ssh: connect to host h port 22: Connection timed out", 75, ""),
        ("ssh: connect to host h port 22: No route to host", 75, ""),
        ("kex_exchange_identification: Connection closed by remote host", 75, ""),
    ],
)
def test_a_host_that_refuses_is_the_users_to_mend_and_one_that_is_down_is_waited_for(
    tmp_path: Path, words: str, code: int, says: str
) -> None:
    hosts = Connections(tmp_path, f"echo '{words}\r' >&2; exit 255")
    found, out = ended(hosts.start("print('one')"))
    assert found == code and f"203.0.113.0: {words}" in out and says in out
    assert (f"until this works here: {tmp_path}/ssh 203.0.113.0 true" in out) == (code == 2)


def test_words_of_a_login_shell_do_not_hide_a_hosts_answer(tmp_path: Path) -> None:
    hosts = Connections(tmp_path, f'printf "Welcome\nlast login: today "; {CONNECTS}')
    assert ended(hosts.start("print('one')")) == (0, "one\n")


@pytest.mark.parametrize("how", ["exit 137", "kill -9 $$"])
def test_a_host_whose_shell_is_killed_before_it_answers_is_tried_again(tmp_path: Path, how: str) -> None:
    hosts = Connections(tmp_path, f"echo ssh: line 2: Killed >&2; {how}")
    assert ended(hosts.start("print('one')"))[0] == 75


def test_a_first_host_that_is_lost_while_the_others_try_to_reach_it_is_not_called_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = 'host=$1; shift; [ $host = 203.0.113.1 ] && exec "$@"; head -n 1 | "$@"'
    monkeypatch.setenv("TANDEM_SSH", Connections(tmp_path, ssh).env["TANDEM_SSH"])
    with pytest.raises(Retryable, match=r"203.0.113.0: the connection ended"):
        answers(["203.0.113.0", "203.0.113.1"])


def test_an_address_is_known_by_a_name_with_a_user_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SSH", Connections(tmp_path).env["TANDEM_SSH"])
    assert answers(["me@127.0.0.1", "203.0.113.1"])[1]["known"] == ["127.0.0.1"]


@pytest.mark.parametrize("trouble", ["key", "host key", "user", "name", "down"])
def test_so_says_a_real_ssh(tmp_path: Path, trouble: str) -> None:
    folder, hosts = tmp_path / "sshd", Connections(tmp_path)
    with ssh_server(folder, "127.0.0.2", free_port()) as ssh:
        hosts.env = {"TANDEM_SSH": ssh, "PATH": os.environ["PATH"]}
        if trouble == "key":
            (folder / "user.pub").write_text("")
        elif trouble == "host key":
            (folder / "known").write_text("")
        else:
            option = {"user": "User=nobody-here", "name": "HostName=no-such-host.invalid", "down": "Port=1"}[trouble]
            hosts.env["TANDEM_SSH"] = f"{ssh} -o {option}"
        code, out = ended(hosts.start("print('one')"))
    words = {"host key": "Host key verification failed", "name": "Could not resolve", "down": "Connection refused"}
    assert code == (75 if trouble == "down" else 2) and words.get(trouble, "Permission denied (publickey") in out


def test_a_folder_with_a_space_is_found_by_ssh_and_by_what_has_no_shell(hosts: Connections) -> None:
    folder = hosts.folder / "it's my $HOME"
    for room in ("common", "launcher", "model", "trainer"):
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    assert ended(hosts.start("print('one')", root=folder)) == (0, "one\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["connecting", "the other connects", "run folder"])
def test_a_signal_ends_what_has_not_begun_within_seconds(tmp_path: Path, moment: str, number: int) -> None:
    """moment: all that a host can wait for before its process has begun."""
    ssh = {"connecting": "sleep 1000", "the other connects": f"[ $1 = 203.0.113.0 ] || sleep 1000; {CONNECTS}"}
    hosts = Connections(tmp_path, ssh.get(moment, CONNECTS))
    process = hosts.start("1", "1", proof="late" if moment == "run folder" else "proof", within_s=1000.0)
    until(lambda: len(psutil.Process(process.pid).children(recursive=True)) >= 2, 20)
    time.sleep(0.5)
    started = psutil.Process(process.pid).children(recursive=True)
    begun = time.monotonic()
    process.send_signal(number)
    assert ended(process)[0] == 130 and not overdue(time.monotonic() - begun, 2.0)
    until(lambda: all(is_gone(one.pid) for one in started))


def test_processes_on_hosts_can_be_interrupted_whoever_started_them(hosts: Connections) -> None:
    """A shell's background job ignores Ctrl-C, and what it starts would."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = hosts.start("import signal; print(signal.getsignal(2) is signal.default_int_handler)")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended(process) == (0, "True\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("role", ["what holds the links", "what watches", "the process"])
def test_a_signal_on_one_host_reaches_the_processes_on_all(hosts: Connections, role: str, number: int) -> None:
    saves = "\n".join(f"signal.signal({n}, lambda *_: (print('saved', flush=True), os._exit(130)))" for n in (2, 15))
    process, pids = hosts.two_sleepers(saves)
    of_host = psutil.Process(pids[1])
    agent = of_host.parent()
    assert agent is not None
    {"what holds the links": process, "what watches": agent, "the process": of_host}[role].send_signal(number)
    code, out = ended(process)
    assert code == 130 and out.split().count("saved") == 2
    until(lambda: all(map(is_gone, pids)), 20)


FAILS = "import sys, time; time.sleep({}); print('tandem: trainer: {}', file=sys.stderr); time.sleep({}); sys.exit({})"


@pytest.mark.parametrize(
    ("codes", "code", "first"),
    [
        # rank 1 says its end, and leaves later than rank 0, which broke with it
        ([FAILS.format(0.6, "broken", 0, 1), FAILS.format(0.1, "cause", 1.0, 1)], 1, 1),
        ([FAILS.format(0.1, "cause", 1.0, 75), FAILS.format(0.6, "broken", 0, 1)], 75, 0),
        # a killed rank says nothing, and DeepSpeed's launcher sees it later
        ([FAILS.format(0.1, "broken", 0, 1), "import os, time; time.sleep(1); os.kill(os.getpid(), 9)"], 247, 1),
    ],
)
def test_the_first_error_of_any_host_is_what_is_read(tmp_path: Path, codes: list[str], code: int, first: int) -> None:
    found, out = ended(Connections(tmp_path).start(*codes))
    assert found == code and "tandem: 203.0.113.0: trainer: " in out
    _, _, log = out.partition(f"tandem: 203.0.113.{first}: the first that ")
    assert log and f"host{first}.log" in log and ("cause" in log or code == 247)


def test_a_host_that_lacks_the_run_folder_or_ours_is_the_users_to_mend(hosts: Connections) -> None:
    code, out = ended(hosts.start("print('one')", proof="nowhere/proof"))
    assert code == 2 and "203.0.113.0 does not see" in out and "set run.output_dir to a folder that all hosts" in out
    (hosts.folder / "lacks").write_text("#!/bin/sh\nexit 127\n")
    (hosts.folder / "lacks").chmod(0o755)
    hosts.env |= {"TANDEM_SSH": str(hosts.folder / "lacks")}
    code, out = ended(hosts.start("print('one')"))
    assert code == 2 and "install this folder on it under the same path: bash launch.sh setup" in out
