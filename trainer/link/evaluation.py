"""State of a held-out evaluation: chunks of problems, their leases and their results.

It uses neither a socket nor a clock.
"""

import collections
import math
from dataclasses import dataclass, field

from common.config import Config
from common.errors import WireError, require
from common.types import EvalFailure, EvalRequest, EvalResult

_MAX_PROBLEMS = 64  # per chunk
_BYTES_PER_TOKEN = 16  # the text of a token is seldom longer


@dataclass
class Evaluation:
    """The chunks of one evaluation, each of which is free, leased to one sampler, or answered.

    split_evaluation("v40", 130, 64):
    chunk 0 problems 0…63 │ chunk 1 problems 64…127 │ chunk 2 problems 128, 129
    """

    requests: dict[int, EvalRequest]  # by chunk
    leases: dict[int, str] = field(default_factory=dict)  # chunk -> sampler id; answered ones stay
    results: dict[int, EvalResult] = field(default_factory=dict)  # by chunk

    @property
    def num_missing(self) -> int:
        """Returns the number of chunks that are not answered yet."""
        return len(self.requests) - len(self.results)

    def grant(self, sampler_id: str, num_samplers: int) -> list[EvalRequest]:
        """Leases free chunks to a sampler up to its share, and returns its unanswered chunks."""
        share = math.ceil(len(self.requests) / num_samplers)
        num_leased = list(self.leases.values()).count(sampler_id)
        for chunk in self.requests:
            if num_leased < share and chunk not in self.leases:
                self.leases[chunk] = sampler_id
                num_leased += 1
        return [self.requests[chunk] for chunk in self._unanswered(sampler_id)]

    def release(self, sampler_id: str) -> list[int]:
        """Frees a lost sampler's unanswered chunks for other samplers, and returns these chunks."""
        lost = self._unanswered(sampler_id)
        for chunk in lost:
            del self.leases[chunk]
        return lost

    def _unanswered(self, sampler_id: str) -> list[int]:
        """Returns the chunks that a sampler has leased and not answered, in order of leasing."""
        chunks = []
        for chunk, owner in self.leases.items():
            if owner == sampler_id and chunk not in self.results:
                chunks.append(chunk)
        return chunks

    def accept(
        self, result: EvalResult, version: int, num_generations: int, reward_funcs: tuple[str, ...]
    ) -> None:
        """Stores the result of a chunk.

        Raises WireError if the result was not requested, is a duplicate, is of another policy
        version than `version`, or is incomplete.
        """
        request = self.requests.get(result.chunk)
        if request is None or request.eval_id != result.eval_id:
            raise WireError("eval_unknown", result.eval_id)
        require(result.policy_version == version, "eval_version", f"{result.policy_version}")
        is_first = result.chunk not in self.results
        require(is_first, "eval_duplicate", f"chunk {result.chunk} of {result.eval_id}")
        _check_problems(result, request, num_generations)
        for sample in result.samples:
            is_scored = tuple(sample.rewards) == reward_funcs
            require(is_scored, "reward_funcs", f"expected {reward_funcs}")
        self.results[result.chunk] = result

    def fail(self, chunk: int, version: int, reason: str) -> EvalResult:
        """Counts all problems of a chunk as failed, and returns this as the chunk's result.

        A chunk is some of the held-out problems. This method is for one whose sampler has no
        better answer. reason: for the user.
        """
        request = self.requests[chunk]
        failures = tuple(EvalFailure(problem, reason) for problem in request.problem_indexes)
        result = EvalResult(request.eval_id, chunk, version, (), failures)
        self.results[chunk] = result
        return result


def _check_problems(result: EvalResult, request: EvalRequest, num_generations: int) -> None:
    """Raises WireError unless the result answers every requested problem exactly once.

    A problem is answered by a failure or by `num_generations` samples.
    """
    failed = [failure.problem_index for failure in result.failures]
    # the requested problems that must have samples, because the result has no failure of them
    to_score = [problem for problem in request.problem_indexes if problem not in failed]
    num_samples = collections.Counter(sample.problem_index for sample in result.samples)
    is_partition = sorted(to_score + failed) == sorted(request.problem_indexes)
    is_complete = num_samples == dict.fromkeys(to_score, num_generations)
    answers = f"{dict(num_samples)} and failed {failed}, expected {request.problem_indexes}"
    require(is_partition and is_complete, "eval_problems", answers)


def problems_per_chunk(config: Config) -> int:
    """Returns how many problems a chunk has, at least 1 and at most 64.

    The texts of their completions fill at most half a message if a token has up to 16 bytes.
    """
    num_tokens = config.eval.num_generations * config.sampler.max_completion_length
    bytes_per_problem = _BYTES_PER_TOKEN * num_tokens
    fitting = config.max_message_bytes // 2 // bytes_per_problem
    return max(1, min(_MAX_PROBLEMS, fitting))


def split_evaluation(eval_id: str, num_problems: int, per_chunk: int) -> Evaluation:
    """Returns an evaluation of all problems in chunks of at most `per_chunk` problems."""
    requests = {}
    for chunk, start in enumerate(range(0, num_problems, per_chunk)):
        end = min(start + per_chunk, num_problems)
        requests[chunk] = EvalRequest(eval_id, chunk, tuple(range(start, end)))
    return Evaluation(requests)
