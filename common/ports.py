"""A free port of this host."""

from __future__ import annotations

import contextlib
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
    with listen() as socket_:
        return int(socket_.getsockname()[1])


def listen() -> socket.socket:
    """Listens at such a port, on every address of this host."""
    try:
        first, _ = map(int, _GIVEN_TO_ANYONE.read_text().split())
    except (OSError, ValueError):
        first = 32_768  # Linux's own default
    own = range(_LOWEST, max(first, _LOWEST))
    both = socket.has_dualstack_ipv6()
    for port in (*random.SystemRandom().sample(own, min(_TRIES, len(own))), 0):
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
            )
    raise OSError("every port of this host is in use")
