"""(d) A step at the shapes of Qwen2.5: seconds, share of the peak, memory beside plan's, packed over padded."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.paths import ROOT
from launcher.resources.machine import GIB
from tests.gpu.conftest import Record
from tests.support.own_process import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TOY = "1m-2x4-p64-c8"
_LARGE = "4x8-p384-c256"
_REAL = ("model.dtype=bfloat16", "model.gradient_checkpointing=true")
_WHOLE = 40 * GIB  # of a GPU that trains every weight of 1.5B; a smaller one trains adapters
_MFU_AIM = 0.35  # at 1.5B
_FASTER_AIM = 2.0
_MEMORY = 1.1  # of plan's estimate


def test_shared_prompts_are_faster_than_padded_rows_and_a_step_fits_in_what_plan_says(
    on_gpu: bool, tmp_path: Path, record_property: Record
) -> None:
    cell, settings = (f"qwen2.5-0.5b-{_LARGE}", _REAL) if on_gpu else (TOY, ())
    packed = measured(tmp_path, cell, settings)
    times = measured(tmp_path, cell, [*settings, "trainer.packing=separate"])["step_s"] / packed["step_s"]
    note(packed, record_property)
    record_property("packed over padded", f"{times:.1f} × as fast")
    assert not on_gpu or times >= _FASTER_AIM
    assert not on_gpu or fits(packed)


def test_a_step_of_one_and_a_half_billion_parameters(on_gpu: bool, tmp_path: Path, record_property: Record) -> None:
    if not on_gpu:
        pytest.skip("needs a GPU")
    whole = torch.cuda.get_device_properties(0).total_memory > _WHOLE
    record = measured(tmp_path, f"qwen2.5-1.5b-{_LARGE}", [*_REAL, f"lora.r={0 if whole else 16}"])
    note(record, record_property)
    assert fits(record)
    assert not whole or record["mfu"] is None or record["mfu"] >= _MFU_AIM


def measured(
    scratch: Path,
    cell: str,
    settings: Sequence[str] = (),
    launcher: Sequence[str] = (sys.executable,),
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The record of tools/benchmarks/trainer_step.py, which runs the trainer's own engine."""
    out, steps = scratch / "step.jsonl", ("3", "--warmup", "1") if cell == TOY else ("5", "--warmup", "2")
    program = str(ROOT / "tools" / "benchmarks" / "trainer_step.py")
    run([*launcher, program, "--cell", cell, "--steps", *steps, "--out", str(out), "--", *settings], env=env)
    return dict(json.loads(out.read_text().splitlines()[-1]))


def note(record: dict[str, Any], record_property: Record) -> None:
    mfu = "its peak is not known" if record["mfu"] is None else f"{100 * record['mfu']:.0f} % of the peak"
    record_property("a step", f"{record['step_s']:.2f} s, {mfu}")
    record_property("memory", f"{record['peak_memory_gib']:.1f} GiB, plan says {record['estimated_gib']:.1f} GiB")


def fits(record: dict[str, Any]) -> bool:
    """On a CPU the program itself is larger than a toy."""
    return bool(record["peak_memory_gib"] <= _MEMORY * record["estimated_gib"])
