"""R13: nobody waits for ever and nothing is left behind, whoever is killed, stopped, interrupted, absent or stuck.

The supervisor alone, with programs that know nothing of the protocol, is in test_supervisor.py.
"""

from collections.abc import Callable
from functools import partial

import pytest

from tests.support import tier
from tests.support.ending_processes import NUM_STEPS
from tests.support.endings import LONG, SHORT, Ending, Scenario, run_all
from tests.support.own_process import in_processes

pytestmark = pytest.mark.timeout(0)  # each scenario has a limit of its own

CHOSEN = LONG if tier.ALL else SHORT


@pytest.fixture(scope="module")
def endings() -> dict[str, Ending]:
    """By the scenario's name."""
    [found] = in_processes(partial(run_all, CHOSEN))
    return {ending.name: ending for ending in found}


def verdict(scenario: Scenario, ending: Ending) -> str:
    """What is wrong with how it ended; "" if nothing."""
    if ending.code is None:
        return f"still running after {ending.seconds} s"
    if ending.code not in (scenario.code, scenario.or_code):
        return f"exit code {ending.code}, expected {scenario.code}"
    if ending.is_late:
        return f"took {ending.seconds} s, {scenario.within_s} would be in time on the reference machine"
    if ending.left:
        return f"left behind: {ending.left}"
    if scenario.is_saved and ending.saved != ending.steps:
        return f"{ending.steps} steps were made and {ending.saved} saved"
    if scenario.code == 0 and ending.steps != NUM_STEPS:
        return f"{ending.steps} steps in metrics.jsonl, expected {NUM_STEPS}"
    return ""


@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
def test_it_ends_in_time_with_its_code_and_leaves_nothing(scenario: Scenario, endings: dict[str, Ending]) -> None:
    ending = endings[scenario.name]
    problem = verdict(scenario, ending)
    assert not problem, f"{problem}\n{ending.log}"


def test_all_of_them_in_one_figure(endings: dict[str, Ending], figure: Callable[[str, str], None]) -> None:
    good = sum(not verdict(scenario, endings[scenario.name]) for scenario in CHOSEN)
    clean = [endings[s.name].seconds for s in CHOSEN if s.code == 130 and "frozen" not in s.name]
    figure("R13", f"{good} of {len(CHOSEN)} endings right and clean; after an interrupt at most {max(clean):.1f} s")
    assert good == len(CHOSEN)
