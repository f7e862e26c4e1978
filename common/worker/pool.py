"""The pool of workers under rewards, environments and agents.

Threads of the pool fork workers and ask them. The results wait in a queue, until the owner's own
thread takes them: that thread is never held up by a user's code.
"""

import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from common.errors import UserError
from common.worker import WorkerSetup
from common.worker.owner import Server, StartError, Worker

Result = TypeVar("Result")
T = TypeVar("T")


class WorkerPool(Generic[Result]):
    """A pool of workers that run one service, with the threads that ask them.

    The fork server is started by the first `fork`, and again when it has died.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        title: str,
        max_workers: int,
        import_timeout_s: float = 120.0,
        setting: str = "",
    ) -> None:
        """Prepares the pool and starts nothing.

        title: names the pool in messages, as in "the process that rewards are forked from".
        max_workers: the number of threads, each of which uses one worker at a time.
        import_timeout_s: the limit for importing the user's file in the fork server.
        setting: the name of this limit in the config, for the message that it is exceeded.
        """
        self._setup = setup
        self._title = title
        self._import_timeout_s = import_timeout_s
        self._setting = setting
        # A child dies with the thread that started it, so the pool's threads start the server, too.
        self._threads = ThreadPoolExecutor(max_workers)
        self._results = queue.SimpleQueue[Result]()
        self._server: Server | None = None
        self._closed = False
        self._starting = threading.Lock()
        self._closing = threading.Lock()

    def start(self, first: Callable[[], T]) -> T:
        """Calls `first` in a thread of the pool and returns its result.

        Raises what `first` raises, and UserError for a StartError.
        """
        try:
            return self._threads.submit(first).result()
        except StartError as error:
            raise UserError(str(error)) from None

    def submit(self, task: Callable[..., object], *arguments: Any) -> None:
        """Calls `task` in a thread of the pool as soon as one is free. It should `put` a result."""
        self._threads.submit(task, *arguments)

    def put(self, result: Result) -> None:
        """Hands a result to the thread that calls `take`."""
        self._results.put(result)

    def take(self, timeout_s: float) -> list[Result]:
        """Returns the results since the last call; waits at most timeout_s for the first."""
        results: list[Result] = []
        try:
            if timeout_s > 0:
                results.append(self._results.get(timeout=timeout_s))
            while True:
                results.append(self._results.get_nowait())
        except queue.Empty:
            return results

    def fork(self) -> Worker:
        """Forks a fresh worker. Raises StartError."""
        server = self._running_server()
        channel, worker_channel = socket.socketpair()
        lifeline, worker_lifeline = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with worker_channel, worker_lifeline:
            descriptors = [worker_channel.fileno(), worker_lifeline.fileno()]
            try:
                socket.send_fds(server.control, [b"fork"], descriptors)
            except OSError:
                server.kill()  # the server is stuck or ends: the lifeline says so
        worker = Worker(channel, lifeline, server)
        failure = worker.wait_until_forked()
        if failure:
            worker.close()
            raise StartError(f"a process for {self._title} {failure}")
        return worker

    def _running_server(self) -> Server:
        with self._starting:
            if self._server is None or self._server.has_exited:
                with self._closing:
                    if self._closed:
                        name = f"the process that {self._title} are forked from"
                        raise StartError(f"{name} is closed")
                    self._server = Server(self._setup, self._title)
                self._server.wait_until_ready(self._import_timeout_s, self._setting)
            return self._server

    def close(self) -> None:
        """Ends the server and every worker with all that it started, then waits for the threads."""
        with self._closing:
            self._closed = True
        if self._server is not None:
            self._server.close()
        self._threads.shutdown(cancel_futures=True)
