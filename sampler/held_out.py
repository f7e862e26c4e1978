"""Schedules held-out problems in the sampler: they yield to the training groups that a trainer waits for.

A version stays loaded until its evaluation is done, because the trainer publishes no other before; so the problems may
use any gap that the groups leave: the trainer's step, or the rest of a batch whose first sequences have finished.

    CPU    every sequence more makes a step slower: a problem starts when no group decodes
    GPU    more sequences decode in nearly the same time: problems fill the engine, and queue behind the groups in it

Only a few are given to the engine at once, so that groups leased meanwhile do not queue behind the whole evaluation.
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
    """A chunk of an evaluation: its missing problems, and the results of the others."""

    missing: set[int]
    samples: list[EvalSample] = field(default_factory=list)
    failures: list[EvalFailure] = field(default_factory=list)
    sent: EvalResult | None = None


class HeldOut:
    """Schedules held-out problems and sends their results; `decode` maps token ids to texts."""

    def __init__(self, config: Config, on_cpu: bool, decode: Callable[[list[list[int]]], list[str]], link: Link):
        self._config, self._on_cpu, self._decode, self._link = config, on_cpu, decode, link
        at_once = int(config.vllm.get("max_num_seqs", max_num_seqs(config)))
        self._limit = at_once if on_cpu else 2 * at_once  # sequences in the engine, of groups and problems
        self._chunks: dict[tuple[str, int], _Chunk] = {}
        self.waiting: collections.deque[EvalKey] = collections.deque()  # problems that are not in the engine yet

    def ask(self, request: EvalRequest, version: int, trainer: int) -> None:
        """Queues a leased chunk unless it is queued. Sends an answered one again, because its result was lost."""
        chunk = self._chunks.get((request.eval_id, request.chunk))
        if chunk is not None:
            if chunk.sent is not None and chunk.sent.policy_version == version:
                self._link.send_eval(chunk.sent)
            return
        if any(eval_id != request.eval_id for eval_id, _ in self._chunks):
            self.forget()
        self._chunks[request.eval_id, request.chunk] = _Chunk(set(request.problem_indexes))
        self.waiting.extend(
            EvalKey(request.eval_id, request.chunk, problem, version, trainer) for problem in request.problem_indexes
        )

    def to_start(self, version: int | None, decoding: list[Key]) -> list[EvalKey]:
        """Returns the problems to start now. version: the engine's; decoding: the keys without completions."""
        if self.waiting and self.waiting[0].policy_version != version:
            self.forget()  # another sampler answered, and the trainer went on
        if not self.waiting or (self._on_cpu and any(isinstance(key, GroupKey) for key in decoding)):
            return []
        room = self._limit - sum(sampling_params(key, self._config).num_completions for key in decoding)
        count = min(len(self.waiting), max(room // self._config.eval.num_generations, 0 if decoding else 1))
        return [self.waiting.popleft() for _ in range(count)]

    def note(self, key: EvalKey, sampled: Sampled, scores: Scores | str) -> None:
        """Stores a problem's scores, or why it has none, and sends its chunk after the last problem."""
        chunk = self._chunks.get((key.eval_id, key.chunk))
        if chunk is None:
            return  # chunk of an earlier evaluation: another sampler answered it, and the trainer went on
        chunk.missing.discard(key.problem)
        if isinstance(scores, str):
            chunk.failures.append(EvalFailure(key.problem, scores))
        else:
            texts = self._decode([c.token_ids.tolist() for c in sampled.completions])
            source = sampled.prompt.problem.source
            chunk.samples += [
                EvalSample(key.problem, text, rewards, c.num_sampled, c.finish_reason, source, c.failure)
                for text, c, (rewards, _) in zip(texts, sampled.completions, scores, strict=True)
            ]
        if not chunk.missing:
            samples = tuple(sorted(chunk.samples, key=lambda s: s.problem_index))
            failures = tuple(sorted(chunk.failures, key=lambda f: f.problem_index))
            chunk.sent = EvalResult(key.eval_id, key.chunk, key.policy_version, samples, failures)
            self._link.send_eval(chunk.sent)

    def forget(self) -> None:
        self._chunks.clear()
        self.waiting.clear()
