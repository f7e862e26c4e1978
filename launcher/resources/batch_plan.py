"""The sizes of batches and runs that follow from the settings, in words. Pure functions.

A batch of rollouts is `steps_per_generation` optimizer steps in one pass, each of some micro-batches on every rank.
If the groups of a step do not divide over the ranks, "per rank" is the busiest one; several sequence-parallel ranks
share every micro-batch.
"""

import math

from common.config import Config


def batch_line(config: Config, num_ranks: int) -> str:
    """Returns "4 problems × 8 completions = 32 sequences a batch, 16 per rank; 1 optimizer step of 2 micro-batches"."""
    prompts, completions = config.prompts_per_batch, config.sampler.num_generations
    ranks, sharing = config.dp_size(num_ranks), config.ranks_per_row
    per_rank = ""
    if ranks > 1:
        groups = math.ceil(config.trainer.prompts_per_step / ranks) * config.algorithm.steps_per_generation
        of_whom = "rank" if sharing == 1 else f"{sharing} ranks that share them"
        per_rank = f", {groups * completions:,} per {of_whom}"
    budget = config.trainer.max_tokens_per_micro_batch
    at_most = "" if budget is None else f" of {budget:,} tokens, or fewer"
    steps = counted(config.algorithm.steps_per_batch, "optimizer step")
    micro = counted(config.micro_batches(num_ranks), "micro-batch", "es")
    batch = f"{prompts:,} problems × {completions} completions = {prompts * completions:,} sequences a batch"
    return f"{batch}{per_rank}; {steps} of {micro}{at_most}"


def run_line(config: Config, num_rows: int) -> str:
    """Returns "800 rows = 50 batches; the run is 100 batches, 100 optimizer steps, 2 epochs" for num_rows=800.

    With `dead_groups: resample` "2 to 4 epochs", as many groups are replaced.
    """
    prompts, batches, steps = config.prompts_per_batch, config.num_batches, config.trainer.max_steps
    epochs = batches * prompts / num_rows
    more = f" to {epochs * (1 + resamples):.3g}" if (resamples := config.algorithm.resamples) else ""
    run = f"{batches:,} batches, {steps:,} optimizer steps, {epochs:.3g}{more} epochs"
    return f"{num_rows:,} rows = {num_rows / prompts:.4g} batches; the run is {run}"


def settings_of_epochs(config: Config) -> list[str]:
    """Returns overrides that turn trainer.epochs into max_steps, in whole batches of the rows as they are read."""
    if config.trainer.epochs is None:
        return []
    from sampler.prompts.dataset import load_data

    num_rows = len(load_data("data.train", config.data.train, config.data))
    batches = math.ceil(config.trainer.epochs * num_rows / config.prompts_per_batch)
    return ["trainer.epochs=null", f"trainer.max_steps={batches * config.algorithm.steps_per_batch}"]


def counted(n: int, what: str, ending: str = "s") -> str:
    """Returns "1 rank", or "1,024 ranks"."""
    return f"{n:,} {what}{ending * (n != 1)}"
