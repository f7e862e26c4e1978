"""Executes cases on a card that is not there, beside the CPU's way, and prints a JSON line for each.

Triton's interpreter runs the kernels that torch generates for the card. A case's errors are ‖found − expected‖ /
‖expected‖ of values and gradients. What is expected is computed on the CPU: attention by group, layers as they are.
"""

import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from common.config.algorithm import Algorithm
from model import attention, compiled
from model.log_softmax import LogSoftmaxAt
from tests.support.forget_compiled import forget_compiled
from tests.support.pretended_card.attention import Heads, hidden_states, make_model, packed_row
from trainer.algorithm.losses import loss_and_terms

DEVICE = torch.device("cuda", 0)
SCALE = 1.5  # of the scores, beside the usual one, which is torch's default
Errors = dict[str, float]


def attention_case(heads: dict[str, Any], tokens: list[int], dtype: str = "float32", has_forks: bool = True) -> Errors:
    """Returns the largest errors of rows of these lengths, one after the other."""
    errors_of_rows = []
    for i, length in enumerate(tokens):
        row = packed_row(length, has_forks, seed=i)
        errors_of_rows.append(_attention_errors(Heads(**heads), row, getattr(torch, dtype)))
    return _largest(errors_of_rows)


def _attention_errors(heads: Heads, row: Any, dtype: torch.dtype) -> Errors:
    length = row.input_ids.shape[1]
    torch.manual_seed(length)
    inputs = [torch.randn(1, number, length, heads.size) for number in (heads.query, heads.key, heads.key)]
    if heads.has_sinks:
        inputs.append(torch.randn(heads.query))
    inputs = [tensor.to(dtype) for tensor in inputs]
    direction = torch.randn(1, length, heads.query, heads.size)
    options = {"scaling": SCALE * heads.size**-0.5, "sliding_window": heads.window, "softcap": heads.cap}

    def run(tensors: list[Tensor], **of_device: Any) -> list[Tensor]:
        """Returns the value and the gradients of query, key, value and sinks."""
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        sinks = leaves[3] if heads.has_sinks else None
        module = torch.nn.Module()
        value, _ = attention._attention(module, *leaves[:3], None, **options, **of_device, s_aux=sinks)
        total = (value.float() * direction.to(value.device)).sum()
        return [value.detach(), *torch.autograd.grad(total, leaves)]

    mask = attention._block_mask(row.spans, heads.window, DEVICE)
    groups = attention._Groups(row.spans)
    on_card = [tensor.to(DEVICE) for tensor in inputs]
    found = run(on_card, block_masks={heads.window: mask}, groups=groups)
    expected = run([tensor.float() for tensor in inputs], spans=row.spans)
    return _errors(("value", "dq", "dk", "dv", "dsinks"), found, expected)


def layer_case(heads: dict[str, Any], tokens: list[int], has_adapters: bool = False) -> Errors:
    """Returns the largest errors of a compiled decoder layer's hidden states and of its parameters' gradients."""
    plain = make_model(Heads(**heads), torch.float32, has_adapters)
    _fill_adapters(plain)
    model = copy.deepcopy(plain).to(DEVICE)
    compiled.compile_layers(model)
    errors_of_rows = []
    for i, length in enumerate(tokens):
        row = packed_row(length, has_forks=True, seed=i)
        found = _run_layer(model, row.to(DEVICE))
        expected = _run_layer(plain, row)
        errors_of_rows.append({name: _error(found[name], expected[name]) for name in expected})
    return _largest(errors_of_rows)


def _largest(errors_of_rows: list[Errors]) -> Errors:
    """Returns the largest error of each tensor over all rows."""
    return {name: max(errors[name] for errors in errors_of_rows) for name in errors_of_rows[0]}


def _fill_adapters(model: Any) -> None:
    """Gives the adapters' second matrix values: with zeros the first one has no gradient."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)


def _run_layer(model: Any, row: Any) -> dict[str, Tensor]:
    model.zero_grad()
    hidden = hidden_states(model, row)
    torch.manual_seed(0)
    direction = torch.randn(hidden.shape).to(hidden.device)
    (hidden * direction).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"value": hidden.detach()} | gradients


def head_case(
    tokens: int, vocabulary: int, dtype: str = "float32", num_in_set: int = 0, entropy_gradient: bool = False
) -> Errors:
    """Returns the errors of log-probs, entropies, masses and the logits' gradient. num_in_set: of a target's set."""
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, vocabulary).to(getattr(torch, dtype))
    targets = torch.randint(vocabulary, (tokens,))
    sets = None
    if num_in_set:
        sets = torch.rand(tokens, vocabulary).argsort(-1)[:, :num_in_set]
        sets[:, 0] = targets
        sets[::2, -1] = -1  # these sets are smaller
    directions = torch.randn(2, tokens)

    def run(device: torch.device, values: Tensor) -> list[Tensor]:
        leaf = values.to(device).requires_grad_()
        moved = None if sets is None else sets.to(device)
        logprobs, entropy, log_mass = LogSoftmaxAt.apply(leaf, targets.to(device), moved, 0.7, True, entropy_gradient)
        total = (logprobs * directions[0].to(device)).sum()
        if entropy_gradient:
            total = total + (entropy * directions[1].to(device)).sum()
        (gradient,) = torch.autograd.grad(total, [leaf])
        return [x.detach() for x in (logprobs, entropy, log_mass, gradient)]

    found = run(DEVICE, logits)
    expected = run(torch.device("cpu"), logits.float())
    errors = _errors(("value", "entropy", "log_mass", "gradient"), found, expected)
    return errors if num_in_set else {name: error for name, error in errors.items() if name != "log_mass"}


def objective_case(settings: dict[str, Any], lengths: list[int]) -> Errors:
    """Returns the errors of an objective's loss, of what its metrics read, and of its gradient."""
    torch.manual_seed(0)
    algorithm = Algorithm(**settings)
    total = sum(lengths)
    logprobs = -torch.rand(total)
    old = logprobs + 0.3 * torch.randn(total)
    reference = logprobs + 0.3 * torch.randn(total)
    advantages = torch.randn(len(lengths)).repeat_interleave(torch.tensor(lengths))
    weights = torch.full((total,), 1 / total)
    given = logprobs, weights, old, reference, advantages, torch.tensor(lengths)

    def run(device: torch.device) -> list[Tensor]:
        leaf, *others = (tensor.to(device) for tensor in given)
        leaf.requires_grad_()
        entropy = torch.ones(total, device=device)
        found = compiled.compiled(loss_and_terms, leaf, *others, algorithm, entropy, None)
        (gradient,) = torch.autograd.grad(found[0], [leaf])
        return [*(x.detach() for x in found), gradient]

    found, expected = run(DEVICE), run(torch.device("cpu"))
    names = ["value", *(f"term {i}" for i in range(1, len(found) - 1)), "gradient"]
    return _errors(names, found, expected)


def _errors(names: Any, found: list[Tensor], expected: list[Tensor]) -> Errors:
    pairs = zip(names, found, expected, strict=False)
    return {name: _error(ours, right) for name, ours, right in pairs}


def _error(found: Tensor, expected: Tensor) -> float:
    assert found.isfinite().all(), "not finite"
    size = expected.float().norm()
    difference = (found.cpu().float() - expected.float()).norm()
    return float(difference / size) if size else float(difference)


CASES: dict[str, Callable[..., Errors]] = {
    "attention": attention_case,
    "layer": layer_case,
    "head": head_case,
    "objective": objective_case,
}


def main(request: dict[str, Any]) -> None:
    """Prints a line for each case of a request, as `python -m tests.support.pretended_card` is given it."""
    for case in request["cases"]:
        forget_compiled()
        counters.clear()
        named = dict(case)
        run = functools.partial(CASES[named.pop("of")], **named)
        try:
            found: dict[str, Any] = {"errors": run()}
        except Exception as error:
            text = " ".join(str(error).split())
            found = {"raised": f"{type(error).__name__}: {text[:600]}"}
        graphs = counters["stats"]["unique_graphs"]
        print(json.dumps({"case": case, **found, "graphs": graphs, "compiled": not compiled.has_failed()}), flush=True)
