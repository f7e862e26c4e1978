"""A second of measuring what this machine does at the shapes of a run:  python -m launcher.measure '{"model": …}'

In a process of its own, because `plan` and `run` never import torch. Each figure is the best of a few short trials, so
that other work on the machine disturbs it little. Nothing is kept: a bad second must not stay for ever. The model is a
stand-in of one layer and a slice of the head, with the trainer's own attention, products and log-probs.
Left out: GPUs, whose data sheets are in compute_time.py.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from launcher.cpu_time import Measured, RunShape
from launcher.machine import ROOT, Machine
from launcher.placement import Placement
from launcher.who_waits import threads_of
from launcher.workload import Workload
from model.dims import ModelDims

if TYPE_CHECKING:
    import torch

_TRIAL_S = 0.12  # of one figure, after one trial that warms up
_LARGEST_S = 0.15  # of one trial: large models are measured on fewer tokens
_HEAD_ROWS, _HEAD_WIDTH = 256, 8192  # tokens and entries of the vocabulary
_STREAMED = 64 * 2**20  # bytes of weights that take turns while decoding, so that caches do not hold them
_COPIED = 64 * 2**20  # bytes of each of the three arrays that tell the bandwidth
_TIMEOUT_S = 300


def with_measured(machine: Machine, work: Workload, place: Placement) -> Machine:
    """The machine with what its CPU does with the threads of either process; with GPUs as it is.

    Takes a second or two beside the import of torch. `measured` stays None where it fails: then there is no estimate.
    """
    return machine if machine.gpus else replace(machine, measured=_in_a_process(work, set(threads_of(place))))


def _in_a_process(work: Workload, threads: Iterable[int]) -> dict[int, Measured] | None:
    wanted = {"shapes": asdict(RunShape.of(work)), "threads": sorted(threads)}
    command = [sys.executable, "-m", "launcher.measure", json.dumps(wanted)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["OMP_WAIT_POLICY"] = "PASSIVE"  # as both processes where they share cores; spinning would be counted
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return {record["threads"]: Measured(**record) for record in json.loads(done.stdout.splitlines()[-1])}
    except (subprocess.SubprocessError, ValueError, IndexError):
        return None


def main(arguments: list[str]) -> None:
    wanted = json.loads(arguments[0])
    given = wanted["shapes"]
    shapes = RunShape(**{**given, "model": ModelDims(**given["model"])})
    print(json.dumps([asdict(measure(shapes, threads)) for threads in wanted["threads"]]))


def measure(shapes: RunShape, threads: int) -> Measured:
    """With so many threads of this process."""
    import torch

    torch.set_num_threads(threads)
    product = _product(shapes)
    layer, call = _layer(shapes, product)
    decode_layer, decode_head = _decode(shapes)
    return Measured(
        threads=threads,
        product=product,
        bandwidth=_bandwidth(),
        layer=layer,
        layer_call=call,
        head=_head(shapes),
        decode_layer=decode_layer,
        decode_head=decode_head,
        operation=_operation(),
    )


def _best(trial: Callable[[], Any], seconds: float = _TRIAL_S) -> float:
    """Seconds of the fastest trial; one at least, after one that is not counted.

    Of wall time and this process's processor time the shorter: waiting for others is in the first, several threads at
    once are in the second.
    """
    trial()
    best, end = math.inf, time.perf_counter() + seconds
    while best == math.inf or time.perf_counter() < end:
        wall, processor = time.perf_counter(), time.process_time()
        trial()
        best = min(best, time.perf_counter() - wall, time.process_time() - processor)
    return max(best, 1e-9)


def _weight(shapes: RunShape, rows: int, columns: int, of_vllm: bool = False) -> torch.nn.Linear:
    """A linear layer as the trainer has it, or through oneDNN as vLLM. Of zeros every page would be the same one."""
    import torch

    from model.cpu.linear import use_faster_linear, use_onednn

    layer = torch.nn.Linear(columns, rows, bias=False, device="meta", dtype=getattr(torch, shapes.dtype))
    layer.weight = torch.nn.Parameter(torch.full((rows, columns), 0.01, dtype=layer.weight.dtype))
    (use_onednn if of_vllm else use_faster_linear)(torch.nn.ModuleList([layer]))
    return layer


def _rows(shapes: RunShape, *size: int) -> torch.Tensor:
    import torch

    return torch.randn(size).to(getattr(torch, shapes.dtype))


def _product(shapes: RunShape) -> float:
    """FLOP/s of 256 tokens times a matrix of the MLP."""
    import torch

    model = shapes.model
    layer, x = _weight(shapes, model.intermediate, model.hidden), _rows(shapes, 256, model.hidden)
    with torch.no_grad():
        return 2 * 256 * model.hidden * model.intermediate / _best(lambda: layer(x), 0.05)


def _bandwidth() -> float:
    """Bytes per second of a = b + 3·c, each far larger than a cache: two read and one written."""
    import torch

    a, b, c = (torch.full((_COPIED // 4,), 0.5) for _ in range(3))
    return 3 * _COPIED / _best(lambda: torch.add(b, c, alpha=3.0, out=a))


def _operation() -> float:
    """Seconds of one operation of torch on next to nothing."""
    import torch

    x = torch.ones(1)

    def many() -> None:
        for _ in range(1000):
            torch.add(x, x)

    return _best(many, 0.02) / 1000


def _layer(shapes: RunShape, product: float) -> tuple[float, float]:
    """(seconds per token of a group, seconds of a call): forward and backward of one layer.

    Of as many layers as can be afforded: what they keep for the backward pass does not stay in a cache.
    """

    from launcher.standin import Layer
    from model.packing import Span

    affordable = _LARGEST_S * product / (6 * shapes.model.layer_parameters)
    few, group = Span(0, 4, (2, 2)), Span(0, *shapes.group(affordable))
    tokens = group.prompt + sum(group.completions)
    count = max(1, min(shapes.model.layers, int(affordable / tokens)))
    layers = [Layer(shapes.model, lambda rows, columns: _weight(shapes, rows, columns)) for _ in range(count)]

    def trial(x: torch.Tensor, span: Span) -> None:
        for layer in layers:
            x = layer(x, (span,))
        x.sum().backward()

    seconds = []
    for span, length in ((few, 8), (group, tokens)):
        x = _rows(shapes, 1, length, shapes.model.hidden).requires_grad_()
        seconds.append(_best(lambda x=x, span=span: trial(x, span)) / count)  # type: ignore[misc]
    call = seconds[0]
    return max(seconds[1] - call, 1e-9) / tokens, call


def _head(shapes: RunShape) -> float:
    """Seconds per completion token of head and log-probs, forward and backward."""
    import torch

    from model.logprobs import token_terms

    width = min(shapes.model.vocab, _HEAD_WIDTH)
    head, x = _weight(shapes, width, shapes.model.hidden), _rows(shapes, _HEAD_ROWS, shapes.model.hidden)
    targets = torch.zeros(_HEAD_ROWS, dtype=torch.int64)
    x.requires_grad_()

    def trial() -> None:
        token_terms(x, targets, head, 1.0, _HEAD_ROWS)[0].sum().backward()

    return _best(trial) / _HEAD_ROWS * shapes.model.vocab / width


def _decode(shapes: RunShape) -> tuple[float, float]:
    """(products of one layer, head and drawing of the next tokens): seconds for all sequences that decode at once."""
    import torch

    model, rows = shapes.model, shapes.sequences
    copies = max(1, min(model.layers, _STREAMED // (shapes.bytes_per_value * model.layer_parameters)))
    layers = [[_weight(shapes, r, c, of_vllm=True) for r, c in model.matrices] for _ in range(copies)]
    inputs = {c: _rows(shapes, rows, c) for _, c in model.matrices}
    width = min(model.vocab, _HEAD_WIDTH)
    head, x = _weight(shapes, width, model.hidden, of_vllm=True), _rows(shapes, rows, model.hidden)

    def products() -> None:
        for layer in layers:
            for weight in layer:
                weight(inputs[weight.in_features])

    def draw() -> None:
        logits = head(x).float()
        logits.log_softmax(-1).gather(-1, logits.argmax(-1, keepdim=True))
        (logits.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1)

    with torch.no_grad():
        return _best(products) / copies, _best(draw) * model.vocab / width


if __name__ == "__main__":
    main(sys.argv[1:])
