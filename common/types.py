"""The records that move between stages, in the order in which a batch meets them. All are frozen.

    Problem ─► Prompt ─► Rollout × num_generations = Group ─► wire ─► the trainer's tensors

Arrays are one-dimensional and never padded: a completion's mask is its length, carried from the engine
that produced it and never guessed from a pad id.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length"]
FailureKind = Literal["error", "timeout", "crash", "no_reward"]
Forks: TypeAlias = tuple[tuple[int, int], ...]
ImageFile: TypeAlias = "bytes | memoryview | Path"  # the contents of a file, or its path


@dataclass(frozen=True)
class Problem:
    """A data set row.  Problem(index=0, columns={"question": "2+2?", "answer": "#### 4"})"""

    index: int  # position in the data set as loaded, before shuffling
    columns: Mapping[str, Any]  # every column of the row; reward functions receive them by name
    images: tuple[ImageFile, ...] = field(default=(), repr=False)  # from data.image_key, as they are in the data set
    source: str = ""  # name of its data set
    scored_by: tuple[str, ...] = ()  # reward functions; () = all


@dataclass(frozen=True)
class EncodedImage:
    """An image as the model sees it: resized once by the sampler, so that nobody resizes twice."""

    png: bytes  # RGB PNG, height and width multiples of patch_size × merge_size
    grid_thw: tuple[int, int, int]  # (1, height / patch_size, width / patch_size), in patches


@dataclass(frozen=True)
class Prompt:
    """A problem as the model sees it.  Prompt(problem, text="<|im_start|>user…", token_ids=[151644, …])"""

    problem: Problem
    for_rewards: str | list[dict[str, str]]  # `prompts` of reward functions: the text of a row, or chat messages
    text: str  # the rendered chat template, for people
    token_ids: NDArray[np.int32]  # [P] for the trainer; one image token for each merged patch of the prompt's images
    images: tuple[EncodedImage, ...] = ()  # in the order of their positions in token_ids
    turn_prefix: str = ""  # the start of the model's turn, such as "<think>\n": rewards read it before a completion


def sequences(prompt: int, length: int, forks: Forks) -> list[NDArray[np.int64]]:
    """Returns a rollout's token sequences, each as positions in prompt ‖ completion, in the order the model saw them.

    sequences(2, 5, ((3, 3),)) == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]: prompt 0 1; 2 3 4, of which 2 is kept; 5 6
    """
    found, ends = [np.arange(prompt)], [*(start for start, _ in forks), length]
    for (start, kept), end in zip(((0, prompt), *forks), ends, strict=True):
        found.append(np.concatenate([found[-1][:kept], np.arange(prompt + start, prompt + end)]))
    return found[1:]


@dataclass(frozen=True)
class Failure:
    """Why a rollout failed: its environment, tool or agent raised, was too slow, died or gave no reward."""

    kind: FailureKind
    reason: str


@dataclass(frozen=True)
class Rollout:
    """A completion and all that is known about it.

    For "4<eos>":  completion_ids=[19, 2]  old_logprobs=[-0.1, -0.3]  ref_logprobs=[-0.2, -0.3]
                   rewards={"answer": 1.0, "format": -1.0}  reward=0.0  finish_reason="stop"

    A rollout of several turns is one completion too: call [7 8], the tool's answer [30 31 32], answer [19 2] are
    completion_ids=[7, 8, 30, 31, 32, 19, 2]  observed=((2, 5),)  turns=2. Observed tokens have log-probs of 0 and a
    sampling_mask row of themselves alone, and count nowhere: see `sampled`.
    """

    completion_ids: NDArray[np.int32]  # [C] all tokens after the prompt, the end-of-sequence token included
    old_logprobs: NDArray[np.float32]  # [C] log π_old(token), by the engine, at the sampling temperature
    ref_logprobs: NDArray[np.float32] | None  # [C] log π_ref(token), same temperature; None: the sampler has none
    rewards: Mapping[str, float]  # by reward function, before weights; NaN where it does not apply
    reward: float  # Σ weight · reward
    finish_reason: FinishReason
    sampling_mask: NDArray[np.int32] | None = None
    """[C, K] the tokens each could have been, itself first, -1 fills: what top-p, top-k and min-p left. None = all."""
    observed: tuple[tuple[int, int], ...] = ()
    """Half-open spans [start, end) of completion_ids that the environment wrote, ascending, with sampled tokens before,
    between and behind them."""
    turns: int = 1  # the model's
    tool_calls: int = 0  # calls by the model, those that could not be read included
    tool_errors: int = 0  # the calls that failed
    environment_s: float = 0.0  # seconds spent in its environment or tools
    version_spans: tuple[tuple[int, int], ...] = ()
    """(start, policy version) of completion_ids, ascending in both, the first at 0: the version that sampled the tokens
    from `start` on. () = the group's alone. Only sampler.in_flight_updates makes others."""
    routing: NDArray[np.unsignedinteger] | None = None
    """[C − 1, layers, k] the experts that each token met, but the last, which no engine ran. None = not recorded."""
    turn_rewards: tuple[float, ...] = ()
    """What of `reward` the environment gave with each turn; the rest is of the last. () = all of it is."""
    forks: Forks = ()
    """(start, kept), ascending: from completion_ids[start] on, tokens follow the first `kept` tokens of the sequence
    before, prompt included, and not the token at start − 1: `sequences`. So goes on a rollout whose history was
    rewritten. What that repeats was sampled once, and is observed here: an observed span begins at every start."""
    failure: Failure | None = None
    """How it ended too early, after its first sampled token. No function has scored it: its reward is set."""

    @property
    def num_sampled(self) -> int:
        """Returns S, the number of tokens of completion_ids that the model sampled: the length |o| in training."""
        return len(self.completion_ids) - sum(end - start for start, end in self.observed)

    def sampled(self) -> slice | NDArray[np.int64]:
        """Returns the mask of training as an index: x[rollout.sampled()] takes [C] to [S], for x of every token."""
        if not self.observed:
            return slice(None)
        return np.delete(np.arange(len(self.completion_ids)), np.r_[tuple(slice(*span) for span in self.observed)])

    def turn_lengths(self) -> NDArray[np.int64]:
        """Returns [turns] the sampled tokens of each turn; 0 comes first if a rollout begins with observed tokens."""
        return np.diff(np.r_[0, np.ravel(self.observed), len(self.completion_ids)].astype(np.int64))[::2]

    def rewards_by_turn(self, reward: float) -> NDArray[np.float64]:
        """Returns [turns] rewards that sum to `reward`, which is the rollout's own, or that after shaping."""
        rewards = np.zeros(len(self.observed) + 1)
        rewards[: len(self.turn_rewards)] = self.turn_rewards
        rewards[-1] = reward - rewards[:-1].sum()
        return rewards

    def token_versions(self, of_group: int) -> NDArray[np.int64]:
        """Returns [C] the policy version that sampled each token. of_group: the group's version."""
        starts, versions = zip(*(self.version_spans or ((0, of_group),)), strict=True)
        return np.repeat(np.array(versions, np.int64), np.diff([*starts, len(self.completion_ids)]))

    def ref_log_ratios(self) -> NDArray[np.float64]:
        """Returns [S] log π_old − log π_ref, in nats: its Σ_t estimates the KL of the completion."""
        assert self.ref_logprobs is not None, "the sampler was not asked to score the reference"
        return (self.old_logprobs.astype(np.float64) - self.ref_logprobs)[self.sampled()]


@dataclass(frozen=True)
class Group:
    """The `num_generations` rollouts of one prompt, all sampled by one policy version unless they have version_spans.

    A rollout that failed before its first sampled token is missing: nothing of it could train.
    """

    group_id: int  # position in the run's stream of groups: 0, 1, 2, …
    policy_version: int  # optimizer steps completed in the weights that sampled its oldest token
    problem_index: int
    prompt_ids: NDArray[np.int32]  # [P]
    rollouts: tuple[Rollout, ...]  # at least two; with the missing ones num_generations
    images: tuple[EncodedImage, ...] = ()  # the prompt's, in the order of their positions in prompt_ids
    failures: tuple[str, ...] = ()  # why each of the missing rollouts failed
    routing: NDArray[np.unsignedinteger] | None = None  # [P, layers, k] the prompt's, as in Rollout
    source: str = ""  # name of the data set that its row is from; "" where it has none

    @property
    def newest_version(self) -> int:
        """Returns the policy version of the group's newest token."""
        return max((r.version_spans[-1][1] for r in self.rollouts if r.version_spans), default=self.policy_version)


def oldest_version(version: int, rollouts: Iterable[Rollout]) -> int:
    """Returns the policy version of a group's oldest token. version: that of rollouts without spans."""
    return min((r.version_spans[0][1] if r.version_spans else version for r in rollouts), default=version)


class Tombstone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tombstone"):
    """A group that could not be produced. It is counted, trains nothing, and the cursor passes it."""

    group_id: int
    policy_version: int
    reason: str


def without_tombstones(groups: Iterable[Group | Tombstone]) -> list[Group]:
    return [group for group in groups if isinstance(group, Group)]


@dataclass(frozen=True)
class EvalRequest:
    """A chunk of a held-out evaluation, leased like a group. eval_id names the evaluation: "v40"."""

    eval_id: str
    chunk: int
    problem_indexes: tuple[int, ...]  # into the evaluation data set


@dataclass(frozen=True)
class EvalSample:
    """A scored held-out completion."""

    problem_index: int
    completion: str
    rewards: Mapping[str, float]
    num_tokens: int
    finish_reason: FinishReason
    source: str = ""  # as in Group
    failure: Failure | None = None  # as in Rollout: it never counts as right


@dataclass(frozen=True)
class EvalFailure:
    """A held-out problem that could not be scored. It is counted and named, and left out of the evaluation's means.

    Where versions are compared it counts as failed.
    """

    problem_index: int
    reason: str


class EvalResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="eval"):
    """The result of an evaluation chunk: every problem of the request, with all its samples or as a failure."""

    eval_id: str
    chunk: int
    policy_version: int
    samples: tuple[EvalSample, ...]
    failures: tuple[EvalFailure, ...] = ()
