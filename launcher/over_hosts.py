"""The trainer's ranks, or a sampler, on other hosts as one process here:  python -m launcher.over_hosts ORDERS.json

    supervisor.py ─► over_hosts.py ── ssh HOST ──► on_host.py ─► deepspeed.launcher.launch --node_rank 0 …
                                   └─ ssh HOST ──► on_host.py ─► deepspeed.launcher.launch --node_rank 1 …

They start once all hosts are there, with a port that the first of them has free. It ends as the first of them that ends
with another code than 0; the others have a few seconds to follow, and are ended. A host that is down, or a connection
that breaks, counts as 75: start again; one that is refused as 2. SIGINT and SIGTERM are passed on.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.exits import DONE, INTERRUPTED, SIGKILLED, USER_ERROR, meaning, say
from common.transcript import tail
from launcher.host_link import FOLLOW_S, Host, Patience, end, read

PORT = "@port of the first host@"  # in an order
_TAIL = 13  # lines; with ours they are what the supervisor shows


def main(arguments: Sequence[str]) -> int:
    orders = json.loads(Path(arguments[0]).read_text())
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    hosts: list[Host] = []
    try:
        hosts += [Host(order["host"]) for order in orders]
        first, code = _watch(hosts, orders, asked)
    except UserError as error:
        say(str(error))
        return USER_ERROR
    finally:
        end(hosts)
    if first is not None and code != INTERRUPTED:
        _explain(first, code, Path(orders[hosts.index(first)]["log"]))
    return code


def _watch(hosts: Sequence[Host], orders: Sequence[Mapping[str, Any]], asked: list[int]) -> tuple[Host | None, int]:
    """The host that was the first to end other than well, and its code."""
    told, started, until, patience = 0, False, float("inf"), Patience()
    while True:
        read(hosts)
        missing = [host for host in hosts if not host.was_there]
        patience.wait_for(missing)
        if asked and not started:
            return None, INTERRUPTED
        if not started and not missing:
            port, started = str(hosts[0].answer["port"]), True
            for host, order in zip(hosts, orders, strict=True):
                host.tell(json.loads(json.dumps(order).replace(PORT, port)))
        for number in asked[told:]:
            for host in hosts:
                host.tell(number)
        told = len(asked)
        codes = [host.ended() for host in hosts]
        failed = [(host, code) for host, code in zip(hosts, codes, strict=True) if code]
        if failed:
            until = min(until, time.monotonic() + FOLLOW_S * started)
        if None not in codes or time.monotonic() >= until:
            first, code = min(failed, key=_order, default=(None, DONE))
            return first, INTERRUPTED if asked and code not in (DONE, USER_ERROR) else code


def _order(ended: tuple[Host, int]) -> tuple[bool, float]:
    """By time; but what breaks with another rank may be seen before it: DeepSpeed's launcher looks every second."""
    host, code = ended
    return code not in (USER_ERROR, INTERRUPTED, *SIGKILLED), host.said_end_at


def _explain(host: Host, code: int, log: Path) -> None:
    """Last, below what the others said once it was gone."""
    say(f"{host.name}: {host.why or f'the first that {meaning(code)}'}")
    if not host.why:
        with suppress(OSError):
            print(f"the end of {log}:", *tail(log, _TAIL), sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
