"""Assignment of groups to micro-batches and ranks. Pure functions.

    budget   what one micro-batch may hold: trainer.max_tokens_per_micro_batch, or trainer.groups_per_micro_batch
    round    one micro-batch of every rank, () where a rank has none left and runs a filler: all ranks run as many
             forwards as each other, because ZeRO's collectives must match

    tokens 60 50 40 30 20, budget 100, 2 ranks:   round (60 30) (50 40)   round (20) ()

The costliest remaining group goes to the rank with the least work (longest processing time first: Graham, SIAM
J. Appl. Math. 17, 1969), and a rank's groups fill its micro-batches first fit. A group above the budget gets a
micro-batch of its own. Sums are divided by the whole step's denominator, so that no plan changes the gradient.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.config import Algorithm
from common.types import Group, sequences
from model.files.dims import ModelDims
from model.packing import Packing
from trainer.data.experience import Experience
from trainer.data.tensors import trained_completions, unmasked_completions

Round = tuple[tuple[int, ...], ...]  # [rank] -> keys of its groups


@dataclass(frozen=True)
class Work:
    """The work of training one group; zeros if none of its completions train."""

    tokens: int  # in the group's packed row
    cost: float  # any unit, the same for all groups


NOTHING = Work(0, 0.0)


@dataclass(frozen=True)
class Budget:
    """The limit of one micro-batch, in groups or in tokens."""

    groups: int
    tokens: int | None = None  # replaces the limit in groups

    def is_exceeded_by(self, work: Work) -> bool:
        return self.tokens is not None and work.tokens > self.tokens

    def at_once(self, ranks: int) -> int:
        """Returns how many groups to take from the stream at a time: those of one round, as far as known before."""
        return ranks * (1 if self.tokens else self.groups)


def work(
    prompt: int, completions: Sequence[int], packing: Packing, model: ModelDims | None, patches: Sequence[int] = ()
) -> Work:
    """Returns a group's work from the tokens of its prompt P and its trained completions C_i, and its images' patches.

    tokens   shared: P + Σ C_i     separate: G · (P + max C_i), with the padding
    cost     floating-point operations of a forward (Kaplan et al., arXiv 2001.08361, table 1): 2 · parameters of the
             layers that a token meets · tokens + 4 · L · A · D · pairs + 2 · V · H · Σ C_i, where pairs counts every
             position with those it attends to: P²/2 for a prompt, C_i · P + C_i²/2 for a completion; and the tower's
             for each image. A model of unknown layers: tokens
    """
    if not completions:
        return NOTHING
    count, total, longest = len(completions), sum(completions), max(completions)
    prompts = 1 if packing == "shared" else count
    if packing == "separate":
        completions = [longest] * count
    tokens = prompts * prompt + sum(completions)
    if model is None:
        return Work(tokens, float(tokens))
    pairs = prompts * prompt**2 / 2 + sum(c * prompt + c * c / 2 for c in completions)
    linear = 2.0 * model.active_in_layers * tokens
    attention = 4.0 * model.layers * model.heads * model.head_dim * pairs
    seen = sum(model.vision.flops(n) for n in patches) if model.vision else 0.0
    return Work(tokens, linear + attention + 2.0 * model.vocab * model.hidden * total + seen)


def work_of(taken: Iterable[Experience], algorithm: Algorithm, packing: Packing, model: ModelDims | None) -> Work:
    """Returns the work of the group that trains among those taken for one slot, or NOTHING if there is none."""
    for e in taken:
        unmasked = unmasked_completions(e.group, algorithm)
        # a critic learns from every completion, and its values are needed before there are advantages
        if isinstance(e.group, Group) and unmasked and (algorithm.needs_critic or trained_completions(e, algorithm)):
            rollouts, prompt = [e.group.rollouts[i] for i in unmasked], len(e.group.prompt_ids)
            lengths = [len(r.completion_ids) for r in rollouts]
            if packing == "separate" and any(r.forks for r in rollouts):  # a row for each sequence
                of_all = [sequences(prompt, n, r.forks) for n, r in zip(lengths, rollouts, strict=True)]
                lengths = [len(places) - prompt for of in of_all for places in of]
            patches = [math.prod(image.grid_thw) for image in e.group.images]
            return work(prompt, lengths, packing, model, patches)
    return NOTHING


def plan(works: Mapping[int, Work], ranks: int, budget: Budget, loads: Sequence[float] = ()) -> list[Round]:
    """Returns the rounds that train these groups, as keys of works; a single empty round if no group has work.

    loads: each rank's cost so far. With a budget of groups no rank has more rounds than the number of groups requires;
    with a budget of tokens no two ranks differ by more than the cost of the costliest group.
    """
    costs = {key: work.cost for key, work in works.items() if work.tokens}
    loads = loads or [0.0] * ranks
    if budget.tokens is None:
        rounds = math.ceil(len(costs) / (ranks * budget.groups))
        of_ranks = _assign(costs, loads, most=rounds * budget.groups)
        packed = [_assign({key: costs[key] for key in keys}, [0.0] * rounds, budget.groups) for keys in of_ranks]
    else:
        packed = [_first_fit(keys, works, budget.tokens) for keys in _assign(costs, loads, most=len(costs))]
    return _in_rounds(packed, works)


def divided(rounds: Iterable[Round], works: Mapping[int, Work], tokens: int) -> list[Round]:
    """Returns rounds of the same groups, each on the same rank, in micro-batches of at most `tokens`.

    If `plan` made the rounds, these are the rounds that it makes with this budget. A group of more
    tokens gets a micro-batch of its own.
    """
    packed = []
    for bins in zip(*rounds, strict=True):
        keys = sorted(itertools.chain(*bins), key=lambda key: (-works[key].cost, key))
        packed.append(_first_fit(keys, works, tokens))
    return _in_rounds(packed, works)


class Planner:
    """A planner of groups that are still arriving, which closes a round once groups of the average size fill it.

    Groups that do not fit in a round wait for the next one. Loads are kept from round to round, so that a rank that
    got a long group gets less later. The rounds follow from the groups' order and sizes alone.
    """

    def __init__(self, ranks: int, budget: Budget):
        self._ranks, self._budget = ranks, budget
        self._loads = [0.0] * ranks
        self._waiting: dict[int, Work] = {}
        self.rounds: list[Round] = []  # all rounds so far

    def add(self, works: Mapping[int, Work]) -> list[Round]:
        """Returns the rounds that these works complete, as keys of works."""
        before = len(self.rounds)
        for key, work in works.items():
            if work.tokens:
                self._waiting[key] = work
            while _is_full(self._waiting.values(), self._ranks, self._budget):
                round_ = plan(self._waiting, self._ranks, self._budget, self._loads)[0]
                self.rounds.append(round_)
                for rank, keys in enumerate(round_):
                    self._loads[rank] += sum(self._waiting.pop(key).cost for key in keys)
        return self.rounds[before:]

    def finish(self) -> list[Round]:
        """Returns the rounds of the remaining groups; a single empty round if no group had work."""
        before = len(self.rounds)
        if self._waiting or not self.rounds:
            self.rounds += plan(self._waiting, self._ranks, self._budget, self._loads)
            self._waiting = {}
        return self.rounds[before:]


def plan_metrics(rounds: Sequence[Round], works: Mapping[int, Work], budget: Budget) -> dict[str, float]:
    """Returns the metrics of a step's rounds. works: the work of each of the step's slots."""
    costs = [sum(works[key].cost for round_ in rounds for key in round_[rank]) for rank in range(len(rounds[0]))]
    metrics = {"micro_batches": float(len(rounds))}
    if len(costs) > 1:
        metrics["rank_imbalance"] = max(costs) * len(costs) / sum(costs) - 1 if any(costs) else 0.0
    if budget.tokens:
        metrics["oversized_groups"] = float(sum(map(budget.is_exceeded_by, works.values())))
    return metrics


def warning(works: Mapping[int, Work], budget: Budget) -> str:
    """Returns a warning about groups above the budget, or "" if there are none."""
    largest = max(works.values(), key=lambda work: work.tokens)
    if not budget.is_exceeded_by(largest):
        return ""
    return (
        f"a group of {largest.tokens} tokens is above trainer.max_tokens_per_micro_batch {budget.tokens} and trains "
        f"alone; if memory is short, shorten it: sampler.max_completion_length, sampler.num_generations"
    )


def _is_full(waiting: Iterable[Work], ranks: int, budget: Budget) -> bool:
    tokens = [work.tokens for work in waiting]
    if not tokens:
        return False
    per_rank = budget.groups if budget.tokens is None else budget.tokens * len(tokens) // sum(tokens)
    return len(tokens) >= ranks * max(1, per_rank)


def _in_rounds(packed: Iterable[list[list[int]]], works: Mapping[int, Work]) -> list[Round]:
    """Returns the rounds of each rank's micro-batches."""
    # if collectives end every micro-batch, the micro-batches of one round should take equally long
    packed = [sorted(bins, key=lambda bin: -sum(works[key].cost for key in bin)) for bins in packed]
    rounds_of_bins = itertools.zip_longest(*(bins or [[]] for bins in packed), fillvalue=[])
    order = {key: place for place, key in enumerate(works)}
    return [tuple(tuple(sorted(keys, key=order.__getitem__)) for keys in bins) for bins in rounds_of_bins]


def _assign(costs: dict[int, float], loads: Sequence[float], most: int) -> list[list[int]]:
    """Assigns each key, the costliest first, to the bin with the least cost among those with fewer than `most` keys."""
    loads, bins = list(loads), [list[int]() for _ in loads]
    for key in sorted(costs, key=lambda key: -costs[key]):
        least = min((b for b in range(len(bins)) if len(bins[b]) < most), key=lambda b: loads[b])
        bins[least].append(key)
        loads[least] += costs[key]
    return bins


def _first_fit(keys: Iterable[int], works: Mapping[int, Work], budget: int) -> list[list[int]]:
    """Puts each key into the first bin that has room for its tokens, else into a new one."""
    bins, rooms = list[list[int]](), list[int]()
    for key in keys:
        tokens = works[key].tokens
        found = next((place for place, room in enumerate(rooms) if tokens <= room), len(bins))
        if found == len(bins):
            bins.append([])
            rooms.append(budget)
        bins[found].append(key)
        rooms[found] -= tokens
    return bins
