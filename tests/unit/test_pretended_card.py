"""Attention's kernels, compiled by torch and Triton for cards that are not there. No kernel runs.

`--all` compiles cases of all pairs of card, heads, dtype, options and length. docs/gpu.md has a table of them.
"""

import re
from functools import cache
from typing import Any

import pytest

from tests.support import pretended_card, simulated_device
from tests.support.pretended_card import ROOT, cells
from tests.support.pretended_card.cells import Cell, covering_cells
from tests.support.pretended_card.damages import COMPILED
from tests.support.pretended_card.table import row_of
from tests.support.tier import full

pytestmark = pytest.mark.timeout(600)
LONG = 20_000  # tokens

if reason := pretended_card.missing():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def compile_cells(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function from a card and cells to what happens to each."""

    def run(card: str, chosen: list[Cell], **more: Any) -> list[dict[str, Any]]:
        request = cells.request(card, chosen) | more
        return pretended_card.run("compiles", request, simulated_device.library(), tmp_path_factory.mktemp("card"))

    return run


DEFAULT = cells.by_card(cells.cells_of_default_tier())


@pytest.mark.parametrize("card", DEFAULT)
def test_attention_is_compiled_for_a_card(card: str, compile_cells: Any) -> None:
    found = compile_cells(card, DEFAULT[card])
    for cell, result in zip(DEFAULT[card], found, strict=True):
        assert result["outcome"] == "fits", (str(cell), result)
    _assert_no_mask_is_written_out(found)


@full
@pytest.mark.parametrize("card", cells.FACTORS["card"][1:])
def test_head_and_objective_are_compiled_for_a_card(card: str, compile_cells: Any) -> None:
    found = compile_cells(card, [], head_and_objective=["bfloat16", "float32"])
    for result in found:
        assert result["outcome"] == "fits" and result["kernels"]
        assert not any(kernel["is_refused"] for kernel in result["kernels"])


@full
@pytest.mark.parametrize("card", cells.FACTORS["card"])
def test_no_case_dies_and_each_of_the_page_is_as_it_says(card: str, compile_cells: Any) -> None:
    chosen = cells.by_card(covering_cells())[card]
    found = compile_cells(card, chosen)
    for cell, result in zip(chosen, found, strict=True):
        assert result["outcome"] in ("fits", "by group", "refused"), (str(cell), result)
        row = _without_registers(row_of(result))
        assert row == _page_rows()[str(cell)]
    _assert_no_mask_is_written_out(found)


def test_at_most_120_cases_have_all_pairs_and_the_page_has_them() -> None:
    chosen = covering_cells()
    assert len(chosen) <= 120
    assert set(_page_rows()) == {str(cell) for cell in chosen}
    pairs = {pair for cell in chosen for pair in cells.pairs({name: getattr(cell, name) for name in cells.FACTORS})}
    sizes = [len(values) for values in cells.FACTORS.values()]
    assert len(pairs) == (sum(sizes) ** 2 - sum(size**2 for size in sizes)) // 2


@full
@pytest.mark.parametrize("damage", COMPILED)
def test_a_fault_that_keeps_a_kernel_from_compiling_is_found(damage: str, compile_cells: Any) -> None:
    card, size, length = ("9.0", 64, "short") if "short rows" in damage else ("8.6", 256, "long")
    cell = Cell(card, size, 4, "bfloat16", "full", length, False, "attention alone")
    [wrong] = compile_cells(cell.card, [cell], damage=damage)
    assert wrong["outcome"] == "by group"


@full  # test_compiled_layers.py counts graphs in each run, without kernels
@pytest.mark.parametrize(("layer", "kind", "most"), [("layer", "full", 4), ("layer with LoRA", "window", 4)])
def test_rows_of_twenty_lengths_need_the_graphs_of_the_first_two(
    layer: str, kind: str, most: int, compile_cells: Any
) -> None:
    """The first row has one block of the mask, for which torch compiles apart, and the others have several."""
    cell = Cell("9.0", 64, 2, "bfloat16", kind, "short", True, layer)
    [found] = compile_cells("9.0", [cell], num_lengths=20)
    assert found["graphs"][1:] == [found["graphs"][1]] * 19
    assert 1 <= found["graphs"][-1] <= most
    assert found["outcome"] == "fits"


def _assert_no_mask_is_written_out(found: list[dict[str, Any]]) -> None:
    for result in found:
        if result["cell"]["length"] == "long":
            assert result["largest_buffer"] < LONG * LONG / 2, result


@cache
def _page_rows() -> dict[str, list[str]]:
    """Returns what docs/gpu.md says of each case, without registers and spills, which come with the assembler alone."""
    lines = (ROOT / "docs" / "gpu.md").read_text().splitlines()
    rows = [[entry.strip() for entry in line.strip("|").split("|")] for line in lines if re.match(r"\| \d+\.\d ", line)]
    return {", ".join(row[:8]): _without_registers(row) for row in rows}


def _without_registers(row: list[str]) -> list[str]:
    return [entry.partition(";")[0] for entry in row]
