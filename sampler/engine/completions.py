"""The sampling parameters of a prompt, and its completions as they are read from vLLM's output."""

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
    """Sampling parameters of one prompt.

    Tokens follow softmax(logits / temperature) over those that min_p, top_k and top_p keep.
    """

    temperature: float
    max_tokens: int
    num_completions: int
    # Completion k of a prompt uses seed + k. Accelerators ignore seeds unless keeps_seed is set.
    seed: int | None
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0
    returns_sampling_mask: bool = False  # needs top_k
    stop: tuple[str, ...] = ()  # texts that end a completion, besides sampler.stop
    # sampler.generation_kwargs, which are arguments of vLLM that forbid tokens.
    more: Mapping[str, Any] = field(default_factory=dict)
    # This is called with the tokens of the only completion so far, after each step.
    hears: Callable[[list[int]], None] | None = None
    keeps_seed: bool = False  # because an agent's request named a seed


@dataclass(frozen=True)
class Completion:
    """All tokens of a rollout after its prompt, before rewards score it.

    The engine makes completions of one turn. `Episode.played` joins several turns, and what the
    environment wrote between them, to one completion.
    """

    token_ids: NDArray[np.int32]  # [C] sampled and observed tokens
    logprobs: NDArray[np.float32]  # [C] under the sampled distribution; 0 for observed tokens
    finish_reason: FinishReason
    sampling_mask: NDArray[np.int32] | None = None  # [C, K], as Rollout.sampling_mask
    incomplete_support: int = 0  # the number of positions whose kept tokens were not all returned
    version_spans: tuple[tuple[int, int], ...] = ()  # as Rollout.version_spans
    observed: tuple[tuple[int, int], ...] = ()  # [start, end) of tokens that an environment wrote
    turns: int = 1
    tool_calls: int = 0  # includes calls that could not be read
    tool_errors: int = 0  # calls that returned an error to the model
    environment_s: float = 0.0
    # [P + C - 1, layers, k] the experts of prompt and completion. None: they are not recorded.
    routing: NDArray[Any] | None = None
    forks: Forks = ()  # as Rollout.forks
    failure: Failure | None = None  # as Rollout.failure
    # The chat messages after the prompt, for reward functions. () = it has one turn, whose text
    # they get.
    messages: tuple[dict[str, Any], ...] = ()
    environment_reward: float | None = None  # the sum over all turns and the end
    # The environment's public attributes at its end.
    environment_state: Mapping[str, Any] = field(default_factory=dict)
    # What of environment_reward was given with each turn. () = all of it at the end.
    turn_rewards: tuple[float, ...] = ()

    @property
    def num_sampled(self) -> int:
        """Returns the number of tokens that the model sampled."""
        num_observed = sum(end - start for start, end in self.observed)
        return len(self.token_ids) - num_observed

    def failed(self, failure: Failure) -> Completion:
        """Returns the completion of a rollout that failed.

        What its environment gave before no longer counts.
        """
        return replace(self, failure=failure, environment_reward=None, turn_rewards=())

    def cut(self, length: int) -> Completion:
        """Returns a completion of one turn as if it had ended after `length` tokens."""
        num_cut = len(self.token_ids) - length
        if num_cut <= 0:
            return self
        sampling_mask = self.sampling_mask
        if sampling_mask is not None:
            sampling_mask = sampling_mask[:length]
        routing = self.routing
        if routing is not None:
            routing = routing[:-num_cut]
        return replace(
            self,
            token_ids=self.token_ids[:length],
            logprobs=self.logprobs[:length],
            finish_reason="length",
            sampling_mask=sampling_mask,
            routing=routing,
        )


def completions_of(output: RequestOutput) -> list[Completion]:
    """Returns the completions of one prompt, in the order of their numbers."""
    prompt_length = len(output.prompt_token_ids or ())
    outputs = sorted(output.outputs, key=lambda completion: completion.index)
    return [_completion(completion, prompt_length) for completion in outputs]


def _completion(output: CompletionOutput, prompt_length: int) -> Completion:
    token_ids = np.array(output.token_ids, np.int32)
    flat = cast("FlatLogprobs", output.logprobs)
    # Of each position, the sampled token, then as many of the likeliest tokens as were requested.
    logprobs = np.array(flat.logprobs, np.float32).reshape(len(token_ids), -1)
    finish_reason: FinishReason = "length"
    if output.finish_reason == "stop":
        finish_reason = "stop"
    routing = output.routed_experts
    if routing is not None:  # drop the padding to whole blocks after the tokens that were run
        routing = routing[: prompt_length + len(token_ids) - 1]
    completion = Completion(
        token_ids,
        logprobs[:, 0],
        finish_reason,
        version_spans=spans_of(output),
        routing=routing,
    )
    if logprobs.shape[1] == 1:
        return completion
    ids = np.array(flat.token_ids, np.int32).reshape(logprobs.shape)
    sampling_mask, incomplete = kept_tokens(ids, logprobs)
    return replace(completion, sampling_mask=sampling_mask, incomplete_support=incomplete)


def kept_tokens(
    ids: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> tuple[NDArray[np.int32], int]:
    """Returns the tokens that top-p, top-k and min-p kept, and how many positions lack some.

    ids and logprobs are [C, 1 + n]: the sampled token, then the n likeliest, renormalised over the
    kept tokens. The kept tokens are [C, K], the sampled token first, filled with -1. A token that
    was not kept has log-prob −∞. The probabilities of the kept tokens sum to 1 unless some are
    missing, which takes more than TIES tokens as likely as the last of top_k.
    """
    is_kept = np.isfinite(logprobs)
    is_kept[:, 1:] &= ids[:, 1:] != ids[:, :1]
    probabilities = np.exp(logprobs.astype(np.float64))
    mass = np.where(is_kept, probabilities, 0.0).sum(1)
    most_kept = is_kept.sum(1).max()
    order = np.argsort(~is_kept, axis=1, kind="stable")[:, :most_kept]
    sampling_mask = np.take_along_axis(np.where(is_kept, ids, -1), order, 1)
    num_incomplete = (np.abs(mass - 1) > 1e-3).sum()
    return sampling_mask, int(num_incomplete)
