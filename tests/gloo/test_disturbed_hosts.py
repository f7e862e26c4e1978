"""Two hosts whose processes are killed and signalled at random moments, again and again, until nothing is left to do.

A few times; TANDEM_TEST_DISTURBANCES=60 bash launch.sh test --all -s tests/gloo/test_disturbed_hosts.py for 30 each.
"""

import fcntl
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from common.files.run_folder import FINAL, checkpoints
from report.run_log import read_jsonl
from tests.gloo.test_two_hosts import start
from tests.support.own_group import Group, own_group
from tests.support.replay_worker import Trainers, sha256_of_run
from tests.support.speed import overdue, until
from tests.support.tier import full

COUNT = int(os.environ.get("TANDEM_TEST_DISTURBANCES", "4"))
pytestmark = [full, pytest.mark.timeout(300 + 60 * COUNT)]

ROLES = {  # by words of the command line, the first that fits
    "launcher.hosts.over_hosts": "what holds the links",
    "launcher.hosts.on_host": "on_host",
    "tests.support.hosts_worker": "launch.sh",
    "launcher.hosts.ranks": "ranks' launcher",
    "training_worker.py": "rank",
    "cat": "link",
}
# cat is what ssh is: when it ends there are no more words from here
LINK = '#!/bin/bash\nip netns exec "$@" < <(exec cat)\n'
ENDS = (0, 75, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)


def role(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return next((name for word, name in ROLES.items() if any(w == word or w.endswith(f"/{word}") for w in words)), "")


class Lives:
    """Of one run, and of another one when that is done."""

    def __init__(self, trainers: Trainers, hosts: tuple[str, str], expected: dict[str, str], group: Group):
        self.trainers, self.hosts, self.expected, self.group, self.done = trainers, hosts, expected, group, 0
        self.ssh = trainers.folder / "cat-ssh"
        self.ssh.write_text(LINK)
        self.ssh.chmod(0o755)
        self._begin()

    @property
    def folder(self) -> Path:
        return self.trainers.folder / f"disturbed-{self.done}"

    def steps(self) -> int:
        return len(read_jsonl(self.folder / "metrics.jsonl"))

    def _begin(self) -> None:
        resume = ["run.resume=true"] if checkpoints(self.folder) else []
        if not resume:  # as launch.sh moves it aside
            (self.folder / "metrics.jsonl").unlink(missing_ok=True)
        self.process = start(
            self.trainers, self.hosts, self.folder.name, *resume, enter=self.group.enter, TANDEM_SSH=str(self.ssh)
        )

    def go_on(self) -> None:
        """Once this life has ended with nothing left, the next begins."""
        if self.process.poll() is not None:
            self.require_nothing_left()
            code = self.process.returncode
            assert code in ENDS or (code == 1 and not checkpoints(self.folder)), f"{code}\n{self.log()}"
            if (self.folder / FINAL).is_dir():
                assert sha256_of_run(self.folder) == self.expected
                self.done += 1
            self._begin()

    def require_nothing_left(self) -> None:
        until(lambda: not self.group.processes(), 5)
        for path in self.folder.glob("lock.*"):
            with open(path, "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        begun = time.monotonic()
        while not condition():
            self.go_on()
            assert not overdue(time.monotonic() - begun, seconds), self.log()
            time.sleep(0.02)

    def log(self) -> str:
        return (self.trainers.folder / f"{self.folder.name}.log").read_text()[-4000:]


def disturb(lives: Lives, number: signal.Signals) -> str:
    """Sends it to one of the processes. Returns what came of it."""
    victims = [(role(process), process) for process in lives.group.processes()]
    who = random.choice([name for name in ROLES.values() if name in dict(victims)] or ["launch.sh"])
    victim = random.choice([process for name, process in victims if name == who] or [lives.process])
    process = lives.process
    said = f"{number.name} to {who} after step {lives.steps()}"
    with suppress(psutil.NoSuchProcess):
        victim.send_signal(number)
    if (number == signal.SIGKILL and who != "launch.sh") or who == "link":
        return f"{said}: it goes on by itself"
    until(lambda: process.poll() is not None, 30)
    return f"{said}: {process.returncode} at step {lives.steps()}"


def test_kills_and_signals_at_any_moment_leave_nothing_and_change_no_bit(
    trainers: Trainers, hosts: tuple[str, str], expected: dict[str, str], figure: Callable[[str, str], None]
) -> None:
    random.seed(COUNT)
    others = [random.choice((signal.SIGINT, signal.SIGTERM)) for _ in range(COUNT - COUNT // 2)]
    numbers = random.sample([signal.SIGKILL] * (COUNT // 2) + others, COUNT)
    with own_group() as group:
        lives, begun = Lives(trainers, hosts, expected, group), time.monotonic()
        lives.wait_until(lambda: lives.steps() > 0, 120)
        start_s = time.monotonic() - begun
        for number in numbers:
            moment = time.monotonic() + random.random() * 2 * start_s  # before and after the next life's first step
            lives.wait_until(lambda: time.monotonic() > moment, 120)  # noqa: B023
            print(disturb(lives, number), flush=True)
        done = lives.done
        lives.wait_until(lambda: lives.done > done, 200)
    figure("R13", f"{COUNT} disturbances of two hosts, {done + 1} runs with the weights of one host")
