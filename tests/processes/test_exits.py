"""Exit codes: what a supervisor is told, what a person reads, and what signals do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.paths import ROOT
from tests.support.speed import limit

HEAD = """
import os, signal, sys, time; from common import errors; from common.errors import UserError
from common.processes import exits
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits SIGINT ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and one of nohup this
"""


INT, TERM, HUP = (f"os.kill(os.getpid(), {number})" for number in (2, 15, 1))
DECIDES, FOLLOWS = "exits.defer_interrupts('after this step')", "exits.defer_interrupts('')"
INTERRUPTED = "tandem: sampler: interrupted\n"
LATER = "time.sleep(1.1)"  # DeepSpeed's launcher adds a SIGTERM at once


def run(body: str) -> subprocess.CompletedProcess[str]:
    code = HEAD + f"def main():\n    {body}\nexits.leave(exits.run('sampler', main))"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=limit(60))


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("pass", 0, ""),
        ("raise UserError('model.path m: no such folder')", 2, "tandem: sampler: model.path m: no such folder\n"),
        ("raise errors.Retryable('silent for 9 s')", 75, "tandem: sampler: silent for 9 s\n"),
        ("raise errors.PeerEnded('done', 0)", 0, "tandem: sampler: done\n"),
        ("raise errors.PeerEnded('bad config', 2)", 2, "tandem: sampler: the peer ended: bad config\n"),
        ("raise KeyboardInterrupt", 130, INTERRUPTED),
        (f"{INT}; time.sleep(9)", 130, INTERRUPTED),
        (f"\n    try: {TERM}; time.sleep(9)\n    finally: sys.stderr.write('cleaned ')", 130, f"cleaned {INTERRUPTED}"),
        (f"{DECIDES}; {TERM}; assert exits.interrupted()", 0, "tandem: after this step\n"),
        (f"{DECIDES}; {INT}; {TERM}; assert exits.interrupted()", 0, "tandem: after this step\n"),
        (f"{DECIDES}; {INT}; {LATER}; {INT}; time.sleep(9)", 130, f"tandem: after this step\n{INTERRUPTED}"),
        (f"{DECIDES}; {INT}; raise errors.Interrupted", 130, f"tandem: after this step\n{INTERRUPTED}"),
        (f"{DECIDES}; {HUP}; assert exits.interrupted()", 0, "tandem: after this step\n"),  # a terminal that is lost
        (f"os.dup2(os.open('/dev/full', 1), 2); {DECIDES}; {HUP}; assert exits.interrupted()", 0, ""),
        (f"{FOLLOWS}; {TERM}; assert exits.interrupted()", 0, ""),  # rank 0 hears of it and speaks
        (f"{FOLLOWS}; {TERM}; {LATER}; {INT}; time.sleep(9)", 130, INTERRUPTED),
        (f"{FOLLOWS}; {INT}; {LATER}; {TERM}; time.sleep(9)", 130, INTERRUPTED),
        ("sys.exit(2)", 2, ""),  # argparse
        ("import threading; threading.Thread(target=time.sleep, args=(600,)).start()", 0, ""),  # it cannot keep us
    ],
)
def test_every_ending_has_its_code_and_one_line(body: str, code: int, said: str) -> None:
    result = run(body)
    assert (result.returncode, result.stderr) == (code, said)


def test_a_bug_shows_its_traceback_and_exits_1() -> None:
    result = run("1 / 0")
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
    assert result.stderr.endswith("tandem: sampler: failed, see the traceback above\n")


def test_the_exit_code_survives_a_reader_that_closed_our_output() -> None:
    code = HEAD + "exits.leave(exits.run('sampler', lambda: print('still in the buffer')))"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, stdout=closed, stderr=subprocess.PIPE)
    assert result.returncode == 0, result.stderr


def test_a_process_that_asked_for_it_dies_with_its_killed_parent() -> None:
    child = HEAD + "exits.die_with_parent(); print(os.getpid(), flush=True); time.sleep(600)"
    above = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", above], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        orphan = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    orphan.wait(timeout=limit(10))


@pytest.mark.parametrize("before", ["", f"{DECIDES}; {INT}; {LATER}; "])
def test_a_signal_ends_work_that_cannot_hear_it(before: str) -> None:
    """As where a library waits for another rank: Python's handlers run when that returns."""
    deaf = "mutex = ctypes.create_string_buffer(64); lock = ctypes.CDLL(None).pthread_mutex_lock; lock(mutex)"
    late = "subprocess.Popen(['sh', '-c', f'sleep 0.5; kill -15 {os.getpid()}'])"
    start = "exits._UNWIND_S = 0.5; exits.end_in_time()"
    assert run(f"import ctypes, subprocess; {start}; {deaf}; {before}{late}; lock(mutex)").returncode == 130


@pytest.mark.parametrize("early", [False, True])
def test_when_the_launcher_above_a_launcher_is_gone_its_ranks_end_in_order(tmp_path: Path, early: bool) -> None:
    """DeepSpeed's dies of a SIGTERM, and what it has started lives on. early: before its ranks look after it."""
    rank = HEAD + (  # as a rank of the trainer
        "def main():\n    exits.end_in_time('launch.py'); exits.defer_interrupts('after this step')\n"
        "    print('up', flush=True)\n"
        "    while not exits.interrupted(): time.sleep(0.1)\n    raise errors.Interrupted\n"
        "exits.leave(exits.run('trainer', main))"
    )
    (tmp_path / "rank.py").write_text(rank)
    (tmp_path / "launch.py").write_text(
        f"import os, subprocess, sys, time; parent = os.getppid(); {early} and os.kill(parent, 9)\n"
        f"while {early} and os.getppid() == parent: time.sleep(0.01)\n"
        "sys.exit(subprocess.call([sys.executable, 'rank.py']))"
    )
    above = "import subprocess, sys; subprocess.call([sys.executable, 'launch.py'])"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", above], cwd=tmp_path, env=env, **pipes) as process:
        assert process.stdout.readline() == ("" if early else "up\n")
        process.kill()
        said = "tandem: trainer: interrupted\n"
        assert process.stderr.read() == (said if early else f"tandem: after this step\n{said}")  # until both are gone


def test_sigusr1_shows_the_stacks_and_the_process_goes_on() -> None:
    code = (
        "import sys; from common.processes import exits\n"
        "def samples_for_ever():\n    print('up', flush=True); sys.stdin.readline()\n"
        "exits.leave(exits.run('sampler', samples_for_ever))"
    )
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")} | {"text": True}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate("\n", timeout=limit(20))
    assert process.returncode == 0
    assert "samples_for_ever" in said
