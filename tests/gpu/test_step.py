"""(d) A step at the shapes of Qwen2.5: seconds, share of the peak, memory; shared prompts and compiled layers.

Separate rows have 1.8 times the FLOPs of shared prompts at 384 + 8 × 256 tokens, 2.8 times at 1,024 + 8 × 256. Shared
prompts must save nine tenths of that in seconds.

A share of the peak below the best that others have published for one GPU is a failure. A share below
our own goal is only said. Published, on one GPU, with rows of up to 16,384 tokens:

    prime-rl    Qwen3-0.6B, H100, RL, recomputation    11.1 %, 11,896 tokens/s (A6000: 10.9 %, 3,687)
    TRL         1.7B, AsyncGRPO (pull request 6092)     9.0 %, 7,282 tokens/s
"""

import functools
import math
import os
import sys
from typing import Any, NamedTuple

import pytest
import torch

from launcher.resources.machine import GIB
from tests.gpu.conftest import Row, json_lines
from tools.benchmarks.cells import forward_flops, named

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TOY = "1m-2x4-p64-c8"
_LARGE, _LONG = "16x8-p384-c256", "8x8-p1024-c256"


class Size(NamedTuple):
    """What a step of a shape needs, in GiB of a GPU, and the shares of the peak that it is measured by."""

    for_adapters: float
    for_every_weight: float
    for_activations: float  # to keep all of them
    published: float = 0.0  # the best of others, for a model of about this size
    goal: float = 0.0


_SIZES = {
    "qwen2.5-0.5b": Size(0, 0, 40, published=0.111, goal=0.25),
    "qwen2.5-1.5b": Size(0, 40, 70, published=0.09, goal=0.35),
    "qwen2.5-7b": Size(30, math.inf, math.inf),
}
_GAIN = 0.9  # of the ratio of FLOPs
_MEMORY = 1.1  # of plan's estimate


@pytest.mark.parametrize("shape", _SIZES)
def test_a_step_has_its_share_of_the_peak_and_fits_in_what_plan_says(shape: str, on_gpu: bool, row: Row) -> None:
    size = _SIZES[shape]
    if on_gpu and _gib() < size.for_adapters:
        pytest.skip(f"needs a GPU of {size.for_adapters} GiB")
    if not on_gpu and shape == "qwen2.5-1.5b":
        pytest.skip("needs a GPU")
    settings = _settings(shape, on_gpu)
    if "lora.r=16" in settings:
        size = size._replace(published=0.0, goal=0.0)
    record = measured(f"{shape}-{_LARGE}" if on_gpu else TOY, *settings)
    note(record, row, size.published, size.goal)


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


def note(record: dict[str, Any], row: Row, published: float = 0.0, goal: float = 0.0) -> None:
    """Adds the rows of a step. Its share of the peak must reach `published`, and says whether it reaches `goal`."""
    mfu, memory, planned = record["mfu"], record["peak_memory_gib"], record["estimated_gib"]
    row(f"{record['cell']}, a step", f"{record['step_s']:.2f} s")
    if mfu is None:
        row("its MFU", "its peak is not known")
    else:
        row("its MFU", *_share_of_peak(mfu, published, goal))
    fits = memory <= _MEMORY * planned
    row("its memory", f"{memory:.1f} GiB, plan says {planned:.1f} GiB", f"≤ {_MEMORY} × plan's", fits)


def _share_of_peak(mfu: float, published: float, goal: float) -> tuple[str, str, bool]:
    """Returns the row's text, the limit, and whether it is kept."""
    text = f"{100 * mfu:.1f} %"
    if goal and mfu < goal:
        text += f", below our goal of {100 * goal:.0f} %"
    limit = f"≥ {100 * published:.1f} %, published by others" if published else ""
    return text, limit, mfu >= published


def _settings(shape: str, on_gpu: bool) -> list[str]:
    """Returns settings that fit this GPU; on a CPU those of the smallest GPU."""
    size = _SIZES[shape]
    found = []
    if on_gpu:
        found.append("model.dtype=bfloat16")
    if _gib() < size.for_every_weight:
        found.append("lora.r=16")
    if _gib() < size.for_activations:
        found.append("model.gradient_checkpointing=true")
    return found


def _gib() -> float:
    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else 0
