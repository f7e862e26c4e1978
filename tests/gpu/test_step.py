"""(d) A step at the shapes of Qwen2.5: seconds, share of the peak, memory beside plan's, packed over padded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_check.finding import Finding, judged
from gpu_check.running import run
from launcher.machine import GIB, ROOT

TOY = {"model": "1m", "groups": 2, "generations": 4, "prompt": 64, "completion": 8, "steps": 2, "warmup": 1}
_STEP = {"groups": 4, "generations": 8, "prompt": 384, "completion": 256, "steps": 3, "warmup": 2}
_SMALL: dict[str, Any] = {**_STEP, "model": "qwen2.5-0.5b", "gradient_checkpointing": True}
_LARGE: dict[str, Any] = {**_STEP, "model": "qwen2.5-1.5b", "gradient_checkpointing": True}
_WHOLE = 40 * GIB  # of a GPU that trains every weight of 1.5B; a smaller one trains adapters
_MFU_AIM = 0.35  # at 1.5B
_FASTER_AIM = 2.0
_MEMORY = 1.1  # of plan's estimate


def findings(on_gpu: bool, scratch: Path) -> Iterator[Finding]:
    name, small = ("0.5B", _SMALL) if on_gpu else ("1M", TOY)
    packed = measured(scratch, **small)
    yield from _said(name, packed, on_gpu)
    padded = measured(scratch, **small, packing="off")
    times = padded["step_s"]["median"] / packed["step_s"]["median"]
    is_fast = times >= _FASTER_AIM if on_gpu else None
    text = f"{times:.1f} × as fast; the aim on a GPU is {_FASTER_AIM:g}"
    yield judged("step", f"{name}, packed over padded", is_fast, text, times=times)
    if on_gpu:
        import torch

        whole = torch.cuda.get_device_properties(0).total_memory > _WHOLE
        large = measured(scratch, **_LARGE, lora=0 if whole else 16)
        yield from _said("1.5B" if whole else "1.5B, LoRA", large, on_gpu, _MFU_AIM if whole else None)


def measured(
    scratch: Path, launcher: Sequence[str] = (sys.executable,), env: Mapping[str, str] | None = None, **options: Any
) -> dict[str, Any]:
    """The record of tools/benchmarks/trainer_step.py, which runs the trainer's own engine."""
    out = scratch / "step.jsonl"
    words = [word for name, value in options.items() for word in _words(name, value)]
    program = str(ROOT / "tools" / "benchmarks" / "trainer_step.py")
    run([*launcher, program, "--no-publish", "--out", str(out), *words], env)
    return dict(json.loads(out.read_text().splitlines()[-1]))


def _words(name: str, value: Any) -> list[str]:
    option = "--" + name.replace("_", "-")
    return [option] if value is True else [option, str(value)]


def _said(what: str, record: dict[str, Any], on_gpu: bool, aim: float | None = None) -> Iterator[Finding]:
    """Memory is judged on a GPU alone: on a CPU the program itself is larger than a toy."""
    seconds, mfu = record["step_s"]["median"], record["mfu"]
    yield Finding("step", f"{what}, seconds", "figure", f"{seconds:.2f} s", record)
    if mfu is None:
        text = f"{record['device']} has no data sheet in launcher/compute_time.py"
        yield Finding("step", f"{what}, MFU", "skipped", text)
    else:
        text = f"{100 * mfu:.0f} % of the peak" + (f"; the aim is {100 * aim:.0f} %" if aim else "")
        yield judged("step", f"{what}, MFU", None if aim is None else mfu >= aim, text, mfu=mfu)
    peak, estimate = record["peak_memory_gib"], record["estimated_gib"]
    text = f"{peak:.1f} GiB, plan says {estimate:.1f} GiB"
    fits = peak <= _MEMORY * estimate if on_gpu else None
    yield judged("step", f"{what}, memory", fits, text, peak=peak, estimate=estimate)
