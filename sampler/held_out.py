"""Schedules held-out problems, which yield to the training groups that a trainer waits for.

A version stays loaded until its evaluation is done, because the trainer publishes no other before.
So the problems may use any gap that the groups leave: the trainer's step, or the rest of a batch
whose first sequences have finished.

    CPU    each more sequence makes a step slower, so a problem starts when no group decodes
    GPU    more sequences decode in nearly the same time, so problems fill the engine, and queue
           behind the groups in it

Only a few problems are given to the engine at once. Otherwise groups that are leased meanwhile
would queue behind the whole evaluation.
"""

import collections
from collections.abc import Callable
from dataclasses import dataclass, field

from common.config import Config
from common.types import EvalFailure, EvalRequest, EvalResult, EvalSample
from rewards import Scores
from sampler.engine.engine_arguments import max_num_seqs
from sampler.link import Link
from sampler.turns.sampled import Sampled
from sampler.turns.task import EvalKey, GroupKey, Key, sampling_params


@dataclass
class _Chunk:
    """A chunk of an evaluation: the problems without a result, and the results so far."""

    missing: set[int]
    samples: list[EvalSample] = field(default_factory=list)
    failures: list[EvalFailure] = field(default_factory=list)
    sent: EvalResult | None = None


class HeldOut:
    """Schedules held-out problems and sends their results."""

    def __init__(
        self,
        config: Config,
        on_cpu: bool,
        decode: Callable[[list[list[int]]], list[str]],
        link: Link,
    ):
        """Starts without an evaluation. decode: maps token ids to texts."""
        self._config = config
        self._on_cpu = on_cpu
        self._decode = decode
        self._link = link
        # The most sequences of groups and problems that are in the engine at once.
        self._limit = int(config.vllm.get("max_num_seqs", max_num_seqs(config)))
        if not on_cpu:
            self._limit *= 2
        self._chunks: dict[tuple[str, int], _Chunk] = {}
        # Problems that are not in the engine yet.
        self.waiting: collections.deque[EvalKey] = collections.deque()

    def ask(self, request: EvalRequest, version: int, trainer: int) -> None:
        """Queues a leased chunk unless it is queued.

        If the chunk is answered, this sends its result again, because the result was lost.
        """
        chunk = self._chunks.get((request.eval_id, request.chunk))
        if chunk is not None:
            if chunk.sent is not None and chunk.sent.policy_version == version:
                self._link.send_eval(chunk.sent)
            return
        if any(eval_id != request.eval_id for eval_id, _ in self._chunks):
            self.forget()
        self._chunks[request.eval_id, request.chunk] = _Chunk(set(request.problem_indexes))
        for problem in request.problem_indexes:
            key = EvalKey(request.eval_id, request.chunk, problem, version, trainer)
            self.waiting.append(key)

    def to_start(self, version: int | None, decoding: list[Key]) -> list[EvalKey]:
        """Returns the problems to start now.

        version: the engine's. decoding: groups and problems that have no completions yet.
        """
        if self.waiting and self.waiting[0].policy_version != version:
            self.forget()  # another sampler answered, and the trainer went on
        groups = [key for key in decoding if isinstance(key, GroupKey)]
        if self._on_cpu and groups:
            return []
        room = self._limit
        for key in decoding:
            room -= sampling_params(key, self._config).num_completions
        count = max(0, room // self._config.eval.num_generations)
        if not decoding:
            count = max(1, count)
        count = min(count, len(self.waiting))
        return [self.waiting.popleft() for _ in range(count)]

    def note(self, key: EvalKey, sampled: Sampled, scores: Scores | str) -> None:
        """Stores a problem's scores, or why it has none.

        After the last problem of a chunk, this sends the result of the chunk.
        """
        chunk = self._chunks.get((key.eval_id, key.chunk))
        if chunk is None:
            return  # of an earlier evaluation: another sampler answered, and the trainer went on
        chunk.missing.discard(key.problem)
        if isinstance(scores, str):
            chunk.failures.append(EvalFailure(key.problem, scores))
        else:
            chunk.samples += self._samples(key, sampled, scores)
        if not chunk.missing:
            chunk.sent = EvalResult(
                key.eval_id,
                key.chunk,
                key.policy_version,
                samples=tuple(sorted(chunk.samples, key=lambda sample: sample.problem_index)),
                failures=tuple(sorted(chunk.failures, key=lambda failure: failure.problem_index)),
            )
            self._link.send_eval(chunk.sent)

    def _samples(self, key: EvalKey, sampled: Sampled, scores: Scores) -> list[EvalSample]:
        """Returns the scored completions of a problem."""
        completions = sampled.completions
        texts = self._decode([completion.token_ids.tolist() for completion in completions])
        samples = []
        for text, completion, (rewards, _) in zip(texts, completions, scores, strict=True):
            sample = EvalSample(
                problem_index=key.problem,
                completion=text,
                rewards=rewards,
                num_tokens=completion.num_sampled,
                finish_reason=completion.finish_reason,
                source=sampled.prompt.problem.source,
                failure=completion.failure,
            )
            samples.append(sample)
        return samples

    def forget(self) -> None:
        """Drops all chunks and the problems that wait, because nobody wants their results."""
        self._chunks.clear()
        self.waiting.clear()
