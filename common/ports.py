"""A free port of this host."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port that is free now. Another program may take it first; then the ranks fail and are started again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
