"""Compares the trainer's results with those of a model's own forward, one sequence at a time.

`python -m tools.families.exact FOLDER` prints a line of JSON. It compares, in float32 and without vLLM, the log-probs
of every completion and the gradient of all parameters.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.files.counted_dims import read_dims
from model.layout import packing_of
from model.logprobs import load_causal_lm, score_logprobs
from model.packing import pack

_PROMPT = list(range(5, 29))  # longer than two kernels of a convolution; with a completion longer than a window of 32
_COMPLETIONS = [list(range(30, 47)), list(range(60, 61)), list(range(20, 44)), list(range(41, 30, -1))]


def compare(folder: Path) -> dict[str, Any]:
    """Returns {layout, logprobs: largest difference, gradient: ‖g − g'‖ / ‖g'‖, parameters, planned}."""
    from transformers import AutoModelForCausalLM

    model = load_causal_lm(str(folder), "float32", None, False)
    # eager, because transformers' call of torch's kernel leaves out the soft caps of scores
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    plain.train(model.training)
    packing = packing_of(model)
    found = score_logprobs(model, pack([(_PROMPT, _COMPLETIONS)], packing), 1.0, 16)
    expected = torch.cat([_own_logprobs(plain, completion) for completion in _COMPLETIONS])
    weights = torch.linspace(-1, 1, len(found))
    for logprobs in (found, expected):
        (logprobs * weights).sum().backward()
    gradient, own = _gradient(model), _gradient(plain)
    dims = read_dims(str(folder), None)
    return {
        "layout": packing,
        "logprobs": (found - expected).detach().abs().max().item(),
        "gradient": float((gradient - own).norm() / own.norm()),
        "parameters": sum(p.numel() for p in plain.parameters()),
        "planned": dims.parameters if dims else None,
    }


def _own_logprobs(model: Any, completion: list[int]) -> Tensor:
    """Returns the log-probabilities [C] of one sequence alone."""
    logits = model(input_ids=torch.tensor([_PROMPT + completion]), use_cache=False).logits[0, len(_PROMPT) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def _gradient(model: Any) -> Tensor:
    """Returns the float64 gradient of all parameters in the order of their names, zero if one has none."""
    named = sorted(model.named_parameters())
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for _, p in named]).double()


if __name__ == "__main__":
    print(json.dumps(compare(Path(sys.argv[1]))))
