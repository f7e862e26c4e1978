"""Runs ranks or a sampler on other hosts as one local process:  python -m launcher.hosts.over_hosts ORDERS.json

    supervisor.py ─► over_hosts.py ── ssh HOST ──► on_host.py ─► ranks.py 0 2 4 …
                                   └─ ssh HOST ──► …

The processes start once all hosts have answered, with a free port of the first host. This process ends with the exit
code of the first one that fails; the others have a few seconds to follow, and are then killed. A host that is down, or
a connection that breaks, counts as 75 (start again); a refused connection as 2. SIGINT and SIGTERM are passed on, also
from a host. TANDEM_SSH holds the command words before the name of a host, by default "ssh" with options.
"""

import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from common.errors import Retryable, UserError
from common.paths import ROOT
from common.processes import exits
from common.processes.exits import INTERRUPTED, RETRYABLE, USER_ERROR, every, kill_group, say
from common.processes.transcript import tail
from launcher.hosts.on_host import ANSWER

PORT = "@port of the first host@"  # placeholder in an order
FOLLOW_S = 15.0  # for peers to notice that a process has ended, and to pass their codes on
_SSH = "ssh -T -o RemoteCommand=none -o ClearAllForwardings=yes"  # whatever a user's ssh config says
_SSH += " -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
_NO_CONNECTION = 255  # exit code of ssh
_ITS_END = re.compile(r"tandem: (trainer|sampler)[^:]*: ")  # as common/processes/exits.py prints it
_DOWN = re.compile("refused|timed out|timeout|o route|unreachable|reset by|closed|is down|roken pipe")
_REFUSED = {  # message of ssh → remedy
    "Permission denied": 'ssh-copy-id, or name user and key: export TANDEM_SSH="ssh -l USER -i KEY"',
    "Too many authentication": 'name the key: export TANDEM_SSH="ssh -o IdentitiesOnly=yes -i KEY"',
    "Host key verification failed": "connect once by hand, and compare and accept its key",
    "Could not resolve": "write its address in the hostfile",
}


def main(arguments: Sequence[str]) -> int:
    orders = json.loads(Path(arguments[0]).read_text())
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    hosts: list[Host] = []
    try:
        hosts += [Host(order["host"]) for order in orders]
        _until_answered(hosts, asked)
        port = str(hosts[0].answer["port"])
        for host, order in zip(hosts, orders, strict=True):
            host.tell(json.loads(json.dumps(order).replace(PORT, port)))
        first, code = _watch_all(hosts, asked)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (UserError, Retryable) as error:
        say(str(error))
        return USER_ERROR if isinstance(error, UserError) else RETRYABLE
    finally:
        _end_all(hosts)
    if first is not None and code != INTERRUPTED:  # printed last, below what the other hosts print at this end
        say(f"{first.name}: {'the connection ended' if first.is_lost else f'the first that {exits.meaning(code)}'}")
        if not first.is_lost and (log := Path(orders[hosts.index(first)]["log"])).exists():
            print(f"the end of {log}:", *tail(log, 13), sep="\n", file=sys.stderr, flush=True)
    return code


def answers(names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns what each host reports of itself, and for those after the first, how they reach the first.

    Raises UserError or Retryable with the message of the first host that does not answer.
    """
    hosts = [Host(name) for name in names]
    try:
        _until_answered(hosts)
        first, name = hosts[0].answer, names[0].rpartition("@")[2]
        for asked in (hosts[1:], hosts[:1]):  # the first host last, so that it listens while the others connect
            for host in asked:
                host.tell({"reach": {"name": name, "addresses": list(first["cards"]), "port": first["port"]}})
            _until_answered(hosts)
        return [first, *(host.answer for host in hosts[1:])]
    finally:
        _end_all(hosts)


class Host:
    """A process on another host, seen through its connection. Raises UserError if ssh is not installed."""

    def __init__(self, name: str):
        self.name = name
        self.answer: dict[str, Any] = {}  # the newest message
        self.has_answered = self.is_lost = False
        self.reported_end_at = float("inf")
        self._early_output: list[str] = []  # output of ssh and of a shell, before the first answer
        self._rest = b""
        words, pipe = shell_on(name, os.environ), subprocess.PIPE
        own_session: Any = {"start_new_session": True, "preexec_fn": exits.die_with_parent}  # safe: we have no threads
        try:
            self.process = subprocess.Popen(words, 0, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, **own_session)
        except OSError as error:
            raise UserError(f"{words[0]}: {error.strerror}; install it, or set TANDEM_SSH") from None
        self.stdin: Any = self.process.stdin
        self.stdout: Any = self.process.stdout
        self._write(f"exec {shlex.join(['env', f'PYTHONPATH={ROOT}', sys.executable, '-m', 'launcher.hosts.on_host'])}")

    def tell(self, message: Mapping[str, Any] | int) -> None:
        self.answer = {}
        self._write(json.dumps(message))

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the process has ended
            self.stdin.write(f"{text}\n".encode())

    def read(self) -> None:
        """Prints whole lines of output, so that those of several hosts do not mix; Tandem's own get the host's name."""
        data = os.read(self.stdout.fileno(), 65536)
        *lines, self._rest = (self._rest + (data or b"\n" * bool(self._rest))).split(b"\n")
        if not data:
            self.stdout.close()
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            if line.startswith(ANSWER):
                self.answer, self.has_answered = json.loads(line.removeprefix(ANSWER)), True
            elif not self.has_answered:
                self._early_output += [text] if text.strip() else []
            else:
                if _ITS_END.match(text):
                    self.reported_end_at = min(self.reported_end_at, time.monotonic())
                print(re.sub("^tandem: ", f"tandem: {self.name}: ", text), flush=True)

    def drain(self, timeout_s: float) -> None:
        while not self.stdout.closed and select.select([self.stdout], [], [], timeout_s)[0]:
            self.read()

    def ended(self) -> int | None:
        """Returns the exit code of the host's process, RETRYABLE if the connection is lost, None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        self.drain(0)
        self.reported_end_at = min(self.reported_end_at, time.monotonic())
        self.is_lost = code < 0 or code == _NO_CONNECTION
        return RETRYABLE if self.is_lost else code

    def refusal(self) -> UserError | Retryable:
        """Returns the error that reports an end without an answer."""
        code, last = self.process.returncode, self._early_output[-1] if self._early_output else ""
        if self.has_answered or not (0 <= code < 128 or code == _NO_CONNECTION):  # or a signal killed it
            return Retryable(f"{self.name}: the connection ended")
        if 0 < code < 128:
            install = "install this folder on it under the same path: bash launch.sh setup"
            return UserError(f"{self.name}: no {sys.executable} that works there ({last}); {install}")
        helps = [(word, what) for word in self._early_output for known, what in _REFUSED.items() if known in word]
        if not last or (not helps and _DOWN.search(last)):
            return Retryable(f"{self.name}: {last or 'the connection ended'}")
        word, what = helps[0] if helps else (last, "mend it")
        by_hand = [*shell_on(self.name, os.environ)[:-1], "true"]
        return UserError(f"{self.name}: {word}; {what}, until this works here: {shlex.join(by_hand)}")


def _until_answered(hosts: Sequence[Host], asked: Sequence[int] = ()) -> None:
    """Waits for all hosts' answers; ssh limits the time. Raises a host's refusal, or KeyboardInterrupt on a signal."""
    is_due = every(10.0)
    while missing := [host for host in hosts if not host.answer]:
        _read_all(hosts)
        if asked:
            raise KeyboardInterrupt
        for host in missing:
            if host.ended() is not None and not host.answer:
                raise KeyboardInterrupt if host.ended() == INTERRUPTED else host.refusal()
        if is_due():
            say(f"waiting for {', '.join(host.name for host in missing)}")


def _watch_all(hosts: Sequence[Host], asked: list[int]) -> tuple[Host | None, int]:
    """Waits for all processes and passes signals on. Returns the first host that failed, or None, and the exit code."""
    num_passed_on, until = 0, float("inf")
    while True:
        _read_all(hosts)
        failed = [(host, code) for host in hosts if (code := host.ended())]
        asked += [host.answer.pop("asked") for host in hosts if "asked" in host.answer]
        asked += [signal.SIGTERM] * (not asked and INTERRUPTED in [code for _, code in failed])
        for number in asked[num_passed_on:]:
            num_passed_on += 1
            for host in hosts:
                host.tell(number)
        if failed:
            until = min(until, time.monotonic() + FOLLOW_S)
        if time.monotonic() >= until or all(host.process.returncode is not None for host in hosts):
            first, code = min(failed, key=_by_cause, default=(None, exits.DONE))
            return first, INTERRUPTED if asked and code not in (exits.DONE, USER_ERROR) else code


def _by_cause(ended: tuple[Host, int]) -> tuple[bool, float]:
    """Returns a sort key: codes that another rank's end cannot cause come first, then the time of the end decides."""
    host, code = ended
    return code not in (USER_ERROR, INTERRUPTED, *exits.SIGKILLED), host.reported_end_at


def _end_all(hosts: Sequence[Host]) -> None:
    """Closes the connections, which ends every process on the hosts."""
    until = time.monotonic() + FOLLOW_S
    for host in hosts:
        host.stdin.close()
        if not host.has_answered:  # nothing has started on this host
            kill_group(host.process.pid)
    while time.monotonic() < until and any(host.process.poll() is None for host in hosts):
        _read_all(hosts)
    for host in hosts:
        kill_group(host.process.pid)
        host.process.wait()
        host.drain(1.0)
        host.stdout.close()


def _read_all(hosts: Sequence[Host]) -> None:
    """Reads the output that hosts send within a tenth of a second."""
    streams = {host.stdout: host for host in hosts if not host.stdout.closed}
    for stream in select.select(list(streams), [], [], 0.1)[0]:
        streams[stream].read()


def shell_on(host: str, environ: Mapping[str, str]) -> list[str]:
    """Returns the argv of a shell on the host, which reads stdin: ssh drops quotes, `ip netns exec` has no shell."""
    return ["sh"] if is_here(host) else [*shlex.split(environ.get("TANDEM_SSH", _SSH)), host, "sh"]


def is_here(host: str) -> bool:
    """Returns whether `host` is this host's name, perhaps with a domain for Debian's 127.0.1.1, or has its address."""
    found = []
    with suppress(OSError):  # only ssh may know the name
        found = [str(of[4][0]) for of in socket.getaddrinfo(host, None)]
    own, is_loopback = socket.gethostname(), all(address.startswith(("127.", "::1")) for address in found)
    is_own_name = host == own or (host.partition(".")[0] == own.partition(".")[0] and is_loopback)
    return is_own_name or any(a.address in found for of in psutil.net_if_addrs().values() for a in of)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
