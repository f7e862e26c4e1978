"""Finds engine tensors that hold the published numbers in another order.

A kernel reorders them after a load, or a merge does that no name tells.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from model.checksum import unordered_sum
from sampler.engine.engine_layout import expert_of, kind_of, layer_of

_MOST_KINDS = 3  # of published tensors in one engine tensor, as q, k and v


def names_by_sum(published: Mapping[str, Tensor], names: list[str]) -> dict[int, list[str]]:
    """Returns {unordered sum: the published tensors that have it together}.

    They are all tensors of one to three kinds of a layer.
    """
    layers: dict[Any, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        layers[layer_of(name)][kind_of(name)].append(name)
    found = {}
    for kinds in layers.values():
        sum_of_kind = {}
        for kind, of_kind in kinds.items():
            sum_of_kind[kind] = sum(unordered_sum(published[name]) for name in of_kind)
        for num_kinds in range(1, _MOST_KINDS + 1):
            for chosen in itertools.combinations(kinds, num_kinds):
                total = sum(sum_of_kind[kind] for kind in chosen)
                found[total % 2**64] = [name for kind in chosen for name in kinds[kind]]
    return found


def has_same_numbers(tensor: Tensor, parts: Mapping[str, Tensor]) -> bool:
    """Returns whether a tensor holds the numbers of all parts in some order, beside zeros.

    The numbers of each expert must be in the slot of this expert.
    parts: name -> published tensor.
    """
    experts = {name: expert_of(name) for name in parts}
    has_experts = tensor.ndim > 2
    for part in parts.values():
        if part.ndim < 2 or part.shape[0] != tensor.shape[0]:
            has_experts = False
    if has_experts:  # all experts are published in one tensor
        sums = [0] * len(tensor)
        for part in parts.values():
            for slot, expert in enumerate(part):
                sums[slot] += unordered_sum(expert)
    elif tensor.ndim > 1 and set(experts.values()) == set(range(len(tensor))):
        sums = [0] * len(tensor)
        for name, part in parts.items():
            expert_slot = experts[name]
            assert expert_slot is not None
            sums[expert_slot] += unordered_sum(part)
    else:
        tensor = tensor[None]
        sums = [sum(unordered_sum(part) for part in parts.values())]
    return [unordered_sum(slot) for slot in tensor] == [total % 2**64 for total in sums]
