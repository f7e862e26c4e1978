"""What rank 0 waits for all ranks wait for, with its reason and without a clock of their own."""

import pytest

from tests.support.gloo_data import VOCAB_SIZE
from tests.support.replay_worker import Trainers
from tests.support.slow_waits import VARIANTS, WAITS
from tests.support.tier import full
from tests.support.tiny import tiny_model, tiny_reward_model

pytestmark = pytest.mark.timeout(600)
SHORT = ("zero3",)


@pytest.mark.parametrize("variant", [name if name in SHORT else pytest.param(name, marks=full) for name in VARIANTS])
def test_no_wait_of_rank_0_outlasts_the_patience_of_the_others(trainers: Trainers, variant: str) -> None:
    tiny_reward_model(trainers.folder / "critic", tiny_model(trainers.folder / "of_critic", vocab=VOCAB_SIZE))
    seen = trainers.seen("tests.support.slow_waits", f"slow-{variant}", 2)
    assert seen.ranks == [{"waited": sorted(WAITS), "heard": []}, {"waited": [], "heard": list(WAITS)}]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_whose_imports_take_longer_than_the_others_limit_is_waited_for(trainers: Trainers, late: int) -> None:
    trainers.seen("tests.support.slow_waits", f"late-{late}", 2, "start_late")
