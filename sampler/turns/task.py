"""Defines what a lease asks for: which problem, and how its completions are sampled.

Both are functions of the seed and the group's number, so whoever holds the weights can make a lost group again: on a
CPU with the same tokens, on an accelerator with others of the same distribution.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
    group_id: int
    policy_version: int
    trainer: int  # number since this sampler started: a later trainer may ask for the same group with other weights


@dataclass(frozen=True)
class EvalKey:
    eval_id: str
    chunk: int
    problem: int
    policy_version: int
    trainer: int


Key = GroupKey | EvalKey


@dataclass(frozen=True)
class Task:
    """The sampler's work: problems to train on, held-out problems, and the decoder of token ids for rewards."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    decode: Decode
    parts: Sequence[tuple[Fraction | int, int]] = ()  # (weight, problems) of each source of train; () = one

    def prompt(self, key: Key, config: Config) -> Prompt:
        prompts, place = self._place(key, config)
        return prompts[place]

    def _place(self, key: Key, config: Config) -> tuple[Sequence[Prompt], int]:
        if isinstance(key, EvalKey):
            return self.held_out, key.problem
        parts = self.parts or [(1, len(self.train))]
        return self.train, mixed_index(key.group_id, config.run.seed, parts, config.data.shuffle)

    def begin(self, keys: Iterable[Key], config: Config) -> None:
        """Starts to make the requested prompts that have images in parallel: each takes a tenth of a second."""
        for prompts, place in (self._place(key, config) for key in keys):
            if isinstance(prompts, Prompts):
                prompts.begin(place)


def parts_of(config: Config, problems: Iterable[Problem], of: str = "train") -> list[tuple[Fraction | int, int]]:
    """Returns Task.parts. Raises UserError for a source of which no problem is left."""
    sizes = Counter(problem.source for problem in problems)
    given = {entry.label: entry for entry in entries(getattr(config.data, of))}
    if empty := [label for label in given if not sizes[label]]:
        raise UserError(f"data.{of}: no row of source {empty[0]!r} is left, see the lines above; take the source out")
    return [(Fraction(str(e.weight)) if e.weight else sizes[label], sizes[label]) for label, e in given.items()]


def sampling_params(key: Key, config: Config) -> SamplingParams:
    if isinstance(key, EvalKey):
        return held_out_params(config, key.problem)
    sampler = config.sampler
    return SamplingParams(
        sampler.temperature,
        sampler.max_completion_length,
        sampler.num_generations,
        sampling_seed(config.run.seed, key.group_id),
        sampler.top_p,
        max(0, sampler.top_k or 0),
        sampler.min_p,
        sampler.truncates,
        more=sampler.generation_kwargs,
    )


def held_out_params(config: Config, problem: int) -> SamplingParams:
    """Returns the sampling parameters of a held-out problem, by its index in the evaluation data."""
    length = config.sampler.max_completion_length
    seed = sampling_seed(config.run.seed + 1_000_003, problem)  # no seed of a training group
    top_k = max(0, config.eval.top_k or 0)
    params = config.eval.temperature, length, config.eval.num_generations, seed, config.eval.top_p, top_k
    return SamplingParams(*params, more=config.sampler.generation_kwargs)
