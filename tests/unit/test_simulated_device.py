"""The simulated CUDA device: values as on a CPU, and refusals as CUDA's, where an operation gets tensors of both."""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from common.paths import ROOT
from tests.support import simulated_device

pytestmark = pytest.mark.timeout(300)

# x, y: [2, 3] float32 on the device and on the CPU; i, j: two indexes on the CPU and on the device
VALUES = {
    "x + 1": [[1, 2, 3], [4, 5, 6]],
    "x @ x.T": [[5, 14], [14, 50]],
    "x + torch.tensor(2.0)": [[2, 3, 4], [5, 6, 7]],
    "x.sum().item()": 15,
    "x[i]": [[3, 4, 5], [0, 1, 2]],
    "x[x > 2]": [3, 4, 5],
    "x.index_select(0, j)": [[3, 4, 5], [0, 1, 2]],
    "y.cuda()[1]": [3, 4, 5],
    "x.to('cpu') + y": [[0, 2, 4], [6, 8, 10]],
    "x.clone().copy_(y + 1)": [[1, 2, 3], [4, 5, 6]],
    "x.clone().index_put_((i,), torch.tensor(7.0))": [[7, 7, 7], [7, 7, 7]],
    "torch.cat([x, x[:1]])": [[0, 1, 2], [3, 4, 5], [0, 1, 2]],
    "torch.where(x > 2, x, torch.tensor(0.0))": [[0, 0, 0], [3, 4, 5]],
    "x.nonzero()": [[0, 1], [0, 2], [1, 0], [1, 1], [1, 2]],
    "x.max(1).values": [2, 5],
    "x.t().contiguous().view(-1)": [0, 3, 1, 4, 2, 5],
    "torch.histc(j.int(), 2, 0, 1)": [1, 1],
    "torch.equal(x, x.clone())": True,
    "gradient_of(lambda t: t.square().sum())": [[0, 2, 4], [6, 8, 10]],
    "torch.allclose(attended(True), attended(False))": True,
    "drawn('cuda', 5) - drawn('cpu', 5)": [0, 0, 0],
    "drawn('cuda', 5) != drawn('cuda', 6)": [True, True, True],
    "str(x.device)": "cuda:0",
    "str(torch.accelerator.current_accelerator())": "cuda",
    "torch.accelerator.device_count()": 1,
}
REFUSED = [
    "x + y",
    "x.clone().add_(y)",
    "y.clone().add_(x)",
    "x @ y.T",
    "x.index_select(0, i)",
    "x.gather(1, i[:, None])",
    "x.index_select(0, torch.tensor(1))",
    "y[j]",
    "x.clone().index_put_((i,), y)",
    "torch.nn.functional.embedding(i, x)",
    "torch.nn.functional.linear(x, y)",
    "torch.where(x > 2, x, y)",
    "torch.cat([x, y])",
    "torch.equal(x, y)",
    "x.masked_fill(y > 2, 0.0)",
    "x.scatter(1, i[:, None], 0.0)",
    "x.index_add(0, i, x)",
    "torch.maximum(x, y)",
]
SCRIPT = """
import json, sys
from pathlib import Path
from tests.support.simulated_device import start
start(Path(sys.argv[1]))
import torch

y = torch.arange(6.0).view(2, 3)
x, i = y.cuda(), torch.tensor([1, 0])
j = i.cuda()

def gradient_of(function):
    leaf = x.clone().requires_grad_()
    function(leaf).backward()
    return leaf.grad

def attended(is_on_device):
    mask = torch.tensor([[True, False], [True, True]])
    q = torch.tensor([1.0, 2.0, 3.0, 5.0]).view(1, 1, 2, 2)
    q, mask = (q.cuda(), mask.cuda()) if is_on_device else (q, mask)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, mask).flatten().cpu()

def drawn(device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.rand(3, generator=generator, device=device).cpu()

found = {}
for expression in json.loads(sys.stdin.read()):
    try:
        value = eval(expression)
        found[expression] = value.tolist() if isinstance(value, torch.Tensor) else value
    except RuntimeError as error:
        found[expression] = f"RuntimeError: {error}"
print(json.dumps(found))
"""


@cache
def found() -> dict[str, Any]:
    """Returns each expression's value, or the error that it raised."""
    if reason := simulated_device.missing():
        pytest.skip(reason)
    command = [sys.executable, "-c", SCRIPT, str(simulated_device.library())]
    expressions = json.dumps([*VALUES, *REFUSED])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=expressions, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("expression", VALUES)
def test_operations_on_the_device_have_their_values(expression: str) -> None:
    assert found()[expression] == VALUES[expression]


@pytest.mark.parametrize("expression", REFUSED)
def test_operations_on_tensors_of_the_device_and_the_cpu_are_refused(expression: str) -> None:
    value = found()[expression]
    assert isinstance(value, str) and value.startswith("RuntimeError") and "device" in value
