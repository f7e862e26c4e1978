"""Starts one host's ranks:  python -m launcher.hosts.ranks FIRST COUNT WORLD ADDRESS PORT training_worker.py [word …]

Replaces DeepSpeed's launcher, which imports torch before it starts ranks, exits with 1 when a signal ends it, leaves
orphans if the signal came early, and kills ranks that then take longer than 30 s. SIGINT and SIGTERM go to all ranks.
"""

import faulthandler
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from common.processes import exits

FOLLOW_S = 0.5  # for the other ranks to end by themselves after the first failure
END_S = 30.0


def main(words: Sequence[str]) -> int:
    first, count, world, address, port, *program = words
    signals: list[int] = []
    faulthandler.register(signal.SIGUSR1, 2)
    for number in exits.ENDS:
        signal.signal(number, lambda number, _: signals.append(number))
    meeting = {"WORLD_SIZE": world, "MASTER_ADDR": address, "MASTER_PORT": port, "LOCAL_SIZE": count}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-u", *program],
            env={**os.environ, **meeting, "RANK": str(int(first) + local), **device(local, os.environ)},
            preexec_fn=exits.die_with_parent,  # safe: this process has no threads
        )
        for local in range(int(count))
    ]
    return watch(ranks, signals) % 256


def device(local: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns a rank's device variables. Ranks that share a GPU (gloo only) see it alone: CUDA does not take "3,3"."""
    gpus = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    is_shared = len(set(gpus)) < len(gpus)
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpus[local]} if is_shared else {"LOCAL_RANK": str(local)}


def watch(ranks: Sequence[subprocess.Popen[bytes]], signals: Sequence[int]) -> int:
    """Waits for the ranks and returns the exit code of the first to fail; the others follow or are told to end."""
    code, num_passed_on, kill_at = exits.DONE, 0, math.inf
    while alive := [rank for rank in ranks if rank.poll() is None]:
        time.sleep(0.05)
        numbers, num_passed_on = list(signals[num_passed_on:]), len(signals)
        if not code and _cause(ranks):
            time.sleep(FOLLOW_S)
            code, kill_at = _cause(ranks), time.monotonic() + END_S
            numbers += [signal.SIGTERM] * (not signals)
        for rank in alive:
            for number in [signal.SIGKILL] if time.monotonic() > kill_at else numbers:
                rank.send_signal(number)
    return exits.of_child(code or _cause(ranks), bool(signals))


def _cause(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Returns a failed rank's exit code, 1 only if there is no other: ranks that break with another exit with 1."""
    return min((code for rank in ranks if (code := rank.poll())), key=lambda code: code == 1, default=exits.DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
