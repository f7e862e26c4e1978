"""The benchmark of the control plane runs: samplers join, are killed and come back, and every group comes once."""

from __future__ import annotations

import pytest

from tools.benchmarks import control_plane

pytestmark = pytest.mark.timeout(240)


def test_every_group_comes_once_while_samplers_are_killed() -> None:
    found = control_plane.run(samplers=4, rate=100.0, seconds=2.0, kills=4)  # it asserts each group, in order
    assert found["groups_per_s"] > 0 and found["link_us_per_group"] > 0
    assert set(found["counters"]) <= {"refused/duplicate", "refused/trained", "unsent"}


def test_a_trainer_that_is_started_again_finds_all_its_samplers() -> None:
    found = control_plane.restart(samplers=4, rate=100.0)
    assert 0 < found["all_known_s"] <= found["first_batch_s"]
