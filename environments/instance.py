"""What runs in the process of one rollout: requests in, answers out, the user's environment between the two."""

from __future__ import annotations

import contextlib
import os
import random  # before any fork
import socket
import sys
import time
from typing import NoReturn

import msgspec

from common.errors import UserError
from common.worker import pack, read_frame
from environments import Done, Turn
from environments.contracts import BrokenEnvironment, Found, Instance
from environments.messages import MAX_ANSWER_BYTES, Answer, Request
from environments.tools import schemas


def serve(channel: socket.socket, found: Found) -> NoReturn:
    """Answers requests until the pool closes the socket; then the environment may clean up."""
    pid, requests = os.getpid(), channel.makefile("rb")
    instance: list[Instance] = []
    try:
        while True:
            request = msgspec.msgpack.decode(read_frame(requests), type=Request)
            answer = _answer(request, found, instance)
            if os.getpid() != pid:  # the environment forked and both copies returned
                os._exit(1)
            channel.sendall(_packed(answer))
    except SystemExit:  # the pool has closed the socket
        for one in instance:
            with contextlib.suppress(BrokenEnvironment):
                one.close()
        if os.getpid() == pid:
            sys.stdout.flush()
    os._exit(0)


def _answer(request: Request, found: Found, instance: list[Instance]) -> Answer:
    begun = time.monotonic()
    try:
        if request.kind == "describe":
            return _describe(found)
        if request.kind == "reset":
            _seed(request.seed)
            instance.append(found.instance())
            given: Turn | Done = instance[0].reset(request.columns)
        else:
            given = instance[0].step(request.completion) if request.kind == "step" else instance[0].finish()
    except BrokenEnvironment as error:
        return Answer("failed", reason=str(error), seconds=time.monotonic() - begun)
    except Exception as error:  # an object that the environment returned may raise when it is read
        return Answer("failed", reason=f"{type(error).__name__}: {error}", seconds=time.monotonic() - begun)
    state = instance[0].state() if isinstance(given, Done) else {}
    return msgspec.structs.replace(Answer.of(given), seconds=time.monotonic() - begun, state=state)


def _describe(found: Found) -> Answer:
    try:
        instance = found.checked()
        tools = schemas(instance.toolbox.tools) if instance.toolbox is not None else []
        answer = Answer("described", tools=tools, gives_rewards=instance.gives_rewards)
        instance.close()
    except (UserError, BrokenEnvironment) as error:
        return Answer("failed", reason=str(error))
    return answer


def _packed(answer: Answer) -> bytes:
    try:
        return pack(answer, MAX_ANSWER_BYTES)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return pack(Answer("failed", reason=f"the answer cannot be sent: {error}", seconds=answer.seconds))


def _seed(seed: int | None) -> None:
    """Processes that were forked from one have the same state of numpy's generator."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(random.getrandbits(32))
