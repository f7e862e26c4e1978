"""Starts, watches and ends child processes so that none of them outlives this process.

Three means: each child leads its own session, so a signal to its group reaches what it started. The kernel kills the
child when we die (PR_SET_PDEATHSIG). And a guard, a small process of its own, notices by the end of a pipe that we are
gone, even by SIGKILL, and kills every group and every process that carries our mark in its environment: the first two
means may miss what a user's function starts. When to start or stop a process is decided in supervisor.py.
"""

import glob
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import psutil

from common.files.shared_memory import remove_orphans
from common.paths import ROOT
from common.processes.exits import die_with_parent, kill_group, say
from common.processes.transcript import Transcript
from common.redact import redacted_words

MARK = "TANDEM_MARK"  # environment variable that every descendant carries
PID = "{pid}"  # stands for the process id in Child.scratch


@dataclass(frozen=True)
class Child:
    """A command as a value.  Child("sampler", ("python", "sampling.py"), {"PATH": …}, Path("sampler.log"))"""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]  # the whole environment, not an addition to ours
    log: Path  # receives stdout and stderr, appended
    cores: tuple[int, ...] = ()  # CPU affinity; empty = ours
    echo: bool = False  # stdout is shown at our terminal too
    scratch: tuple[str, ...] = ()  # glob patterns, with PID, of what it leaves in memory when it is killed
    on_other_hosts: bool = False  # then on_host.py reports who killed it


class Running:
    """A started child. Its output moves only while `relay` is called."""

    def __init__(self, child: Child, mark: str, attempt: int):
        self.child = child
        self._mark = f"{mark}-{child.name}/"  # with /, for sampler.1 must not begin as sampler.10 does
        try:
            child.log.parent.mkdir(parents=True, exist_ok=True)
            self._log = open(child.log, "a", encoding="utf-8")  # noqa: SIM115  closed in `close`
        except OSError as error:
            say(f"{child.name} goes without a log: {error}")
            self._log = open(os.devnull, "w")  # noqa: SIM115
        command = shlex.join(redacted_words(child.argv))
        self._note(f"=== {child.name}, attempt {attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {command}")
        self.process = subprocess.Popen(
            child.argv,
            env={**child.env, MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: _in_child(child.cores),  # safe: this process has no threads
        )
        pipes = (self.process.stdout, child.echo), (self.process.stderr, False)
        self.streams = {pipe.fileno(): (pipe, Transcript(), echo) for pipe, echo in pipes if pipe}
        self.scratch = [pattern.replace(PID, str(self.process.pid)) for pattern in child.scratch]

    def relay(self, descriptor: int) -> bool:
        """Moves available output to the log, and what people should see to the terminal. Returns False at its end."""
        pipe, transcript, echo = self.streams[descriptor]
        data = os.read(descriptor, 65536)
        lines = transcript.feed(data) if data else transcript.end()
        self._note(*lines)
        for line in lines:
            if not echo and line.startswith("tandem: "):
                show(line.encode() + b"\n")
        if echo and data:
            show(data)
        if not data:
            pipe.close()
            del self.streams[descriptor]
        return bool(data)

    def close(self) -> None:
        """Kills the process group and all processes with its mark outside of it; removes its files except the log."""
        kill_group(self.process.pid)
        kill_marked(self._mark)
        self.process.wait()
        remove(self.scratch)
        remove_orphans()
        for descriptor in list(self.streams):
            while select.select([descriptor], [], [], 1.0)[0] and self.relay(descriptor):
                pass
        for pipe, _, _ in self.streams.values():  # another process holds the other end
            pipe.close()
        self.streams.clear()
        with suppress(OSError):
            self._log.close()

    def _note(self, *lines: str) -> None:
        """Appends lines to the log. A disk that is full or gone costs lines of it, never the run."""
        with suppress(OSError):
            self._log.writelines(f"{line}\n" for line in lines)
            self._log.flush()


def compiler_cache(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables by which torch keeps what it compiles in the user's cache, not among temporary files."""
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/torchinductor", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


def show(data: bytes) -> None:
    """Writes to stdout, also inside a signal handler. If its reader is gone, later output is dropped."""
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Guard:
    """A process that kills our children if this process vanishes: `with Guard() as guard:`"""

    def __init__(self) -> None:
        self.mark = os.environ.get(MARK, "") + uuid.uuid4().hex  # with the mark of who started us, who can find ours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "launcher.processes.processes", self.mark],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )

    def tell(self, running: Running, scratch: Sequence[str] | None) -> None:
        """Adds the child's process group and files to what the guard removes.

        None removes a child whose group has ended, because the kernel may reuse its number.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the guard was killed; the two other means remain
            self._process.stdin.write(json.dumps([running.process.pid, scratch]).encode() + b"\n")
            self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        kill_marked(self.mark)
        self._process.communicate()  # closes its stdin, by which it ends


def kill_marked(mark: str) -> None:
    """Kills every process of this user whose mark begins with `mark`, until a second look finds none."""
    for _ in range(20):
        everyone = psutil.process_iter(["environ", "status"])
        marked = [p for p in everyone if (p.info["environ"] or {}).get(MARK, "").startswith(mark)]
        alive = [p for p in marked if p.pid != os.getpid() and p.info["status"] != psutil.STATUS_ZOMBIE]
        if not alive:
            return
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


def remove(patterns: Sequence[str]) -> None:
    """Deletes files and folders of this user by glob patterns, without following a link."""
    for path in [path for pattern in patterns for path in glob.glob(pattern)]:
        with suppress(OSError):
            if os.lstat(path).st_uid == os.getuid():
                is_folder = os.path.isdir(path) and not os.path.islink(path)
                shutil.rmtree(path) if is_folder else os.unlink(path)


def _in_child(cores: tuple[int, ...]) -> None:
    die_with_parent()
    if cores:
        os.sched_setaffinity(0, cores)


def guard_main(mark: str, messages: IO[str]) -> None:
    """Runs the guard: it notes process groups until the pipe closes, then kills what is left of them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, list[str] | None] = dict(map(json.loads, messages))  # of a group the newest message counts
    live = {pid: scratch for pid, scratch in groups.items() if scratch is not None}
    for pid in live:
        kill_group(pid)
    kill_marked(mark)
    for scratch in live.values():
        remove(scratch)
    remove_orphans()


if __name__ == "__main__":
    guard_main(sys.argv[1], sys.stdin)
