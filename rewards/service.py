"""The service in a reward worker: it finds the functions, then scores one job after the other.

The worker and not the fork server imports the user's modules, because threads and GPU contexts do
not survive a fork. This module never imports torch, vllm or pydantic, so that a worker is cheap to
replace.
"""

import contextlib
import importlib
import math
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from common.errors import UserError, with_type
from common.user_code.functions import short_name, unnamed
from common.worker import decode, encode
from rewards import (
    Logged,
    NoRewardError,
    RewardError,
    RewardFunction,
    Scores,
    TrainerState,
    score_completions,
)
from rewards.find import Wanted, bind, check_signature, resolve, wanted_by
from rewards.mathematics.gold import gold_kind


class RewardSetup(msgspec.Struct, frozen=True):
    names: list[str]
    weights: list[float]
    columns: list[str] | None  # null: signatures are not checked
    arguments: dict[str, dict[str, Any]] = {}  # rewards.reward_kwargs
    max_steps: int = 0  # for trainer_state
    has_rollouts: bool = True  # false: functions that need one are found, and not called
    timeout_s: float = 0.0  # for a job, which is killed then


class Job(msgspec.Struct, frozen=True):
    """The completions of one prompt, with the row's columns."""

    prompt: str | list[dict[str, Any]]
    completions: list[str | list[dict[str, Any]]]  # texts, or conversations of several turns
    completion_ids: list[list[int]]
    columns: dict[str, Any]  # those of one data set row
    policy_version: int = 0  # for trainer_state
    # one per completion; null without an environment
    environment_rewards: list[float | None] | None = None
    environments: list[dict[str, Any]] | None = None  # their public attributes, one per completion
    scored_by: list[str] = []  # the functions that apply to the row; empty: all


def columns_for(
    wanted: Wanted, columns: Mapping[str, Any], image_key: str | None
) -> dict[str, Any]:
    """Returns the columns of a row that the functions ask for.

    Those are the columns that a function names and, if one takes `**columns`, all others except
    files and the column of pictures.
    """
    row = {}
    for name, value in columns.items():
        is_file = name == image_key or _holds_bytes(value)
        if name in wanted.names or (wanted.rest and not is_file):
            row[name] = value
    return row


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_bytes, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_bytes, value))
    return isinstance(value, bytes | bytearray | memoryview)


class JobReply(msgspec.Struct, frozen=True):
    scores: Scores = []
    reason: str = ""  # why the job failed; "" if it did not
    logged: dict[str, float] = {}  # by log_metric
    seconds: float = 0.0  # wall time, without the time in which it waited for a core
    cpu_s: float = 0.0  # CPU time of this process, and of the children that it waited for
    wanted: Wanted | None = None  # the answer to the request null, which finds the functions


def _clocks() -> tuple[float, float]:
    """Returns monotonic seconds and CPU seconds.

    The monotonic seconds leave out those in which this thread waited for a core.
    """
    delayed_s = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        waits = Path("/proc/thread-self/schedstat").read_text()
        delayed_s = int(waits.split()[1]) / 1e9
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - delayed_s, time.process_time() + children.ru_utime + children.ru_stime


class RewardService:
    def __init__(self, setup: bytes) -> None:
        self._setup = decode(setup, RewardSetup)
        self._functions: list[tuple[str, RewardFunction, float]] = []
        if any(unnamed(name) == "judge" for name in self._setup.names):
            importlib.import_module("openai")  # it takes a second and 60 MB: the workers share it

    def answer(self, request: bytes) -> bytes:
        job = decode(request, Job | None)
        if job is None:
            return encode(self._find())
        before_s, before_cpu_s = _clocks()
        reply = self._score(job)
        after_s, after_cpu_s = _clocks()
        seconds = after_s - before_s
        cpu_s = after_cpu_s - before_cpu_s
        reply = msgspec.structs.replace(reply, seconds=seconds, cpu_s=cpu_s)
        try:
            return encode(reply)
        except UnicodeEncodeError:  # the message of an error quotes half a surrogate of the row
            return encode(JobReply(reason=reply.reason.encode(errors="backslashreplace").decode()))

    def close(self) -> None:
        pass

    def _find(self) -> JobReply:
        setup = self._setup
        try:
            for spec, weight in zip(setup.names, setup.weights, strict=True):
                name = short_name(spec)
                function = bind(resolve(spec), setup.arguments.get(name, {}), name, setup.timeout_s)
                if setup.columns is not None:
                    check_signature(function, setup.columns, name)
                self._functions.append((name, function, weight))
        except UserError as error:
            return JobReply(reason=str(error))
        named = [(name, function) for name, function, _ in self._functions]
        wanted = wanted_by(named)
        if not setup.has_rollouts:
            self._functions = [f for f in self._functions if f[0] not in wanted.needs_rollout]
        return JobReply(wanted=wanted)

    def _score(self, job: Job) -> JobReply:
        """Scores a job in TRL's shapes: message completions for message prompts, else strings."""
        n = len(job.completions)
        completions: list[Any] = []
        for completion in job.completions:
            if isinstance(completion, str) and not isinstance(job.prompt, str):
                completions.append([{"role": "assistant", "content": completion}])
            else:
                completions.append(completion)
        columns: dict[str, list[Any]] = {}
        for name, value in job.columns.items():
            columns[name] = [value] * n
        columns["environment_rewards"] = list(job.environment_rewards or [None] * n)
        states = job.environments or [{}] * n
        columns["environments"] = [SimpleNamespace(**state) for state in states]
        functions = []
        absent = {}
        for found in self._functions:
            name = found[0]
            absent[name] = math.nan
            if not job.scored_by or name in job.scored_by:
                functions.append(found)
        state = TrainerState(job.policy_version, self._setup.max_steps)
        logged = Logged()
        prompts = [job.prompt] * n
        try:
            scores = score_completions(
                functions, prompts, completions, columns, job.completion_ids, state, logged
            )
            scores = [(absent | rewards, total) for rewards, total in scores]
            return JobReply(scores, logged=logged.means())
        except NoRewardError as error:
            reason = str(error)
            gold_reason = gold_kind(job.columns.get("answer")).reason
            if gold_reason:
                reason += f". Of the gold answer: {gold_reason}"
            return JobReply(reason=reason)
        except RewardError as error:
            return JobReply(reason=str(error))
        except Exception as error:  # an object that a reward returned may raise when it is read
            return JobReply(reason=with_type(error))
