"""Exactly once, in order, under SIGKILL at every failpoint of both processes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.failpoints import FAILPOINTS
from tests.support.own_process import in_processes
from tests.support.protocol_kill import SAMPLER_POINTS, TRAINER_POINTS, judge
from tests.support.tier import count

pytestmark = pytest.mark.timeout(0)  # the judge has a deadline of its own


def judged(folder: Path, kills: int, links: int, deadline_s: int, rounds: bool = False) -> dict[str, Any]:
    """What the judge found of a run with so many kills of processes and of links between them."""
    [result] = in_processes(partial(judge, folder, kills, links, deadline_s, rounds))
    assert result["kills"] == kills + links
    assert result["exactly_once_in_order"] and result["groups"] > 0
    assert result["leftovers"] == []
    return dict(result)


def test_only_points_inside_deepspeed_are_left_to_the_tests_with_deepspeed() -> None:
    assert set(FAILPOINTS) - set(TRAINER_POINTS) - set(SAMPLER_POINTS) == {"checkpoint.engine"}


def test_every_group_is_trained_exactly_once_and_in_order_whoever_is_killed_wherever(
    folder: Path, figure: Callable[[str, str], None]
) -> None:
    kills = count(30, 200)
    result = judged(folder, kills, links=0, deadline_s=60 + kills)
    assert set(result["by_point"]) == {*TRAINER_POINTS, *SAMPLER_POINTS}
    assert result["begun_again"] == 0, "what a trainer had accepted is not sampled again"
    said = f"{result['groups']:,} groups, {kills} SIGKILLs"
    figure("R1", f"{said} at {len(result['by_point'])} points: 0 lost, 0 doubled, 0 sampled again")
    figure("R5", f"{said}: each by the version that it names, none too old")


def test_so_it_is_when_the_links_are_bad_and_are_killed_too_and_weights_do_not_come_again(
    folder: Path, figure: Callable[[str, str], None]
) -> None:
    kills, links = count(8, 40), count(6, 10)
    result = judged(folder, kills, links, 120 + 2 * kills, rounds=True)
    assert result["by_point"]["links"] == links
    figure(
        "R1, R8",
        f"{kills} SIGKILLs of processes, {links} of links that lose, double and delay: {result['groups']:,} groups, "
        "0 lost, 0 doubled",
    )
