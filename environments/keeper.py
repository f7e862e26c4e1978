"""The pool's thread: owns the fork server, holds deadlines, and owes one reply to every request.

It never waits for one instance. PR_SET_PDEATHSIG ends a child with the *thread* that started it, so the server is
started here.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import selectors
import socket
import time
from collections.abc import Hashable
from typing import Literal

from common.outcomes import shorten
from common.worker_process import StartError
from environments import Failed, Reply
from environments.messages import Answer, EnvironmentSetup, Request
from environments.places import Places
from environments.process import ForkServerProcess, InstanceSocket

START_TIMEOUT_S = 120.0  # imports of the user's file included, and of what describes tools
_CAUSE_PATIENCE_S = 0.5  # a socket closes a moment before its process counts as dead
_CLOSE_PATIENCE_S = 1.0  # of one that is closed while it works
_EXIT_PATIENCE_S = 3.0
_RETRY_S = 0.05
_FIRST = -1  # number of the instance that is looked at in the beginning


class Keeper:
    """`ask`, `close` and `stop` are the pool's; `replies` and `first` are for it; `run` is the thread."""

    def __init__(self, setup: EnvironmentSetup, timeout_s: float, max_instances: int) -> None:
        self.first: queue.SimpleQueue[Answer | str] = queue.SimpleQueue()  # what the run has, or why it cannot start
        self.replies: queue.SimpleQueue[tuple[Hashable, int, Reply]] = queue.SimpleQueue()
        self._setup, self._timeout_s = setup, timeout_s
        self._orders: queue.SimpleQueue[tuple[Hashable, int, Request | None]] = queue.SimpleQueue()
        self._wake, self._wakes = socket.socketpair()
        for end in (self._wake, self._wakes):
            end.setblocking(False)
        self._stopped = False
        self._server: ForkServerProcess | None = None
        self._server_problem, self._server_deadline = "", 0.0
        self._waiting: collections.deque[tuple[Hashable, int, Request]] = collections.deque()  # for a process
        self._instances: dict[int, InstanceSocket] = {}  # of keys in use
        self._places = Places(max_instances)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)

    def ask(self, key: Hashable, number: int, request: Request) -> None:
        """From the pool's thread, like the two below."""
        self._order(key, number, request)

    def close(self, number: int) -> None:
        self._order(None, number, None)

    def stop(self) -> None:
        self._stopped = True
        self._order(None, 0, None)

    def _order(self, key: Hashable, number: int, request: Request | None) -> None:
        self._orders.put((key, number, request))
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: it has ended
            self._wakes.send(b"\0")

    def run(self) -> None:
        self._waiting.append((None, _FIRST, Request("describe")))
        try:
            while not self._stopped:
                try:
                    self._launch()
                    self._wait()
                    self._obey()
                    self._hold_deadlines()
                except Exception as error:  # a reply is owed whatever happens: without it the sampler waits for ever
                    self._lose_server(f"{type(error).__name__}: {error}")
        finally:
            for instance in self._instances.values():
                instance.close()
            if self._server is not None:
                self._server.close(_EXIT_PATIENCE_S)
            self._selector.close()
            self._wake.close()
            self._wakes.close()

    def _wait(self) -> None:
        """Until something can be read, ordered or killed."""
        deadlines = [i.deadline for i in self._instances.values() if i.asked] + self._places.deadlines()
        if self._server is not None and not self._server.is_ready:
            deadlines.append(self._server_deadline)
        wait_s = min(deadlines, default=time.monotonic() + 5.0) - time.monotonic()
        for event, mask in self._selector.select(max(0.0, min(wait_s, 5.0))):
            if event.fileobj == self._wake:
                self._wake.recv(4096)
            elif event.data is None:
                self._hear_server()
            elif event.data.number in self._instances:
                if mask & selectors.EVENT_WRITE:
                    self._send(event.data)
                if mask & selectors.EVENT_READ:
                    self._hear(event.data)

    # ---- instances ----

    def _launch(self) -> None:
        """Processes for those that wait for one, while there is room."""
        if self._waiting and self._server is None:
            try:
                self._server = ForkServerProcess(self._setup)
            except StartError as error:
                self._fail_waiting(str(error))
                return
            self._server_problem, self._server_deadline = "", time.monotonic() + START_TIMEOUT_S
            self._selector.register(self._server.control, selectors.EVENT_READ)
        while self._waiting and self._server and self._server.is_ready and self._places.has_room:
            key, number, request = self._waiting.popleft()
            try:
                channel = self._server.fork(number)
            except OSError as error:  # no more descriptors, or the server is going, which its socket says
                self._give_up(key, number, f"a process for the environment cannot be asked for: {error}")
                continue
            instance = self._instances[number] = InstanceSocket(key, number, channel)
            self._places.ordered(number)
            self._selector.register(channel, selectors.EVENT_READ, instance)
            self._request(instance, request)

    def _obey(self) -> None:
        """What the pool has ordered."""
        with contextlib.suppress(queue.Empty):
            while True:
                key, number, request = self._orders.get_nowait()
                if request is not None and request.kind == "reset":
                    self._waiting.append((key, number, request))
                elif number not in self._instances:
                    self._waiting = collections.deque(w for w in self._waiting if w[1] != number)
                elif request is not None:
                    self._request(self._instances[number], request)
                else:
                    is_busy = bool(self._instances[number].asked)
                    self._retire(self._instances[number], _CLOSE_PATIENCE_S if is_busy else self._timeout_s)

    def _request(self, instance: InstanceSocket, request: Request) -> None:
        instance.about = f" Completion: {shorten(request.completion)}" if request.kind == "step" else ""
        try:
            instance.ask(request, self._timeout_s if request.kind != "describe" else START_TIMEOUT_S)
        except (TypeError, ValueError, OverflowError) as error:
            self._fail(instance, "error", f"the row cannot be sent to the environment: {error}")
            return
        if not instance.lost:
            self._send(instance)
        elif instance.number in self._places:  # its end is not reported yet, with the cause
            instance.deadline = time.monotonic() + _CAUSE_PATIENCE_S
        else:
            self._fail(instance, "crash", f"the environment {instance.lost}")

    def _send(self, instance: InstanceSocket) -> None:
        instance.send()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if instance.has_more_to_send else 0)
        self._selector.modify(instance.channel, events, instance)

    def _hear(self, instance: InstanceSocket) -> None:
        """What an instance has written: its answer, its end, or something else."""
        try:
            answer = instance.receive()
        except EOFError:
            self._selector.unregister(instance.channel)
            instance.lost = instance.lost or "closed its connection"
            instance.deadline = min(instance.deadline, time.monotonic() + _CAUSE_PATIENCE_S)
        except ValueError as error:
            self._selector.unregister(instance.channel)
            instance.lost = f"broke the protocol ({error})"
            if instance.asked:
                self._fail(instance, "crash", f"the environment {instance.lost}")
        else:
            if answer is not None:
                self._answered(instance, answer)

    def _answered(self, instance: InstanceSocket, answer: Answer) -> None:
        instance.asked = ""
        if instance.number == _FIRST:
            self.first.put(answer.reason if answer.kind == "failed" else answer)
        else:
            self.replies.put((instance.key, instance.number, answer.reply()))
        if answer.kind != "turn":
            self._retire(instance, self._timeout_s)

    def _fail(self, instance: InstanceSocket, kind: Literal["timeout", "crash", "error"], reason: str) -> None:
        """Its reply, and its end by force."""
        reason, seconds = f"{reason}.{instance.about}", time.monotonic() - instance.begun
        self._give_up(instance.key, instance.number, reason, kind, seconds)
        self._retire(instance, 0.0)

    def _give_up(
        self,
        key: Hashable,
        number: int,
        reason: str,
        kind: Literal["timeout", "crash", "error"] = "crash",
        seconds: float = 0.0,
    ) -> None:
        if number == _FIRST:
            self.first.put(reason)
        else:
            self.replies.put((key, number, Failed(kind, reason, seconds)))

    def _retire(self, instance: InstanceSocket, patience_s: float) -> None:
        """Its socket is closed: it cleans up and ends by itself, or is killed."""
        del self._instances[instance.number]
        with contextlib.suppress(KeyError, ValueError):  # unregistered when it was lost
            self._selector.unregister(instance.channel)
        instance.close()
        self._places.end_by(instance.number, time.monotonic() + patience_s)

    def _hold_deadlines(self) -> None:
        now = time.monotonic()
        for instance in [i for i in self._instances.values() if i.asked and i.deadline <= now]:
            if instance.lost:
                self._fail(instance, "crash", f"the environment {instance.lost}")
            else:
                limit_s = START_TIMEOUT_S if instance.number == _FIRST else self._timeout_s
                self._fail(instance, "timeout", f"no answer from {instance.asked} within {limit_s:g} s, killed")
        for number in self._places.due(time.monotonic()):
            self._kill(number)
        if self._places.is_stuck(now):
            self._lose_server("does not kill what it should")
        elif self._server is not None and not self._server.is_ready and self._server_deadline <= now:
            self._lose_server(f"was not ready after {START_TIMEOUT_S:g} s of importing")

    # ---- the fork server ----

    def _kill(self, number: int) -> None:
        if self._server is None:
            return
        now = time.monotonic()
        self._places.killed(number, now)
        try:
            self._server.kill(number)
        except OSError:  # it is busy, or gone, which its socket says
            self._places.end_by(number, now + _RETRY_S)

    def _hear_server(self) -> None:
        try:
            for news in self._server.news() if self._server is not None else ():
                if news.kind == "ended":
                    self._note_end(news.number, news.reason)
                elif news.kind == "forked":
                    self._places.forked(news.number)
                    if news.number in self._instances:
                        self._instances[news.number].start_clock()
                elif news.kind == "refused":
                    self._server_problem = news.reason
                elif self._server is not None:
                    self._server.is_ready = True
        except EOFError:
            self._lose_server("")

    def _note_end(self, number: int, reason: str) -> None:
        self._places.ended(number)
        instance = self._instances.get(number)
        if instance is not None and not instance.lost:  # what it wrote last is still read
            self._hear(instance)
        if instance is None or number not in self._instances:
            return
        instance.lost = reason
        if instance.asked:
            self._fail(instance, "crash", f"the environment {reason}")

    def _lose_server(self, cause: str) -> None:
        """It has died, or is given up: every rollout of the moment fails, and the next start starts another."""
        server, self._server = self._server, None
        died = ""
        if server is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(server.control)
            died = server.close()
        reason = self._server_problem or f"the process that environments are forked from {cause or died}"
        self._places.clear()
        for instance in list(self._instances.values()):
            instance.lost = f"is lost: {reason}"
            if instance.asked:
                self._fail(instance, "crash", reason)
        if server is None or not server.is_ready:
            self._fail_waiting(reason)

    def _fail_waiting(self, reason: str) -> None:
        while self._waiting:
            key, number, _ = self._waiting.popleft()
            self._give_up(key, number, reason)
