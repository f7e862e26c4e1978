"""The trainer's ranks, or a sampler, on other hosts as one process here:  python -m launcher.over_hosts ORDERS.json

    supervisor.py ─► over_hosts.py ── ssh HOST ──► on_host.py ─► ranks.py 0 2 4 …
                                   └─ ssh HOST ──► …

They start once all hosts are there, with a port that the first of them has free. It ends as the first of them that ends
with another code than 0; the others have a few seconds to follow, and are ended. A host that is down, or a connection
that breaks, counts as 75: start again; one that is refused as 2. SIGINT and SIGTERM are passed on, also from a host.
TANDEM_SSH is what reaches a host, "ssh" with options by default: the words before the host's name.
"""

from __future__ import annotations

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

from common import exits
from common.errors import Retryable, UserError
from common.exits import INTERRUPTED, RETRYABLE, USER_ERROR, every, kill_group, say
from common.transcript import tail
from launcher.machine import ROOT
from launcher.on_host import ANSWER

PORT = "@port of the first host@"  # in an order
FOLLOW_S = 15.0  # a peer that has ended is noticed, and its code passed on
_SSH = "ssh -T -o RemoteCommand=none -o ClearAllForwardings=yes"  # whatever is configured for people
_SSH += " -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
_NO_CONNECTION = 255  # exit code of ssh
_ITS_END = re.compile(r"tandem: (trainer|sampler)[^:]*: ")  # as common/exits.py says it
_DOWN = re.compile("refused|timed out|timeout|o route|unreachable|reset by|closed|is down|roken pipe")
_REFUSED = {  # words of ssh → what helps
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
        first, code = _watch(hosts, asked)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (UserError, Retryable) as error:
        say(str(error))
        return USER_ERROR if isinstance(error, UserError) else RETRYABLE
    finally:
        _end(hosts)
    if first is not None and code != INTERRUPTED:  # last, below what the others said once it was gone
        say(f"{first.name}: {'the connection ended' if first.is_lost else f'the first that {exits.meaning(code)}'}")
        if not first.is_lost and (log := Path(orders[hosts.index(first)]["log"])).exists():
            print(f"the end of {log}:", *tail(log, 13), sep="\n", file=sys.stderr, flush=True)
    return code


def answers(names: Sequence[str]) -> list[dict[str, Any]]:
    """What every host says of itself, and the others of the first: how they reach it.

    Raises UserError or Retryable with the words of the first that is not there.
    """
    hosts: list[Host] = []
    try:
        hosts += [Host(name) for name in names]
        _until_answered(hosts)
        first, name = hosts[0].answer, names[0].rpartition("@")[2]
        for asked in (hosts[1:], hosts[:1]):  # the first as the last: then it was there while the others tried
            for host in asked:
                host.tell({"reach": {"name": name, "addresses": list(first["cards"]), "port": first["port"]}})
            _until_answered(hosts)
        return [first, *(host.answer for host in hosts[1:])]
    finally:
        _end(hosts)


class Host:
    """A process on a host, as its connection shows it. Raises UserError if there is no ssh."""

    def __init__(self, name: str):
        self.name = name
        self.answer: dict[str, Any] = {}  # the newest
        self.was_there = self.is_lost = False
        self.said_end_at = float("inf")
        self._words: list[str] = []  # of ssh and of a shell, before the first answer
        self._rest = b""
        words, pipe = reach(name, os.environ), subprocess.PIPE
        more: Any = {
            "start_new_session": True,
            "preexec_fn": exits.die_with_parent,
        }  # safe: this process has no threads
        try:
            self.process = subprocess.Popen(words, 0, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, **more)
        except OSError as error:
            raise UserError(f"{words[0]}: {error.strerror}; install it, or set TANDEM_SSH") from None
        self.stdin: Any = self.process.stdin
        self.stdout: Any = self.process.stdout
        self._write(f"exec {shlex.join(['env', f'PYTHONPATH={ROOT}', sys.executable, '-m', 'launcher.on_host'])}")

    def tell(self, message: Mapping[str, Any] | int) -> None:
        self.answer = {}
        self._write(json.dumps(message))

    def _write(self, text: str) -> None:
        with suppress(OSError):  # it has ended
            self.stdin.write(f"{text}\n".encode())

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
                self._words += [text] if text.strip() else []
            else:
                if _ITS_END.match(text):
                    self.said_end_at = min(self.said_end_at, time.monotonic())
                print(re.sub("^tandem: ", f"tandem: {self.name}: ", text), flush=True)

    def drain(self, timeout_s: float) -> None:
        while not self.stdout.closed and select.select([self.stdout], [], [], timeout_s)[0]:
            self.read()

    def ended(self) -> int | None:
        """The exit code of the process there, RETRYABLE if the connection is lost. None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        self.drain(0)
        self.said_end_at = min(self.said_end_at, time.monotonic())
        self.is_lost = code < 0 or code == _NO_CONNECTION
        return RETRYABLE if self.is_lost else code

    def refusal(self) -> UserError | Retryable:
        """What it means that it has ended without an answer."""
        code, last = self.process.returncode, self._words[-1] if self._words else ""
        if self.was_there or not (0 <= code < 128 or code == _NO_CONNECTION):  # or a signal killed it
            return Retryable(f"{self.name}: the connection ended")
        if 0 < code < 128:
            install = "install this folder on it under the same path: bash launch.sh setup"
            return UserError(f"{self.name}: no {sys.executable} that works there ({last}); {install}")
        helps = [(word, what) for word in self._words for known, what in _REFUSED.items() if known in word]
        if not last or (not helps and _DOWN.search(last)):
            return Retryable(f"{self.name}: {last or 'the connection ended'}")
        word, what = helps[0] if helps else (last, "mend it")
        by_hand = [*reach(self.name, os.environ)[:-1], "true"]
        return UserError(f"{self.name}: {word}; {what}, until this works here: {shlex.join(by_hand)}")


def _until_answered(hosts: Sequence[Host], asked: Sequence[int] = ()) -> None:
    """How long a connection may take is ssh's. Raises KeyboardInterrupt once somebody asks for the end."""
    is_due = every(10.0)
    while missing := [host for host in hosts if not host.answer]:
        _read(hosts)
        if asked:
            raise KeyboardInterrupt
        for host in missing:
            if host.ended() is not None and not host.answer:
                raise KeyboardInterrupt if host.ended() == INTERRUPTED else host.refusal()
        if is_due():
            say(f"waiting for {', '.join(host.name for host in missing)}")


def _watch(hosts: Sequence[Host], asked: list[int]) -> tuple[Host | None, int]:
    """The host that was the first to end other than well, and its code."""
    told, until = 0, float("inf")
    while True:
        _read(hosts)
        failed = [(host, code) for host in hosts if (code := host.ended())]
        asked += [host.answer.pop("asked") for host in hosts if "asked" in host.answer]
        asked += [signal.SIGTERM] * (not asked and INTERRUPTED in [code for _, code in failed])
        for number in asked[told:]:
            told += 1
            for host in hosts:
                host.tell(number)
        if failed:
            until = min(until, time.monotonic() + FOLLOW_S)
        if time.monotonic() >= until or all(host.process.returncode is not None for host in hosts):
            first, code = min(failed, key=_order, default=(None, exits.DONE))
            return first, INTERRUPTED if asked and code not in (exits.DONE, USER_ERROR) else code


def _order(ended: tuple[Host, int]) -> tuple[bool, float]:
    """By time; but what breaks with another rank may be seen before it."""
    host, code = ended
    return code not in (USER_ERROR, INTERRUPTED, *exits.SIGKILLED), host.said_end_at


def _end(hosts: Sequence[Host]) -> None:
    """Closes the connections, at which everything there ends."""
    until = time.monotonic() + FOLLOW_S
    for host in hosts:
        host.stdin.close()
        if not host.was_there:  # nothing has begun there
            kill_group(host.process.pid)
    while time.monotonic() < until and any(host.process.poll() is None for host in hosts):
        _read(hosts)
    for host in hosts:
        kill_group(host.process.pid)
        host.process.wait()
        host.drain(1.0)
        host.stdout.close()


def _read(hosts: Sequence[Host]) -> None:
    """What they say within a tenth of a second."""
    streams = {host.stdout: host for host in hosts if not host.stdout.closed}
    for stream in select.select(list(streams), [], [], 0.1)[0]:
        streams[stream].read()


def reach(host: str, environ: Mapping[str, str]) -> list[str]:
    """What starts a shell there, which gets its command over stdin: ssh drops quotes, `ip netns exec` has no shell."""
    return ["sh"] if is_here(host) else [*shlex.split(environ.get("TANDEM_SSH", _SSH)), host, "sh"]


def is_here(host: str) -> bool:
    """Whether it is this host's name, perhaps with a domain for Debian's 127.0.1.1, or stands for an address of it."""
    found = []
    with suppress(OSError):  # a name may be ssh's alone
        found = [str(of[4][0]) for of in socket.getaddrinfo(host, None)]
    own, is_loopback = socket.gethostname(), all(address.startswith(("127.", "::1")) for address in found)
    is_own_name = host == own or (host.partition(".")[0] == own.partition(".")[0] and is_loopback)
    return is_own_name or any(a.address in found for of in psutil.net_if_addrs().values() for a in of)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
