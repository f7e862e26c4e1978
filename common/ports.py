"""A free port of this host."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST, _TRIES = 10_240, 100
_GIVEN_TO_ANYONE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A TCP port that is free now, and that nobody gets by chance before it is used.

    The ranks listen on it ten seconds later. So it is below those that the system gives to whoever asks for any port;
    one of those where there are no others.
    """
    for port in random.SystemRandom().sample(ports := _not_given(), min(_TRIES, len(ports))):
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _not_given() -> range:
    try:
        first, _ = map(int, _GIVEN_TO_ANYONE.read_text().split())
    except (OSError, ValueError):
        first = 32_768  # Linux's own default
    return range(_LOWEST, max(first, _LOWEST))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
