"""Linear layers on a CPU in float32, through oneDNN instead of torch's default library.

PyPI's torch multiplies float32 matrices with MKL, which leaves AVX-512 alone on an AMD processor: 118 GFLOP/s on a
Zen 5 core, where oneDNN, which torch also carries and vLLM uses, does 265. Elsewhere it is the other way round (Xeon
with AVX-512: MKL 113 to 163, oneDNN 85 to 129; Zen 3, which has none: 61 to 86 and 40 to 71), and MKL keeps nothing for
a shape, where oneDNN compiles and caches a kernel for each. The choice follows the processor and not a measurement, so
that a resumed run makes the same one. All other devices and dtypes go to torch as before. Left out: attention, whose
products are inside torch's own kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model import cpu
from model.cpu.equal import is_equal

_BLOCK = 32  # rows; a multiple costs a twentieth at 360 tokens, and leaves a handful of shapes


def use_faster_linear(model: torch.nn.Module) -> None:
    """Every torch.nn.Linear of the model through the library that is faster on this processor, in place."""
    if cpu.is_on() and not (torch.backends.mkl.is_available() and _suits_mkl()):
        use_onednn(model)


def _suits_mkl(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether MKL uses all that this processor has."""
    said = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    return "GenuineIntel" in said or ("AuthenticAMD" in said and "avx512f" not in said)


def use_onednn(model: torch.nn.Module) -> None:
    """Every torch.nn.Linear of the model whose products are equal, in place. Their weights and names stay.

    No-op if torch lacks oneDNN.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    equal: dict[tuple[int, int, bool], bool] = {}
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            shape = (module.out_features, module.in_features, module.bias is not None)
            if shape not in equal:
                equal[shape] = _computes_the_same(module)
            if equal[shape]:
                module.__class__ = OneDnnLinear


def _computes_the_same(layer: torch.nn.Linear) -> bool:
    """Whether a few rows through the first outputs of this layer give what torch gives, and so do the gradients."""
    if layer.weight.device.type != "cpu":
        return True  # nothing of it will be computed here
    weight = layer.weight.detach()[:_BLOCK].float()
    bias = None if layer.bias is None else layer.bias.detach()[:_BLOCK].float()
    random = torch.Generator().manual_seed(0)  # not the run's: its numbers stay what they are
    x, dy = (torch.randn(_BLOCK + 1, size, generator=random) for size in (weight.shape[1], len(weight)))
    found, plain = (_value_and_gradients(product, x, weight, bias, dy) for product in (_Linear.apply, F.linear))
    return all(map(is_equal, found, plain))


def _value_and_gradients(product: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> list[Tensor]:
    given = [part.clone().requires_grad_() for part in (x, weight, bias) if part is not None]
    with torch.enable_grad():
        y = product(*given, *([None] if bias is None else []))
        return [y.detach(), *torch.autograd.grad(y, given, dy)]


class OneDnnLinear(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or input.dtype != torch.float32 or not input.numel():
            return F.linear(input, self.weight, self.bias)
        return _Linear.apply(input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b        ∂x = ∂y W        ∂W = ∂yᵀ x        ∂b = Σ ∂y        x [..., in], W [out, in], y [..., out]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = _product(_whole_blocks(x), weight, bias)
        return y[: x.shape[:-1].numel()].view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dy_rows = _whole_blocks(dy)
        dx = _product(dy_rows, weight.t())[: x.shape[:-1].numel()].view(x.shape) if needs_x else None
        dweight = _product(dy_rows.t(), _whole_blocks(x).t()) if needs_weight else None
        return dx, dweight, dy_rows.sum(0) if needs_bias else None


def _whole_blocks(x: Tensor) -> Tensor:
    """[..., D] -> [rows, D], with rows of zeros up to a multiple of _BLOCK.

    oneDNN compiles a kernel for each shape and keeps the last 1,024. With completions of every length the caching
    never ends, and its small allocations lie between the large ones of the heap, which then finds no room and grows:
    0.4 GiB in every step of a 135M model.
    """
    rows = x.reshape(-1, x.shape[-1])
    missing = -len(rows) % _BLOCK
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, in full float32: oneDNN would round to bfloat16 only if torch.backends.mkldnn.matmul asked for it."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
