"""Connections to the hosts of a run, over each of which on_host.py is started.

TANDEM_SSH is what reaches a host, "ssh" with options by default: the words before the host's name.
"""

from __future__ import annotations

import functools
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
from typing import Any

import psutil

from common.errors import Retryable, UserError
from common.exits import INTERRUPTED, RETRYABLE, USER_ERROR, die_with_parent, meaning, say
from launcher.machine import ROOT
from launcher.on_host import ANSWER

SSH = "TANDEM_SSH"
FOLLOW_S = 15.0  # a peer that has ended is noticed, and its code passed on
_DEFAULT = "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
_NO_CONNECTION = 255  # exit code of ssh
_STILL_S = 10.0
_ITS_END = re.compile(r"tandem: (trainer|sampler)[^:]*: ")  # as common/exits.py says it
_DOWN = re.compile("refused|timed out|timeout|o route|unreachable|reset by|closed|is down|roken pipe")
_REFUSED = {  # words of ssh → what helps
    "Permission denied": "let this user in by a key (ssh-copy-id), or name user and key: "
    'export TANDEM_SSH="ssh -l USER -i KEY"',
    "Too many authentication": 'name the key: export TANDEM_SSH="ssh -o IdentitiesOnly=yes -i KEY"',
    "Host key verification failed": "connect once by hand, and compare and accept its key",
    "Could not resolve": "write its address in the hostfile",
}


class Host:
    """A process on a host, as its connection shows it. Raises UserError if there is no ssh."""

    def __init__(self, name: str):
        self.name = name
        self.answer: dict[str, Any] = {}  # the newest
        self.was_there = False
        self.why = ""  # it ended, if that was not its process
        self.said_end_at = float("inf")
        self._words: list[str] = []  # of ssh and of a shell, before the first answer
        self._rest = b""
        words = reach(name, os.environ)
        try:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # safe: this process has no threads
            )
        except OSError as error:
            raise UserError(f"{words[0]}: {error.strerror}; install it, or set {SSH}") from None
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        there = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "launcher.on_host"]
        self._write(f"exec {shlex.join(there)}")

    def tell(self, message: Mapping[str, Any] | int) -> None:
        self.answer = {}
        self._write(json.dumps(message))

    def _write(self, text: str) -> None:
        with suppress(OSError):  # it has ended
            self.stdin.write(f"{text}\n".encode())
            self.stdin.flush()

    def read(self) -> None:
        """Shows whole lines, so that two hosts do not write into each other's, and Tandem's with the host's name."""
        data = os.read(self.stdout.fileno(), 65536)
        *lines, self._rest = (self._rest + (data or b"\n" * bool(self._rest))).split(b"\n")
        if not data:
            self.stdout.close()
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            if line.startswith(ANSWER):
                self.answer, self.was_there = json.loads(line.removeprefix(ANSWER)), True
            elif not self.was_there:
                self._words.append(text)
            else:
                if _ITS_END.match(text):
                    self.said_end_at = min(self.said_end_at, time.monotonic())
                print(re.sub("^tandem: ", f"tandem: {self.name}: ", text), flush=True)

    def ended(self) -> int | None:
        """The exit code of the process there, or what a code of ssh itself means, and `why`. None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        while not self.stdout.closed and select.select([self.stdout], [], [], 0)[0]:
            self.read()
        self.said_end_at = min(self.said_end_at, time.monotonic())
        if self.was_there and 0 <= code != _NO_CONNECTION:
            return code
        meant, self.why = (RETRYABLE, "") if self.was_there else self._never_there(code)
        self.why = self.why or "the connection ended"
        return meant

    def _never_there(self, code: int) -> tuple[int, str]:
        said = [word for word in self._words if word.strip()]
        if 0 < code < 128:
            said_there = f" ({said[-1]})" if said else ""
            install = "install this folder on it under the same path: bash launch.sh setup"
            return USER_ERROR, f"no {sys.executable} that works there{said_there}; {install}"
        helps = [(word, what) for word in said for known, what in _REFUSED.items() if known in word]
        if code < 0 or not said or (not helps and _DOWN.search(said[-1])):
            return RETRYABLE, "".join(said[-1:])
        word, what = helps[0] if helps else (said[-1], "mend it")
        by_hand = shlex.join([*reach(self.name, os.environ)[:-1], "true"])
        return USER_ERROR, f"{word}; {what}, until this works here: {by_hand}"


def end(hosts: Sequence[Host]) -> None:
    """Closes the connections, at which everything there ends."""
    until = time.monotonic() + FOLLOW_S
    for host in hosts:
        with suppress(OSError):
            host.stdin.close()
        if not host.was_there:  # nothing has begun there
            _kill(host)
    while time.monotonic() < until and any(host.process.poll() is None for host in hosts):
        read(hosts)
    for host in hosts:
        _kill(host)
        host.process.wait()
        while not host.stdout.closed and select.select([host.stdout], [], [], 1.0)[0]:
            host.read()
        host.stdout.close()


def _kill(host: Host) -> None:
    with suppress(OSError):
        os.killpg(host.process.pid, signal.SIGKILL)


def read(hosts: Sequence[Host]) -> None:
    """What they say within a tenth of a second."""
    streams = {host.stdout: host for host in hosts if not host.stdout.closed}
    for stream in select.select(list(streams), [], [], 0.1)[0]:
        streams[stream].read()


class Patience:
    """Says every ten seconds which hosts are still missing. How long a connection may take is ssh's."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _STILL_S

    def wait_for(self, missing: Sequence[Host]) -> None:
        if missing and time.monotonic() > self._next:
            self._next += _STILL_S
            say(f"waiting for {', '.join(host.name for host in missing)}")


def answers(names: Sequence[str]) -> list[dict[str, Any]]:
    """What every host says of itself, and the others of the first: how they reach it.

    Raises UserError or Retryable with the words of the first that is not there.
    """
    hosts: list[Host] = []
    try:
        hosts += [Host(name) for name in names]
        _until_answered(hosts)
        first = hosts[0].answer
        question = {"reach": {"name": names[0], "addresses": list(first["cards"]), "port": first["port"]}}
        for host in hosts[1:]:
            host.tell(question)
        _until_answered(hosts)
        return [host.answer for host in hosts]
    finally:
        end(hosts)


def _until_answered(hosts: Sequence[Host]) -> None:
    patience = Patience()
    while missing := [host for host in hosts if not host.answer]:
        read(hosts)
        for host in missing:
            code = host.ended()
            if code is not None and not host.answer:
                error = Retryable if code in (RETRYABLE, INTERRUPTED) else UserError
                raise error(f"{host.name}: {host.why or meaning(code)}")
        patience.wait_for(missing)


def reach(host: str, environ: Mapping[str, str]) -> list[str]:
    """The command that starts a shell there, which gets its own over stdin: what ssh is told loses its quotes, and
    `ip netns exec` has no shell."""
    return ["sh"] if is_here(host) else [*shlex.split(environ.get(SSH, _DEFAULT)), host, "sh"]


@functools.cache
def is_here(host: str) -> bool:
    """Whether the name is this host's, which on Debian stands for 127.0.1.1, or stands for one of its addresses."""
    if host.partition(".")[0] == socket.gethostname().partition(".")[0]:
        return True
    try:
        found = {found[4][0] for found in socket.getaddrinfo(host, None)}
    except OSError:  # ssh may know it
        return False
    return any(a.address in found for of in psutil.net_if_addrs().values() for a in of)
