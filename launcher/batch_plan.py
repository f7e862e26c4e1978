"""The numbers that follow from a batch's settings, for people. Pure.

A batch of rollouts is `steps_per_generation` optimizer steps in one pass, each of some micro-batches on every rank.
Where the groups of a step do not divide over the ranks, "per rank" is the busiest one. Ranks are data-parallel ones
here: each may be several sequence-parallel ranks, which share every micro-batch.

EasyR1's Geometry3K example: 2,100 rows, 256 prompts of 6 completions on 8 ranks in 4 mini-batches are 1,536 sequences,
192 per rank, and 48 per rank in each optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from common.config import Config


def sequences_per_step(config: Config, num_ranks: int) -> int:
    """On the busiest data-parallel rank."""
    groups = math.ceil(config.trainer.prompts_per_step / config.dp_size(num_ranks))
    return groups * config.sampler.num_generations


def one_line(config: Config, num_ranks: int) -> str:
    """ "16 problems × 8 completions = 128 sequences a batch, 64 per rank; 1 optimizer step of 8 micro-batches" """
    prompts, completions, sp_size = _sizes(config)
    per_rank = ""
    if config.dp_size(num_ranks) > 1:
        count = sequences_per_step(config, num_ranks) * config.algorithm.steps_per_generation
        per_rank = f", {count:,} per {'rank' if sp_size == 1 else f'{sp_size} ranks that share them'}"
    budget = config.trainer.max_tokens_per_micro_batch
    at_most = "" if budget is None else f" of {budget:,} tokens, or fewer"
    steps = _count(config.algorithm.steps_per_batch, "optimizer step")
    micro = _count(config.micro_batches(num_ranks), "micro-batch", "es")
    batch = f"{prompts:,} problems × {completions} completions = {prompts * completions:,} sequences a batch"
    return f"{batch}{per_rank}; {steps} of {micro}{at_most}"


def lines(config: Config, num_ranks: int, num_rows: int) -> Iterator[tuple[str, str]]:
    """(what, its value); num_rows: of the data set."""
    prompts, completions, sp_size = _sizes(config)
    ranks, passes, steps = config.dp_size(num_ranks), config.algorithm.num_iterations, config.algorithm.steps_per_batch
    mini_batches, per_step = config.algorithm.steps_per_generation, sequences_per_step(config, num_ranks)
    yield "prompts", f"{prompts:,} in a batch of rollouts, each a group of {completions} completions"
    per_rank = f"{per_step * mini_batches:,} per rank of {ranks}"
    yield "sequences", f"{prompts:,} × {completions} = {prompts * completions:,} in a batch; {per_rank}"
    each = f"one optimizer step each, {per_step:,} sequences per rank"
    yield "mini-batches", f"{mini_batches} of {config.trainer.prompts_per_step:,} prompts: {each}"
    yield "micro-batches", _micro_batches(config, num_ranks)
    if sp_size > 1:
        kinds = f"{ranks} data-parallel × {sp_size} sequence-parallel ranks"
        yield "long sequences", f'{kinds}: {sp_size} share every micro-batch, and "rank" above means {sp_size} of them'
    if passes > 1:
        yield "passes", f"{passes} over every batch: {steps} optimizer steps a batch"
    batches = num_rows / prompts
    optimizer_steps = f", {batches * steps:.4g} optimizer steps" if steps > 1 else ""
    yield "epoch", f"{num_rows:,} rows = {batches:.4g} batches of rollouts{optimizer_steps}"
    epochs = f"{config.num_batches * prompts / num_rows:.3g} epochs"
    yield "run", f"{config.num_batches:,} batches of rollouts, {config.trainer.max_steps:,} optimizer steps, {epochs}"


def _micro_batches(config: Config, num_ranks: int) -> str:
    steps, budget = (
        _count(config.micro_batches(num_ranks), "accumulation step"),
        config.trainer.max_tokens_per_micro_batch,
    )
    if budget is None:
        sequences = config.groups_at_once * config.sampler.num_generations
        return f"{sequences} sequences in one forward of one rank; {steps}"
    alone = ", and then trains alone" if config.longest_group > budget else ""
    longest = f"the longest group has {config.longest_group:,}{alone}; at most about {steps}"
    return f"whole groups up to {budget:,} tokens in one forward of one rank; {longest}"


def _sizes(config: Config) -> tuple[int, int, int]:
    """(prompts of a batch, completions of each, ranks that share a micro-batch)."""
    return config.prompts_per_batch, config.sampler.num_generations, config.trainer.sequence_parallel_size


def _count(n: int, what: str, ending: str = "s") -> str:
    return f"{n:,} {what}{ending * (n != 1)}"
