"""No sampler gets more of one data source than the run has, however the groups become free.

The real ledger leases, the real mix assigns the sources.
"""

import collections
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from sampler.prompts.dataset import mixed_index
from tests.support.simulated_samplers import Lengths, SimulatedSamplers

NUM_GROUPS, ROWS = 1000, 50


def source_of(group_id: int, weights: tuple[int, ...]) -> int:
    return mixed_index(group_id, 3, [(Fraction(weight), ROWS) for weight in weights]) // ROWS


def assert_fair(weights: tuple[int, ...], speeds: list[float], *arguments: Any, **options: Any) -> None:
    """Asserts that no sampler's share of a source is more than three standard errors from the run's."""
    samplers = SimulatedSamplers(*arguments, speeds=dict(zip("abcd", speeds, strict=False)), **options)
    samplers.run(NUM_GROUPS)
    owners = [(name, source_of(g, weights)) for g, name in samplers.owners.items() if g < NUM_GROUPS]
    count_of = collections.Counter(owners)
    of_sampler = collections.Counter(name for name, _ in owners)
    of_source = collections.Counter(source for _, source in owners)
    assert set(of_sampler) == set(samplers.speeds)
    for name, source in itertools.product(of_sampler, of_source):
        share = of_source[source] / len(owners)
        variance = share * (1 - share) * (1 - of_sampler[name] / len(owners)) / of_sampler[name]
        assert abs(count_of[name, source] / of_sampler[name] - share) <= 3 * math.sqrt(variance)


def random_duration(weights: tuple[int, ...], ratio: float) -> Callable[[int], Lengths]:
    """Source s has completions that are ratio ** s as long."""
    rng = np.random.default_rng(0)
    return lambda group_id: rng.lognormal(0, 0.6, 1) * ratio ** source_of(group_id, weights)


SAMPLERS = pytest.mark.parametrize(
    ("weights", "speeds"),
    [((1, 1), [1, 0.5]), ((3, 1), [1, 1, 1, 1]), ((1, 1, 1), [1, 1, 1])],
)


@SAMPLERS
@pytest.mark.parametrize(("prompts", "staleness"), [(64, 0), (8, 1), (1, 3)])
@pytest.mark.parametrize("ratio", [1, 3])
def test_each_sampler_has_the_sources_of_the_run(
    weights: tuple[int, ...], speeds: list[float], prompts: int, staleness: int, ratio: float
) -> None:
    assert_fair(weights, speeds, prompts, staleness, draw=random_duration(weights, ratio))


@pytest.mark.parametrize(("prompts", "staleness"), [(64, 0), (8, 1), (1, 1)])
def test_two_samplers_that_take_turns_share_two_sources_that_take_turns(prompts: int, staleness: int) -> None:
    """All groups but the first take as long. With (1, 1) one becomes free whenever one is trained."""
    assert_fair((1, 1), [1, 1], prompts, staleness, draw=lambda group_id: np.full(1, 1.0 if group_id else 1.5))


@pytest.mark.parametrize("prompts", [2, 8])
def test_groups_in_the_place_of_dead_ones_alias_no_more_than_others(prompts: int) -> None:
    """Two groups of each batch are dead. Each is replaced when it arrives."""
    assert_fair((1, 1), [1, 1], prompts, 0, draw=lambda _: np.ones(1), is_dead=lambda g: g % (prompts + 2) < 2)


@SAMPLERS
@pytest.mark.parametrize("prompts", [2, 64])
def test_groups_of_an_earlier_start_leave_a_fair_rest(
    weights: tuple[int, ...], speeds: list[float], prompts: int
) -> None:
    assert_fair(weights, speeds, prompts, 1, draw=random_duration(weights, 3), is_kept=lambda g: g % 4 == 1)
