"""Runs of the real supervisor that are disturbed: how each of them ends, and whatever is left behind.

`run_all` forks a supervisor per scenario, as many at a time as there are cores, and beside them twice as many of those
that mostly wait. All limits, those of the runs and those of the verdicts, are seconds of the reference machine in
tests/support/speed.py.
"""

import fcntl
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from common import durable
from common.config import load
from common.errors import UserError
from common.processes import exits
from launcher import run as launcher_run
from launcher.processes.processes import Child
from launcher.processes.supervisor import Rules, Supervisor
from launcher.resources.placement import placement
from tests.support.configs import config_in
from tests.support.ending_processes import HOLD_AT, PER_STEP, STEP_S
from tests.support.own_process import alive
from tests.support.speed import overdue, slowness

INT, TERM, KILL, STOP, CONT, HUP = (getattr(signal, f"SIG{n}") for n in ("INT", "TERM", "KILL", "STOP", "CONT", "HUP"))
IDLE = ("start-hang", "work-hang")
AT_ONCE = 10.0  # seconds from a clean signal to the end
GRACE_S, STALL_S, CONNECT_S, MAX_RESTARTS = 3.0, 2.0, 6.0, 2


@dataclass(frozen=True)
class Scenario:
    """Signals to roles, sent when a few steps are trained or when the first of them has started.

    Seconds are those of the reference machine.
    """

    name: str
    code: int  # of the supervisor; -9 = it was killed itself
    signals: tuple[tuple[str, int], ...] = ()
    when: str = "training"
    ending: str = ""  # TANDEM_ENDING: what goes wrong by itself
    within_s: float = 25.0
    pause_s: float = 0.0  # between two signals; 0 = 10 ms
    saves: bool = True
    connect_s: float = CONNECT_S
    is_saved: bool = False  # a checkpoint of the last step is required
    ends_after_s: float | None = None  # trainer.max_hours
    or_code: int | None = None  # as good as `code`
    is_abrupt: bool = False  # something was killed for good: the next start removes what it had not finished

    @property
    def is_idle(self) -> bool:
        """Something is frozen or stuck, and most of the time goes by until a limit finds it."""
        return any(number == STOP for _, number in self.signals) or self.ending.partition(":")[2].startswith(IDLE)


S = Scenario
SHORT = (  # one per role and signal, and one per exit code and cause
    *(S(f"{role} SIGKILL", 0, ((role, KILL),)) for role in ("sampler", "rank 0", "rank 1", "launcher", "guard")),
    *(
        S(f"{role} {number.name}", 130, ((role, number),), within_s=AT_ONCE, is_saved=True)
        for role in ("sampler", "rank 0", "launcher", "supervisor")
        for number in (INT, TERM, *([HUP] if role == "supervisor" else []))
    ),
    S("sampler SIGSTOP", 0, (("sampler", STOP),), connect_s=4.0),
    S("rank 0 SIGSTOP", 75, (("rank 0", STOP),), connect_s=4.0, within_s=40.0),
    # rank 1 says 130, or rank 0 finds it gone: whichever the launcher sees first
    S("rank 1 SIGTERM", 130, (("rank 1", TERM),), or_code=0),
    S("rank 1 SIGINT", 0, (("rank 1", INT),)),
    S("rank 1 SIGSTOP", 0, (("rank 1", STOP),)),
    S("launcher SIGSTOP", 0, (("launcher", STOP),)),
    S("supervisor SIGKILL", -9, (("supervisor", KILL),), within_s=2.0),
    S("supervisor SIGSTOP then SIGCONT", 0, (("supervisor", STOP), ("supervisor", CONT)), pause_s=2.0),
    S("supervisor SIGINT, rank 0 frozen", 130, (("rank 0", STOP), ("supervisor", INT)), is_abrupt=True),
    # absent, failing, stuck or out of time, without any signal
    S("time is over", 75, ends_after_s=3.0, is_saved=True),
    S("absent sampler", 75, ending="sampler:start-hang:always", connect_s=2.0),
    S("absent trainer", 75, ending="trainer:start-hang:always", connect_s=2.0),
    S("user error of the sampler later", 2, ending="sampler:work-user:always"),
    S("user error of the trainer at its start", 2, ending="trainer:start-user:always"),
    S("retryable end of the trainer, once", 0, ending="trainer:work-retry:once"),
    S("bug of the trainer without a checkpoint", 1, ending="trainer:work-bug:once", saves=False),
    S("bug of the sampler, once", 0, ending="sampler:work-bug:once"),
    S("sampler stuck in its engine", 0, ending="sampler:work-hang:once"),
    S("rank 0 stuck in a step", 0, ending="trainer:work-hang:once"),
)
ALL_FROZEN = tuple((role, STOP) for role in ("sampler", "rank 0", "rank 1", "launcher"))
LONG = (
    *SHORT,
    S("sampler SIGKILL at its start", 0, (("sampler", KILL),), when="sampler starts"),
    S("sampler SIGSTOP then SIGCONT", 0, (("sampler", STOP), ("sampler", CONT)), pause_s=1.5),
    S("rank 0 SIGKILL without a checkpoint", 1, (("rank 0", KILL),), saves=False, within_s=AT_ONCE),
    S("rank 0 SIGKILL at its start", 1, (("rank 0", KILL),), when="rank 0 starts", within_s=AT_ONCE),
    S("supervisor SIGKILL at the start", -9, (("supervisor", KILL),), when="sampler starts", within_s=2.0),
    S("supervisor SIGINT at the start", 130, (("supervisor", INT),), when="rank 0 starts", within_s=AT_ONCE),
    S("supervisor SIGINT, sampler frozen", 130, (("sampler", STOP), ("supervisor", INT)), is_saved=True),
    S("supervisor SIGKILL, all frozen", -9, (*ALL_FROZEN, ("supervisor", KILL)), within_s=2.0),
    S("launcher and both ranks SIGKILL", 0, (("launcher", KILL), ("rank 0", KILL), ("rank 1", KILL))),
    S("time is over, without checkpoints", 75, ends_after_s=3.0, saves=False),
    S("time is over before a sampler comes", 75, ends_after_s=1.5, ending="sampler:start-hang:always"),
)


@dataclass
class Ending:
    """What happened."""

    name: str
    code: int | None = None
    seconds: float = 0.0  # from the disturbance, or from the start if there is none, to the end
    is_late: bool = False
    steps: int = 0  # reported
    saved: int = 0  # step of the newest checkpoint
    left: list[str] = field(default_factory=list)
    log: str = ""


class Command(launcher_run.Commands):
    """The real commands with the programs exchanged."""

    def samplers(self) -> list[Child]:
        return [self._with(child, "sampler") for child in super().samplers()]

    def trainer(self, *extra: str) -> Child:
        return self._with(super().trainer(*extra), "launcher", *extra)

    def _with(self, child: Child, role: str, *extra: str) -> Child:
        argv = (sys.executable, "-u", "-m", "tests.support.ending_processes", role, *self._arguments, *extra)
        return replace(child, argv=argv, cores=())


class Running:
    """One scenario on its way."""

    def __init__(self, scenario: Scenario, folder: Path):
        self.scenario, self.folder, self.tag = scenario, folder, uuid.uuid4().hex
        self._slowness = slowness()
        config = config_in(
            folder,
            rewards={"reward_funcs": ["answer"]},
            sampler={"num_generations": 2},
            trainer={
                "prompts_per_step": PER_STEP,
                "save_steps": 4 if scenario.saves else 0,
                "max_hours": scenario.ends_after_s and scenario.ends_after_s * self._slowness / 3600,
            },
            channel={
                "connect_timeout_s": scenario.connect_s * self._slowness,
                "stall_timeout_s": STALL_S * self._slowness,
            },
        )
        (folder / "config.yaml").write_text(config.model_dump_json(exclude_unset=True))
        if scenario.signals or scenario.ends_after_s:
            (folder / "hold").touch()
        self.ending, self.begun = Ending(scenario.name), time.monotonic()
        self._to_send, self._send_at = list(scenario.signals), self.begun
        self._ended_at: float | None = None
        self.disturbed_at: float | None = None if scenario.signals else self.begun
        self.pid = os.fork()
        if self.pid == 0:
            self._supervise()

    def _supervise(self) -> None:
        """In the child: never returns."""
        code = 99
        try:
            os.setsid()
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
            os.environ.update({"TANDEM_ENDING": self.scenario.ending, "TANDEM_TEST_TAG": self.tag})
            os.environ["TANDEM_ENDING_SLOWNESS"] = str(self._slowness)
            os.environ[exits.STARTED_AT] = str(self.begun)
            log = os.open(self.folder / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            config = load(self.folder / "config.yaml")
            command = Command(self.folder / "config.yaml", (), config, placement(config, (), [0, 1]))
            final = config.run.output_dir / "final"
            grace_s = GRACE_S * self._slowness
            exits.limit_time(config.trainer.max_hours)
            limits = {"max_restarts": MAX_RESTARTS, "backoff_s": 0.05, "grace_s": grace_s}
            rules = Rules(command.restart_trainer, command.steps, final.is_dir, exits.out_of_time, **limits)
            with durable.lock(config.run.output_dir / launcher_run.LOCK, UserError):
                code = Supervisor(command.samplers(), command.trainer(), rules).run()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def look(self) -> bool:
        """Disturbs it when its time has come. True when it has ended, one way or another."""
        now = time.monotonic()
        if self._ended_at is not None:
            return self._judge(now - self._ended_at)
        if self._to_send and now >= self._send_at and (self.disturbed_at is not None or self._is_ripe()):
            self._send(now)
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        since = self.disturbed_at if self.disturbed_at is not None else self.begun
        if pid:
            self.ending.code = os.waitstatus_to_exitcode(status)
        elif not self._is_overdue(now - since, self.scenario.within_s + (30 if self.disturbed_at is None else 0)):
            return False
        else:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.ending.seconds, self._ended_at = round(now - since, 2), now
        self.ending.is_late = self._is_overdue(now - since, self.scenario.within_s)
        return False

    def _is_overdue(self, took_s: float, seconds: float) -> bool:
        """The run's own limits are those of the machine as it was at the start: it may have been busier than now."""
        return took_s > seconds * self._slowness and overdue(took_s, seconds)

    def _is_ripe(self) -> bool:
        if self.scenario.when != "training":
            return self._pid(self.scenario.when.removesuffix(" starts")) is not None
        return self._steps() >= HOLD_AT and all(self._pid(name) is not None for name, _ in self.scenario.signals)

    def _send(self, now: float) -> None:
        """The next signal, and those that follow it at once."""
        self.disturbed_at, self._send_at = now, now + self.scenario.pause_s
        (self.folder / "disturbed").touch()
        time.sleep(random.uniform(0, STEP_S))  # it lands anywhere in a step
        while self._to_send:
            role, number = self._to_send.pop(0)
            pid = self._pid(role)
            assert pid is not None, role
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            if self.scenario.pause_s:
                break
            time.sleep(0.01)

    def _pid(self, role: str) -> int | None:
        if role == "supervisor":
            return self.pid
        with suppress(psutil.Error):
            if not role.startswith("rank"):
                word = {"guard": "launcher.processes.processes"}.get(role, role)
                return next((c.pid for c in psutil.Process(self.pid).children() if word in c.cmdline()), None)
        with suppress(OSError, ValueError):  # a fork of the launcher, with its command line
            return int((self.folder / f"{role}.pid").read_text())
        return None

    def _steps(self) -> int:
        with suppress(OSError):
            return (self.folder / "run" / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def _judge(self, since_s: float) -> bool:
        """True once nothing is left, or the time is over that a guard needs, if it comes to that."""
        left = self._left()
        if left and not self._is_overdue(since_s, 2.0):
            return False
        self.ending.left, self.ending.steps = left, self._steps()
        saved = sorted((self.folder / "run" / "checkpoints").glob("step_*"))
        self.ending.saved = int(saved[-1].name[5:]) if saved else 0
        self.ending.log = "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in (self.folder / "supervisor.log", *sorted((self.folder / "run" / "logs").glob("*")))
            if path.exists()
        )
        for process in alive(self.tag):  # of a scenario that failed
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return True

    def _left(self) -> list[str]:
        """Processes, locks that are held, and files outside the run folder or never finished inside it."""
        run = self.folder / "run"
        tag = durable.run_tag(run)
        left = [f"process {process.pid}" for process in alive(self.tag)]
        left += [f"lock {path}" for path in run.glob("lock.*") if _is_held(path)]
        left += [str(path) for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob(f"{tag}*")]
        unfinished = [p for p in run.rglob(".*") if p.name.startswith((durable.TEMPORARY, durable.TRASH))]
        if not self.scenario.is_abrupt and self.scenario.code not in (-9, 1):
            left += [str(path) for path in unfinished]
        return left


def _is_held(path: Path) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def run_all(chosen: Sequence[Scenario]) -> list[Ending]:
    jobs = len(os.sched_getaffinity(0))
    waiting, running, ended = list(chosen), list[Running](), list[Ending]()
    with tempfile.TemporaryDirectory(prefix="tandem-ends-") as name:
        while waiting or running:
            for scenario in waiting[:]:
                beside = sum(one.scenario.is_idle == scenario.is_idle for one in running)
                if beside < (2 * jobs if scenario.is_idle else jobs):
                    waiting.remove(scenario)
                    folder = Path(name, str(len(waiting)))
                    folder.mkdir()
                    running.append(Running(scenario, folder))
            for one in [one for one in running if one.look()]:
                running.remove(one)
                ended.append(one.ending)
            time.sleep(0.01)
    return ended
