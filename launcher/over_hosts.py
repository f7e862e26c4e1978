"""The trainer's ranks, or a sampler, on other hosts as one process here:  python -m launcher.over_hosts ORDERS.json

    supervisor.py ─► over_hosts.py ── ssh HOST ──► on_host.py ─► deepspeed --no_ssh --node_rank 0 …
                                   └─ ssh HOST ──► on_host.py ─► deepspeed --no_ssh --node_rank 1 …

It ends as the first of them that ends with another code than 0; the others have a few seconds to follow, and are ended.
A connection that breaks counts as 75: start again. SIGINT and SIGTERM are passed on. TANDEM_SSH is what reaches a host,
"ssh" with options by default: the words before the host's name.
"""

from __future__ import annotations

import json
import os
import selectors
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

from common.exits import DONE, INTERRUPTED, RETRYABLE, USER_ERROR, die_with_parent, say
from launcher.machine import ROOT

SSH = "TANDEM_SSH"
_DEFAULT = "ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
_NO_CONNECTION, _NO_PROGRAM = 255, (126, 127)  # exit codes of ssh, and of a shell
_FOLLOW_S = 15.0  # a peer that has ended is noticed, and its code passed on


def main(arguments: Sequence[str]) -> int:
    orders = json.loads(Path(arguments[0]).read_text())
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    hosts = [Host(order) for order in orders]
    try:
        return _watch(hosts, asked)
    finally:
        for host in hosts:
            host.end()


class Host:
    """A process on a host, as its connection shows it."""

    def __init__(self, order: Mapping[str, Any]):
        self.name = order["host"]
        self.process = subprocess.Popen(
            reach(self.name, os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,  # safe: this process has no threads
        )
        self.tell(json.dumps(order))
        self._rest = b""

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()

    def show(self, data: bytes) -> None:
        """Whole lines, so that two hosts do not write into each other's."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            print(line.decode(errors="replace"), flush=True)

    def ended(self) -> tuple[int, str] | None:
        """(exit code of the process there, what a code of ssh itself means); None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        if code == _NO_CONNECTION or code < 0:
            return RETRYABLE, "the connection ended"
        if code in _NO_PROGRAM:
            why = f"no {sys.executable} there; install this folder on it under the same path: bash launch.sh setup"
            return USER_ERROR, why
        return code, ""

    def end(self) -> None:
        """Closes the connection, at which everything there ends."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_FOLLOW_S)
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.show((self.process.stdout.read() or b"") + b"\n" * bool(self._rest))
        self.process.stdout.close()


def _watch(hosts: Sequence[Host], asked: list[int]) -> int:
    told, found, until = 0, DONE, float("inf")
    with selectors.DefaultSelector() as selector:
        for host in hosts:
            assert host.process.stdout is not None
            selector.register(host.process.stdout, selectors.EVENT_READ, host)
        while True:
            for key, _ in selector.select(0.1):
                if data := os.read(key.fd, 65536):
                    key.data.show(data)
                else:
                    selector.unregister(key.fileobj)
            for number in asked[told:]:
                for host in hosts:
                    host.tell(str(number))
            told = len(asked)
            ends = [host.ended() for host in hosts]
            failed = [(host, *end) for host, end in zip(hosts, ends, strict=True) if end and end[0] != DONE]
            if failed and found == DONE:
                host, found, why = failed[0]
                until = time.monotonic() + _FOLLOW_S
                if why:
                    say(f"{host.name}: {why}")
            if None not in ends or time.monotonic() > until:
                return INTERRUPTED if asked and found == RETRYABLE else found


def reach(host: str, environ: Mapping[str, str]) -> list[str]:
    """The command that starts on_host.py there, in words without shell syntax: ssh gives them to a shell."""
    there = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "launcher.on_host"]
    return there if is_here(host) else [*shlex.split(environ.get(SSH, _DEFAULT)), host, *there]


def is_here(host: str) -> bool:
    """Whether the name stands for an address of this host."""
    try:
        address = socket.gethostbyname(host)
    except OSError:  # ssh may know it
        return host == socket.gethostname()
    return any(a.address == address for of in psutil.net_if_addrs().values() for a in of)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
