"""State of a held-out evaluation: chunks of problems, their leases and their results. No socket, no clock."""

import collections
from dataclasses import dataclass, field

from common.config import Config
from common.errors import WireError, require
from common.types import EvalFailure, EvalRequest, EvalResult

_MAX_PROBLEMS = 64  # per chunk
_BYTES_PER_TOKEN = 16  # a token's text is seldom longer


@dataclass
class Evaluation:
    """The chunks of one evaluation, each of which is free, leased to one sampler, or answered.

    evaluation_of("v40", 130):  chunk 0 problems 0…63 │ 1 problems 64…127 │ 2 problems 128, 129
    """

    requests: dict[int, EvalRequest]  # by chunk
    leases: dict[int, str] = field(default_factory=dict)  # chunk -> sampler id; kept when it is answered
    results: dict[int, EvalResult] = field(default_factory=dict)

    @property
    def num_missing(self) -> int:
        """Returns the number of chunks that are not answered yet."""
        return len(self.requests) - len(self.results)

    def grant(self, sampler_id: str, num_samplers: int) -> list[EvalRequest]:
        """Tops this sampler's leases up to its share of the chunks, and returns those it has not answered."""
        share = -(-len(self.requests) // num_samplers)
        mine = [chunk for chunk, owner in self.leases.items() if owner == sampler_id]
        free = [chunk for chunk in self.requests if chunk not in self.leases]
        for chunk in free[: max(0, share - len(mine))]:
            self.leases[chunk] = sampler_id
            mine.append(chunk)
        return [self.requests[chunk] for chunk in mine if chunk not in self.results]

    def release(self, sampler_id: str) -> list[int]:
        """Frees a lost sampler's unanswered chunks for other samplers, and returns them."""
        lost = [chunk for chunk, owner in self.leases.items() if owner == sampler_id and chunk not in self.results]
        for chunk in lost:
            del self.leases[chunk]
        return lost

    def accept(self, result: EvalResult, version: int, num_generations: int, reward_funcs: tuple[str, ...]) -> None:
        """Stores a result. Raises WireError if it is unrequested, a duplicate, of another version or incomplete."""
        request = self.requests.get(result.chunk)
        if request is None or request.eval_id != result.eval_id:
            raise WireError("eval_unknown", result.eval_id)
        require(result.policy_version == version, "eval_version", f"{result.policy_version}")
        require(result.chunk not in self.results, "eval_duplicate", f"chunk {result.chunk} of {result.eval_id}")
        # every requested problem is answered once, by a failure or by num_generations samples
        failed = [failure.problem_index for failure in result.failures]
        scored = [problem for problem in request.problem_indexes if problem not in failed]
        counts = collections.Counter(sample.problem_index for sample in result.samples)
        answered = sorted([*scored, *failed]) == sorted(request.problem_indexes)
        found = f"{dict(counts)} and failed {failed}, expected {request.problem_indexes}"
        require(answered and counts == dict.fromkeys(scored, num_generations), "eval_problems", found)
        have_rewards = all(tuple(sample.rewards) == reward_funcs for sample in result.samples)
        require(have_rewards, "reward_funcs", f"expected {reward_funcs}")
        self.results[result.chunk] = result

    def fail(self, chunk: int, version: int, reason: str) -> EvalResult:
        """Answers a chunk that will get no better answer with failures of all its problems, and returns this result."""
        request = self.requests[chunk]
        failures = tuple(EvalFailure(problem, reason) for problem in request.problem_indexes)
        self.results[chunk] = EvalResult(request.eval_id, chunk, version, (), failures)
        return self.results[chunk]


def problems_per_chunk(config: Config) -> int:
    """Returns how many problems' texts fit in half a message, if a token has up to 16 bytes."""
    text_bytes = _BYTES_PER_TOKEN * config.eval.num_generations * config.sampler.max_completion_length
    return max(1, min(_MAX_PROBLEMS, config.max_message_bytes // 2 // text_bytes))


def evaluation_of(eval_id: str, num_problems: int, per_chunk: int) -> Evaluation:
    starts = range(0, num_problems, per_chunk)
    chunks = [tuple(range(start, min(start + per_chunk, num_problems))) for start in starts]
    return Evaluation({i: EvalRequest(eval_id, i, chunk) for i, chunk in enumerate(chunks)})
