"""A bad network between samplers and trainer: it loses, doubles, delays and reorders messages and drops connections.

Towards the samplers it is a ROUTER like the trainer; towards the trainer it has one DEALER per sampler, under the
sampler's identity. Every message, in both directions, meets one random fate. All sockets belong to one thread.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections import Counter

import zmq

from tests.support.speed import limit

LOST, DOUBLED, DELAYED = 0.1, 0.1, 0.2  # shares of all messages
MAX_DELAY_S = 0.06  # longer than several beats, so that delayed messages are overtaken
RESET_EVERY = 120  # messages


class LossyProxy:
    """`with LossyProxy(front, back, seed) as proxy:` samplers connect to `front`, the trainer has bound `back`."""

    def __init__(self, front: str, back: str, seed: int):
        self._front_address, self._back_address, self._random = front, back, random.Random(seed)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._later: list[tuple[float, int, bytes, list[bytes]]] = []  # due, number, towards, frames
        self._numbers, self._newest = itertools.count(), 0
        self._stopped = threading.Event()
        self.fates: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LossyProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(timeout=limit(5))
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self._front = self._bind()
        reset_at = RESET_EVERY
        while not self._stopped.is_set():
            poller = zmq.Poller()
            for socket in (self._front, *self._backs.values()):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(5))
            if self._front in ready:
                identity, *frames = self._front.recv_multipart(zmq.DONTWAIT)
                self._meet_fate(b"trainer", [identity, *frames])
            for identity, socket in self._backs.items():
                if socket in ready:
                    self._meet_fate(b"sampler", [identity, *socket.recv_multipart(zmq.DONTWAIT)])
            while self._later and self._later[0][0] <= time.monotonic():
                _, number, towards, message = heapq.heappop(self._later)
                self.fates["overtaken"] += number < self._newest
                self._newest = max(number, self._newest)
                self._pass_on(towards, message)
            if self.fates["messages"] >= reset_at:
                reset_at += RESET_EVERY
                self._reset()
        for socket in (self._front, *self._backs.values()):
            socket.close(linger=0)

    def _meet_fate(self, towards: bytes, message: list[bytes]) -> None:
        chance = self._random.random()
        self.fates["messages"] += 1
        if chance < LOST:
            self.fates["lost"] += 1
            return
        copies = 1
        if chance < LOST + DOUBLED:
            self.fates["doubled"] += 1
            copies = 2
        is_delayed = chance > 1 - DELAYED
        self.fates["delayed"] += is_delayed
        for _ in range(copies):
            delay_s = self._random.uniform(0, MAX_DELAY_S) if is_delayed else 0.0
            heapq.heappush(self._later, (time.monotonic() + delay_s, next(self._numbers), towards, message))

    def _pass_on(self, towards: bytes, message: list[bytes]) -> None:
        identity, *frames = message
        with contextlib.suppress(zmq.Again):  # a full queue loses it, too
            if towards == b"trainer":
                self._back(identity).send_multipart(frames, zmq.DONTWAIT)
            else:  # without MANDATORY: to nobody, if the sampler is not connected
                self._front.send_multipart(message, zmq.DONTWAIT)

    def _reset(self) -> None:
        """Half of the time the trainer's side loses its connections, half of the time the samplers' side."""
        self.fates["resets"] += 1
        if self._random.random() < 0.5:
            for socket in self._backs.values():
                socket.close(linger=0)
            self._backs.clear()
        else:
            self._front.close(linger=0)
            self._front = self._bind()

    def _bind(self) -> zmq.Socket[bytes]:
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.bind(self._front_address)
        return socket

    def _back(self, identity: bytes) -> zmq.Socket[bytes]:
        if identity not in self._backs:
            socket = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.connect(self._back_address)
            self._backs[identity] = socket
        return self._backs[identity]
