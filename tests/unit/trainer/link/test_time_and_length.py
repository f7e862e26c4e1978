"""What trains does not depend on how long it took: drawn lengths through the real ledger.

Samplers draw without seeds, as on an accelerator: a group that is drawn again has other lengths.
"""

import math

import numpy as np
import pytest

from tests.support.simulated_samplers import SimulatedSamplers
from tests.support.tier import count


def make_samplers(
    prompts: int, size: int, sigma: float, limit: int, staleness: int, speeds: dict[str, float]
) -> SimulatedSamplers:
    """Lengths are log-normal, cut at the limit."""
    rng = np.random.default_rng(0)
    return SimulatedSamplers(
        prompts, staleness, speeds, lambda _: np.ceil(np.minimum(rng.lognormal(5.5, sigma, size), limit))
    )


def true_mean(sigma: float, limit: int) -> float:
    """The mean of ⌈min(L, limit)⌉ = Σ_n P(L > n), with log L normal around 5.5."""
    total = 1.0  # n = 0
    for n in range(1, limit):
        total += math.erfc((math.log(n) - 5.5) / (sigma * math.sqrt(2))) / 2
    return total


BATCHES = pytest.mark.parametrize(
    ("prompts", "size", "sigma", "limit"),
    [(16, 8, 0.8, 4096), (64, 8, 0.8, 4096), (16, 8, 1.2, 8192), (8, 4, 1.2, 16384)],
)


@pytest.mark.parametrize("speeds", [{"a": 1.0, "b": 0.25}, {"a": 1.0, "b": 1.0, "c": 0.5}])
@pytest.mark.parametrize("staleness", [0, 1])
@BATCHES
def test_trained_completions_are_as_long_as_drawn_ones(
    prompts: int, size: int, sigma: float, limit: int, staleness: int, speeds: dict[str, float]
) -> None:
    samplers = make_samplers(prompts, size, sigma, limit, staleness, speeds)
    samplers.run(max(20 * prompts, 3200))
    trained = samplers.trained(samplers.accepted)
    drawn = samplers.trained(samplers.first_draws)
    standard_error = drawn.std() / math.sqrt(drawn.size)
    assert abs(trained.mean() - drawn.mean()) <= min(0.003 * drawn.mean(), standard_error)
    of_mean = trained.mean(1).std() / math.sqrt(len(trained))
    assert abs(trained.mean() - true_mean(sigma, limit)) <= 3 * of_mean


@BATCHES
def test_groups_that_a_lost_sampler_had_begun_are_drawn_again_and_counted(
    prompts: int, size: int, sigma: float, limit: int
) -> None:
    """One of two samplers is killed in each batch. Short groups were finished before, so the mean falls."""
    samplers = make_samplers(prompts, size, sigma, limit, 0, {"a": 1.0, "b": 1.0})
    num_begun = 0
    for num_finished in np.random.default_rng(1).integers(1, prompts, count(200, 1500)):
        for number in range(prompts):
            if number == num_finished:
                num_begun += len(samplers.ledger.by_sampler().get("b", []))
                samplers.lose("b")
            samplers.finish_next_group()
    assert samplers.ledger.redrawn == num_begun
    lengths = samplers.trained(samplers.accepted)
    change = lengths.mean() / true_mean(sigma, limit) - 1
    print(f"{prompts} × {size}, sigma {sigma}: drawn again {num_begun / len(lengths):.1%}, mean length {change:+.1%}")
    assert -0.12 < change < 0.0
