"""model.dtype: auto, the dtype that this machine multiplies fastest.

bfloat16 on a GPU, and on a processor that multiplies it twice as fast as float32: one with AMX, or AMD's AVX-512-BF16.
Elsewhere float32: an Intel Xeon with AVX-512-BF16 alone was slower with bfloat16, and without any such instruction it
is emulated. A resumed run keeps the dtype that it began with, whatever machine it goes on on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16"]

_CPUINFO = Path("/proc/cpuinfo")
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # NVIDIA's, and its place in Windows' Linux


def decide_dtype(settings: Mapping[str, Any]) -> Dtype | None:
    """What `auto` in these unchecked settings means here; None where they do not say auto."""
    model = settings.get("model")
    if not isinstance(model, Mapping) or model.get("dtype") != "auto":
        return None
    return _begun_with(settings.get("run")) or native_dtype()


def native_dtype() -> Dtype:
    if any(driver.exists() for driver in _DRIVERS):
        return "bfloat16"
    said = _CPUINFO.read_text(errors="replace") if _CPUINFO.exists() else ""
    return "bfloat16" if multiplies_bfloat16(said) else "float32"


def multiplies_bfloat16(cpuinfo: str) -> bool:
    """Whether bfloat16 products are the faster ones on the processor that /proc/cpuinfo describes."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((value.split() for name, _, value in lines if name.strip() == "flags"), [])
    return "amx_bf16" in flags or ("avx512_bf16" in flags and "AuthenticAMD" in cpuinfo)


def _begun_with(run: Any) -> Dtype | None:
    """The dtype in the folder of a run that is resumed; None where there is none."""
    if not isinstance(run, Mapping) or not run.get("resume") or not isinstance(run.get("output_dir"), str):
        return None
    try:
        dtype = json.loads((Path(run["output_dir"]).expanduser() / "config.json").read_text())["model"]["dtype"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dtype if dtype in ("float32", "bfloat16") else None
