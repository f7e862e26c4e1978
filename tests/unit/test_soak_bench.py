"""What tools/benchmarks/soak.py says of a run, by hand. The soak itself is run by its command."""

from __future__ import annotations

import pytest

from tools.benchmarks.soak import GIB, Kill, Life, tables, violations

# Killed at second 100 after step 7 with checkpoint 5: steps 6 and 7 are trained again, at 120 and 130.
LINES = [{"step": s, "time": t} for s, t in [(1, 10), (2, 20), (3, 30), (4, 40), (5, 50), (6, 120), (7, 130), (8, 140)]]
KILL = Kill("trainer", minute=1.7, at=100.0, step=7, checkpoint=5)


def test_steps_that_are_trained_again_are_counted_from_the_first_line_after_the_kill() -> None:
    assert KILL.trained_again(LINES) == 2
    sampler = Kill("sampler", minute=2.1, at=125.0, step=6, checkpoint=5)
    assert sampler.trained_again(LINES) == 0
    assert Kill("sampler", minute=3.0, at=150.0, step=8, checkpoint=5).trained_again(LINES) == 0  # nothing followed


def test_a_run_that_lost_no_more_than_its_checkpoint_allows_is_right() -> None:
    assert violations(0, 8, [KILL], LINES) == []


@pytest.mark.parametrize(
    ("code", "max_steps", "kill", "said"),
    [
        (75, 8, KILL, "ended with 75"),
        (0, 9, KILL, "every step once"),
        (0, 8, Kill("trainer", 1.7, 100.0, step=7, checkpoint=6), "before the newest checkpoint"),
    ],
)
def test_what_does_not_hold_is_said(code: int, max_steps: int, kill: Kill, said: str) -> None:
    (sentence,) = violations(code, max_steps, [kill], LINES)
    assert said in sentence


def test_growth_compares_the_ends_of_what_follows_the_first_five_steps() -> None:
    # step 3 is its first; from step 9 on it is settled: 100 in the first two of ten readings, 103 in the last two
    sizes = [100, 100, 101, 101, 101, 102, 102, 102, 103, 103]
    life = Life("sampler", [(3, 10), (8, 50), *((9 + i, size) for i, size in enumerate(sizes))])
    assert life.growth() == pytest.approx(0.03)
    assert Life("sampler", [(3, 10), (8, 50)]).growth() is None


def test_the_tables_name_every_kill_and_every_process() -> None:
    text = tables([KILL], [Life("trainer", [(0, GIB), (7, 2 * GIB)]), Life("trainer", [(7, GIB)])], LINES)
    assert "| 2 | trainer | 7 | 5 | 2 steps |" in text
    assert "| trainer | 0–7 | 2.00 GiB | too short |" in text and "| trainer | 7–7 | 1.00 GiB | too short |" in text
