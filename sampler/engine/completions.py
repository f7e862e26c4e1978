"""Defines a prompt's sampling parameters and its completions: token ids and log-probs, read from vLLM's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from common.types import Failure, FinishReason, Forks
from sampler.engine.in_flight import spans_of

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters: tokens follow softmax(logits / temperature) over those that min_p, top_k and top_p keep."""

    temperature: float
    max_tokens: int
    num_completions: int
    seed: int | None  # completion k of a prompt uses seed + k; accelerators ignore it unless keeps_seed
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0
    returns_sampling_mask: bool = False  # needs top_k
    stop: tuple[str, ...] = ()  # texts that end a completion, besides sampler.stop
    more: Mapping[str, Any] = field(default_factory=dict)  # sampler.generation_kwargs: vLLM's, forbid tokens
    hears: Callable[[list[int]], None] | None = None  # called with one completion's tokens so far at each step
    keeps_seed: bool = False  # an agent's request named a seed


@dataclass(frozen=True)
class Completion:
    token_ids: NDArray[np.int32]  # [C]
    logprobs: NDArray[np.float32]  # [C] log-prob of each sampled token under the sampled distribution
    finish_reason: FinishReason
    sampling_mask: NDArray[np.int32] | None = None  # [C, K] tokens each could have been, sampled one first, -1 fills
    incomplete_support: int = 0  # positions whose kept tokens were not all returned
    version_spans: tuple[tuple[int, int], ...] = ()  # as Rollout.version_spans; () unless sampler.in_flight_updates
    observed: tuple[tuple[int, int], ...] = ()  # [start, end) of token_ids that an environment wrote
    turns: int = 1
    tool_calls: int = 0  # includes calls that could not be read
    tool_errors: int = 0  # calls that returned an error to the model
    environment_s: float = 0.0
    routing: NDArray[Any] | None = None  # [P + C − 1, layers, k] experts of prompt and completion; None: not recorded
    forks: Forks = ()  # as Rollout.forks
    failure: Failure | None = None  # as Rollout.failure

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - sum(end - start for start, end in self.observed)

    def cut(self, length: int) -> Completion:
        """Returns a completion of one turn as if it had ended after `length` tokens."""
        if (more := len(self.token_ids) - length) <= 0:
            return self
        mask, routing = self.sampling_mask, self.routing
        return replace(
            self,
            token_ids=self.token_ids[:length],
            logprobs=self.logprobs[:length],
            finish_reason="length",
            sampling_mask=None if mask is None else mask[:length],
            routing=None if routing is None else routing[:-more],
        )


def completions_of(output: RequestOutput) -> list[Completion]:
    """Returns the completions of one prompt, in the order of their numbers."""
    prompt = len(output.prompt_token_ids or ())
    return [_completion(c, prompt) for c in sorted(output.outputs, key=lambda c: c.index)]


def _completion(output: CompletionOutput, prompt: int) -> Completion:
    token_ids = np.array(output.token_ids, np.int32)
    flat = cast("FlatLogprobs", output.logprobs)
    # for each position the sampled token, then as many of the most likely ones as were requested
    logprobs = np.array(flat.logprobs, np.float32).reshape(len(token_ids), -1)
    finish_reason: FinishReason = "stop" if output.finish_reason == "stop" else "length"
    versions = spans_of(output)
    routing = output.routed_experts
    if routing is not None:  # drop the padding to whole blocks after the tokens that were run
        routing = routing[: prompt + len(token_ids) - 1]
    if logprobs.shape[1] == 1:
        return Completion(token_ids, logprobs[:, 0], finish_reason, version_spans=versions, routing=routing)
    ids = np.array(flat.token_ids, np.int32).reshape(logprobs.shape)
    sampling_mask, incomplete = kept_tokens(ids, logprobs)
    return Completion(token_ids, logprobs[:, 0], finish_reason, sampling_mask, incomplete, versions, routing=routing)


def kept_tokens(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> tuple[NDArray[np.int32], int]:
    """Returns ([C, K] kept tokens, sampled one first, -1 fills; number of positions whose kept tokens are incomplete).

    ids and logprobs are [C, 1 + n]: the sampled token, then the n most likely, renormalised over the kept tokens. A
    token that was not kept has log-prob −∞; the probabilities of the kept ones sum to 1 unless some are missing, which
    takes more than TIES tokens as likely as the last of top_k.
    """
    kept = np.isfinite(logprobs)
    kept[:, 1:] &= ids[:, 1:] != ids[:, :1]
    mass = np.where(kept, np.exp(logprobs.astype(np.float64)), 0.0).sum(1)
    order = np.argsort(~kept, axis=1, kind="stable")[:, : kept.sum(1).max()]
    sampling_mask = np.take_along_axis(np.where(kept, ids, -1), order, 1)
    return sampling_mask, int((np.abs(mass - 1) > 1e-3).sum())
