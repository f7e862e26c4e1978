"""Linear layers through oneDNN: the same numbers as torch's, in full float32, forward and backward."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.cpu import linear
from model.cpu.linear import OneDnnLinear, use_onednn
from model.logprobs import load_causal_lm, score_logprobs
from model.packing import pack
from tests.support.tiny import tiny_model


def layer(weight: Tensor, bias: Tensor | None) -> torch.nn.Linear:
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight.data = weight
    if bias is not None:
        made.bias.data = bias
    use_onednn(made)
    assert type(made) is OneDnnLinear
    return made


def run(made: torch.nn.Linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = made(x)
    inputs = {"x": x, **dict(made.named_parameters())}
    return {"y": y.detach(), **dict(zip(inputs, torch.autograd.grad(y, list(inputs.values()), dy), strict=True))}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("leading", [(1, 37), (3, 5), (9,), (), "transposed"], ids=str)
def test_values_and_gradients_are_those_of_float64(leading: tuple[int, ...] | str, has_bias: bool) -> None:
    torch.manual_seed(0)
    outputs, inputs = 48, 96
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs) if has_bias else None
    if isinstance(leading, str):
        x, dy = torch.randn(inputs, 7).t(), torch.randn(outputs, 7).t()
    else:
        x, dy = torch.randn(*leading, inputs), torch.randn(*leading, outputs)
    made = layer(weight, bias)
    exact = torch.nn.Linear(inputs, outputs, bias=has_bias).double()
    exact.load_state_dict(made.state_dict())
    found, wanted = run(made, x, dy), run(exact, x.double(), dy.double())
    assert found.keys() == wanted.keys() and found["weight"].is_contiguous()
    for name in wanted:
        scale = wanted[name].abs().max()
        # sums of 96 products: float32 keeps 1e-6 of the largest; bfloat16 would keep 1e-2
        assert (found[name] - wanted[name]).abs().max() < 1e-6 * scale, name


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.bfloat16, (3, 5)), (torch.float64, (3, 5)), (torch.float32, (0, 5)), (torch.float32, (2, 0, 5))],
)
def test_other_dtypes_and_no_rows_are_left_to_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    made = layer(torch.randn(6, 5), torch.randn(6)).to(dtype)
    x = torch.randn(shape).to(dtype)
    assert torch.equal(made(x), torch.nn.functional.linear(x, made.weight, made.bias))


def test_a_frozen_weight_and_a_frozen_input_get_no_gradient() -> None:
    made = layer(torch.ones(2, 2), torch.ones(2))
    made.weight.requires_grad_(False)
    x = torch.ones(1, 2)
    made(x).sum().backward()
    assert made.weight.grad is None and x.grad is None
    assert made.bias.grad is not None


@pytest.mark.parametrize("shape", [(2, 37, 5), (32, 5)], ids=["rows that are filled up", "whole blocks"])
@pytest.mark.parametrize("change", ["add_", "mul_", "relu_", "exp_"])
def test_what_a_layer_returns_may_be_changed_in_place_as_torch_s_own(shape: tuple[int, ...], change: str) -> None:
    torch.manual_seed(0)
    made, x = layer(torch.randn(6, 5), torch.randn(6)), torch.randn(shape)
    plain = torch.nn.Linear(5, 6)
    plain.load_state_dict(made.state_dict())
    for _ in range(2):  # the first call also compares the two
        found = []
        for each in (made, plain):
            y = each(x)
            getattr(y, change)(*[2.0] * (change in ("add_", "mul_")))
            found.append([y.detach(), *torch.autograd.grad(y.sum(), list(each.parameters()))])
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert type(made) is OneDnnLinear


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


@pytest.mark.parametrize(
    ("differs", "suits_mkl", "has_mkl", "kind"),
    [
        ("", False, True, OneDnnLinear),
        ("", True, False, OneDnnLinear),
        ("", True, True, torch.nn.Linear),
        ("y", False, True, torch.nn.Linear),
        ("dx", False, True, torch.nn.Linear),
        ("dw", False, True, torch.nn.Linear),
        ("off", False, True, torch.nn.Linear),
    ],
)
def test_a_loaded_model_uses_it_but_where_mkl_is_faster_a_product_differs_or_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differs: str, suits_mkl: bool, has_mkl: bool, kind: type
) -> None:
    product = linear._product

    def wrong(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        of = "y" if weight.is_contiguous() else "dx" if x.is_contiguous() else "dw"
        return product(x, weight, bias) * (1.01 if of == differs else 1)

    monkeypatch.setattr(linear, "_product", wrong)
    monkeypatch.setattr(linear, "_suits_mkl", lambda: suits_mkl)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    if differs == "off":
        monkeypatch.setenv("TANDEM_CPU_TRICKS", "0")
    model = load_causal_lm(str(tiny_model(tmp_path)), "float32", None, False)
    score_logprobs(model, pack([([5, 6], [[7, 8]])]), 1.0, 8)
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(layers) > 7 and {type(module) for module in layers} == {kind}


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
def test_mkl_suits_intel_and_amd_without_avx512(tmp_path: Path, vendor: str, flags: str, suits_mkl: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert not linear._suits_mkl(cpuinfo)  # not Linux
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags} sha_ni\n")
    assert linear._suits_mkl(cpuinfo) == suits_mkl
