"""The reward process: reads jobs from stdin, writes scores to stdout, runs the user's code between the two.

The first request is a RewardSetup. The pipes are moved off descriptors 0 and 1 before any user code runs, so that a
print goes to stderr and never into the protocol. Nothing here imports torch, vllm or pydantic: the process is up in
about 0.2 s, so killing and replacing it is cheap.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import SimpleNamespace
from typing import Any, BinaryIO, NoReturn

import msgspec

from common.errors import UserError
from common.functions import short_name
from common.worker import close_standard_streams, die_with, limit_memory, pack, read_frame
from rewards import Logged, RewardError, RewardFunction, Scores, TrainerState, score_completions
from rewards.find import bind, check_signature, resolve


class RewardSetup(msgspec.Struct, frozen=True):
    names: list[str]
    weights: list[float]
    columns: list[str] | None  # null: signatures are not checked
    max_memory: int = 0  # bytes; 0 = no limit
    arguments: dict[str, dict[str, Any]] = {}  # rewards.reward_kwargs
    max_steps: int = 0  # for trainer_state


class Job(msgspec.Struct, frozen=True):
    """The completions of one prompt."""

    number: int  # counts from 1 within one process; the answer repeats it
    prompt: str | list[dict[str, Any]]
    completions: list[str | list[dict[str, Any]]]  # texts, or conversations of several turns
    completion_ids: list[list[int]]
    columns: dict[str, Any]  # of one data set row
    policy_version: int = 0  # for trainer_state
    environment_rewards: list[float | None] | None = None  # one per completion; null: no environment
    environments: list[dict[str, Any]] | None = None  # their public attributes, one per completion


class JobReply(msgspec.Struct, frozen=True):
    number: int  # of the job; 0 answers the RewardSetup
    scores: Scores = []
    reason: str = ""  # not empty: failed, and why
    logged: dict[str, float] = {}  # by log_metric


def reply_to(job: Job, functions: list[tuple[str, RewardFunction, float]], max_steps: int = 0) -> JobReply:
    """Reply with the scores of one job, in TRL's shapes: message completions for message prompts, else strings."""
    n = len(job.completions)
    completions: list[Any] = job.completions
    if not isinstance(job.prompt, str):
        completions = [
            [{"role": "assistant", "content": given}] if isinstance(given, str) else given for given in job.completions
        ]
    columns: dict[str, list[Any]] = {name: [value] * n for name, value in job.columns.items()}
    columns["environment_rewards"] = list(job.environment_rewards or [None] * n)
    columns["environments"] = [SimpleNamespace(**state) for state in job.environments or [{}] * n]
    state, logged = TrainerState(job.policy_version, max_steps), Logged()
    try:
        scores = score_completions(functions, [job.prompt] * n, completions, columns, job.completion_ids, state, logged)
        return JobReply(job.number, scores, logged=logged.means())
    except RewardError as error:
        return JobReply(job.number, reason=str(error))
    except Exception as error:  # an object that a reward returned may raise when it is read
        return JobReply(job.number, reason=f"{type(error).__name__}: {error}")


def main(parent_pid: int) -> NoReturn:
    """Serve until stdin ends."""
    die_with(parent_pid)
    pid = os.getpid()
    requests, replies = _private_pipes()

    def reply(record: JobReply) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the user's code may have closed or replaced it
            sys.stdout.flush()
        if os.getpid() != pid:  # a reward function forked and both copies returned
            os._exit(1)
        replies.write(pack(record))
        replies.flush()

    setup = msgspec.msgpack.decode(read_frame(requests), type=RewardSetup)
    limit_memory(setup.max_memory)
    try:
        functions = _functions(setup)
    except UserError as error:
        reply(JobReply(0, reason=str(error)))
        sys.exit(2)
    reply(JobReply(0))
    while True:
        reply(reply_to(msgspec.msgpack.decode(read_frame(requests), type=Job), functions, setup.max_steps))


def _functions(setup: RewardSetup) -> list[tuple[str, RewardFunction, float]]:
    """Found, given their own arguments, and checked. Raises UserError."""
    functions = []
    for spec, weight in zip(setup.names, setup.weights, strict=True):
        name = short_name(spec)
        function = bind(resolve(spec), setup.arguments.get(name, {}), name)
        if setup.columns is not None:
            check_signature(function, setup.columns, name)
        functions.append((name, function, weight))
    return functions


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The protocol's pipes on descriptors of their own."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    close_standard_streams()
    return requests, replies


if __name__ == "__main__":
    main(int(sys.argv[1]))
