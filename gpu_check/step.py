"""(d) A step at the shapes of Qwen2.5: seconds, share of the peak, memory beside plan's, packed over padded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_check.finding import Finding, judged
from launcher.machine import GIB, ROOT

_TOY = {"model": "1m", "groups": 2, "generations": 2, "prompt": 32, "completion": 8, "steps": 2, "warmup": 1}
_STEP = {"groups": 4, "generations": 8, "prompt": 384, "completion": 256, "steps": 3, "warmup": 2}
_MFU_AIM = 0.35  # at 1.5B
_MEMORY = 1.1  # of plan's estimate


def findings(on_gpu: bool, scratch: Path) -> Iterator[Finding]:
    if not on_gpu:
        yield from _judged("toy step", _measured(scratch, **_TOY), on_gpu)
        return
    import torch

    whole = torch.cuda.get_device_properties(0).total_memory > 40 * GIB
    small = _measured(scratch, **_STEP, model="qwen2.5-0.5b", gradient_checkpointing=True)
    yield from _judged("0.5B", small, on_gpu)
    padded = _measured(scratch, **_STEP, model="qwen2.5-0.5b", gradient_checkpointing=True, packing="off")
    times = padded["step_s"]["median"] / small["step_s"]["median"]
    yield judged("step", "0.5B, packed over padded", times >= 2, f"{times:.1f} × as fast; the aim is 2", times=times)
    large = _measured(scratch, **_STEP, model="qwen2.5-1.5b", gradient_checkpointing=True, lora=0 if whole else 16)
    yield from _judged("1.5B" if whole else "1.5B, LoRA", large, on_gpu, aim=_MFU_AIM if whole else None)


def _measured(scratch: Path, **options: Any) -> dict[str, Any]:
    """The record of benchmarks/trainer_step.py, which runs the trainer's own engine."""
    out = scratch / "step.jsonl"
    words = [word for name, value in options.items() for word in _words(name, value)]
    program = [sys.executable, str(ROOT / "benchmarks" / "trainer_step.py"), "--no-publish", "--out", str(out)]
    done = subprocess.run([*program, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return dict(json.loads(out.read_text().splitlines()[-1]))


def _words(name: str, value: Any) -> list[str]:
    option = "--" + name.replace("_", "-")
    return [option] if value is True else [option, str(value)]


def _judged(what: str, record: dict[str, Any], on_gpu: bool, aim: float | None = None) -> Iterator[Finding]:
    seconds, mfu, peak = record["step_s"]["median"], record["mfu"], record["peak_memory_gib"]
    yield Finding("step", f"{what}, seconds", "figure", f"{seconds:.2f} s", record)
    if mfu is not None:
        ok = aim is None or mfu >= aim
        text = f"{100 * mfu:.0f} % of the data sheet" + (f"; the aim is {100 * aim:.0f} %" if aim else "")
        yield judged("step", f"{what}, MFU", ok, text, mfu=mfu)
    if on_gpu:
        estimate = record["estimated_gib"]
        text = f"{peak:.1f} GiB, plan says {estimate:.1f} GiB"
        yield judged("step", f"{what}, memory", peak <= _MEMORY * estimate, text, peak=peak, estimate=estimate)
