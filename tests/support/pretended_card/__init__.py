"""GPUs that are not there: torch generates kernels for them, and Triton compiles or interprets these on the CPU.

    card = CARDS["8.6"]
    start(library, card)                    Triton compiles each kernel for the card, and none runs
    start(library, card, executes=True)     Triton's interpreter runs each kernel in the simulated device's memory

A pretended card is like a real one in its compute capability, by which torch and Triton choose code,
blocks and stages. It refuses a kernel that needs more shared memory than it has, as its driver would. If kernels are
executed, their values are those of the generated code. It does not show time, which blocks autotuning would choose (no
kernel is measured), nor tensor cores, whose sums have another order and whose float32 products may be in TF32.

    __main__.py     starts a process on such a card
    backend.py      what torch and Triton ask a driver, answered for the card
    attention.py    rows and layers whose attention is compiled or executed
    cells.py        the cases, which cover all pairs of card, heads, dtype, options and length
    compiles.py     compiles cases for a card
    executes.py     executes cases, beside the CPU's way
    cases.py        what is executed
    damages.py      faults that the tests must find
    table.py        the command that makes the tables of docs/gpu.md
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import simulated_device
from tests.support.simulated_device.card import Card

ROOT = Path(__file__).resolve().parents[3]
LOCK = "tools/locks/triton.txt"
TRITON = ROOT / ".venv" / "triton"  # apart from the packages of Tandem: vLLM and torch would use it

_KIB = 1 << 10
CARDS = {
    "7.5": Card("T4", (7, 5), 64 * _KIB, 1024),
    "8.0": Card("A100", (8, 0), 163 * _KIB, 2048),
    "8.6": Card("RTX 3090", (8, 6), 99 * _KIB, 1536),
    "8.9": Card("RTX 4090, L4", (8, 9), 99 * _KIB, 1536),
    "9.0": Card("H100, H200", (9, 0), 227 * _KIB, 2048),
    "10.0": Card("B200", (10, 0), 227 * _KIB, 2048),
    "12.0": Card("RTX 5090", (12, 0), 99 * _KIB, 1536),
}


def missing() -> str | None:
    """Why no card can be pretended here; None if it can."""
    if not TRITON.is_dir() and importlib.util.find_spec("triton") is None:
        remedy = f"{sys.executable} -m pip install --no-deps --target {TRITON} -r {LOCK}"
        return f"triton is not installed, which compiles kernels for GPUs: {remedy}"
    return simulated_device.missing()


def start(library: Path, card: Card, executes: bool = False) -> None:
    """Makes this process's torch one with the card, from now on. Call it before torch is imported."""
    simulated_device.start(library, card)

    from tests.support.pretended_card import backend

    backend.install(card, executes)


def run(module: str, request: Any, library: Path, folder: Path, **environment: str) -> list[Any]:
    """Returns the JSON lines that a module of this folder prints for a request, in a process of its own.

    folder: for what it compiles. Raises AssertionError with the end of its output if it fails.
    """
    changes = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TRITON), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0",  # it loads kernels in C, where no card can be pretended
        "TORCH_COMPILE_DISABLE": "0",
        "TORCHDYNAMO_DISABLE": "0",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1" if module == "executes" else "0",
        **environment,
    }
    command = [sys.executable, "-m", __name__, module, str(library), json.dumps(request)]
    done = subprocess.run(command, env=os.environ | changes, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
