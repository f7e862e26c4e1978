"""An agent in the worker of one rollout: the user's function or command, and the address at which it finds its model.

    agent ──HTTP──► Endpoint ──channel──► the sampler, which answers in any order
    main thread     a thread

The address is in OPENAI_BASE_URL. Clients of the openai package that the user's file made when it was imported, before
there was a rollout, are told of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from common import functions
from common.errors import UserError
from common.functions import check_parameters, short_name
from common.outcomes import finite_number, shorten
from common.worker import BETWEEN, HEADER, decode, encode
from environments import Done
from environments.chat_completions import Ask, Body, Refused, Said, answer, ask_of, chunks, read
from environments.contracts import AgentSetup, BrokenEnvironment, called, wanted
from environments.service import MAX_ANSWER_BYTES, Answer, EnvironmentService, Request, seed_generators

_NOWHERE = "http://127.0.0.1:9/v1"  # until there is a rollout
_ROOM = 1 << 12  # of MAX_ANSWER_BYTES for what is around a request


class Endpoint:
    """Serves while it is entered."""

    def __init__(self, channel: Any, law: Mapping[str, float]) -> None:
        self._channel, self._law = channel, law
        self._address = secrets.token_hex(8)
        self._asked: list[asyncio.Future[Said]] = []  # by the id of the Ask
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> str:
        """The address."""
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._channel.setblocking(True)

    async def _start(self) -> str:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._channel.dup())
        self._hearing = self._loop.create_task(self._hear(reader))
        app = web.Application(client_max_size=MAX_ANSWER_BYTES - _ROOM, middlewares=[_as_openai])
        app.router.add_post(f"/{self._address}/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/{self._address}/v1"

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """The sampler's answers, until it wants no more of this rollout: the function need not end by itself."""
        try:
            while True:
                size, _ = HEADER.unpack(await reader.readexactly(HEADER.size))
                said: Said = decode(await reader.readexactly(size), Said)
                if not self._asked[said.id].done():  # else nobody waits for it any more
                    self._asked[said.id].set_result(said)
        except Exception:
            os._exit(0)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = read(await request.read(), self._law)
        said = await self._answer(ask_of(body, len(self._asked)))
        if not body.stream:
            return web.json_response(answer(said, body, self._address))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events = [*(json.dumps(chunk) for chunk in chunks(said, body, self._address)), "[DONE]"]
        await response.write("".join(f"data: {event}\n\n" for event in events).encode())
        await response.write_eof()
        return response

    async def _answer(self, ask: Ask) -> Said:
        try:
            frame = encode(Answer(ask=ask), MAX_ANSWER_BYTES)
        except (TypeError, ValueError, OverflowError) as error:
            raise Refused(f"the request cannot be sent: {error}") from None
        self._asked.append(asked := self._loop.create_future())
        self._writer.write(HEADER.pack(len(frame), BETWEEN) + frame)
        await self._writer.drain()
        if (said := await asked).error:
            raise Refused(said.error)
        return said


@web.middleware
async def _as_openai(request: web.Request, handler: Any) -> web.StreamResponse:
    """Errors in the form that OpenAI's clients read."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except Refused as error:
        return web.json_response(error.body, status=error.status)
    except web.HTTPException as error:
        what = f"{request.method} {request.path}: {error.reason}; what is served is POST …/chat/completions"
        return web.json_response(Refused(what).body, status=error.status)


class AgentService(EnvironmentService):
    """The user's file is imported once, in the fork server. Raises UserError."""

    def __init__(self, setup: bytes) -> None:
        self._setup, self._instance = decode(setup, AgentSetup), None
        os.environ["OPENAI_BASE_URL"] = _NOWHERE
        os.environ.setdefault("OPENAI_API_KEY", "none")  # clients want one; nobody else knows the address
        direct = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = f"{direct},127.0.0.1" if direct else "127.0.0.1"
        agent = self._setup.agent
        if isinstance(agent, str):
            self._label = f"agent {short_name(agent)}"
            self._function = functions.find(f"rollout.agent {agent!r}", agent)
        elif shutil.which(agent[0]) is None:
            raise UserError(f"rollout.agent {agent}: no program {agent[0]!r}")
        openai = sys.modules.get("openai")
        kinds = (openai.OpenAI, openai.AsyncOpenAI) if openai else ()
        clients = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
        self._clients = [client for client in clients if str(client.base_url).rstrip("/") == _NOWHERE]
        if openai:
            with contextlib.suppress(Exception):  # of another version than ours: it only takes longer
                _warm(openai)

    def connect(self, channel: Any) -> None:
        self._channel = channel

    def _answer(self, request: Request, begun: float) -> Answer:
        if request.kind == "describe":
            self._check()
            return Answer(tools=[])
        seed_generators(request.seed)
        with Endpoint(self._channel, self._setup.law) as url:
            return Answer(done=_done(self._run(request.columns, url)))

    def _check(self) -> None:
        """Raises UserError where the function wants what no row has."""
        if self._setup.columns is None or isinstance(self._setup.agent, list):
            return
        offered = ["base_url", *self._setup.columns]

        def unknown(wanted: str) -> str:
            remedy = f"Remove it, or set data.rename: {{<a column>: {wanted}}}"
            return f"{self._label} wants {wanted!r}; it gets {', '.join(offered)}. {remedy}"

        check_parameters(self._label, self._function, offered, (), "", unknown)

    def _run(self, row: Mapping[str, Any], url: str) -> Any:
        os.environ["OPENAI_BASE_URL"] = url
        for client in self._clients:
            client.base_url = url
        if isinstance(self._setup.agent, list):
            return _ran(self._setup.agent, row)
        return called(self._label, self._function, **wanted(self._function, {**row, "base_url": url}))


def _warm(openai: Any) -> None:
    """What the package imports and compiles for its first request and answer is done before the forks, not in each."""
    import httpx2

    said = Said(0, {"role": "assistant", "content": ""})
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, json=answer(said, Body([{}]), "")))
    ask: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": ""}]}

    async def asked() -> None:
        for http_client in (httpx2.AsyncClient(transport=transport), None):
            with contextlib.suppress(openai.APIConnectionError):  # the second asks nobody, by way of the network
                await openai.AsyncOpenAI(http_client=http_client, max_retries=0).chat.completions.create(**ask)

    openai.OpenAI(http_client=httpx2.Client(transport=transport)).chat.completions.create(**ask)
    asyncio.run(asked())


def _ran(command: list[str], row: Mapping[str, Any]) -> Any:
    """What the last line that it prints says, in JSON. Raises BrokenEnvironment."""
    told = json.dumps(row, default=str).encode()
    ended = subprocess.run(command, input=told, stdout=subprocess.PIPE, check=False)
    last = next((line for line in reversed(ended.stdout.splitlines()) if line.strip()), b"null")
    if ended.returncode:
        raise BrokenEnvironment(f"{command[0]} ended with exit code {ended.returncode}; its last line: {shorten(last)}")
    try:
        return json.loads(last)
    except ValueError:
        raise BrokenEnvironment(
            f"{command[0]} printed {shorten(last)} as its last line, expected a reward, or an answer as a JSON string"
        ) from None


def _done(given: Any) -> Done:
    """A number is the reward, text the answer that reward functions read. Raises BrokenEnvironment."""
    if isinstance(given, str):
        return Done(None, [{"role": "assistant", "content": given}])
    if given is not None and finite_number(given) is None:
        raise BrokenEnvironment(
            f"the agent gave {shorten(given)}, expected its reward, which is a finite number, its answer, which is "
            "text, or None"
        )
    return Done(None if given is None else finite_number(given))
