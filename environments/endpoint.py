"""HTTP endpoint through which agents reach the model.

Each rollout has an address of its own. One thread of the sampler's process serves all of them.

agent ──HTTP──► Address ──PendingRequest──► the sampler, which calls `tell` with the model's answer
                   └─────PendingRequest──► again, when the agent has read the answer or is gone

An answer that the agent has not read does not train.
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
from environments.chat_completions import (
    ChatRequest,
    ModelAnswer,
    RequestError,
    answer,
    chunk,
    end_of_stream,
    read,
)

_MAX_CONNECTIONS = 256  # of one rollout, each with one request at a time
Said = str | ModelAnswer | RequestError


@dataclass(eq=False)
class PendingRequest:
    """An agent's request until it has been answered."""

    ask: ChatRequest
    loop: asyncio.AbstractEventLoop
    is_read: bool | None = None  # None: not answered yet
    sent_text: str = ""  # with streaming: the text of the answer so far
    outbox: asyncio.Queue[Said] = field(default_factory=asyncio.Queue)

    def tell(self, said: Said) -> None:
        """Queues what the model says, from any thread.

        said: the answer, or why there is none. With streaming, also the whole text so far, of which
        the part that is new is sent.
        """
        if isinstance(said, str):
            text = said
            said = text[len(self.sent_text) :]
            self.sent_text = text
        if said != "":
            self.loop.call_soon_threadsafe(self.outbox.put_nowait, said)


class Endpoint:
    """The thread that serves all addresses, until `close`."""

    def __init__(self, law: Mapping[str, float]) -> None:
        """Starts the thread. law: the sampling settings in force."""
        self._law = law
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def address(
        self, worker: Worker, timeout_s: float, say: Callable[[PendingRequest], None]
    ) -> Iterator[Address]:
        """Opens an address for the agent in a worker, for the length of a `with` block.

        timeout_s: the agent's time between an answer and its next request.
        say: takes each request twice, in the endpoint's thread.
        """
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
    """The address of one rollout.

    Only `url` and `asked_s` may be read outside the endpoint's thread.
    """

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
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connect, "127.0.0.1", 0)
        _, port = self._listener.sockets[0].getsockname()
        self.url = f"http://127.0.0.1:{port}{self._path}"

    async def close(self) -> None:
        self._listener.close()
        for asking in [*self._asked]:
            self._end(asking)
        for connection in self._server.connections:
            connection.force_close()

    def _connect(self) -> asyncio.Protocol:
        if len(self._server.connections) >= _MAX_CONNECTIONS:
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
            what = f"{request.method} {request.path}: {error.reason}"
            refusal = RequestError(f"{what}; what is served is POST …/chat/completions")
            return web.json_response(refusal.body, status=error.status)

    async def _answer(self, request: web.BaseRequest, ask: ChatRequest) -> web.StreamResponse:
        """Waits for the model's answer and sends it, as a stream if the request asks for one."""
        asking = PendingRequest(ask, asyncio.get_running_loop())
        call_id = f"chatcmpl-{secrets.token_hex(8)}"
        head = {"id": call_id, "created": int(time.time()), "model": ask.model}
        self._begin(asking)
        try:
            said = await asking.outbox.get()
            if ask.stream and not isinstance(said, RequestError):
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                await response.write(chunk(head, {"role": "assistant", "content": ""}))
            while isinstance(said, str):
                async with asyncio.timeout(
                    self.timeout_s
                ):  # reading counts as the agent's own time
                    await response.write(chunk(head, {"content": said}))
                said = await asking.outbox.get()
            if isinstance(said, RequestError):
                raise said
            await asyncio.sleep(0)  # lets the server notice a client that has disconnected
            asking.is_read = True
            async with asyncio.timeout(self.timeout_s):
                if ask.stream:
                    options = ask.stream_options or {}
                    rest = end_of_stream(head, said, asking.sent_text, options)
                    await response.write_eof(rest)
                else:
                    response = web.json_response(answer(head, said))
                    await response.prepare(request)
                    await response.write_eof()
            return response
        except BaseException:
            asking.is_read = False
            raise
        finally:
            self._end(asking)

    def _begin(self, asking: PendingRequest) -> None:
        """Registers a request and suspends the agent's deadline while the model works on it.

        A deadline that has passed during concurrent requests holds.
        """
        if not self._listener.is_serving():
            raise RequestError("the rollout is over")
        if not self._asked:
            self._paused_at_s = time.monotonic()
            self._deadline = self.worker.deadline
        self._asked.add(asking)
        if time.monotonic() < self._deadline:
            self.worker.deadline = math.inf
        else:
            self.worker.deadline = self._deadline
        self.say(asking)

    def _end(self, asking: PendingRequest) -> None:
        """Ends a request, once. Only an answer that was read renews the agent's deadline."""
        if asking not in self._asked:
            return
        self._asked.remove(asking)
        asking.is_read = bool(asking.is_read)
        if asking.is_read:
            self._deadline = time.monotonic() + self.timeout_s
        if not self._asked:
            self.asked_s += time.monotonic() - self._paused_at_s
            self.worker.deadline = self._deadline
        self.say(asking)
