"""HTTP endpoint through which agents reach the model: one address per rollout, all served by one sampler thread.

agent ──HTTP──► Address ──request─► the sampler, which tells it what the model says
                   └───request────► and hears whether the agent has read it: what it left unread does not train
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from aiohttp import web

from common.worker.owner import Worker
from environments.chat_completions import ChatRequest, ModelAnswer, RequestError, answer, chunk, end_of_stream, read


@dataclass(eq=False)
class PendingRequest:
    """An agent's request until it has been answered."""

    ask: ChatRequest
    loop: asyncio.AbstractEventLoop
    is_read: bool | None = None  # None: not answered yet
    sent_text: str = ""  # with streaming: the text of the answer so far
    outbox: asyncio.Queue[str | ModelAnswer | RequestError] = field(default_factory=asyncio.Queue)

    def tell(self, said: str | ModelAnswer | RequestError) -> None:
        """Queues, from any thread, a stream's whole text so far (its new part is sent), or the answer or refusal."""
        if isinstance(said, str):
            said, self.sent_text = said[len(self.sent_text) :], said
        if said != "":
            self.loop.call_soon_threadsafe(self.outbox.put_nowait, said)


class Endpoint:
    """The thread that serves all addresses, ended by `close`. law: the sampling settings in force."""

    def __init__(self, law: Mapping[str, float]) -> None:
        self._law, self._loop = law, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def address(self, worker: Worker, timeout_s: float, say: Callable[[PendingRequest], None]) -> Iterator[Address]:
        """Opens an address while a worker runs. timeout_s: the agent's time between an answer and its next request."""
        address = Address(self._law, worker, timeout_s, say)
        asyncio.run_coroutine_threadsafe(address.open(), self._loop).result()
        try:
            yield address
        finally:
            asyncio.run_coroutine_threadsafe(address.close(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(eq=False)
class Address:
    """The address of one rollout. All attributes but `url` and `asked_s` belong to the endpoint's thread."""

    law: Mapping[str, float]
    worker: Worker
    timeout_s: float
    say: Callable[[PendingRequest], None]
    url: str = ""
    asked_s: float = 0.0  # seconds that the agent has waited for the model
    _path: str = field(default_factory=lambda: f"/{secrets.token_hex(8)}/v1")
    _asked: set[PendingRequest] = field(default_factory=set)

    async def open(self) -> None:
        self._server = web.Server(self._serve, handler_cancellation=True, access_log=None)
        self._listener = await asyncio.get_running_loop().create_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}{self._path}"

    async def close(self) -> None:
        self._listener.close()
        for asking in [*self._asked]:
            self._end(asking)
        for connection in self._server.connections:
            connection.force_close()

    def _connect(self) -> asyncio.Protocol:
        if len(self._server.connections) >= 256:  # of one rollout, each with one request at a time
            raise ConnectionRefusedError  # asyncio then closes the connection
        return self._server()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers an HTTP request, with errors in the form that OpenAI's clients read."""
        try:
            if (request.method, request.path) != ("POST", f"{self._path}/chat/completions"):
                raise web.HTTPNotFound
            return await self._answer(request, read(await request.read(), self.law))
        except RequestError as error:
            return web.json_response(error.body, status=400)
        except web.HTTPException as error:
            what = f"{request.method} {request.path}: {error.reason}; what is served is POST …/chat/completions"
            return web.json_response(RequestError(what).body, status=error.status)

    async def _answer(self, request: web.BaseRequest, ask: ChatRequest) -> web.StreamResponse:
        asking = PendingRequest(ask, asyncio.get_running_loop())
        head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": ask.model}
        self._begin(asking)
        try:
            said = await asking.outbox.get()
            if ask.stream and not isinstance(said, RequestError):
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                await response.write(chunk(head, {"role": "assistant", "content": ""}))
            while isinstance(said, str):
                async with asyncio.timeout(self.timeout_s):  # reading counts as the agent's own time
                    await response.write(chunk(head, {"content": said}))
                said = await asking.outbox.get()
            if isinstance(said, RequestError):
                raise said
            await asyncio.sleep(0)  # lets the server notice a client that has disconnected
            asking.is_read = True
            async with asyncio.timeout(self.timeout_s):
                if ask.stream:
                    await response.write_eof(end_of_stream(head, said, asking.sent_text, ask.stream_options or {}))
                else:
                    await (response := web.json_response(answer(head, said))).prepare(request)
                    await response.write_eof()
            return response
        except BaseException:
            asking.is_read = False
            raise
        finally:
            self._end(asking)

    def _begin(self, asking: PendingRequest) -> None:
        """Registers a request and suspends the agent's deadline, unless that has passed during concurrent requests."""
        if not self._listener.is_serving():
            raise RequestError("the rollout is over")
        if not self._asked:
            self._paused, self._deadline = time.monotonic(), self.worker.deadline
        self._asked.add(asking)
        self.worker.deadline = math.inf if time.monotonic() < self._deadline else self._deadline
        self.say(asking)

    def _end(self, asking: PendingRequest) -> None:
        """Ends a request, at most once. Only an answer that was read renews the agent's deadline."""
        if asking not in self._asked:
            return
        self._asked.remove(asking)
        asking.is_read = bool(asking.is_read)
        self._deadline = time.monotonic() + self.timeout_s if asking.is_read else self._deadline
        if not self._asked:
            self.asked_s += time.monotonic() - self._paused
            self.worker.deadline = self._deadline
        self.say(asking)
