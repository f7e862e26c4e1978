"""Which groups of a batch of rollouts stand in which optimizer step."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from common.config import Config
from tests.support.configs import config_of
from trainer.data.mini_batches import steps


def config(prompts: int, mini_batches: int, passes: int, shuffle: bool = False, seed: int = 0) -> Config:
    settings = {"steps_per_generation": mini_batches, "num_iterations": passes, "shuffle_mini_batches": shuffle}
    trainer = {"prompts_per_step": prompts, "max_steps": 3 * mini_batches * passes}
    return config_of(run={"seed": seed}, algorithm=settings, trainer=trainer)


def test_without_mini_batches_a_batch_is_one_step() -> None:
    (step,) = steps(config(3, 1, 1), batch=7)
    assert (step.iteration, step.mini_batch, step.places, step.is_last) == (0, 0, (0, 1, 2), True)


def test_in_order_a_pass_trains_the_groups_as_the_stream_has_them() -> None:
    planned = steps(config(2, 2, 2), batch=7)
    assert [(s.iteration, s.mini_batch) for s in planned] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [s.places for s in planned] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert [s.is_last for s in planned] == [False, False, False, True]


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 3), st.integers(-(2**70), 2**70), st.integers(0, 10**6))
def test_shuffled_every_group_is_once_in_every_pass(
    prompts: int, mini_batches: int, passes: int, seed: int, batch: int
) -> None:
    planned = steps(config(prompts, mini_batches, passes, shuffle=True, seed=seed), batch)
    assert len(planned) == mini_batches * passes
    for _, of_pass in itertools.groupby(planned, key=lambda s: s.iteration):
        parts = [s.places for s in of_pass]
        assert [len(part) for part in parts] == [prompts] * mini_batches
        assert sorted(itertools.chain(*parts)) == list(range(prompts * mini_batches))


def test_shuffling_is_a_function_of_seed_batch_and_pass_alone() -> None:
    def dealt(seed: int, batch: int) -> list[tuple[int, ...]]:
        return [s.places for s in steps(config(8, 4, 2, shuffle=True, seed=seed), batch)]

    assert dealt(0, 5) == dealt(0, 5)
    first, second = dealt(0, 5)[:4], dealt(0, 5)[4:]
    assert first != second, "each pass deals anew"
    assert dealt(0, 5) != dealt(0, 6)
    assert dealt(0, 5) != dealt(1, 5)


def test_sizes_follow_from_mini_batches_and_no_groups_are_left_after_the_last_batch_or_beyond_it() -> None:
    """Beyond it: a run of 4 batches is resumed with trainer.max_steps for 3."""
    c = config(8, 4, 2)
    assert (c.prompts_per_batch, c.algorithm.steps_per_batch, c.num_batches) == (32, 8, 3)
    assert [c.groups_after(batch) for batch in range(5)] == [96, 64, 32, 0, 0]
