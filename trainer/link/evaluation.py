"""The chunks of a held-out evaluation: which sampler has which chunk, and the results.

An evaluation scores completions of problems that are not trained on. This module uses neither a
socket nor a clock, and is called by the modules that do.
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
    # chunk -> id of the sampler that has leased it; an answered chunk keeps its lease
    leases: dict[int, str] = field(default_factory=dict)
    results: dict[int, EvalResult] = field(default_factory=dict)  # by chunk

    @property
    def num_missing(self) -> int:
        """Returns the number of chunks that are not answered yet."""
        return len(self.requests) - len(self.results)

    def grant(self, sampler_id: str, num_samplers: int) -> list[EvalRequest]:
        """Leases free chunks to a sampler up to its share, and returns its unanswered chunks.

        The share is the number of all chunks divided by `num_samplers`, rounded up.
        """
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

        version: the policy version under evaluation. num_generations: the number of samples for
        each problem. reward_funcs: the names of the functions that must have scored each sample.

        Raises WireError if the result was not requested, is a duplicate, comes from a different
        policy version, or is incomplete.
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
        """Stores a result in which every problem of the chunk has failed, and returns this result.

        It takes the place of a sampler's invalid result. version: the policy version under
        evaluation. reason: the text that is shown to the user for each problem.
        """
        request = self.requests[chunk]
        failures = tuple(EvalFailure(problem, reason) for problem in request.problem_indexes)
        result = EvalResult(request.eval_id, chunk, version, samples=(), failures=failures)
        self.results[chunk] = result
        return result


def _check_problems(result: EvalResult, request: EvalRequest, num_generations: int) -> None:
    """Raises WireError unless the result answers every requested problem exactly once.

    A problem is answered by a failure or by `num_generations` samples.
    """
    failed = [failure.problem_index for failure in result.failures]
    must_have_samples = [problem for problem in request.problem_indexes if problem not in failed]
    num_samples = collections.Counter(sample.problem_index for sample in result.samples)
    # this is false if a failed problem was not requested, or failed twice
    failures_are_valid = sorted(must_have_samples + failed) == sorted(request.problem_indexes)
    samples_are_complete = num_samples == dict.fromkeys(must_have_samples, num_generations)
    detail = (
        f"number of samples by problem {dict(num_samples)}, failed problems {failed}; "
        f"expected {num_generations} samples or a failure for each of {request.problem_indexes}"
    )
    require(failures_are_valid and samples_are_complete, "eval_problems", detail)


def problems_per_chunk(config: Config) -> int:
    """Returns how many problems a chunk has, at least 1 and at most 64.

    The completions of a chunk with several problems fill at most half of the largest message,
    if the text of a token has no more than 16 bytes.
    """
    num_tokens = config.eval.num_generations * config.sampler.max_completion_length
    bytes_per_problem = _BYTES_PER_TOKEN * num_tokens
    num_fitting = config.max_message_bytes // 2 // bytes_per_problem
    return max(1, min(_MAX_PROBLEMS, num_fitting))


def split_evaluation(eval_id: str, num_problems: int, per_chunk: int) -> Evaluation:
    """Returns an evaluation of all held-out problems in chunks of at most `per_chunk` problems."""
    requests = {}
    for chunk, start in enumerate(range(0, num_problems, per_chunk)):
        end = min(start + per_chunk, num_problems)
        requests[chunk] = EvalRequest(eval_id, chunk, tuple(range(start, end)))
    return Evaluation(requests)
