"""The choice of a free TCP port of this host."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_LOWEST, _TRIES = 10_240, 100
_GIVEN_TO_ANYONE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Returns a TCP port that is free now, and that no other program gets by chance before it is used.

    The ranks listen on it ten seconds later, so it is below the range from which the system gives ports to programs
    that ask for any port. If no port below that range is free, it is one of that range.
    """
    with listen() as socket_:
        return int(socket_.getsockname()[1])


def listen() -> socket.socket:
    """Listens at a port chosen as in `free_port`, on every address of this host."""
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
