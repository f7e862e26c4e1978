"""Kernels that torch generates for cards that are not there, executed by Triton's interpreter, beside the CPU's way.

What is executed is the product's: attention with its mask, compiled decoder layers, the head and the objective.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import pretended_card, simulated_device
from tests.support.pretended_card.cases import DEFAULT, FULL, SINKS_AND_WINDOW, Case
from tests.support.pretended_card.damages import EXECUTED
from tests.support.tier import full

pytestmark = pytest.mark.timeout(600)

if reason := pretended_card.missing():
    pytest.skip(reason, allow_module_level=True)

Execute = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def execute(tmp_path_factory: pytest.TempPathFactory) -> Execute:
    """Returns a function from a case to its errors."""

    def run(case: Case, **more: Any) -> dict[str, Any]:
        request = {"card": case.card, "cases": [case.request]} | more
        folder = tmp_path_factory.mktemp("card")
        library = simulated_device.library()
        [found] = pretended_card.run("executes", request, library, folder)
        return dict(found)

    return run


@pytest.mark.parametrize("name", [*DEFAULT, *(pytest.param(name, marks=full) for name in FULL)])
def test_generated_kernels_have_the_values_and_gradients_of_the_cpu(name: str, execute: Execute) -> None:
    case = (DEFAULT | FULL)[name]
    found = execute(case)
    assert "raised" not in found, found
    assert found["compiled"] and 1 <= found["graphs"] <= case.most_graphs, found
    assert max(found["errors"].values()) < case.bound, found


@full
@pytest.mark.parametrize("damage", EXECUTED)
def test_damage_of_the_attention_is_found_by_its_values(damage: str, execute: Execute) -> None:
    found = execute(SINKS_AND_WINDOW, damage=damage)
    assert "raised" in found or max(found["errors"].values()) > 10 * SINKS_AND_WINDOW.bound, found
