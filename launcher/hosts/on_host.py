"""Runs one process of a run on one of its hosts:  python -m launcher.hosts.on_host, started by over_hosts.py over ssh.

stdout   first a free port and the addresses of this host, for over_hosts.py; then the output that a user should see
         (all output is in the process's log in the run folder)
stdin    lines of JSON: questions, then the order (hosts.py); then signal numbers for the process, one per line. A
         signal that arrives here is reported on stdout and sent to all hosts. End of file kills the process
exit     the code of the process, 256 - n for a signal n; 2 if this host does not see the run folder of the others
"""

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
from common.paths import ROOT
from common.processes.exits import INTERRUPTED, RETRYABLE, SIGKILLED, STARTED_AT, USER_ERROR, of_child, say
from common.processes.out_of_memory import less_memory
from common.wire.ports import listen
from launcher.processes.killed import OomKills
from launcher.processes.processes import Child, Guard, Running, compiler_cache, show
from launcher.resources.machine import usable_cores
from launcher.resources.placement import visible_gpus

ANSWER = b"tandem-host "  # prefix of the lines of stdout that over_hosts.py reads


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: None)  # SIG_IGN would be inherited by every child
    os.chdir(ROOT)
    try:
        order = _receive_order()
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
        guard.tell(running, running.scratch)
        code = _watch(running, kills)
        if code in SIGKILLED:
            advice = less_memory(child.name.partition(".")[0], is_host_of_gpus="DS_ACCELERATOR" not in child.env)
            say(kills.why_killed(f"{child.name} on {order['host']}", advice)[1])
        return code % 256


def _receive_order() -> dict[str, Any]:
    """Answers questions until the order comes and returns it; reads no byte beyond it. Exits at the end of stdin."""
    with listen() as listening, open(0, "rb", buffering=0, closefd=False) as words:
        _answer({"port": listening.getsockname()[1], "cards": _network_cards()})
        for line in iter(words.readline, b""):
            order: dict[str, Any] = json.loads(line)
            if "reach" not in order:
                return order
            _answer(_reachable(**order["reach"]))
    sys.exit(RETRYABLE)


def _answer(content: Mapping[str, Any]) -> None:
    show(b"\n" + ANSWER + json.dumps(content).encode() + b"\n")


def _network_cards() -> dict[str, str]:
    """Returns {address: network card} of this host, without IPv6 addresses that are valid on one link only."""
    ip = (socket.AF_INET, socket.AF_INET6)
    found = [(of, card) for card, addresses in psutil.net_if_addrs().items() for of in addresses if of.family in ip]
    return {of.address: card for of, card in found if "%" not in of.address}


def _reachable(name: str, addresses: Sequence[str], port: int) -> dict[str, Any]:
    """Returns the network card that reaches each address of another host, and the addresses of that host's name."""

    def card_to(address: str) -> str | None:
        with suppress(OSError), socket.create_connection((address, port), timeout=5.0) as link:
            return _network_cards().get(link.getsockname()[0])
        return None

    known: list[str] = []
    with ThreadPoolExecutor(max(1, len(addresses))) as pool, suppress(OSError):
        cards = {address: card for address, card in zip(addresses, pool.map(card_to, addresses), strict=True) if card}
        known = [str(of[4][0]) for of in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    return {"cards": cards, "known": known}


def _require_shared(order: Mapping[str, Any]) -> None:
    """Raises UserError if the first host's file does not appear in time, KeyboardInterrupt at input on stdin."""
    proof, deadline = Path(order["proof"]), time.monotonic() + order["within_s"]
    while proof.name not in glob("*", root_dir=proof.parent):  # a listing, for it refreshes NFS's cache
        if select.select([0], [], [], 0.2)[0]:
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            raise UserError(
                f"{order['host']} does not see {proof.parent}, which the first host has written; set run.output_dir to "
                "a folder that all hosts share"
            )


def _child(order: Mapping[str, Any], environ: Mapping[str, str]) -> Child:
    """Returns the order's process with the environment, GPUs and cores of this host."""
    env = {**order["defaults"], **compiler_cache(environ), **environ, **order["env"]}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"  # ninja, for compiled ops
    env[STARTED_AT] = str(time.monotonic() - order["running_s"])
    gpus = visible_gpus(environ)
    first, count = order["gpus"]
    if not gpus:
        env["DS_ACCELERATOR"] = "cpu"
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cores()) // order["processes"])))
    elif first + count > len(gpus):
        raise UserError(
            f"{order['host']} has {len(gpus)} GPUs and the hostfile gives its processes {first + count}; lower slots= "
            "or samplers= there"
        )
    else:
        env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of these numbers
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus[first : first + count]))
    argv, scratch = tuple(order["argv"]), tuple(order["scratch"])
    return Child(order["name"], argv, env, Path(order["log"]), echo=True, scratch=scratch)


def _watch(running: Running, kills: OomKills) -> int:
    """Relays output to stdout and signals from stdin until the process ends, and returns its exit code."""
    is_asked = False
    while running.process.poll() is None:
        kills.look()
        for descriptor in select.select([0, *running.streams], [], [], 0.1)[0]:
            if descriptor != 0:
                running.relay(descriptor)
            elif words := os.read(0, 4096).split():
                is_asked = True
                for number in map(int, words):
                    running.process.send_signal(number)
            else:
                running.close()
                return INTERRUPTED
    code = running.process.returncode
    running.close()
    return of_child(code, is_asked)


if __name__ == "__main__":
    sys.exit(main())
