"""The choice of a free TCP port of this host."""

import contextlib
import random
import socket
from pathlib import Path

_LOWEST, _TRIES = 10_240, 100
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


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
        first, _ = map(int, _EPHEMERAL_RANGE.read_text().split())
    except (OSError, ValueError):
        first = 32_768  # Linux's own default
    candidates = range(_LOWEST, max(first, _LOWEST))
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    for port in (*random.SystemRandom().sample(candidates, min(_TRIES, len(candidates))), 0):
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=family, dualstack_ipv6=dual_stack)
    raise OSError("every port of this host is in use")
