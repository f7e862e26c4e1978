"""(d) A step at the shapes of Qwen2.5: seconds, share of the peak, memory; shared prompts and compiled layers.

Separate rows have 1.8 times the FLOPs of shared prompts at 384 + 8 × 256 tokens, 2.8 times at 1,024 + 8 × 256. Shared
prompts must save nine tenths of that in seconds.
"""

import functools
import math
import os
import sys
from typing import Any

import pytest
import torch

from launcher.resources.machine import GIB
from tests.gpu.conftest import Row, json_lines
from tools.benchmarks.cells import forward_flops, named

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TOY = "1m-2x4-p64-c8"
_LARGE, _LONG = "16x8-p384-c256", "8x8-p1024-c256"
# Shape: GiB of a GPU for a step at all, to train every weight, to keep activations; share of the peak.
_SIZES = {
    "qwen2.5-0.5b": (0, 0, 40, 0.25),
    "qwen2.5-1.5b": (0, 40, 70, 0.35),
    "qwen2.5-7b": (30, math.inf, math.inf, 0.0),
}
_GAIN = 0.9  # of the ratio of FLOPs
_MEMORY = 1.1  # of plan's estimate


@pytest.mark.parametrize("shape", _SIZES)
def test_a_step_has_its_share_of_the_peak_and_fits_in_what_plan_says(shape: str, on_gpu: bool, row: Row) -> None:
    needed, *_, share = _SIZES[shape]
    if (on_gpu and _gib() < needed) or (not on_gpu and shape == "qwen2.5-1.5b"):
        pytest.skip(f"needs a GPU of {needed} GiB" if needed else "needs a GPU")
    settings = _settings(shape, on_gpu)
    note(measured(f"{shape}-{_LARGE}" if on_gpu else TOY, *settings), row, 0.0 if "lora.r=16" in settings else share)


@pytest.mark.parametrize(
    ("batch", "slower"),
    [(_LARGE, "packing=separate"), (_LONG, "packing=separate"), (_LARGE, "compile_layers=false")],
)
def test_shared_prompts_and_compiled_layers_are_faster(batch: str, slower: str, on_gpu: bool, row: Row) -> None:
    if not on_gpu and (batch, slower) != (_LARGE, "packing=separate"):
        pytest.skip("needs a GPU")
    cell, settings = named(f"qwen2.5-0.5b-{batch}" if on_gpu else TOY), _settings("qwen2.5-0.5b", on_gpu)
    ours, other = (measured(cell.name, *settings, *more)["step_s"] for more in ([], [f"trainer.{slower}"]))
    separate = cell._replace(prompts=cell.prompts * cell.generations, generations=1)
    least = _GAIN * forward_flops(separate) / forward_flops(cell) if "packing" in slower else 0.0
    text = f"default {other / ours:.2f} × as fast, {ours:.2f} s beside {other:.2f}"
    row(f"{cell.name}, {slower}", text, f"≥ {least:.2f} ×" if least else "", other / ours >= least)


@functools.cache
def measured(cell: str, *settings: str, launcher: tuple[str, ...] = (sys.executable,)) -> dict[str, Any]:
    """The record of tools/benchmarks/trainer_step.py, which runs the trainer's own engine."""
    steps = ("3", "--warmup", "1") if cell == TOY else ("5", "--warmup", "2")
    words = ["tools/benchmarks/trainer_step.py", "--cell", cell, "--steps", *steps, "--out", os.devnull]
    return json_lines(*launcher, *words, "--", *settings)[-1]


def note(record: dict[str, Any], row: Row, share: float = 0.0) -> None:
    mfu, memory, planned = record["mfu"], record["peak_memory_gib"], record["estimated_gib"]
    row(f"{record['cell']}, a step", f"{record['step_s']:.2f} s")
    limit = f"≥ {100 * share:.0f} % of the peak" if share else ""
    row("its MFU", f"{100 * mfu:.1f} %" if mfu else "its peak is not known", limit, mfu is None or mfu >= share)
    fits = memory <= _MEMORY * planned
    row("its memory", f"{memory:.1f} GiB, plan says {planned:.1f} GiB", f"≤ {_MEMORY} × plan's", fits)


def _settings(shape: str, on_gpu: bool) -> list[str]:
    """Returns settings that fit this GPU; on a CPU those of the smallest GPU."""
    _, whole, keeping, _ = _SIZES[shape]
    found = ["model.dtype=bfloat16"] if on_gpu else []
    found += ["lora.r=16"] if _gib() < whole else []
    return [*found, "model.gradient_checkpointing=true"] if _gib() < keeping else found


def _gib() -> float:
    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else 0
