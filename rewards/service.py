"""The service in the worker of the rewards: it finds the functions, then scores one job after the other.

The worker, not the fork server, imports the user's modules: they may start threads or touch a GPU, which do not
survive a fork. This module never imports torch, vllm or pydantic: killing and replacing a worker is cheap.
"""

import contextlib
import importlib
import math
import resource
import time
from types import SimpleNamespace
from typing import Any

import msgspec

from common.errors import UserError, with_type
from common.user_code.functions import short_name, unnamed
from common.worker import decode, encode
from rewards import Logged, NoRewardError, RewardError, RewardFunction, Scores, TrainerState, score_completions
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
    environment_rewards: list[float | None] | None = None  # one per completion; null: no environment
    environments: list[dict[str, Any]] | None = None  # their public attributes, one per completion
    scored_by: list[str] = []  # the functions that apply to the row; empty: all


class JobReply(msgspec.Struct, frozen=True):
    scores: Scores = []
    reason: str = ""  # why the job failed; "" if it did not
    logged: dict[str, float] = {}  # by log_metric
    seconds: float = 0.0  # wall time, without the time in which it waited for a core
    cpu_s: float = 0.0  # CPU time of this process, and of the children that it waited for
    wanted: Wanted | None = None  # the answer to the request null, which finds the functions


def _clocks() -> tuple[float, float]:
    """Returns monotonic seconds without those in which our thread waited for a core, and CPU seconds."""
    delayed_s = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat") as file:
        delayed_s = int(file.read().split()[1]) / 1e9
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
        reply = msgspec.structs.replace(reply, seconds=after_s - before_s, cpu_s=after_cpu_s - before_cpu_s)
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
        wanted = wanted_by([(name, function) for name, function, _ in self._functions])
        if not setup.has_rollouts:
            self._functions = [found for found in self._functions if found[0] not in wanted.needs_rollout]
        return JobReply(wanted=wanted)

    def _score(self, job: Job) -> JobReply:
        """Scores a job in TRL's shapes: message completions for message prompts, else strings."""
        n = len(job.completions)
        completions: list[Any] = job.completions
        if not isinstance(job.prompt, str):
            completions = [[{"role": "assistant", "content": c}] if isinstance(c, str) else c for c in completions]
        columns: dict[str, list[Any]] = {name: [value] * n for name, value in job.columns.items()}
        columns["environment_rewards"] = list(job.environment_rewards or [None] * n)
        columns["environments"] = [SimpleNamespace(**state) for state in job.environments or [{}] * n]
        state, logged = TrainerState(job.policy_version, self._setup.max_steps), Logged()
        prompts = [job.prompt] * n
        try:
            functions = [found for found in self._functions if not job.scored_by or found[0] in job.scored_by]
            scores = score_completions(functions, prompts, completions, columns, job.completion_ids, state, logged)
            absent = {name: math.nan for name, _, _ in self._functions}
            scores = [(absent | rewards, total) for rewards, total in scores]
            return JobReply(scores, logged=logged.means())
        except NoRewardError as error:
            why = gold_kind(job.columns.get("answer")).reason
            return JobReply(reason=f"{error}{f'. Of the gold answer: {why}' if why else ''}")
        except RewardError as error:
            return JobReply(reason=str(error))
        except Exception as error:  # an object that a reward returned may raise when it is read
            return JobReply(reason=with_type(error))
