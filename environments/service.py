"""Service in the worker of one rollout: it passes requests to the user's environment."""

import contextlib
import random
import sys
import time
from dataclasses import replace
from typing import Any, Literal

import msgspec

from common.errors import UserError, with_type
from common.worker import decode, encode
from environments import Done, Failed, Turn
from environments.contracts import BrokenEnvironment, EnvironmentFactory, EnvironmentSetup, Instance
from environments.tools import NO_CALLS, Calls, schemas

MAX_ANSWER_BYTES = 1 << 20  # many times the text of a rollout's tokens


class Request(msgspec.Struct, frozen=True):
    kind: Literal["describe", "reset", "step", "finish"]
    completion: str = ""
    calls: Calls = NO_CALLS  # tool calls in the completion
    columns: dict[str, Any] = {}
    seed: int | None = None


class Answer(msgspec.Struct, frozen=True):
    """The answer to one Request, with one of these fields set."""

    turn: Turn | None = None
    done: Done | None = None
    failed: Failed | None = None
    tools: list[dict[str, Any]] | None = None  # the answer to describe


class EnvironmentService:
    """The service of an environment.

    The fork server imports the user's file once. Each worker makes an instance of its own.
    """

    def __init__(self, setup: bytes) -> None:
        self._factory = EnvironmentFactory(decode(setup, EnvironmentSetup))
        self._instance: Instance | None = None

    def answer(self, request: bytes) -> bytes:
        started_s = time.monotonic()
        try:
            return encode(self._answer(decode(request, Request), started_s), MAX_ANSWER_BYTES)
        except (UserError, BrokenEnvironment) as error:
            reason = str(error)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            reason = f"the answer cannot be sent: {error}"
        except (
            Exception
        ) as error:  # an object that the environment returned may raise when it is read
            reason = with_type(error)
        return encode(Answer(failed=Failed("error", reason, time.monotonic() - started_s)))

    def close(self) -> None:
        if self._instance is not None:
            with contextlib.suppress(BrokenEnvironment):
                self._instance.close()

    def _answer(self, request: Request, started_s: float) -> Answer:
        if request.kind == "describe":
            self._instance = self._factory.checked()
            return Answer(tools=schemas(self._instance.tools or {}))
        if request.kind == "reset":
            seed_generators(request.seed)
            self._instance = self._factory.instance()
        assert self._instance is not None, "the first request is a reset"
        result: Turn | Done
        if request.kind == "reset":
            result = self._instance.reset(request.columns)
        elif request.kind == "step":
            result = self._instance.step(request.completion, request.calls)
        else:
            result = self._instance.finish()
        seconds = time.monotonic() - started_s
        if isinstance(result, Done):
            state = self._instance.state()
            return Answer(done=replace(result, seconds=seconds, state=state))
        return Answer(turn=replace(result, seconds=seconds))


def seed_generators(seed: int | None) -> None:
    """Seeds `random` and, if it is imported, numpy. None seeds them differently each time.

    Processes that are forked from one process would otherwise draw equal numbers from numpy.
    """
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(random.getrandbits(32))
