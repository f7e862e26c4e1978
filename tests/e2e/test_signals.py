"""Every signal, every way: role × signal × phase, with the real launchers and two ranks over a recording.

    just started    the same, though a process that has not run its first line dies of the signal itself
    starting        it ends within five seconds
    training        the step ends and is saved
    training twice  the second one ends it at once

However it came, nothing is left: no process, no buffer in memory, and the lock is free.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from common import durable
from common.errors import UserError
from common.wire.ports import free_port
from report.run_log import read_jsonl
from tests.support.gloo_data import TRAINER, settings
from tests.support.own_process import alive, in_processes
from tests.support.replay_worker import ENVIRONMENT, ROOT, prepare
from tests.support.speed import limit, overdue, until
from tests.support.tier import full

pytestmark = pytest.mark.timeout(900)
INT, TERM = signal.SIGINT, signal.SIGTERM
# A step takes a second, so that a signal meets it.
SLOW = "import time\n\ndef slow(rewards):\n    time.sleep(0.25)\n    return rewards - rewards.mean()\n"


@dataclass
class Run:
    """Ranks that train in `folder`, as one of the ways to start them has started them."""

    folder: Path
    tag: str
    port: int
    started: list[subprocess.Popen[bytes]]

    def ranks(self) -> list[psutil.Process]:
        """Not the launchers above them, which have the same words further behind."""
        found = [p for p in alive(self.tag) if any("training_worker" in word for word in p.cmdline()[1:3])]
        return sorted((p for p in found if "RANK" in p.environ()), key=lambda p: p.environ()["RANK"])

    def steps(self) -> int:
        return len(read_jsonl(self.folder / "metrics.jsonl"))

    def saved(self) -> int:
        return max((int(p.name[5:]) for p in (self.folder / "checkpoints").glob("step_*")), default=0)


Role = Callable[[Run], list[int]]


def of_launcher(run: Run) -> psutil.Process:
    (child,) = psutil.Process(run.started[0].pid).children()
    return child


def group_of(run: Run) -> list[int]:
    return [p.pid for p in alive(run.tag) if os.getpgid(p.pid) == run.started[0].pid]


ROLES: dict[str, tuple[str, Role, set[int]]] = {  # how it is started, who gets the signal, and the codes of the started
    "all ranks": ("plain", lambda run: [p.pid for p in run.started], {130}),
    "rank 0": ("deepspeed", lambda run: [run.ranks()[0].pid], {130}),
    "rank 1": ("deepspeed", lambda run: [run.ranks()[1].pid], {130}),
    "the group": ("deepspeed", group_of, {130, -INT, -TERM}),
    "deepspeed": ("deepspeed", lambda run: [run.started[0].pid], {130, -INT, -TERM}),
    "deepspeed's launcher": ("deepspeed", lambda run: [of_launcher(run).pid], {1, 130}),
    "our launcher": ("ours", lambda run: [run.started[0].pid], {130}),
    "a rank of ours": ("ours", lambda run: [run.ranks()[-1].pid], {130}),
}
PHASES = ("just started", "starting", "training", "training twice")
SHORT = {("all ranks", TERM, "training"), ("our launcher", TERM, "training"), ("rank 1", INT, "starting")}
CASES = [(r, number, phase) for r in ROLES for phase in PHASES for number in ((INT, TERM)["twice" in phase :])]


# What CPython prints when it loses a SIGINT before a program's first line, and goes on without it.
LOST_BY_PYTHON = ("Failed checking if argv[0] is an import path entry", "Exception ignored in")


def send_again_if_lost(run: Run, log: Path, number: signal.Signals) -> bool:
    """Sends the signal again to processes that are alive because Python lost it. Returns whether it did."""
    deadline = time.monotonic() + limit(5)
    while alive(run.tag):
        if time.monotonic() > deadline:
            if not any(words in log.read_text() for words in LOST_BY_PYTHON):
                return False
            for process in alive(run.tag):
                process.send_signal(number)
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a recording."""
    folder = tmp_path_factory.mktemp("recorded")
    in_processes(partial(prepare, folder))
    return folder


def start(recorded: Path, folder: Path, way: str) -> Run:
    (folder / "slow.py").write_text(SLOW)
    run = {"replay": str(recorded / "groups"), "report_to": [], "output_dir": str(folder / "run")}
    trainer = TRAINER | {"max_steps": 15, "lr_scheduler_type": "constant", "warmup_steps": 0}
    algorithm = {"adv_estimator": f"{folder}/slow.py:slow", "scale_rewards": "none"}
    config = settings(recorded, "unused", 3, run=run, trainer=trainer, algorithm=algorithm)
    (folder / "run.yaml").write_text(config.model_dump_json(exclude_unset=True))
    tag, port = uuid.uuid4().hex, free_port()
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | ENVIRONMENT
    env |= {"TANDEM_TEST_TAG": tag}
    command = [str(ROOT / "training_worker.py"), "--config", str(folder / "run.yaml")]
    if way == "ours":
        words = ["-m", "launcher.hosts.ranks", "0", "2", "2", "127.0.0.1", str(port)]
        commands = [([sys.executable, *words, *command], env)]
    elif way == "deepspeed":
        words = ["--num_gpus", "2", "--master_port", str(port), "--log_level", "critical"]
        commands = [([str(Path(sys.executable).parent / "deepspeed"), *words, *command], env)]
    else:
        ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        commands = [([sys.executable, *command], env | ranks | {"RANK": r, "LOCAL_RANK": r}) for r in "01"]
    with open(folder / "log", "wb") as log:
        started = [
            subprocess.Popen(c, env=e, cwd=ROOT, stdout=log, stderr=log, start_new_session=way == "deepspeed")
            for c, e in commands
        ]
    return Run(folder / "run", tag, port, started)


@pytest.fixture
def cleanup() -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for run in runs:
        for process in alive(run.tag):
            process.kill()
        for popen in run.started:
            popen.wait()


@pytest.mark.parametrize(
    ("role", "number", "phase"),
    [case if case in SHORT else pytest.param(*case, marks=full) for case in CASES],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_it_ends_in_order_and_leaves_nothing(
    recorded: Path, tmp_path: Path, cleanup: list[Run], role: str, number: signal.Signals, phase: str
) -> None:
    way, who, codes = ROLES[role]
    run = start(recorded, tmp_path, way)
    cleanup.append(run)
    until(lambda: len(run.ranks()) >= (1 if phase == "just started" else 2), 60)
    if phase == "just started":
        codes = codes | {0, 1, -INT, -TERM, 256 - INT, 256 - TERM}  # DeepSpeed's of a launcher that died: 0
    elif phase == "starting":
        # they import torch, and so are behind the first lines of the program, which look after signals
        until(lambda: all("libtorch" in Path(f"/proc/{p.pid}/maps").read_text() for p in run.ranks()), 60)
    else:
        until(lambda: run.steps() >= 2, 120)
    sent = time.monotonic()
    for pid in (pids := who(run)):
        os.kill(pid, number)
    if phase == "training twice":
        time.sleep(1.2)  # more than an echo
        asked = {p.pid for p in alive(run.tag)} & set(pids)
        for pid in asked or [p.pid for p in run.ranks()]:  # a launcher may be gone at the first
            os.kill(pid, number)
    if phase == "just started" and number == INT and send_again_if_lost(run, tmp_path / "log", number):
        sent = time.monotonic()
    until(lambda: not alive(run.tag), 40)
    took, log = time.monotonic() - sent, (tmp_path / "log").read_text()[-3000:]
    assert not overdue(took, 15 if phase == "training" else 5), f"{took:.1f} s\n{log}"
    found = {popen.wait() for popen in run.started}
    assert found <= codes | ({1, -signal.SIGKILL} if phase == "training twice" else set()), f"{found}\n{log}"
    if phase == "training":
        assert 2 <= run.saved() == run.steps() < 15, log
    with durable.lock(run.folder / "lock.trainer", UserError):
        pass
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{run.port}_*"))
