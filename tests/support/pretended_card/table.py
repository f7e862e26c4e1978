"""Makes the table of docs/gpu.md: what happens to attention on cards that are not there.

python -m tests.support.pretended_card.table compiles       bytes of shared memory, registers, spills of each case
python -m tests.support.pretended_card.table executes       errors of what is executed
python -m tests.support.pretended_card.table blocks         other blocks and stages
"""

import itertools
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support import pretended_card, simulated_device
from tests.support.pretended_card import cells
from tests.support.pretended_card.cases import CASES
from tests.support.pretended_card.cells import FACTORS, Cell, covering_cells

HEADINGS = ("card", "head size", "heads per key head", "dtype", "options", "row", "forks", "compiled")
PROCESSES_AT_ONCE = 2


def row_of(result: dict[str, Any]) -> list[str]:
    """Returns a row of the table for what `compiles` printed of a cell."""
    cell = result["cell"]
    kernels = {kernel["name"]: kernel for kernel in result["kernels"]}  # the last of a name is what is used
    forward = [kernel for name, kernel in kernels.items() if "backward" not in name]
    backward = [kernel for name, kernel in kernels.items() if "backward" in name]
    return [*(str(cell[name]) for name in FACTORS), result["outcome"], _text(forward), _text(backward)]


def _text(kernels: list[dict[str, Any]]) -> str:
    """Returns "52,736 B; 168, 0": bytes of shared memory; registers, and spilled bytes, of a thread."""
    if not kernels:
        return "–"
    largest = max(kernels, key=lambda kernel: kernel["shared_memory"])
    text = f"{largest['shared_memory']:,} B"
    if largest["registers"] is not None:
        text += f"; {largest['registers']}, {largest['spilled']}"
    return text


def _in_parallel(module: str, requests: list[dict[str, Any]], **environment: str) -> list[Any]:
    library = simulated_device.library()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PROCESSES_AT_ONCE) as pool:

        def run(given: tuple[int, dict[str, Any]]) -> list[Any]:
            index, request = given
            own = Path(folder, str(index))
            found = pretended_card.run(module, request, library, own, **environment)
            print(f"{module}: {index + 1} of {len(requests)}", file=sys.stderr, flush=True)
            return found

        return [line for lines in pool.map(run, enumerate(requests)) for line in lines]


def compiles() -> None:
    """Prints the table of all cells."""
    requests = [cells.request(card, chosen) for card, chosen in cells.by_card(covering_cells()).items()]
    print(_line((*HEADINGS, "outcome", "forward", "backward")))
    print(_line(["---"] * (len(HEADINGS) + 3)))
    for result in _in_parallel("compiles", requests, TANDEM_TEST_PTXAS="1"):
        print(_line(row_of(result)))


def executes() -> None:
    """Prints the table of what is executed."""
    requests = [{"card": case.card, "cases": [case.request]} for case in CASES.values()]
    print(_line(("executed", "card", "value", "largest error of a gradient", "graphs")))
    print(_line(["---"] * 5))
    for name, result in zip(CASES, _in_parallel("executes", requests), strict=True):
        errors = result["errors"]
        largest = max(error for of, error in errors.items() if of != "value")
        print(_line((name, CASES[name].card, f"{errors['value']:.0e}", f"{largest:.0e}", str(result["graphs"]))))


def blocks() -> None:
    """Prints what attention's kernels need with blocks of torch's own choice, and with others."""
    options = {"kernel_options": [{}, *_alternatives()]}
    requests = []
    for card in ("8.0", "8.6", "9.0"):
        chosen = [Cell(card, size, 2, "bfloat16", "full", "long", False, "attention alone") for size in (64, 128)]
        requests.append(cells.request(card, chosen) | options)
    print(_line(("card", "head size", "blocks", "stages", "forward", "backward")))
    print(_line(["---"] * 6))
    for result in _in_parallel("compiles", requests, TANDEM_TEST_PTXAS="1"):
        options = result["kernel_options"]
        block = str(options.get("fwd_BLOCK_M", "torch's"))
        stages = str(options.get("fwd_num_stages", "torch's"))
        card, size, *_, outcome, forward, backward = row_of(result)
        if outcome != "fits":
            forward, backward = forward + " " + outcome, backward + " " + outcome
        print(_line((card, size, block, stages, forward, backward)))


def _alternatives() -> list[dict[str, int]]:
    """Returns FlexAttention's options for square blocks and numbers of stages, in both directions."""
    found = []
    for block, stages in itertools.product((32, 64, 128), (1, 2, 3)):
        options = {"fwd_BLOCK_M": block, "fwd_BLOCK_N": block, "fwd_num_stages": stages, "bwd_num_stages": stages}
        for name in ("M1", "N1", "M2", "N2"):
            options[f"bwd_BLOCK_{name}"] = block
        found.append(options)
    return found


def _line(entries: Any) -> str:
    return "| " + " | ".join(entries) + " |"


if __name__ == "__main__":
    {"compiles": compiles, "executes": executes, "blocks": blocks}[sys.argv[1]]()
