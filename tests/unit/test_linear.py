"""Linear layers through oneDNN: the same numbers as torch's, in full float32, forward and backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.cpu import linear
from model.cpu.linear import OneDnnLinear, use_onednn
from model.logprobs import load_causal_lm
from tests.support.tiny import tiny_model
from tools.benchmarks.seed_loop import use_torch


def layer(weight: Tensor, bias: Tensor | None) -> torch.nn.Linear:
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight.data = weight
    if bias is not None:
        made.bias.data = bias
    use_onednn(torch.nn.ModuleList([made]))
    assert type(made) is OneDnnLinear
    return made


def test_a_layer_of_two_by_two_computed_by_hand() -> None:
    made = layer(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, -0.5]))
    x = torch.tensor([[10.0, 1.0]], requires_grad=True)
    y = made(x)
    assert y.tolist() == [[12.5, 33.5]]  # 10 + 2 + 0.5, 30 + 4 − 0.5
    y.backward(torch.tensor([[1.0, 2.0]]))
    assert x.grad is not None and x.grad.tolist() == [[7.0, 10.0]]  # 1·(1 2) + 2·(3 4)
    assert made.weight.grad is not None and made.weight.grad.tolist() == [[10.0, 1.0], [20.0, 2.0]]
    assert made.bias.grad is not None and made.bias.grad.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("leading", [(1, 37), (3, 5), (9,), ()])
def test_values_and_gradients_are_those_of_float64(leading: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(0)
    outputs, inputs = 48, 96
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs) if has_bias else None
    x, dy = torch.randn(*leading, inputs), torch.randn(*leading, outputs)
    made = layer(weight, bias)
    exact = torch.nn.Linear(inputs, outputs, bias=has_bias).double()
    exact.load_state_dict(made.state_dict())
    found, wanted = run(made, x, dy), run(exact, x.double(), dy.double())
    assert found["weight"].is_contiguous()
    for name in wanted:
        scale = wanted[name].abs().max()
        # sums of 96 products: float32 keeps 1e-6 of the largest; bfloat16 would keep 1e-2
        assert (found[name] - wanted[name]).abs().max() < 1e-6 * scale, name


def run(made: torch.nn.Linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = made(x)
    y.backward(dy)
    gradients = {name: p.grad for name, p in made.named_parameters()}
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad} | {name: g for name, g in gradients.items() if g is not None}


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_no_rows_give_no_rows(shape: tuple[int, ...]) -> None:
    assert layer(torch.ones(3, 4), None)(torch.ones(*shape)).shape == (*shape[:-1], 3)


def test_transposed_inputs_and_gradients_are_read_as_what_they_are() -> None:
    torch.manual_seed(0)
    made = layer(torch.randn(6, 5), None)
    x = torch.randn(5, 7).t()
    found = run(made, x, torch.randn(6, 7).t())
    wanted = run(made, x.contiguous(), torch.randn(6, 7).t())
    assert torch.allclose(found["y"], wanted["y"], atol=1e-6)
    assert torch.allclose(found["y"], x @ made.weight.t(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = layer(torch.randn(6, 5), torch.randn(6)).to(dtype)
    x = torch.randn(3, 5, dtype=dtype)
    assert torch.equal(made(x), torch.nn.functional.linear(x, made.weight, made.bias))


def test_a_frozen_weight_and_a_frozen_input_get_no_gradient() -> None:
    made = layer(torch.ones(2, 2), torch.ones(2))
    made.weight.requires_grad_(False)
    x = torch.ones(1, 2)
    made(x).sum().backward()
    assert made.weight.grad is None and x.grad is None
    assert made.bias.grad is not None


def test_rows_of_any_number_reach_onednn_in_a_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    product, shapes = linear._product, set()

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.add((*x.shape, *weight.shape))
        return product(x, weight, bias)

    monkeypatch.setattr(linear, "_product", recorded)
    made = layer(torch.ones(3, 5), None)
    for rows in range(1, 65):
        made(torch.ones(rows, 5, requires_grad=True)).sum().backward()
    # y, ∂x and ∂W
    assert shapes == {shape for rows in (32, 64) for shape in ((rows, 5, 3, 5), (rows, 3, 5, 3), (3, rows, 5, rows))}


def linear_layers(folder: Path) -> tuple[torch.nn.Module, list[torch.nn.Linear]]:
    tiny_model(folder)
    model = load_causal_lm(str(folder), "float32", None, False)
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(layers) > 7
    return model, layers


def test_every_linear_layer_of_a_loaded_model_uses_it_under_its_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_suits_mkl", lambda: False)
    model, layers = linear_layers(tmp_path)
    assert {type(m) for m in layers} == {OneDnnLinear}
    names = set(model.state_dict())
    use_torch(model)
    assert {type(m) for m in layers} == {torch.nn.Linear}
    assert set(model.state_dict()) == names


@pytest.mark.parametrize("differs", ["y", "dx", "dw", "off"])
def test_layers_stay_with_torch_where_a_product_differs_or_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differs: str
) -> None:
    product = linear._product

    def wrong(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        of = "y" if weight.is_contiguous() else "dx" if x.is_contiguous() else "dw"
        return product(x, weight, bias) * (1.01 if of == differs else 1)

    monkeypatch.setattr(linear, "_suits_mkl", lambda: False)
    if differs == "off":
        monkeypatch.setenv("TANDEM_CPU_TRICKS", "0")
    monkeypatch.setattr(linear, "_product", wrong)
    assert {type(m) for m in linear_layers(tmp_path)[1]} == {torch.nn.Linear}


def test_on_a_processor_that_mkl_knows_the_layers_stay_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_suits_mkl", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert {type(m) for m in linear_layers(tmp_path / "a")[1]} == {torch.nn.Linear}
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert {type(m) for m in linear_layers(tmp_path / "b")[1]} == {OneDnnLinear}


@pytest.mark.parametrize(
    ("vendor", "flags", "suits_mkl"),
    [
        ("GenuineIntel", "avx2 avx512f", True),
        ("GenuineIntel", "avx2", True),
        ("AuthenticAMD", "avx2", True),
        ("AuthenticAMD", "avx2 avx512f", False),
        ("HygonGenuine", "avx2", False),
    ],
)
def test_mkl_suits_intel_and_amd_processors_without_avx512(
    tmp_path: Path, vendor: str, flags: str, suits_mkl: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert not linear._suits_mkl(cpuinfo)  # not Linux
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags} sha_ni\n")
    assert linear._suits_mkl(cpuinfo) == suits_mkl
