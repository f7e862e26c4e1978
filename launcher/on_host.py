"""One process of a run on one of its hosts:  python -m launcher.on_host, started by over_hosts.py over ssh.

    stdout   first what others must know of this host: a port that is free, and its addresses. Then what a user should
             see of the process; all of its output is in its log in the run folder
    stdin    a line of JSON: a question, or the order (hosts.py); then numbers of signals, one a line, which the process
             gets; those that arrive here go up, and come down on all hosts. Its end is the end of everything here
    exit     the code of the process, 256 - n for a signal n

Ends with 2 if this host does not see the run folder of the others.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

import psutil

from common.errors import UserError
from common.exits import INTERRUPTED, RETRYABLE, SIGKILLED, STARTED_AT, USER_ERROR, of_child, say
from common.out_of_memory import less_memory
from common.ports import listen
from launcher.killed import OomKills
from launcher.machine import ROOT, usable_cores
from launcher.placement import visible_gpus
from launcher.processes import Child, Guard, Running

ANSWER = b"tandem-host "  # begins a line of stdout that is for over_hosts.py
_CONNECTS_S = 5.0


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: None)  # what is ignored stays ignored in all that is started
    os.chdir(ROOT)
    try:
        order = _order()
        _require_shared(order)
        child = _child(order, os.environ)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: _answer({"asked": number}))
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        say(str(error))
        return USER_ERROR
    with Guard() as guard:
        kills = OomKills()
        running = Running(child, guard.mark, order["attempt"])
        guard.watch(running)
        code = _watch(running, kills)
        if code in SIGKILLED:
            role = "trainer" if child.name == "trainer" else "sampler"
            advice = less_memory(role, is_host_of_gpus="DS_ACCELERATOR" not in child.env)
            _, said = kills.why_killed(f"{child.name} on {order['host']}", advice)
            say(said)
        return code % 256


def _order() -> dict[str, Any]:
    """After answers to what else is asked. Not a byte more is read. Ends the program at the end of stdin."""
    with listen() as listening, open(0, "rb", buffering=0, closefd=False) as words:
        _answer({"port": listening.getsockname()[1], "cards": _cards()})
        for line in iter(words.readline, b""):
            order: dict[str, Any] = json.loads(line)
            if "reach" not in order:
                return order
            _answer(_reached(**order["reach"]))
    sys.exit(RETRYABLE)


def _answer(content: Mapping[str, Any]) -> None:
    _show(b"\n" + ANSWER + json.dumps(content).encode() + b"\n")


def _cards() -> dict[str, str]:
    """{address: its network card} of this host; without those of IPv6 that count on one cable alone."""
    ip = (socket.AF_INET, socket.AF_INET6)
    found = [(of, card) for card, addresses in psutil.net_if_addrs().items() for of in addresses if of.family in ip]
    return {of.address: card for of, card in found if "%" not in of.address}


def _reached(name: str, addresses: Sequence[str], port: int) -> dict[str, Any]:
    """The network card by which each address of another host is reached from here, and what its name stands for."""

    def card_to(address: str) -> str | None:
        with suppress(OSError), socket.create_connection((address, port), timeout=_CONNECTS_S) as link:
            return _cards().get(link.getsockname()[0])
        return None

    known: list[str] = []
    with ThreadPoolExecutor(max(1, len(addresses))) as pool, suppress(OSError):
        cards = {address: card for address, card in zip(addresses, pool.map(card_to, addresses), strict=True) if card}
        known = [str(of[4][0]) for of in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    return {"cards": cards, "known": known}


def _require_shared(order: Mapping[str, Any]) -> None:
    """Raises UserError if the first host's file does not appear in time, KeyboardInterrupt at a word on stdin."""
    proof, deadline = Path(order["proof"]), time.monotonic() + order["within_s"]
    while proof.name not in glob("*", root_dir=proof.parent):  # NFS looks anew, for a folder; it may forbid root to
        if select.select([0], [], [], 0.2)[0]:
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            raise UserError(
                f"{order['host']} does not see {proof.parent}, which the first host has written; set run.output_dir to "
                "a folder that all hosts share"
            )


def _child(order: Mapping[str, Any], environ: Mapping[str, str]) -> Child:
    """The order's process with what only this host knows: its own environment, its GPUs and its cores."""
    env = {**environ, **order["env"]}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"  # ninja, for compiled ops
    env[STARTED_AT] = str(time.monotonic() - order["running_s"])
    gpus = visible_gpus(environ)
    first, count = order["gpus"]
    if not gpus:
        env["DS_ACCELERATOR"] = "cpu"
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        threads = max(1, len(usable_cores()) // order["processes"])
        env.setdefault("OMP_NUM_THREADS", str(threads))
    elif first + count > len(gpus):
        raise UserError(
            f"{order['host']} has {len(gpus)} GPUs and the hostfile gives its processes {first + count}; lower slots= "
            "or samplers= there"
        )
    else:
        env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # in which these numbers count
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus[first : first + count]))
    argv, scratch = tuple(order["argv"]), tuple(order["scratch"])
    return Child(order["name"], argv, env, Path(order["log"]), echo=True, scratch=scratch)


def _watch(running: Running, kills: OomKills) -> int:
    """The exit code of the process. Output goes up, signals go down."""
    is_asked = False
    while running.process.poll() is None:
        kills.look()
        for descriptor in select.select([0, *running.streams], [], [], 0.1)[0]:
            if descriptor != 0:
                running.relay(descriptor, _show)
            elif words := os.read(0, 4096).split():
                is_asked = True
                for number in map(int, words):
                    running.process.send_signal(number)
            else:
                running.close(_show)
                return INTERRUPTED
    code = running.process.returncode
    running.close(_show)
    return of_child(code, is_asked)


def _show(data: bytes) -> None:
    """The connection may be gone: then stdin ends, too."""
    try:
        os.write(1, data)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
