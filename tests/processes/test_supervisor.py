"""The supervisor, with small Python programs in the place of vLLM and DeepSpeed."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from common.paths import ROOT
from tests.support.own_process import alive
from tests.support.speed import limit, until

DRIVER = """
import json, os, resource, signal, sys
from pathlib import Path
from launcher.processes.processes import Child
from launcher.processes.supervisor import Rules, Supervisor
spec = json.loads(sys.argv[1])
if not spec.get("under_nohup"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may be
if not spec.get("has_room", True):
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
folder = Path(spec["folder"])
def child(name, **more):
    return Child(name, (sys.executable, "-u", "-c", spec[name]), dict(os.environ), folder / f"{name}.log", **more)
def count(name):
    return len(list(folder.glob(name)))
trainer = child(
    "trainer",
    echo=True,
    scratch=(str(folder / "shm_*"),),
    on_other_hosts=spec.get("on_other_hosts", False),
)
rules = Rules(
    restart_trainer=lambda code: trainer if code == 75 or count("checkpoint") else "no checkpoint",
    progress=lambda: count("step*"),
    finished=lambda: not spec.get("needs_final") or count("final") > 0,
    max_restarts=spec.get("max_restarts", 5),
    backoff_s=0.05,
    grace_s=spec.get("grace_s", 60.0),
    batch_s=lambda: spec.get("batch_s", 0.0),
)
sys.exit(Supervisor([child(name) for name in spec if name.startswith("sampler")], trainer, rules).run())
"""
WAITS = "import time; print('waiting'); time.sleep(60)"
STUBBORN = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; " + WAITS
# Left behind on purpose: a process in a session of its own, which outlives its parent and ignores SIGTERM.
LEAVES_FILES = "import os; [open(os.environ['FOLDER'] + f'/shm_{i}', 'w').close() for i in range(2)]; "
LEAVES_ONE = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True); "


class Run:
    """A supervisor in a process of its own. Everything it starts carries a tag, so that leftovers can be counted."""

    def __init__(self, folder: Path, sampler: str, trainer: str, nohup: bool = False, **options: object) -> None:
        self.folder, self.tag = folder, uuid.uuid4().hex
        spec = {"folder": str(folder), "sampler": sampler, "trainer": trainer, "under_nohup": nohup, **options}
        environment = {**os.environ, "TANDEM_TEST_TAG": self.tag, "FOLDER": str(folder)}
        self.process = subprocess.Popen(
            [*(["nohup"] if nohup else []), sys.executable, "-c", DRIVER, json.dumps(spec)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)"""
        out, err = self.process.communicate(timeout=limit(30))
        return self.process.returncode, out, err

    def log(self, name: str) -> list[str]:
        """Lines, because the first one holds the whole program, and with it every text that it could print."""
        path = self.folder / f"{name}.log"
        return path.read_text().splitlines() if path.exists() else []

    def both_wait(self) -> None:
        until(lambda: "waiting" in self.log("sampler") and "waiting" in self.log("trainer"))


def first_time(name: str, then: str, later: str) -> str:
    """A program that does `then` on its first start and `later` on every other."""
    return (
        f"import os, sys, time; flag = os.path.join(os.environ['FOLDER'], {name!r})\n"
        f"if not os.path.exists(flag):\n    open(flag, 'w').close()\n    {then}\nelse:\n    {later}"
    )


USER_ERROR = "import sys; print('bad value', file=sys.stderr); sys.exit(2)"
KILLS_ITSELF = "import os; os.kill(os.getpid(), 9)"
FORTY_LINES = "import sys\nfor i in range(40): print('line', i)\nsys.exit(1)"
MAKES_FOUR_STEPS = (
    "import os, sys, time\n"
    "n = len([f for f in os.listdir(os.environ['FOLDER']) if f.startswith('step')])\n"
    "if n == 4: time.sleep(60)\n"
    "open(f\"{os.environ['FOLDER']}/step{n}\", 'w').close(); sys.exit(75)"
)


def until_attempt(number: int) -> str:
    """A trainer that ends when its sampler has been started so often."""
    return (
        "import os, time; log = os.environ['FOLDER'] + '/sampler.log'; open(log, 'a').close()\n"
        f"while {f'sampler, attempt {number},'!r} not in open(log).read(): time.sleep(0.02)"
    )


SHORT = {"grace_s": 0.2}


@pytest.mark.parametrize(
    ("sampler", "trainer", "options", "code", "said"),
    [
        (WAITS, "pass", {"needs_final": True}, 1, ["exit 0 without a final checkpoint"]),  # as of a killed launcher
        # user errors
        (WAITS, USER_ERROR, {}, 2, ["    bad value", "full log: FOLDER/trainer.log"]),
        (WAITS, WAITS, {"sampler.1": USER_ERROR}, 2, ["    bad value", "full log: FOLDER/sampler.1.log"]),
        # retryable
        (WAITS, first_time("first", "sys.exit(75)", "print('later')"), SHORT, 0,
         ["trainer ended with exit code 75 (retryable); restart 1 of 5"]),
        ("import sys; sys.exit(75)", WAITS, {"max_restarts": 2}, 75,
         ["restart 1 of 2", "restart 2 of 2", "2 restarts in a row without a new step"]),
        (MAKES_FOUR_STEPS, until_attempt(5), SHORT | {"max_restarts": 1}, 0,
         ["sampler ended with exit code 75 (retryable); restart 1 of 1"] * 4),
        # crashes: a sampler holds no state, a trainer has a checkpoint or not
        (first_time("crashed", KILLS_ITSELF, "time.sleep(60)"), until_attempt(2), SHORT, 0,
         ["tandem: sampler was killed by SIGKILL from outside, not by the kernel", "by SIGKILL; restart 1 of 5"]),
        (WAITS, first_time("checkpoint", "sys.exit(-9)", "pass"), SHORT, 0,
         ["ended with exit code 247 (a rank was killed by SIGKILL); restart 1 of 5"]),
        (WAITS, FORTY_LINES, {}, 1, [*(f"\n    line {i}\n" for i in range(25, 40)), "not started again: no checkpo"]),
        # what they leave
        (LEAVES_ONE + WAITS, LEAVES_ONE + LEAVES_FILES + KILLS_ITSELF, {}, 1, []),
    ],
)  # fmt: skip
def test_how_one_ends_decides_how_all_end_and_nothing_is_left(
    tmp_path: Path, sampler: str, trainer: str, options: dict[str, object], code: int, said: list[str]
) -> None:
    run = Run(tmp_path, sampler, trainer, **options)
    ended, _, err = run.end()
    assert ended == code, err
    for words in said:
        assert err.count(words.replace("FOLDER", str(tmp_path))) == said.count(words), err
    assert "line 24" not in err
    assert alive(run.tag) == [] and list(tmp_path.glob("shm_*")) == []


def test_of_several_samplers_only_the_one_that_ended_is_started_again_and_all_are_asked_to_leave(tmp_path):
    """sampler.1 is killed; the mark of sampler.10 begins with the same letters."""
    killed = first_time("crashed", "os.kill(os.getpid(), 9)", "print('waiting'); time.sleep(60)")
    trainer = (
        "import os, time\n"
        "def log(name): return open(os.environ['FOLDER'] + '/' + name + '.log').read().splitlines()\n"
        "while not all('waiting' in log(n) for n in ('sampler', 'sampler.1', 'sampler.10')): time.sleep(0.02)"
    )
    run = Run(tmp_path, WAITS, trainer, grace_s=0.2, **{"sampler.1": killed, "sampler.10": WAITS})
    code, _, err = run.end()
    assert code == 0
    assert err.count("restart 1 of 5") == 1 and "sampler.1 was killed by SIGKILL; restart 1 of 5" in err
    assert sum(line.startswith("=== sampler.10,") for line in run.log("sampler.10")) == 1
    assert alive(run.tag) == []


def test_who_does_not_end_in_time_is_named_and_killed(tmp_path):
    run = Run(tmp_path, WAITS, STUBBORN, grace_s=1.0)
    run.both_wait()
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 130 and "trainer did not end within 1 s, and is killed" in err and "sampler did not" not in err
    assert alive(run.tag) == []


def test_a_batch_that_takes_longer_than_the_grace_period_is_finished_and_saved(tmp_path):
    saves = (
        "import os, signal, sys, time\n"
        "def end(*_): time.sleep(2); open(os.environ['FOLDER'] + '/saved', 'w').close(); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, end)\n"
    )
    run = Run(tmp_path, WAITS, saves + WAITS, grace_s=0.2, batch_s=limit(20))
    run.both_wait()
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 130 and (tmp_path / "saved").exists()
    assert "killed" not in err


def test_nohup_keeps_a_run_over_the_end_of_its_terminal(tmp_path):
    run = Run(tmp_path, WAITS, WAITS, nohup=True)
    run.both_wait()
    run.process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    run = Run(tmp_path, STUBBORN, STUBBORN, grace_s=600.0)
    run.both_wait()
    run.process.send_signal(signal.SIGINT)
    assert "stopping both" in run.process.stderr.readline()  # two that come at once may be one
    time.sleep(0.5)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert alive(run.tag) == []


def test_a_sampler_that_leaves_by_itself_after_the_trainer_is_not_signalled(tmp_path):
    run = Run(tmp_path, "import time; time.sleep(1); print('left by myself')", "pass", grace_s=limit(20))
    assert run.end()[0] == 0
    assert "left by myself" in run.log("sampler")


def test_what_a_sampler_makes_anew_after_the_trainer_has_ended_does_not_stay_either(tmp_path):
    """Who looks for a trainer makes the socket's folder, and this one looks while the trainer's files are removed."""
    looks = "import os, time\nwhile True:\n    open(os.environ['FOLDER'] + '/shm_0', 'w').close(); time.sleep(0.001)"
    waits = "import os, time\nwhile not os.path.exists(os.environ['FOLDER'] + '/shm_0'): time.sleep(0.01)"
    assert Run(tmp_path, looks, waits, grace_s=0.3).end()[0] == 0
    assert list(tmp_path.glob("shm_*")) == []


def test_sigkill_of_the_supervisor_leaves_nothing_after_two_seconds(tmp_path):
    run = Run(tmp_path, LEAVES_ONE + WAITS, LEAVES_ONE + LEAVES_FILES + STUBBORN)
    run.both_wait()
    assert len(alive(run.tag)) >= 5  # supervisor, guard, sampler, trainer and what they left
    assert len(list(tmp_path.glob("shm_*"))) == 2
    run.process.kill()
    until(lambda: alive(run.tag) == [], seconds=2.0)
    run.end()
    assert list(tmp_path.glob("shm_*")) == []


def test_the_terminal_shows_the_trainer_and_only_marked_lines_of_the_sampler(tmp_path):
    sampler = "import sys, time; print('noise'); print('tandem: loaded', file=sys.stderr); time.sleep(60)"
    trainer = (
        "import os, sys, time\nsys.stdout.write('\\x1b[1mbold\\x1b[0m\\n')\n"
        "while '\\ntandem: loaded' not in open(os.environ['FOLDER'] + '/sampler.log').read(): time.sleep(0.02)"
    )
    run = Run(tmp_path, sampler, trainer, grace_s=0.2)
    assert sorted(run.end()[1].splitlines()) == ["\x1b[1mbold\x1b[0m", "tandem: loaded"]
    assert "bold" in run.log("trainer")


def test_a_log_that_cannot_be_written_costs_lines_of_it_and_never_the_run(tmp_path: Path) -> None:
    (tmp_path / "trainer.log").mkdir()  # in the way
    code, out, err = Run(tmp_path, WAITS, "print('a step')", grace_s=0.2, has_room=False).end()
    assert (code, out) == (0, "a step\n") and "trainer goes without a log: [Errno 21]" in err
