"""A bad network between samplers and trainer: it loses, doubles, delays and reorders messages.

Towards the samplers it is a ROUTER like the trainer; towards the trainer it has one DEALER per sampler, under the
sampler's identity. Every message, in both directions, meets one random fate.
"""

import contextlib
import heapq
import itertools
import random
import time

import zmq

LOST, DOUBLED, DELAYED = 0.1, 0.1, 0.2  # shares of all messages
MAX_DELAY_S = 0.06  # longer than several beats, so that delayed messages are overtaken


class LossyProxy:
    """Samplers connect to `front`, the trainer has bound `back`. One thread calls `run`."""

    def __init__(self, front: str, back: str, seed: int):
        self._back_address, self._random = back, random.Random(seed)
        self._front = zmq.Context.instance().socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._front.bind(front)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._later: list[tuple[float, int, bool, list[bytes]]] = []  # due, number, is for the trainer, frames
        self._numbers = itertools.count()

    def run(self, until: float) -> None:
        """Until this monotonic time."""
        while time.monotonic() < until:
            poller = zmq.Poller()
            for socket in (self._front, *self._backs.values()):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(5))
            if self._front in ready:
                self._meet_fate(True, self._front.recv_multipart(zmq.DONTWAIT))
            for identity, socket in self._backs.items():
                if socket in ready:
                    self._meet_fate(False, [identity, *socket.recv_multipart(zmq.DONTWAIT)])
            while self._later and self._later[0][0] <= time.monotonic():
                _, _, is_for_trainer, message = heapq.heappop(self._later)
                with contextlib.suppress(zmq.Again):  # a full queue loses it, too
                    self._pass_on(is_for_trainer, *message)

    def _meet_fate(self, is_for_trainer: bool, message: list[bytes]) -> None:
        chance = self._random.random()
        copies = 0 if chance < LOST else 2 if chance < LOST + DOUBLED else 1
        for _ in range(copies):
            delay_s = self._random.uniform(0, MAX_DELAY_S) if chance > 1 - DELAYED else 0.0
            heapq.heappush(self._later, (time.monotonic() + delay_s, next(self._numbers), is_for_trainer, message))

    def _pass_on(self, is_for_trainer: bool, identity: bytes, *frames: bytes) -> None:
        if not is_for_trainer:  # without MANDATORY: to nobody, if the sampler is not connected
            self._front.send_multipart([identity, *frames], zmq.DONTWAIT)
            return
        if identity not in self._backs:
            self._backs[identity] = zmq.Context.instance().socket(zmq.DEALER)
            self._backs[identity].setsockopt(zmq.IDENTITY, identity)
            self._backs[identity].connect(self._back_address)
        self._backs[identity].send_multipart(frames, zmq.DONTWAIT)
