"""ZeroMQ sockets of tests: what nobody takes or sends within a deadline is an error and not a test that hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import zmq

from common import channel
from common.config import Config
from tests.support.speed import limit

Socket = zmq.Socket[bytes]


def with_deadline(socket: Socket, seconds: float = 20.0) -> Socket:
    """Its `send` and `recv` raise zmq.Again after so long on the reference machine."""
    socket.setsockopt(zmq.SNDTIMEO, int(1000 * limit(seconds)))
    socket.setsockopt(zmq.RCVTIMEO, int(1000 * limit(seconds)))
    return socket


@contextlib.contextmanager
def router(config: Config) -> Iterator[Socket]:
    """The trainer's bare end."""
    bound, authenticators = channel.bind_router(config, window=4)
    try:
        yield with_deadline(bound)
    finally:
        bound.close()
        for authenticator in authenticators:
            authenticator.stop()


@contextlib.contextmanager
def dealer(config: Config, name: str = "s0") -> Iterator[Socket]:
    """A sampler's bare end."""
    connected = channel.connect_dealer(config, name, window=4)
    try:
        yield with_deadline(connected)
    finally:
        connected.close()
