"""The ZeroMQ link: trainer rank 0 binds a ROUTER, every sampler connects a DEALER.

Why it is safe. PUSH/PULL loses what is in flight when the receiver dies, without an error on either side; here a
group is acknowledged by a CREDIT with a higher cursor, which the trainer sends only after training on it, so a
sampler can send again and duplicates are refused by id. ROUTER_HANDOVER lets a restarted sampler take over its
identity (without it, libzmq ignores it for ever); ROUTER_MANDATORY makes sending to a lost peer an error.
High-water marks sit above the credit window, so nothing blocks and nothing is dropped. One thread per socket.

`bind` and `connect` are the two ends as the link uses them (common/transport.py).

One host: ipc:// in a private folder. Several: tcp:// with CURVE keys, made at the start of the run, readable by
their owner only, and an allow-list of clients (ZAP); tcp without keys does not exist here.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from common import durable
from common.address import cannot_bind, endpoint, holder, remove_dead_socket
from common.config import Config
from common.errors import Retryable, UserError

Socket = zmq.Socket[bytes]
BEAT_S = 1.0  # every state is repeated this often
LOST_AFTER_S = 10.0  # of silence: others get a sampler's groups
_HIGH_WATER_MARGIN = 64
_CLOSED_WITHIN_S = 10.0


def _keys_path(config: Config) -> Path:
    return config.run.output_dir / "keys" / "curve.json"


def make_keys(config: Config) -> dict[str, bytes]:
    """The run's CURVE keys, made on first use: {server,client}_{public,secret}."""
    path = _keys_path(config)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        names = ("server_public", "server_secret", "client_public", "client_secret")
        keys = dict(zip(names, (k.decode() for k in (*server, *client)), strict=True))
        durable.write_file(path, json.dumps(keys).encode(), mode=0o600)
    return read_keys(config)


def read_keys(config: Config) -> dict[str, bytes]:
    path = _keys_path(config)
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path} is readable by others; run: chmod 600 {path}")
    return {name: key.encode() for name, key in json.loads(path.read_text()).items()}


class ZmqTransport:
    """A ROUTER or a DEALER, and a pair of sockets by which other threads end a poll."""

    def __init__(self, socket: Socket, authenticators: list[ThreadAuthenticator]):
        self._socket, self._authenticators = socket, authenticators
        self._has_names = socket.type == zmq.ROUTER  # then a frame with the sampler's id comes first
        self._lock = threading.Lock()  # a socket may change its thread, not have two
        address = f"inproc://wake-{secrets.token_hex(8)}"
        self._wake_receiver, self._wake_sender = (_socket(zmq.PAIR) for _ in range(2))
        self._wake_receiver.bind(address)
        self._wake_sender.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_receiver, zmq.POLLIN)

    def poll(self, timeout_s: float) -> bool:
        woken = self._wake_receiver in dict(self._poller.poll(int(1000 * timeout_s)))
        if woken:
            self._wake_receiver.recv()
        return woken

    def receive(self) -> list[bytes] | None:
        try:
            frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            return None
        return frames[1:] if self._has_names else frames

    def send(self, frames: list[bytes], to: str = "") -> bool:
        try:
            self._socket.send_multipart([to.encode(), *frames] if self._has_names else frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):  # a full pipe, or nobody of this name
                raise
            return False
        return True

    def wake(self) -> None:
        with self._lock, contextlib.suppress(zmq.Again):  # the other thread has many of these to read already
            if not self._wake_sender.closed:
                self._wake_sender.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        with self._lock:
            for socket in (self._wake_sender, self._wake_receiver, self._socket):
                socket.close(linger=0)
            while self._authenticators:
                self._authenticators.pop().stop()


def bind(config: Config) -> ZmqTransport:
    """The trainer's end. Raises UserError if the address is taken."""
    return ZmqTransport(*bind_router(config, config.window))


def connect(config: Config, sampler_id: str) -> ZmqTransport:
    """A sampler's end. On tcp it waits for the trainer's keys; raises Retryable when they do not appear."""
    return ZmqTransport(connect_dealer(config, sampler_id, config.window), [])


def readable(ends: Sequence[ZmqTransport], timeout_s: float) -> list[ZmqTransport]:
    """Those that have a message, as soon as one has, or after timeout_s: for a thread with many ends."""
    poller = zmq.Poller()
    for end in ends:
        poller.register(end._socket, zmq.POLLIN)
    ready = dict(poller.poll(int(1000 * timeout_s)))
    return [end for end in ends if end._socket in ready]


class _Allow:
    """ZAP allow-list of one client key."""

    def __init__(self, key: bytes):
        self.key = key

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self.key


def bind_router(config: Config, window: int) -> tuple[Socket, list[ThreadAuthenticator]]:
    """A bound socket and what must be stopped with it. Raises UserError, and what `_authenticator` raises."""
    address = endpoint(config)
    if address.startswith("ipc://"):
        remove_dead_socket(Path(address.removeprefix("ipc://")))
    socket = _socket(zmq.ROUTER)
    _set_limits(socket, config, window)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    keep: list[ThreadAuthenticator] = []
    if address.startswith("tcp://"):
        keys = make_keys(config)
        keep.append(_authenticator(keys["client_public"]))
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys["server_secret"])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys["server_public"])
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        for authenticator in keep:
            authenticator.stop()
        held_by = holder(address) if error.errno == zmq.EADDRINUSE else ""
        raise cannot_bind(address, f"{error.strerror}{held_by}") from None
    return socket, keep


def _authenticator(client_key: bytes) -> ThreadAuthenticator:
    """A process has one; ZeroMQ lets go of an earlier link's a moment after that was closed.

    Raises Retryable if that takes longer than _CLOSED_WITHIN_S.
    """
    deadline = time.monotonic() + _CLOSED_WITHIN_S
    while True:
        authenticator = ThreadAuthenticator(zmq.Context.instance())
        try:
            authenticator.start()
        except zmq.ZMQError as error:
            if time.monotonic() > deadline:
                raise Retryable(f"an earlier link of this process was not closed: {error}") from None
            time.sleep(0.02)
        else:
            authenticator.configure_curve_callback(domain="*", credentials_provider=_Allow(client_key))
            return authenticator


def connect_dealer(config: Config, sampler_id: str, window: int) -> Socket:
    address = endpoint(config)
    socket = _socket(zmq.DEALER)
    _set_limits(socket, config, window)
    socket.setsockopt(zmq.IDENTITY, sampler_id.encode())
    if address.startswith("tcp://"):
        _wait_for_file(_keys_path(config), config.channel.connect_timeout_s)
        keys = read_keys(config)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys["client_secret"])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys["client_public"])
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys["server_public"])
    socket.connect(address)
    return socket


def _socket(kind: int) -> Socket:
    context: zmq.Context[Socket] = zmq.Context.instance()
    return context.socket(kind)


def _set_limits(socket: Socket, config: Config, window: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, config.max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, window + _HIGH_WATER_MARGIN)
    socket.setsockopt(zmq.RCVHWM, window + _HIGH_WATER_MARGIN)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)


def _wait_for_file(path: Path, timeout_s: float) -> None:
    start = time.monotonic()
    while not path.exists():
        if time.monotonic() - start > timeout_s:
            raise Retryable(f"{path} did not appear within {timeout_s:.0f} s: is the trainer running with this config?")
        time.sleep(0.2)
