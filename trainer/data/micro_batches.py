"""Assigns groups to micro-batches and ranks. Pure functions.

    budget   the limit of one micro-batch: trainer.max_tokens_per_micro_batch tokens, or
             trainer.groups_per_micro_batch groups
    round    one micro-batch on every rank. A rank without groups in a round runs a filler of weight
             0, because ZeRO's collectives require all ranks to run equally many forwards.

    tokens 60 50 40 30 20, budget 100, 2 ranks:   round (60 30) (50 40)   round (20) ()

The costliest remaining group goes to the rank with the least work (longest processing time first:
Graham, SIAM J. Appl. Math. 17, 1969). The groups of a rank then fill its micro-batches first-fit. A
group that exceeds the budget is alone in its micro-batch. Sums are divided by the denominator of
the whole step, so the plan does not change the gradient. Plans name a group by its slot (slots.py).
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

Round = tuple[tuple[int, ...], ...]  # for each rank, the slots in its micro-batch


@dataclass(frozen=True)
class Work:
    """The work of training one group. Tokens fill micro-batches, and costs balance the ranks."""

    tokens: int  # in the group's packed row, prompt included
    cost: float  # in any unit that is the same for all groups


NOTHING = Work(tokens=0, cost=0.0)  # the work of a group of which no completion is trained


@dataclass(frozen=True)
class Budget:
    """The limit of one micro-batch, in groups or in tokens."""

    groups: int
    tokens: int | None = None  # None: the limit is in groups; otherwise `groups` has no effect

    def is_exceeded_by(self, work: Work) -> bool:
        return self.tokens is not None and work.tokens > self.tokens

    def groups_at_once(self, ranks: int) -> int:
        """Returns how many groups to take from the stream at once: at most as fit into a round."""
        if self.tokens:
            # one group may fill a micro-batch, and its length is unknown until it arrives
            return ranks
        return ranks * self.groups


def work(
    num_prompt_tokens: int,
    completion_lengths: Sequence[int],
    packing: Packing,
    model: ModelDims | None,
    image_patches: Sequence[int] = (),
) -> Work:
    """Returns the work of training a group with a prompt of P tokens and completions of C_i tokens.

    tokens   shared packing: P + Σ C_i     separate rows: G · (P + max C_i), padding included
    cost     floating-point operations of a forward (Kaplan et al., arXiv 2001.08361, table 1):
             2 · (active parameters of the layers) · tokens + 4 · layers · heads · head_dim · pairs
             + 2 · vocabulary · hidden · Σ C_i + the vision tower's operations on image_patches.
             pairs is the number of (query, key) pairs in attention: P²/2 within the prompt, and
             C_i · P + C_i²/2 for each completion.

    model: None if its dimensions are unknown; then the cost is the number of tokens.
    image_patches: the number of patches of each image in the prompt.
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
    """Returns the work of the one group that is trained of those taken for a slot, or NOTHING."""
    for group in taken:
        if not group.sampled_tokens.completions:
            continue
        # A critic learns from every group, and its rounds are planned before there are advantages.
        if algorithm.needs_critic or group.trains_policy:
            return _work_of_group(group, packing, model)
    return NOTHING


def _work_of_group(group: TrainingGroup, packing: Packing, model: ModelDims | None) -> Work:
    assert isinstance(group.group, Group)
    num_prompt_tokens = len(group.group.prompt_ids)
    rollouts = [group.rollouts[i] for i in group.sampled_tokens.completions]
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    if packing == "separate" and any(rollout.forks for rollout in rollouts):
        lengths = []  # a rollout that forks has one row for each of its sequences
        for rollout in rollouts:
            num_tokens = len(rollout.completion_ids)
            for sequence in sequences(num_prompt_tokens, num_tokens, rollout.forks):
                lengths.append(len(sequence) - num_prompt_tokens)
    patches = [math.prod(image.grid_thw) for image in group.group.images]
    return work(num_prompt_tokens, lengths, packing, model, patches)


def plan(
    works: Mapping[int, Work], ranks: int, budget: Budget, loads: Sequence[float] = ()
) -> list[Round]:
    """Returns the rounds that train these groups, or a single empty round if no group has work.

    works: each group's work, by slot. loads: the cost that each rank already has; () = none.
    With a budget in groups, there are as few rounds as possible. With a budget in tokens and no
    loads, the costs of any two ranks differ by at most the cost of the costliest group.
    """
    costs = {slot: work.cost for slot, work in works.items() if work.tokens}
    loads = loads or [0.0] * ranks
    per_rank = []  # the micro-batches of each rank
    if budget.tokens is None:
        num_rounds = math.ceil(len(costs) / (ranks * budget.groups))
        # groups are divided among ranks, then those of a rank among rounds
        for slots in _assign(costs, loads, most=num_rounds * budget.groups):
            costs_of_rank = {slot: costs[slot] for slot in slots}
            per_rank.append(_assign(costs_of_rank, [0.0] * num_rounds, most=budget.groups))
    else:
        for slots in _assign(costs, loads, most=len(costs)):
            per_rank.append(_first_fit(slots, works, budget.tokens))
    return _combine_into_rounds(per_rank, works)


def divided(rounds: Iterable[Round], works: Mapping[int, Work], tokens: int) -> list[Round]:
    """Divides the micro-batches of `rounds` into smaller ones of at most `tokens` tokens.

    Every group stays on its rank. If the rounds came from `plan`, the result is what `plan` returns
    with this budget. A group that exceeds the budget gets a micro-batch of its own.
    """
    per_rank = []
    for micro_batches in zip(*rounds, strict=True):  # those of one rank, from all rounds
        slots = list(itertools.chain(*micro_batches))
        slots.sort(key=lambda slot: (-works[slot].cost, slot))
        per_rank.append(_first_fit(slots, works, tokens))
    return _combine_into_rounds(per_rank, works)


class Planner:
    """Plans rounds over groups while they arrive.

    It closes a round once the waiting groups would fill it if all had their average size. Groups
    that do not fit wait for the next round. A rank that got a long group gets less work in later
    rounds. The rounds depend only on the order and the sizes of the groups.
    """

    def __init__(self, ranks: int, budget: Budget):
        self._ranks = ranks
        self._budget = budget
        self._loads = [0.0] * ranks  # the cost of each rank in the rounds so far
        self._waiting: dict[int, Work] = {}  # by slot, the groups that are in no round yet
        self.rounds: list[Round] = []  # all rounds so far

    def add(self, works: Mapping[int, Work]) -> list[Round]:
        """Adds groups, and returns the rounds that they complete. works: each group's, by slot."""
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
        """Returns the rounds of the groups that still wait, after the last `add`.

        If no group has had any work, this is one round of empty micro-batches.
        """
        num_rounds_before = len(self.rounds)
        if self._waiting or not self.rounds:
            self.rounds += plan(self._waiting, self._ranks, self._budget, self._loads)
            self._waiting = {}
        return self.rounds[num_rounds_before:]


def plan_metrics(
    rounds: Sequence[Round], works: Mapping[int, Work], budget: Budget
) -> dict[str, float]:
    """Returns metrics of how evenly a step's groups are divided into micro-batches.

        rank_imbalance = max(cost of a rank) / mean(cost of a rank) − 1      0 = perfectly balanced

    rank_imbalance is absent with one rank. micro_batches is the number that each rank trains.
    oversized_groups, with a budget in tokens, is the number of groups that exceed it.
    works: the work of each of the step's groups, by slot.
    """
    metrics = {"micro_batches": float(len(rounds))}
    costs = []  # of each rank
    for micro_batches in zip(*rounds, strict=True):  # those of one rank, from all rounds
        slots = itertools.chain(*micro_batches)
        costs.append(sum(works[slot].cost for slot in slots))
    num_ranks = len(costs)
    if num_ranks > 1:
        metrics["rank_imbalance"] = 0.0
        if any(costs):
            metrics["rank_imbalance"] = max(costs) * num_ranks / sum(costs) - 1
    if budget.tokens:
        metrics["oversized_groups"] = float(sum(map(budget.is_exceeded_by, works.values())))
    return metrics


def warning(works: Mapping[int, Work], budget: Budget) -> str:
    """Returns a warning about the largest group if it exceeds the budget, otherwise ""."""
    largest = max(works.values(), key=lambda work: work.tokens)
    if not budget.is_exceeded_by(largest):
        return ""
    return (
        f"a group of {largest.tokens} tokens is above trainer.max_tokens_per_micro_batch "
        f"{budget.tokens} and trains alone; if memory is short, make groups smaller with "
        "sampler.max_completion_length or sampler.num_generations"
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


def _combine_into_rounds(
    per_rank: Iterable[list[list[int]]], works: Mapping[int, Work]
) -> list[Round]:
    """Combines the ranks' micro-batches into rounds, pairing each rank's costliest ones first.

    If micro-batches end with collectives, every rank waits for the slowest rank of a round. So the
    micro-batches of one round should take equally long.
    """

    def cost(micro_batch: list[int]) -> float:
        return sum(works[slot].cost for slot in micro_batch)

    sorted_per_rank = []
    for micro_batches in per_rank:
        by_cost = sorted(micro_batches, key=cost, reverse=True)
        # an empty micro-batch, so that there is a round even if no rank has a group
        sorted_per_rank.append(by_cost or [[]])

    positions = {slot: position for position, slot in enumerate(works)}
    rounds = []
    # a rank with fewer micro-batches than the other ranks runs empty ones in the last rounds
    for one_per_rank in itertools.zip_longest(*sorted_per_rank, fillvalue=[]):
        # groups were assigned by cost, and are packed in the order of `works`
        ordered = [tuple(sorted(slots, key=positions.__getitem__)) for slots in one_per_rank]
        rounds.append(tuple(ordered))
    return rounds


def _assign(costs: Mapping[int, float], loads: Sequence[float], most: int) -> list[list[int]]:
    """Assigns each slot, the costliest first, to the bin of least cost that has room.

    costs: the cost of each slot's group. loads: the cost that each bin already has; there are as
    many bins. most: the largest number of slots in a bin. Returns the slots of each bin.
    """
    loads = list(loads)
    bins: list[list[int]] = [[] for _ in loads]
    for slot in sorted(costs, key=lambda slot: -costs[slot]):
        indexes_with_room = [i for i in range(len(bins)) if len(bins[i]) < most]
        cheapest = min(indexes_with_room, key=loads.__getitem__)
        bins[cheapest].append(slot)
        loads[cheapest] += costs[slot]
    return bins


def _first_fit(slots: Iterable[int], works: Mapping[int, Work], budget: int) -> list[list[int]]:
    """Puts each slot into the first bin with room for its tokens, or into a new bin."""
    bins: list[list[int]] = []
    rooms: list[int] = []  # the tokens that still fit into each bin
    for slot in slots:
        tokens = works[slot].tokens
        for i, room in enumerate(rooms):
            if tokens <= room:
                bins[i].append(slot)
                rooms[i] -= tokens
                break
        else:  # no bin has room
            bins.append([slot])
            rooms.append(budget - tokens)
    return bins
