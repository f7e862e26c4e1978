"""What a lease asks for: which problem, and how its completions are sampled.

Both are functions of the seed and the group's number. So whoever holds the weights can make a lost
group again, on a CPU with the same tokens, on an accelerator with others of the same distribution.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from common.config import Config
from common.config.data import entries
from common.errors import UserError
from common.types import Problem, Prompt
from sampler.engine.completions import SamplingParams
from sampler.prompts.dataset import mixed_index, sampling_seed
from sampler.prompts.many_prompts import Prompts

Decode = Callable[[list[list[int]]], list[str]]  # token ids -> text, without special tokens


@dataclass(frozen=True)
class GroupKey:
    """Names a group that a trainer has leased to this sampler."""

    group_id: int
    policy_version: int
    # How many trainers this sampler had before. A later trainer may lease the same group with
    # other weights.
    trainer: int

    @property
    def work(self) -> Hashable:
        """Returns the number of the group, which stays if another version samples it again."""
        return self.group_id


@dataclass(frozen=True)
class EvalKey:
    """Names a held-out problem of an evaluation that a trainer has leased to this sampler."""

    eval_id: str
    chunk: int
    problem: int
    policy_version: int
    trainer: int

    @property
    def work(self) -> Hashable:
        """Returns what names the held-out problem, by whatever weights it is sampled."""
        return self.eval_id, self.problem


Key = GroupKey | EvalKey


@dataclass(frozen=True)
class Task:
    """The sampler's work: problems to train on, held-out problems, and the decoder for rewards."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    decode: Decode
    # (weight, number of problems) of each source of train. () = one source
    parts: Sequence[tuple[Fraction | int, int]] = ()

    def prompt(self, key: Key, config: Config) -> Prompt:
        """Returns the prompt of a group or of a held-out problem."""
        prompts, index = self._prompts_and_index(key, config)
        return prompts[index]

    def _prompts_and_index(self, key: Key, config: Config) -> tuple[Sequence[Prompt], int]:
        if isinstance(key, EvalKey):
            return self.held_out, key.problem
        parts = self.parts or [(1, len(self.train))]
        index = mixed_index(key.group_id, config.run.seed, parts, config.data.shuffle)
        return self.train, index

    def begin(self, keys: Iterable[Key], config: Config) -> None:
        """Starts to make the requested prompts that have images, in parallel.

        Each of them takes a tenth of a second.
        """
        for key in keys:
            prompts, index = self._prompts_and_index(key, config)
            if isinstance(prompts, Prompts):
                prompts.begin(index)


def parts_of(
    config: Config, problems: Iterable[Problem], of: str = "train"
) -> list[tuple[Fraction | int, int]]:
    """Returns Task.parts of the sources in the setting data.`of`.

    Raises UserError for a source of which no problem is left.
    """
    sizes = Counter(problem.source for problem in problems)
    # Plain paths are together one source, so that several entries may have the same label.
    by_label = {entry.label: entry for entry in entries(getattr(config.data, of))}
    parts: list[tuple[Fraction | int, int]] = []
    for label, entry in by_label.items():
        size = sizes[label]
        if size == 0:
            raise UserError(
                f"data.{of}: no row of source {label!r} is left, see the lines above; "
                "take the source out"
            )
        weight: Fraction | int = size
        if entry.weight:
            weight = Fraction(str(entry.weight))
        parts.append((weight, size))
    return parts


def sampling_params(key: Key, config: Config) -> SamplingParams:
    """Returns the sampling parameters of a group or of a held-out problem."""
    if isinstance(key, EvalKey):
        return held_out_params(config, key.problem)
    sampler = config.sampler
    return SamplingParams(
        temperature=sampler.temperature,
        max_tokens=sampler.max_completion_length,
        num_completions=sampler.num_generations,
        seed=sampling_seed(config.run.seed, key.group_id),
        top_p=sampler.top_p,
        top_k=max(0, sampler.top_k or 0),
        min_p=sampler.min_p,
        returns_sampling_mask=sampler.truncates,
        more=sampler.generation_kwargs,
    )


def held_out_params(config: Config, problem: int) -> SamplingParams:
    """Returns the sampling parameters of a held-out problem.

    problem: its index in the evaluation data.
    """
    return SamplingParams(
        temperature=config.eval.temperature,
        max_tokens=config.sampler.max_completion_length,
        num_completions=config.eval.num_generations,
        seed=sampling_seed(config.run.seed + 1_000_003, problem),  # no seed of a training group
        top_p=config.eval.top_p,
        top_k=max(0, config.eval.top_k or 0),
        more=config.sampler.generation_kwargs,
    )
