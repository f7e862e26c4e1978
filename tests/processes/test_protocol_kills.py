"""Exactly once, in order, under SIGKILL at every failpoint of both processes."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from common.failpoints import FAILPOINTS
from common.paths import ROOT
from tests.support.protocol_kill import SAMPLER_POINTS, TRAINER_POINTS
from tests.support.tier import count

pytestmark = pytest.mark.timeout(0)  # the judge has a deadline of its own


def judged(kills: int, links: int, deadline_s: int, *more: str) -> dict[str, Any]:
    """What the judge found of a run with so many kills of processes and of links between them."""
    numbers = {"--kills": kills, "--links": links, "--deadline_s": deadline_s}
    command = [sys.executable, "-m", "tests.support.protocol_kill"]
    command += [*(str(word) for pair in numbers.items() for word in pair), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["kills"] == kills + links
    assert result["exactly_once_in_order"] and result["groups"] > 0
    assert result["leftovers"] == []
    return result


def test_only_points_inside_deepspeed_are_left_to_the_tests_with_deepspeed() -> None:
    assert set(FAILPOINTS) - set(TRAINER_POINTS) - set(SAMPLER_POINTS) == {"checkpoint.engine"}


def test_every_group_is_trained_exactly_once_and_in_order_whoever_is_killed_wherever(
    figure: Callable[[str, str], None],
) -> None:
    kills = count(30, 200)
    result = judged(kills, links=0, deadline_s=60 + kills)
    assert set(result["by_point"]) == {*TRAINER_POINTS, *SAMPLER_POINTS}
    assert result["begun_again"] == 0, "what a trainer had accepted is not sampled again"
    said = f"{result['groups']:,} groups, {kills} SIGKILLs"
    figure("R1", f"{said} at {len(result['by_point'])} points: 0 lost, 0 doubled, 0 sampled again")
    figure("R5", f"{said}: each by the version that it names, none too old")


def test_so_it_is_when_the_links_are_bad_and_are_killed_too_and_weights_do_not_come_again(
    figure: Callable[[str, str], None],
) -> None:
    kills, links = count(8, 40), count(6, 10)
    result = judged(kills, links, 120 + 2 * kills, "--rounds")
    assert result["by_point"]["links"] == links
    figure(
        "R1, R8",
        f"{kills} SIGKILLs of processes, {links} of links that lose, double and delay: {result['groups']:,} groups, "
        "0 lost, 0 doubled",
    )
