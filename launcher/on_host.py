"""One process of a run on one of its hosts:  python -m launcher.on_host, started by over_hosts.py over ssh.

    stdin    a line of JSON: the order (hosts.py); then numbers of signals, one a line, which the process gets.
             Its end is the end of everything here: a lost connection, or a first host that is gone, leaves nothing
    stdout   what a user should see of the process; all of its output is in its log in the run folder
    exit     the code of the process, 256 - n for a signal n as DeepSpeed's launcher has it

Ends with 2 if this host does not see the run folder of the others.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.exits import INTERRUPTED, SIGKILLED, STARTED_AT, USER_ERROR, say
from common.out_of_memory import less_memory
from launcher.killed import oom_kills, why_killed
from launcher.machine import ROOT, usable_cores
from launcher.placement import visible_gpus
from launcher.processes import Child, Guard, Running


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP):  # the first host decides, over stdin
        signal.signal(number, signal.SIG_IGN)
    os.chdir(ROOT)
    order = json.loads(_line())
    try:
        _require_shared(order)
        child = _child(order, os.environ)
    except UserError as error:
        say(str(error))
        return USER_ERROR
    with Guard() as guard:
        kills_before = oom_kills()
        running = Running(child, guard.mark, order["attempt"])
        guard.watch(running)
        code = _watch(running)
        if code in SIGKILLED:
            role = "trainer" if child.name == "trainer" else "sampler"
            advice = less_memory(role, is_host_of_gpus="DS_ACCELERATOR" not in child.env)
            _, said = why_killed(f"{child.name} on {order['host']}", kills_before, advice)
            say(said)
        return code % 256


def _line() -> str:
    """The first line of stdin, and not a byte more."""
    line = bytearray()
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


def _require_shared(order: Mapping[str, Any]) -> None:
    """Raises UserError if the first host's file does not appear here in time."""
    proof, host, deadline = Path(order["proof"]), order["host"], time.monotonic() + order["within_s"]
    while not proof.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"{host} does not see {proof.parent}, which the first host has written; set run.output_dir to a "
                "folder that all hosts share"
            )
        time.sleep(0.2)


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
    elif order["name"].startswith("sampler"):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus[first : first + count]))
    return Child(
        order["name"],
        tuple(order["argv"]),
        env,
        Path(order["log"]),
        echo=True,
        launcher_depth=order["launcher_depth"],
        scratch=tuple(order["scratch"]),
    )


def _watch(running: Running) -> int:
    """The exit code of the process. Output goes up, signals go down."""
    with selectors.DefaultSelector() as selector:
        for descriptor in (0, *running.streams):
            selector.register(descriptor, selectors.EVENT_READ)
        while running.process.poll() is None:
            for key, _ in selector.select(0.1):
                if key.fd != 0:
                    if not running.relay(key.fd, _show):
                        selector.unregister(key.fd)
                    continue
                words = os.read(0, 4096).split()
                if not words:
                    running.close(_show)
                    return INTERRUPTED
                for word in words:
                    running.interrupt(int(word))
    code = running.process.returncode
    running.close(_show)
    return code


def _show(data: bytes) -> None:
    """The connection may be gone: then stdin ends, too."""
    try:
        os.write(1, data)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
