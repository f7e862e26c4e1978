"""Every collective that ZeRO 0 to 3 and our own ranks call, on two gloo ranks: which, and how many bytes.

gloo takes some of them with a GPU's tensors and refuses or crashes with others. A GPU is not needed to know which are
called: the calls are the same on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from model.dims import read_dims
from tests.support.collectives_worker import SHARDED
from tests.support.replay_worker import stack
from tests.support.tiny import VOCAB_SIZE, tiny_model, tiny_reward_model

# with CUDA tensors, by the source of ProcessGroupGloo in torch 2.13
WORKS = {
    "broadcast_",
    "allreduce_",
    "reduce_",
    "_allgather_base_",
    "_reduce_scatter_base_",
    "alltoall_base_",
    "barrier",
}
OURS = {"send", "recv_", "gather_"}  # of the trainer's own messages, which are always in CPU memory
PHASES = {"start", "loop", "step", "publish", "checkpoint", "overflow"}
WIDTH = {"float32": 4, "bfloat16": 2}
MICRO_BATCHES = 4
Rows = Sequence[dict[str, Any]]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = stack().folder / "collectives"
    tiny_reward_model(found / "critic", tiny_model(found / "model", vocab=VOCAB_SIZE))
    return found


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """What each rank called, by run."""
    return stack().seen("collectives_worker", folder.name, 2).ranks


@pytest.fixture(scope="module")
def parameters(folder: Path) -> int:
    dims = read_dims(str(folder / "model"), None)
    assert dims is not None
    return dims.parameters


def moved(rows: Rows, phase: str, dtype: str) -> int:
    """Bytes of the collectives on this dtype."""
    return sum(row["bytes"] for row in rows if (row["phase"], row["dtype"]) == (phase, dtype))


def test_only_collectives_that_gloo_takes_with_a_gpus_tensors_are_called(seen: list[dict[str, Any]]) -> None:
    runs = {name: rows for name, rows in seen[0].items() if name != "waits"}
    assert len(runs) == 2 * len(SHARDED) + 1
    for name, rows in runs.items():
        assert {row["phase"] for row in rows} >= PHASES, name
        assert {row["collective"] for row in rows if row["dtype"] != "uint8"} <= WORKS, name
        assert {row["collective"] for row in rows} <= WORKS | OURS, name


def test_deepspeed_does_not_wait_for_its_device_in_a_micro_batch(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["waits"] == 0


@pytest.mark.parametrize("dtype", list(WIDTH))
def test_zero_1_sends_all_gradients_once_a_step_and_zero_2_after_every_micro_batch(
    seen: list[dict[str, Any]], parameters: int, dtype: str
) -> None:
    """Gradients b·N, once or for each of K micro-batches; then the weights, b·N, in either."""
    whole = WIDTH[dtype] * parameters
    first = seen[0][f"{dtype}1"]
    assert moved(first, "micro-batch", dtype) == 0
    assert moved(first, "step", dtype) == pytest.approx(2 * whole, rel=1e-3)
    if 2 in SHARDED:  # with --all
        second = seen[0][f"{dtype}2"]
        assert moved(second, "micro-batch", dtype) == pytest.approx(MICRO_BATCHES * whole, rel=1e-3)
        assert moved(second, "step", dtype) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("dtype", list(WIDTH))
def test_zero_3_also_gathers_the_weights_in_every_micro_batch(
    seen: list[dict[str, Any]], parameters: int, dtype: str
) -> None:
    rows = [row for row in seen[0][f"{dtype}3"] if row["phase"] == "micro-batch" and row["dtype"] == dtype]
    of = {name: sum(row["bytes"] for row in rows if row["collective"] == name) for name in WORKS}
    whole = WIDTH[dtype] * parameters
    assert of["_reduce_scatter_base_"] == pytest.approx(MICRO_BATCHES * whole, rel=1e-3)
    assert of["_allgather_base_"] > (MICRO_BATCHES - 1) * whole  # some layers are still there from the one before
