"""Assignment of groups to micro-batches and ranks. Pure functions.

    budget   what one micro-batch may hold: trainer.max_tokens_per_micro_batch tokens, or
             trainer.groups_per_micro_batch groups
    round    one micro-batch of every rank. A rank that has no groups left runs a filler: all ranks
             run the same number of forwards, because ZeRO's collectives must match.

    tokens 60 50 40 30 20, budget 100, 2 ranks:   round (60 30) (50 40)   round (20) ()

The costliest remaining group goes to the rank with the least work (longest processing time first:
Graham, SIAM J. Appl. Math. 17, 1969). A rank's groups fill its micro-batches first fit. A group
above the budget gets a micro-batch of its own. Sums are divided by the whole step's denominator, so
no plan changes the gradient. Groups are named by the slots that they were taken for.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.config import Algorithm
from common.types import Group, sequences
from model.files.dims import ModelDims
from model.packing import Packing
from trainer.data.training_group import TrainingGroup

Round = tuple[tuple[int, ...], ...]  # [rank] -> slots of its groups


@dataclass(frozen=True)
class Work:
    """How much work it is to train one group, by which micro-batches are filled and ranks balanced.

    A group none of whose completions train is `NOTHING`.
    """

    tokens: int  # in the group's packed row
    cost: float  # in any unit that is the same for all groups


NOTHING = Work(0, 0.0)


@dataclass(frozen=True)
class Budget:
    """The limit of one micro-batch, in groups or in tokens."""

    groups: int
    tokens: int | None = None  # replaces the limit in groups

    def is_exceeded_by(self, work: Work) -> bool:
        return self.tokens is not None and work.tokens > self.tokens

    def groups_at_once(self, ranks: int) -> int:
        """Returns how many groups to take from the stream at a time, which at most fill a round."""
        if self.tokens:
            # lengths are unknown before groups arrive, and a single group may fill a micro-batch
            return ranks
        return ranks * self.groups


def work(
    num_prompt_tokens: int,
    completion_lengths: Sequence[int],
    packing: Packing,
    model: ModelDims | None,
    image_patches: Sequence[int] = (),
) -> Work:
    """Returns a group's work, from the tokens P of its prompt and C_i of its trained completions.

    tokens   shared: P + Σ C_i     separate: G · (P + max C_i), with the padding
    cost     floating-point operations of a forward (Kaplan et al., arXiv 2001.08361, table 1):
             2 · parameters of the layers that a token meets · tokens + 4 · L · A · D · pairs
             + 2 · V · H · Σ C_i + those of the vision tower for each image's patches.
             pairs counts every position with those that it attends to: P²/2 for a prompt,
             C_i · P + C_i²/2 for a completion. For a model of unknown layers the cost is tokens.
    """
    if not completion_lengths:
        return NOTHING
    num_targets = sum(completion_lengths)
    if packing == "shared":
        num_prompts = 1
        lengths = list(completion_lengths)
    else:
        num_prompts = len(completion_lengths)
        lengths = [max(completion_lengths)] * num_prompts
    num_tokens = num_prompts * num_prompt_tokens + sum(lengths)
    if model is None:
        return Work(num_tokens, float(num_tokens))
    pairs = num_prompts * num_prompt_tokens**2 / 2
    pairs += sum(length * num_prompt_tokens + length * length / 2 for length in lengths)
    layers = 2.0 * model.active_in_layers * num_tokens
    attention = 4.0 * model.layers * model.heads * model.head_dim * pairs
    head = 2.0 * model.vocab * model.hidden * num_targets
    vision = 0.0
    if model.vision:
        vision = sum(model.vision.flops(patches) for patches in image_patches)
    return Work(num_tokens, layers + attention + head + vision)


def work_of_slot(
    taken: Iterable[TrainingGroup],
    algorithm: Algorithm,
    packing: Packing,
    model: ModelDims | None,
) -> Work:
    """Returns the work of the group that trains among those taken for a slot, NOTHING if none."""
    for group in taken:
        if not group.sampled_tokens.completions:
            continue
        # A critic learns from every completion, and its values come before advantages are known.
        if algorithm.needs_critic or group.trains_policy:
            return _work_of_group(group, packing, model)
    return NOTHING


def _work_of_group(group: TrainingGroup, packing: Packing, model: ModelDims | None) -> Work:
    assert isinstance(group.group, Group)
    num_prompt_tokens = len(group.group.prompt_ids)
    rollouts = [group.rollouts[i] for i in group.sampled_tokens.completions]
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    if packing == "separate" and any(rollout.forks for rollout in rollouts):
        lengths = []  # each sequence of a rollout is a row of its own
        for rollout in rollouts:
            num_tokens = len(rollout.completion_ids)
            for sequence in sequences(num_prompt_tokens, num_tokens, rollout.forks):
                lengths.append(len(sequence) - num_prompt_tokens)
    patches = [math.prod(image.grid_thw) for image in group.group.images]
    return work(num_prompt_tokens, lengths, packing, model, patches)


def plan(
    works: Mapping[int, Work], ranks: int, budget: Budget, loads: Sequence[float] = ()
) -> list[Round]:
    """Returns the rounds that train these groups; a single empty round if no group has work.

    works: by slot. loads: each rank's cost so far. With a budget of groups no rank has more rounds
    than the number of groups requires. With a budget of tokens no two ranks differ by more than the
    cost of the costliest group.
    """
    costs = {slot: work.cost for slot, work in works.items() if work.tokens}
    loads = loads or [0.0] * ranks
    micro_batches_of_ranks = []
    if budget.tokens is None:
        num_rounds = math.ceil(len(costs) / (ranks * budget.groups))
        for slots in _assign(costs, loads, most=num_rounds * budget.groups):
            costs_of_rank = {slot: costs[slot] for slot in slots}
            no_loads = [0.0] * num_rounds
            micro_batches_of_ranks.append(_assign(costs_of_rank, no_loads, budget.groups))
    else:
        for slots in _assign(costs, loads, most=len(costs)):
            micro_batches_of_ranks.append(_first_fit(slots, works, budget.tokens))
    return _in_rounds(micro_batches_of_ranks, works)


def divided(rounds: Iterable[Round], works: Mapping[int, Work], tokens: int) -> list[Round]:
    """Returns rounds of the same groups on the same ranks, in micro-batches of at most `tokens`.

    Rounds that `plan` has made become those that it makes with this budget. A group of more tokens
    gets a micro-batch of its own.
    """
    micro_batches_of_ranks = []
    for micro_batches in zip(*rounds, strict=True):
        slots = list(itertools.chain(*micro_batches))
        slots.sort(key=lambda slot: (-works[slot].cost, slot))
        micro_batches_of_ranks.append(_first_fit(slots, works, tokens))
    return _in_rounds(micro_batches_of_ranks, works)


class Planner:
    """A planner of groups that still arrive. It closes a round once average groups would fill it.

    Groups that do not fit in a round wait for the next one. Loads are kept from round to round, so
    that a rank that got a long group gets less later. The rounds follow from the groups' order and
    sizes alone.
    """

    def __init__(self, ranks: int, budget: Budget):
        self._ranks = ranks
        self._budget = budget
        self._loads = [0.0] * ranks
        self._waiting: dict[int, Work] = {}
        self.rounds: list[Round] = []  # all rounds so far

    def add(self, works: Mapping[int, Work]) -> list[Round]:
        """Returns the rounds that these groups complete. works: by slot."""
        num_rounds_before = len(self.rounds)
        for slot, work in works.items():
            if work.tokens:
                self._waiting[slot] = work
            while _is_full(self._waiting.values(), self._ranks, self._budget):
                self._close_round()
        return self.rounds[num_rounds_before:]

    def _close_round(self) -> None:
        round_ = plan(self._waiting, self._ranks, self._budget, self._loads)[0]
        self.rounds.append(round_)
        for rank, slots in enumerate(round_):
            self._loads[rank] += sum(self._waiting.pop(slot).cost for slot in slots)

    def finish(self) -> list[Round]:
        """Plans the groups that still wait for a round, after `add` got the last group.

        Returns their rounds, in each of which every rank has one micro-batch. If no group of
        `add` had any work, this is a single round of empty micro-batches.
        """
        num_rounds_before = len(self.rounds)
        if self._waiting or not self.rounds:
            self.rounds += plan(self._waiting, self._ranks, self._budget, self._loads)
            self._waiting = {}
        return self.rounds[num_rounds_before:]


def plan_metrics(
    rounds: Sequence[Round], works: Mapping[int, Work], budget: Budget
) -> dict[str, float]:
    """Returns how well a step's groups are divided into micro-batches, as metrics.

        rank_imbalance = max(cost of a rank) / mean(cost of a rank) − 1      0 = perfectly balanced

    rank_imbalance is absent with one rank. micro_batches is the number that each rank trains.
    oversized_groups is the number of groups above a budget of tokens.
    works: the work of each of the step's slots.
    """
    metrics = {"micro_batches": float(len(rounds))}
    costs_of_ranks = []
    for micro_batches_of_rank in zip(*rounds, strict=True):  # rounds are indexed [round][rank]
        slots_of_rank = itertools.chain(*micro_batches_of_rank)
        costs_of_ranks.append(sum(works[slot].cost for slot in slots_of_rank))
    num_ranks = len(costs_of_ranks)
    if num_ranks > 1:
        metrics["rank_imbalance"] = 0.0
        if any(costs_of_ranks):
            imbalance = max(costs_of_ranks) * num_ranks / sum(costs_of_ranks) - 1
            metrics["rank_imbalance"] = imbalance
    if budget.tokens:
        metrics["oversized_groups"] = float(sum(map(budget.is_exceeded_by, works.values())))
    return metrics


def warning(works: Mapping[int, Work], budget: Budget) -> str:
    """Returns a warning about groups above the budget, or "" if there are none."""
    largest = max(works.values(), key=lambda work: work.tokens)
    if not budget.is_exceeded_by(largest):
        return ""
    return (
        f"a group of {largest.tokens} tokens is above trainer.max_tokens_per_micro_batch "
        f"{budget.tokens} and trains alone; if memory is short, shorten it: "
        "sampler.max_completion_length, sampler.num_generations"
    )


def _is_full(waiting: Collection[Work], ranks: int, budget: Budget) -> bool:
    """Returns whether the waiting groups would fill a round if all had their average size."""
    if not waiting:
        return False
    groups_per_rank = budget.groups
    if budget.tokens is not None:
        num_tokens = sum(work.tokens for work in waiting)
        groups_per_rank = budget.tokens * len(waiting) // num_tokens
    return len(waiting) >= ranks * max(1, groups_per_rank)


def _in_rounds(
    micro_batches_of_ranks: Iterable[list[list[int]]], works: Mapping[int, Work]
) -> list[Round]:
    """Returns the rounds of each rank's micro-batches, the costliest of each rank first.

    Where every micro-batch ends with collectives, ranks wait for the slowest of a round, so the
    micro-batches of one round should take equally long.
    """

    def cost(slots: list[int]) -> float:
        return sum(works[slot].cost for slot in slots)

    sorted_of_ranks = []
    for micro_batches in micro_batches_of_ranks:
        by_cost = sorted(micro_batches, key=cost, reverse=True)
        # an empty micro-batch, so that there is a round even if no rank has a group
        sorted_of_ranks.append(by_cost or [[]])
    arrival = {slot: i for i, slot in enumerate(works)}
    rounds = []
    # a rank with fewer micro-batches than another one runs empty ones in the last rounds
    for of_ranks in itertools.zip_longest(*sorted_of_ranks, fillvalue=[]):
        # groups were chosen by cost, and are packed in the order of `works`
        in_order = [tuple(sorted(slots, key=arrival.__getitem__)) for slots in of_ranks]
        rounds.append(tuple(in_order))
    return rounds


def _assign(costs: Mapping[int, float], loads: Sequence[float], most: int) -> list[list[int]]:
    """Assigns each slot, the costliest first, to the bin of least cost with room for it.

    loads: the cost that each bin begins with. most: the largest number of slots in a bin.
    """
    loads = list(loads)
    bins: list[list[int]] = [[] for _ in loads]
    for slot in sorted(costs, key=lambda slot: -costs[slot]):
        with_room = [b for b in range(len(bins)) if len(bins[b]) < most]
        least = min(with_room, key=loads.__getitem__)
        bins[least].append(slot)
        loads[least] += costs[slot]
    return bins


def _first_fit(slots: Iterable[int], works: Mapping[int, Work], budget: int) -> list[list[int]]:
    """Puts each slot into the first bin that has room for its tokens, else into a new one."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for slot in slots:
        tokens = works[slot].tokens
        for b, room in enumerate(rooms):
            if tokens <= room:
                bins[b].append(slot)
                rooms[b] -= tokens
                break
        else:
            bins.append([slot])
            rooms.append(budget - tokens)
    return bins
