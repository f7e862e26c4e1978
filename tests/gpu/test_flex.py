"""(b2) FlexAttention beside the same attention group by group, at the shapes of models that are in use.

Both are compared with the attention group by group in float32. In float32 both agree to rounding.
In bfloat16 each has its own rounding: FlexAttention may be no further from the float32 values than
twice what the other way is. Rows have three groups, whose completions fork.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from model import attention
from model.compiled import compiled
from model.packing import PackedRow, pack
from tests.gpu.conftest import Row

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

_FLOAT32 = 1e-4  # of the norm; products in TF32 would give 1e-3
_NAMES = ("value", "dq", "dk", "dv", "dsinks")


@dataclass(frozen=True)
class Heads:
    """The attention of a model's layers."""

    query: int  # number of heads
    key: int  # number of key and value heads
    size: int
    window: int | None = None  # in units of 32 tokens, at toy size of 2
    cap: float | None = None
    has_sinks: bool = False


MODELS = {
    "Qwen2.5-0.5B": Heads(14, 2, 64),
    "Qwen2.5-1.5B": Heads(12, 2, 128),
    "Qwen2.5-7B": Heads(28, 4, 128),
    "Qwen3-0.6B": Heads(16, 8, 128),
    "Llama-3.2-1B": Heads(32, 8, 64),
    "Gemma 2 2B, full": Heads(8, 4, 256, cap=50.0),
    "Gemma 2 2B, window": Heads(8, 4, 256, window=16, cap=50.0),
    "gpt-oss-20b, full": Heads(64, 8, 64, has_sinks=True),
    "gpt-oss-20b, window": Heads(64, 8, 64, window=4, has_sinks=True),
}


@pytest.mark.parametrize("model", MODELS)
def test_flex_attention_has_the_values_and_gradients_of_attention_by_group(model: str, on_gpu: bool, row: Row) -> None:
    unit = 32 if on_gpu else 2
    heads = MODELS[model]
    if heads.window is not None:
        heads = dataclasses.replace(heads, window=unit * heads.window)
    packed = _three_groups(unit)
    inputs = _inputs(heads, packed, on_gpu)
    truth = _by_group(heads, packed, inputs)
    flex, is_compiled = _flex(heads, packed, inputs, on_gpu)
    errors = _distances(flex, truth)
    row(f"{model}, compiled", "yes" if is_compiled else "no", "yes", is_compiled)
    row(f"{model}, float32", _text(errors), f"< {_FLOAT32:.0e}", max(errors.values()) < _FLOAT32)
    rounded = [tensor.bfloat16() for tensor in inputs]
    truth = _by_group(heads, packed, [tensor.float() for tensor in rounded])
    flex_errors = _distances(_flex(heads, packed, rounded, on_gpu)[0], truth)
    other_errors = _distances(_by_group(heads, packed, rounded), truth)
    is_near = all(flex_errors[name] <= 2 * other_errors[name] for name in flex_errors)
    text = f"flex {_text(flex_errors)}; by group {_text(other_errors)}"
    row(f"{model}, bfloat16", text, "flex ≤ 2 × by group", is_near)
    assert max(errors.values()) < _FLOAT32


def _three_groups(unit: int) -> PackedRow:
    """Returns a row of 3 groups of different lengths. Some completions fork, once or twice."""
    lengths = [(9, (4, 7, 1, 6)), (21, (5, 5, 8)), (2, (6,))]
    groups = [([1] * unit * p, [[1] * unit * c for c in of]) for p, of in lengths]
    once = ((unit, 3 * unit),)
    twice = ((1, unit), (2 * unit, 4))
    forks: list[list[Any]] = [[once, twice, (), ()], [(), (), twice], [once]]
    return pack(groups, forks=forks)


def _inputs(heads: Heads, packed: PackedRow, on_gpu: bool) -> list[Tensor]:
    """Returns query, key and value [1, heads, T, size], sinks [heads] if there are any, and a direction."""
    torch.manual_seed(0)
    length = packed.input_ids.shape[1]
    tensors = [torch.randn(1, n, length, heads.size) for n in (heads.query, heads.key, heads.key)]
    if heads.has_sinks:
        tensors.append(torch.randn(heads.query))
    tensors.append(torch.randn(1, heads.query, length, heads.size))  # of the derivative
    return [tensor.to("cuda" if on_gpu else "cpu") for tensor in tensors]


def _by_group(heads: Heads, packed: PackedRow, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs[:-1]]
    sinks = leaves[3] if heads.has_sinks else None
    layer = attention._LayerOptions(heads.size**-0.5, heads.window, heads.cap, sinks)
    value = attention._by_group(*leaves[:3], packed.spans, layer)
    return [value, *torch.autograd.grad((value * inputs[-1]).sum(), leaves)]


def _flex(heads: Heads, packed: PackedRow, inputs: list[Tensor], on_gpu: bool) -> tuple[list[Tensor], bool]:
    """Returns the value and the gradients, and whether a compiler made them.

    On a CPU torch's FlexAttention has no gradients, and is not compiled here.
    """
    leaves = [tensor.clone().requires_grad_(on_gpu) for tensor in inputs[:-1]]
    sinks = leaves[3] if heads.has_sinks else None
    mask = attention._block_mask(packed.spans, heads.window, leaves[0].device)
    given = (*leaves[:3], mask, heads.size**-0.5, heads.cap, sinks)
    uncompiled = []

    def instead() -> Any:
        uncompiled.append(True)
        return attention._flex_attention(*given)

    value = compiled(attention._flex_attention, *given, instead=instead)
    if not on_gpu:
        return [value], False
    gradients = torch.autograd.grad((value * inputs[-1]).sum(), leaves)
    return [value, *gradients], not uncompiled


def _distances(found: list[Tensor], truth: list[Tensor]) -> dict[str, float]:
    """Returns ‖found − truth‖ / ‖truth‖ for the value and each gradient."""
    errors = {}
    for name, one, expected in zip(_NAMES, found, truth, strict=False):
        errors[name] = float((one.detach().float() - expected).norm() / expected.norm())
    return errors


def _text(errors: dict[str, float]) -> str:
    return ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
