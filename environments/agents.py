"""The worker service of an agent: a user's function or command that calls the model over HTTP.

The environment variable OPENAI_BASE_URL holds the rollout's address (endpoint.py). Clients of the
openai package that the user's file created when it was imported are set to this address, too.
"""

import asyncio
import contextlib
import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from common.errors import UserError
from common.outcomes import finite_number, shorten
from common.user_code import functions
from common.user_code.functions import named_arguments, short_name
from common.worker import decode
from environments import Done
from environments.chat_completions import ModelAnswer, answer
from environments.contracts import AgentSetup, BrokenEnvironment, call_user, check_columns
from environments.service import Answer, EnvironmentService, Request, seed_generators

_NOWHERE = "http://127.0.0.1:9/v1"  # the placeholder until a rollout starts
_MAX_LINE = 1 << 20  # bytes; a longer line counts as several


class AgentService(EnvironmentService):
    """The service that runs an agent. The fork server imports the user's file, once."""

    def __init__(self, setup: bytes) -> None:
        self._setup = decode(setup, AgentSetup)
        self._instance = None
        _set_variables()
        agent = self._setup.agent
        if isinstance(agent, list):
            if shutil.which(agent[0]) is None:
                raise UserError(f"rollout.agent {agent}: no program {agent[0]!r}")
            return
        # Without openai, or with another version of it, agents start more slowly.
        with contextlib.suppress(Exception):
            _warm()
        self._label = f"agent {short_name(agent)}"
        self._function = functions.find(f"rollout.agent {agent!r}", agent)
        self._clients = _clients()
        check_columns(self._label, self._function, ["base_url", *self._setup.columns])

    def _answer(self, request: Request, started_s: float) -> Answer:
        if request.kind == "describe":
            return Answer(tools=[])
        seed_generators(request.seed)
        result = self._run(request.columns)
        return Answer(done=_done(result))

    def _run(self, row: Mapping[str, Any]) -> Any:
        """Runs the agent and returns its result. row: the columns and `base_url`."""
        os.environ["OPENAI_BASE_URL"] = row["base_url"]
        if isinstance(self._setup.agent, list):
            return _run_command(self._setup.agent, row)
        for client in self._clients:
            if str(client.base_url).rstrip("/") == _NOWHERE:
                client.base_url = row["base_url"]
        arguments = named_arguments(self._function, row)
        return call_user(self._label, self._function, **arguments)


def _set_variables() -> None:
    """Sets the environment variables through which clients find the model without a proxy."""
    os.environ["OPENAI_BASE_URL"] = _NOWHERE
    # Clients require a key. Any one will do, because nobody else knows the address.
    os.environ.setdefault("OPENAI_API_KEY", "none")
    direct_hosts = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    if direct_hosts:
        direct_hosts += ",127.0.0.1"
    else:
        direct_hosts = "127.0.0.1"
    os.environ["NO_PROXY"] = direct_hosts
    os.environ["no_proxy"] = direct_hosts


def _warm() -> None:
    """Makes openai requests before the fork.

    Workers then inherit what openai imports and compiles for a request.
    """
    import httpx2
    import openai

    head = {"id": "", "created": 0, "model": ""}
    response = answer(head, ModelAnswer({"role": "assistant", "content": ""}, "stop", {}))
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, json=response))
    mock = httpx2.AsyncClient(transport=transport)
    for http_client in (mock, None):  # None: over the network, to an address without a server
        client = openai.AsyncOpenAI(http_client=http_client, max_retries=0)
        question = client.chat.completions.create(
            model="", messages=[{"role": "user", "content": ""}]
        )
        with contextlib.suppress(openai.APIConnectionError):
            asyncio.run(question)


def _clients() -> list[Any]:
    """Returns every openai client of this process."""
    openai = sys.modules.get("openai")
    if openai is None:
        return []
    kinds = (openai.OpenAI, openai.AsyncOpenAI)
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kinds)]


def _run_command(command: list[str], row: Mapping[str, Any]) -> Any:
    """Runs the agent's command and returns the JSON value of its last output line.

    Raises BrokenEnvironment if the command fails or its last line is no JSON.
    """
    with tempfile.TemporaryFile() as columns:
        columns.write(json.dumps(row, default=str).encode())
        columns.seek(0)
        program = subprocess.Popen(command, stdin=columns, stdout=subprocess.PIPE)
    output = deque([b"null"], maxlen=1)

    def keep_last_line() -> None:
        assert program.stdout is not None
        for line in iter(functools.partial(program.stdout.readline, _MAX_LINE), b""):
            if line.strip():
                output.append(line)

    reader = threading.Thread(target=keep_last_line, daemon=True)
    reader.start()
    status = program.wait()
    reader.join(1.0)  # processes that the command leaves behind may hold its output open
    [last] = output
    if status:
        raise BrokenEnvironment(
            f"{command[0]} ended with exit code {status}; its last line: {shorten(last)}"
        )
    try:
        return json.loads(last)
    except ValueError:
        raise BrokenEnvironment(
            f"{command[0]} printed {shorten(last)} as its last line, expected a reward, or an "
            "answer as a JSON string"
        ) from None


def _done(result: Any) -> Done:
    """Converts an agent's result. A number is the reward, text the answer for reward functions.

    Raises BrokenEnvironment for any other result except None.
    """
    if isinstance(result, str):
        return Done(None, [{"role": "assistant", "content": result}])
    reward = finite_number(result)
    if reward is None and result is not None:
        expected = "its reward, which is a finite number, its answer, which is text, or None"
        raise BrokenEnvironment(f"the agent gave {shorten(result)}, expected {expected}")
    return Done(reward)
