"""The ZeroMQ link: trainer rank 0 binds a ROUTER, every sampler connects a DEALER.

Why it is safe. PUSH/PULL loses what is in flight when the receiver dies, without an error on either side; here a
group is acknowledged by a CREDIT with a higher cursor, which the trainer sends only after training on it, so a
sampler can send again and duplicates are refused by id. ROUTER_HANDOVER lets a restarted sampler take over its
identity (without it, libzmq ignores it for ever); ROUTER_MANDATORY makes sending to a lost peer an error.
High-water marks sit above the credit window, so nothing blocks and nothing is dropped. One thread per socket.
Who may connect: docs/SECURITY.md.
"""

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import zmq
from zmq.auth.thread import ThreadAuthenticator

from common import durable
from common.config import Config
from common.errors import Retryable, UserError
from common.wire.address import cannot_bind, endpoint, holder, needs_ipv6, remove_dead_socket, to_bind

Socket = zmq.Socket[bytes]
BEAT_S = 1.0  # every state is repeated this often
LOST_AFTER_S = 10.0  # seconds of silence, after which other samplers get a sampler's groups
_HIGH_WATER_MARGIN = 64


def _keys_path(config: Config) -> Path:
    return config.run.output_dir / "keys" / "curve.json"


def make_keys(config: Config) -> dict[str, bytes]:
    """Returns the run's CURVE keys, {server,client}_{public,secret}, which are made on first use."""
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


class Transport:
    """A ROUTER or a DEALER, used by one thread at a time; only `wake` may be called by others.

    A message is a few frames. It may be lost, doubled or overtaken: the link repeats states and sends results again. It
    arrives whole or not at all.
    """

    def __init__(self, context: zmq.Context[Socket], kind: int, config: Config):
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, config.max_message_bytes)
        self.socket.setsockopt(zmq.SNDHWM, config.window + _HIGH_WATER_MARGIN)
        self.socket.setsockopt(zmq.RCVHWM, config.window + _HIGH_WATER_MARGIN)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        self.authenticator: ThreadAuthenticator | None = None
        self._has_names = kind == zmq.ROUTER  # a ROUTER's messages begin with a frame that holds the sampler's id
        self._lock = threading.Lock()  # protects the descriptor by which other threads end a poll
        self._waker = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)

    def poll(self, timeout_s: float) -> bool:
        """Waits until there is a message, `wake` was called, or the time is over. Returns True if `wake` was called."""
        woken = self._waker in dict(self._poller.poll(int(1000 * timeout_s)))
        if woken:
            os.eventfd_read(self._waker)
        return woken

    def receive(self) -> list[bytes] | None:
        """Returns the frames of the next message, None if there is none. Never waits."""
        try:
            frames = self.socket.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            return None
        return frames[1:] if self._has_names else frames

    def send(self, frames: list[bytes], to: str = "") -> bool:
        """Sends a message; returns False if it cannot leave now. Never waits. `to`: a sampler's id; "" in a sampler."""
        try:
            self.socket.send_multipart([to.encode(), *frames] if self._has_names else frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):  # a full pipe, or no peer with this id
                raise
            return False
        return True

    def wake(self) -> None:
        """Ends the present or the next `poll`. Does nothing after `close`."""
        with self._lock:
            if not self.socket.closed:
                os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        """Closes the socket and drops messages that have not left yet. May be called twice."""
        with self._lock:
            if self.socket.closed:
                return
            os.close(self._waker)
            self.socket.close(linger=0)
        if self.authenticator is not None:
            self.authenticator.stop()
        if self._has_names:
            self.socket.context.term()  # the address is free when this returns


def bind(config: Config) -> Transport:
    """Returns the trainer's bound ROUTER. Raises UserError if the address is taken."""
    address = endpoint(config)
    keys = make_keys(config) if address.startswith("tcp://") else {}
    if address.startswith("ipc://"):
        remove_dead_socket(Path(address.removeprefix("ipc://")))
    context: zmq.Context[Socket] = zmq.Context()  # its own, because a context can have one authenticator only
    transport = Transport(context, zmq.ROUTER, config)
    socket = transport.socket
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if keys:
        allowed = SimpleNamespace(callback=lambda _domain, key: key == keys["client_public"])
        transport.authenticator = ThreadAuthenticator(context)
        transport.authenticator.start()
        transport.authenticator.configure_curve_callback(domain="*", credentials_provider=allowed)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys["server_secret"])
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    bound_address = to_bind(address)
    socket.setsockopt(zmq.IPV6, int(bound_address != address or needs_ipv6(address)))
    try:
        socket.bind(bound_address)
    except zmq.ZMQError as error:
        transport.close()
        held_by = holder(address) if error.errno == zmq.EADDRINUSE else ""
        raise cannot_bind(address, f"{error.strerror}{held_by}") from None
    return transport


def connect(config: Config, sampler_id: str) -> Transport:
    """Returns a sampler's connected DEALER. On tcp it waits for the trainer's keys; raises Retryable without them."""
    address, keys = endpoint(config), dict[str, bytes]()
    if address.startswith("tcp://"):
        path, deadline = _keys_path(config), time.monotonic() + config.channel.connect_timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                waited = f"{path} did not appear within {config.channel.connect_timeout_s:.0f} s"
                raise Retryable(f"{waited}: is the trainer running with this config?")
            time.sleep(0.2)
        keys = read_keys(config)
    transport = Transport(zmq.Context.instance(), zmq.DEALER, config)
    socket = transport.socket
    socket.setsockopt(zmq.IDENTITY, sampler_id.encode())
    if keys:
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys["client_secret"])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys["client_public"])
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys["server_public"])
    socket.setsockopt(zmq.IPV6, int(needs_ipv6(address)))
    socket.connect(address)
    return transport
