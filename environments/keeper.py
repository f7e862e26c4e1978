"""The pool's thread: owns the fork server, holds deadlines, and owes one reply to every request.

It never waits for one instance. PR_SET_PDEATHSIG ends a child with the *thread* that started it, so the server is
started here.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import selectors
import time
from collections.abc import Hashable
from typing import Any

from common.outcomes import shorten
from common.worker_process import StartError
from environments import Failed, Reply
from environments.messages import Answer, Request, Setup
from environments.process import ForkServerProcess, InstanceSocket, wake_pipe

START_TIMEOUT_S = 120.0  # imports of the user's file included, and of what describes tools
_KILL_PATIENCE_S = 30.0  # of a server that does not report the end of what it was told to kill
_CAUSE_PATIENCE_S = 0.5  # a socket closes a moment before its process counts as dead
_EXIT_PATIENCE_S = 3.0
_RETRY_S = 0.05
_FORKS_AT_ONCE = 32  # ordered and not yet confirmed: the socket holds some hundred orders
_FIRST = -1  # number of the instance that is looked at in the beginning


class Keeper:
    """`ask` and `close` from the pool's thread; `replies` for it; everything else in `run`."""

    def __init__(self, setup: Setup, timeout_s: float, max_instances: int) -> None:
        self.first: queue.SimpleQueue[Answer | str] = queue.SimpleQueue()  # what the run has, or why it cannot start
        self.replies: queue.SimpleQueue[tuple[Hashable, int, Reply]] = queue.SimpleQueue()
        self._setup, self._timeout_s, self._max_instances = setup, timeout_s, max_instances
        self._orders: queue.SimpleQueue[tuple[Hashable, int, Request | None]] = queue.SimpleQueue()
        self._wake, self._wakes = wake_pipe()
        self._stopped = False
        self._server: ForkServerProcess | None = None
        self._server_problem, self._server_deadline = "", 0.0
        self._waiting: collections.deque[tuple[Hashable, int, Request]] = collections.deque()  # for a process
        self._instances: dict[int, InstanceSocket] = {}  # of keys in use
        self._alive: set[int] = set()  # numbers that have a process
        self._forking: set[int] = set()  # of these, those for which it is only ordered
        self._to_kill: dict[int, float] = {}  # when, of those that should end by themselves
        self._killed: dict[int, float] = {}  # when, of those that have not ended since
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)

    # ---- from the pool's thread ----

    def ask(self, key: Hashable, number: int, request: Request) -> None:
        self._order(key, number, request)

    def close(self, number: int) -> None:
        self._order(None, number, None)

    def stop(self) -> None:
        self._stopped = True
        self._order(None, 0, None)

    def _order(self, key: Hashable, number: int, request: Request | None) -> None:
        self._orders.put((key, number, request))
        with contextlib.suppress(BlockingIOError):  # full: it will wake anyway
            os.write(self._wakes, b"\0")

    # ---- in a thread of its own ----

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
            os.close(self._wake)

    def _wait(self) -> None:
        """Until something can be read, ordered or killed."""
        deadlines = [i.deadline for i in self._instances.values() if i.asked]
        deadlines += self._to_kill.values()
        if self._server is not None and not self._server.is_ready:
            deadlines.append(self._server_deadline)
        wait_s = min(deadlines, default=time.monotonic() + 5.0) - time.monotonic()
        for event, mask in self._selector.select(max(0.0, min(wait_s, 5.0))):
            if event.fileobj == self._wake:
                os.read(self._wake, 4096)
            elif event.data is None:
                self._hear_server()
            elif mask & selectors.EVENT_WRITE:
                self._send(event.data)
            elif event.data.number in self._instances:
                self._hear(event.data)

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
        while self._waiting and self._has_room():
            key, number, request = self._waiting.popleft()
            assert self._server is not None
            try:
                channel = self._server.fork(number)
            except OSError as error:
                self._waiting.appendleft((key, number, request))
                self._lose_server(f"cannot be told to fork ({error})")
                return
            instance = self._instances[number] = InstanceSocket(key, number, channel)
            self._alive.add(number)
            self._forking.add(number)
            self._selector.register(instance.channel, selectors.EVENT_READ, instance)
            self._request(instance, request)

    def _has_room(self) -> bool:
        is_ready = self._server is not None and self._server.is_ready
        return is_ready and len(self._alive) < self._max_instances and len(self._forking) < _FORKS_AT_ONCE

    def _obey(self) -> None:
        """What the pool's thread has ordered."""
        with contextlib.suppress(queue.Empty):
            while True:
                key, number, request = self._orders.get_nowait()
                if request is not None and request.kind == "reset":
                    self._waiting.append((key, number, request))
                elif number not in self._instances:
                    self._waiting = collections.deque(w for w in self._waiting if w[1] != number)
                elif request is None:
                    self._retire(self._instances[number])
                else:
                    self._request(self._instances[number], request)

    def _request(self, instance: InstanceSocket, request: Request) -> None:
        instance.about = f" Completion: {shorten(request.completion)}" if request.kind == "step" else ""
        if instance.lost:
            instance.asked, instance.begun = request.kind, time.monotonic()
            self._fail(instance, "crash", f"the environment {instance.lost}")
            return
        try:
            instance.ask(request, self._timeout_s if request.kind != "describe" else START_TIMEOUT_S)
        except (TypeError, ValueError, OverflowError) as error:
            instance.asked, instance.begun = request.kind, time.monotonic()
            self._fail(instance, "error", f"the row cannot be sent to the environment: {error}")
            return
        self._send(instance)

    def _send(self, instance: InstanceSocket) -> None:
        instance.send()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if instance.has_more_to_send else 0)
        with contextlib.suppress(KeyError):  # it has closed its side already
            self._selector.modify(instance.channel, events, instance)

    def _hear(self, instance: InstanceSocket) -> None:
        """What an instance has written: its answer, its end, or something else."""
        try:
            answer = instance.receive()
        except EOFError:
            self._selector.unregister(instance.channel)
            instance.lost = "closed its connection"
            instance.deadline = min(instance.deadline, time.monotonic() + _CAUSE_PATIENCE_S)
        except ValueError as error:
            if instance.asked:
                self._fail(instance, "crash", f"the environment broke the protocol ({error})")
            else:
                self._kill(instance.number)
                instance.lost = f"broke the protocol ({error})"
                self._selector.unregister(instance.channel)
        else:
            if answer is not None:
                self._answered(instance, answer)

    def _answered(self, instance: InstanceSocket, answer: Answer) -> None:
        if instance.number == _FIRST:
            self.first.put(answer.reason if answer.kind == "failed" else answer)
            self._retire(instance)
        else:
            self._reply(instance, answer.reply())
            if answer.kind != "turn":
                self._retire(instance)

    def _reply(self, instance: InstanceSocket, reply: Reply) -> None:
        instance.asked = ""
        self.replies.put((instance.key, instance.number, reply))

    def _fail(self, instance: InstanceSocket, kind: Any, reason: str) -> None:
        """A reply, and the end of the instance by force."""
        if instance.number == _FIRST:
            self.first.put(f"{reason}, while it was tried")
        else:
            seconds = time.monotonic() - instance.begun
            self._reply(instance, Failed(kind, f"{reason}.{instance.about}", seconds))
        self._retire(instance)
        self._kill(instance.number)

    def _retire(self, instance: InstanceSocket) -> None:
        """Its socket is closed: it cleans up and ends by itself, or is killed at the deadline."""
        del self._instances[instance.number]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(instance.channel)
        instance.close()
        if instance.number in self._alive:
            self._to_kill[instance.number] = time.monotonic() + self._timeout_s

    def _kill(self, number: int) -> None:
        self._to_kill.pop(number, None)
        if number in self._alive and self._server is not None:
            self._killed.setdefault(number, time.monotonic())
            try:
                self._server.kill(number)
            except OSError:  # it is busy, or gone, which its socket says
                self._to_kill[number] = time.monotonic() + _RETRY_S

    def _hold_deadlines(self) -> None:
        now = time.monotonic()
        for instance in [i for i in self._instances.values() if i.asked and i.deadline <= now]:
            if instance.lost:
                self._fail(instance, "crash", f"the environment {instance.lost}")
            else:
                limit_s = START_TIMEOUT_S if instance.number == _FIRST else self._timeout_s
                self._fail(instance, "timeout", f"no answer from {instance.asked} within {limit_s:g} s, killed")
        for number in [n for n, at in self._to_kill.items() if at <= now]:
            self._kill(number)
        if any(at + _KILL_PATIENCE_S <= now for at in self._killed.values()):
            self._lose_server("does not kill what it should")
        elif self._server is not None and not self._server.is_ready and self._server_deadline <= now:
            self._lose_server(f"was not ready after {START_TIMEOUT_S:g} s of importing")

    # ---- the fork server ----

    def _hear_server(self) -> None:
        if self._server is None:
            return
        try:
            for news in self._server.news():
                if news.kind == "ended":
                    self._note_end(news.number, news.reason)
                elif news.kind == "forked":
                    self._note_fork(news.number)
                elif news.kind == "refused":
                    self._server_problem = news.reason
                elif news.kind == "ready":
                    self._server.is_ready = True
        except EOFError:
            self._lose_server("")

    def _note_fork(self, number: int) -> None:
        self._forking.discard(number)
        if number in self._instances:
            self._instances[number].start_clock()

    def _note_end(self, number: int, reason: str) -> None:
        self._alive.discard(number)
        self._forking.discard(number)
        self._to_kill.pop(number, None)
        self._killed.pop(number, None)
        instance = self._instances.get(number)
        if instance is None:
            return
        if not instance.lost:  # what it wrote last is still read
            self._hear(instance)
        if number not in self._instances:
            return
        instance.lost = reason
        if instance.asked:
            self._fail(instance, "crash", f"the environment {reason}")

    def _lose_server(self, cause: str) -> None:
        """It has died, or is given up: every rollout of the moment fails, and the next start starts another."""
        server, self._server = self._server, None
        if server is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(server.control)
        died = server.close()
        reason = self._server_problem or f"the process that environments are forked from {cause or died}"
        self._alive.clear()
        self._forking.clear()
        self._to_kill.clear()
        self._killed.clear()
        for instance in list(self._instances.values()):
            if instance.asked:
                self._fail(instance, "crash", reason)
            else:
                instance.lost = f"is lost: {reason}"
        if not server.is_ready:
            self._fail_waiting(reason)

    def _fail_waiting(self, reason: str) -> None:
        while self._waiting:
            key, number, _ = self._waiting.popleft()
            if number == _FIRST:
                self.first.put(reason)
            else:
                self.replies.put((key, number, Failed("crash", reason)))
