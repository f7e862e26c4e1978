"""The numbers that follow from a batch's settings. Pure.

One batch of rollouts is `mini_batches` optimizer steps in one pass, each of them `accumulation` forward and backward
passes on every rank. Rows are whole prompts here and whole sequences where a framework counts sequences. Where the
groups of a step do not divide over the ranks, "per rank" is the busiest one. Ranks are data-parallel ones here: each
may be several sequence-parallel ranks, which share every micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from common.config import Config


@dataclass(frozen=True)
class BatchPlan:
    """EasyR1's Geometry3K example: BatchPlan(256, 6, ranks=8, mini_batches=4, micro_sequences=2, num_rows=2100) has
    1,536 sequences, 192 per rank; an update of 48 per rank in 24 micro-batches."""

    prompts: int  # in a batch of rollouts, over all ranks
    num_generations: int
    ranks: int  # dp_size
    mini_batches: int  # optimizer steps in one pass over the batch
    micro_sequences: int  # in one forward of one rank; with a budget of tokens, of the longest groups
    num_rows: int | None = None  # of the data set; None = not known
    num_iterations: int = 1  # passes
    max_tokens: int | None = None  # of one forward, instead of a number of sequences
    longest_group: int | None = None  # its tokens as packed
    sp_size: int = 1

    @property
    def sequences(self) -> int:
        return self.prompts * self.num_generations

    @property
    def sequences_per_rank(self) -> int:
        return self.sequences_per_update_and_rank * self.mini_batches

    @property
    def prompts_per_update(self) -> int:
        return self.prompts // self.mini_batches

    @property
    def sequences_per_update_and_rank(self) -> int:
        return math.ceil(self.prompts_per_update / self.ranks) * self.num_generations

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank in one optimizer step; with a budget of tokens, if all groups are the longest."""
        return math.ceil(self.sequences_per_update_and_rank / self.micro_sequences)

    @property
    def updates_per_batch(self) -> int:
        return self.mini_batches * self.num_iterations


def batch_plan(config: Config, ranks: int, num_rows: int | None = None) -> BatchPlan:
    mini_batches = config.algorithm.steps_per_generation
    return BatchPlan(
        prompts=config.prompts_per_batch,
        num_generations=config.sampler.num_generations,
        ranks=config.dp_size(ranks),
        mini_batches=mini_batches,
        micro_sequences=config.groups_at_once * config.sampler.num_generations,
        num_rows=num_rows,
        num_iterations=config.algorithm.num_iterations,
        max_tokens=config.trainer.max_tokens_per_micro_batch,
        longest_group=config.longest_group,
        sp_size=config.trainer.sequence_parallel_size,
    )


def one_line(plan: BatchPlan) -> str:
    """ "16 problems × 8 completions = 128 sequences a batch, 64 per rank; 1 optimizer step of 8 micro-batches" """
    batch = f"{plan.prompts:,} problems × {plan.num_generations} completions = {plan.sequences:,} sequences a batch"
    who = "rank" if plan.sp_size == 1 else f"{plan.sp_size} ranks that share them"
    per_rank = f", {plan.sequences_per_rank:,} per {who}" if plan.ranks > 1 else ""
    updates, micro = _count(plan.updates_per_batch, "optimizer step"), _count(plan.accumulation, "micro-batch", "es")
    budget = "" if plan.max_tokens is None else f" of {plan.max_tokens:,} tokens, or fewer"
    return f"{batch}{per_rank}; {updates} of {micro}{budget}"


def lines(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    """(what, its value) for people."""
    p = plan
    yield "prompts", f"{p.prompts:,} in a batch of rollouts, each a group of {p.num_generations} completions"
    per_rank = f"{p.sequences_per_rank:,} per rank of {p.ranks}"
    yield "sequences", f"{p.prompts:,} × {p.num_generations} = {p.sequences:,} in a batch; {per_rank}"
    each = f"one optimizer step each, {p.sequences_per_update_and_rank:,} sequences per rank"
    yield "mini-batches", f"{p.mini_batches} of {p.prompts_per_update:,} prompts: {each}"
    steps = _count(p.accumulation, "accumulation step")
    if p.max_tokens is not None and p.longest_group is not None:
        alone = ", and then trains alone" if p.longest_group > p.max_tokens else ""
        longest = f"the longest group has {p.longest_group:,}{alone}; at most about {steps}"
        yield "micro-batches", f"whole groups up to {p.max_tokens:,} tokens in one forward of one rank; {longest}"
    else:
        yield "micro-batches", f"{p.micro_sequences} sequences in one forward of one rank; {steps}"
    if p.sp_size > 1:
        kinds = f"{p.ranks} data-parallel × {p.sp_size} sequence-parallel ranks"
        shared = f'{p.sp_size} share every micro-batch, and "rank" above means {p.sp_size} of them'
        yield "long sequences", f"{kinds}: {shared}"
    if p.num_iterations > 1:
        yield "passes", f"{p.num_iterations} over every batch: {p.updates_per_batch} optimizer steps a batch"
    if p.num_rows is not None:
        batches = p.num_rows / p.prompts
        steps = f", {batches * p.updates_per_batch:.4g} optimizer steps" if p.updates_per_batch > 1 else ""
        yield "epoch", f"{p.num_rows:,} rows = {batches:.4g} batches of rollouts{steps}"


def epochs(plan: BatchPlan, max_steps: int) -> float | None:
    """How often a run of max_steps optimizer steps asks every row."""
    if plan.num_rows is None:
        return None
    return math.ceil(max_steps / plan.updates_per_batch) * plan.prompts / plan.num_rows


def _count(n: int, what: str, ending: str = "s") -> str:
    return f"{n:,} {what}{ending * (n != 1)}"
