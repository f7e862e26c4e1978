"""(h) Tandem beside others, at the same shapes: transformers' operators, vLLM's generate, TRL's GRPOTrainer."""

import importlib.util
import itertools
import statistics
import sys
from pathlib import Path

import pytest

from report.run_log import read_jsonl
from tests.gpu.conftest import Row, json_lines
from tests.gpu.test_together import LOOP
from tests.support.own_process import run
from tools.benchmarks.bench import TRL, command
from tools.benchmarks.cells import Cell

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

_SAMPLING = 0.95  # of vLLM's tokens per second


def test_operators_of_a_step_beside_those_of_transformers(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both counted on the CPU: they are the same on every machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    counter = (sys.executable, "tools/benchmarks/count_operators.py", "trainer.groups_per_micro_batch=4")
    for line in json_lines(*counter):
        for name, count in line.items():
            row(f"operators of a step of 4 groups, 4 layers: {name}", count["total"])


def test_the_sampler_is_nearly_as_fast_as_vllm_alone(on_gpu: bool, row: Row) -> None:
    cell, more = (LOOP, ["model.dtype=bfloat16"]) if on_gpu else (Cell("1m", 2, 4, 64, 8), ["--rounds", "1"])
    speed, *counts = json_lines(sys.executable, "-m", "tools.benchmarks.sampler_alone", "--cell", cell.name, *more)
    ratio, rates = speed["ratio"], [f"{statistics.median(speed[name]):,.0f}" for name in ("tandem", "vllm")]
    text = f"{ratio:.2f}: {' of '.join(rates)} tokens/s"
    row(f"{cell.name}, the sampler over vLLM alone", text, f"≥ {_SAMPLING}", ratio >= _SAMPLING)
    for line in counts:
        name = line.pop("operators")
        row(f"operators of a decoding step, {name}", ", ".join(f"{n} sequences {line[n]}" for n in line))


@pytest.mark.parametrize("backend", ["stock", "vllm"])
def test_a_step_of_trl_on_the_same_machine(backend: str, on_gpu: bool, tmp_path: Path, row: Row) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip(f"TRL is not installed: {sys.executable} -m pip install trl=={TRL}")
    if not on_gpu and backend == "vllm":
        pytest.skip("needs a GPU")
    cell = LOOP if on_gpu else Cell("1m", 2, 2, 64, 16)
    run([*command("trl-stock", cell, 6 if on_gpu else 4, tmp_path), "--backend", backend])
    times = [step["time"] for step in read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]]
    steps = [after - before for before, after in itertools.pairwise(times)]
    row(f"{cell.name}, TRL {TRL}, {backend}, a step", f"{statistics.median(steps):.2f} s")
