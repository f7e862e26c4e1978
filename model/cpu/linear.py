"""Linear layers on a CPU in float32, through oneDNN instead of torch's default library.

PyPI's torch multiplies float32 matrices with MKL, which leaves AVX-512 alone on an AMD processor: 118 GFLOP/s on a
Zen 5 core, where oneDNN, which torch also carries and vLLM uses, does 265. Elsewhere MKL is as fast or faster (Xeon
with AVX-512: MKL 113 to 163, oneDNN 85 to 145; Zen 3, which has none: 61 to 86 and 40 to 71), and MKL keeps nothing for
a shape, where oneDNN compiles and caches a kernel for each. The choice follows the processor and not a measurement, so
that a resumed run makes the same one. All other devices and dtypes go to torch as before. Left out: attention, whose
products are inside torch's own kernel.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model import cpu
from model.cpu.equal import is_equal

_BLOCK = 32  # rows; a multiple costs a twentieth at 360 tokens, and leaves a handful of shapes


def use_faster_linear(model: torch.nn.Module) -> None:
    """Sends every torch.nn.Linear of the model through the library that is faster on this processor, in place."""
    if cpu.is_on() and not (torch.backends.mkl.is_available() and _suits_mkl()):
        use_onednn(model)


def _suits_mkl(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether MKL uses all vector instructions of this processor."""
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    return "GenuineIntel" in text or ("AuthenticAMD" in text and "avx512f" not in text)


def use_onednn(model: torch.nn.Module) -> None:
    """Turns every torch.nn.Linear of the model into a OneDnnLinear, in place. Weights and names stay.

    Does nothing if torch lacks oneDNN.
    """
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.__class__ = OneDnnLinear


class OneDnnLinear(torch.nn.Linear):
    """A linear layer through oneDNN, which turns back into torch's own at its first call if the two are not equal."""

    _is_compared = False

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or input.dtype != torch.float32 or not input.numel():
            return F.linear(input, self.weight, self.bias)
        if not self._is_compared:
            if not _computes_the_same(input.detach(), self.weight.detach(), self.bias):
                self.__class__ = torch.nn.Linear  # type: ignore[assignment]
                return F.linear(input, self.weight, self.bias)
            self._is_compared = True
        return _Linear.apply(input, self.weight, self.bias)


def _computes_the_same(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether oneDNN's values and gradients are torch's, for the input that a layer is called with."""
    random = torch.Generator().manual_seed(0)  # not the run's, whose numbers stay what they are
    dy = torch.randn(*x.shape[:-1], len(weight), generator=random)
    found, plain = (_values_and_gradients(product, x, weight, bias, dy) for product in (_Linear.apply, F.linear))
    return all(map(is_equal, found, plain))


def _values_and_gradients(product: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> list[Tensor]:
    leaves = [None if part is None else part.detach().requires_grad_() for part in (x, weight, bias)]
    with torch.enable_grad():
        y = product(*leaves)
        return [y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy)]


class _Linear(torch.autograd.Function):
    """A linear layer through oneDNN. Its results are not views, so models may change them in place, as F.linear's.

    y = x Wᵀ + b        ∂x = ∂y W        ∂W = ∂yᵀ x        ∂b = Σ ∂y        x [..., in], W [out, in], y [..., out]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(_whole_blocks(x), weight, bias).resize_(*x.shape[:-1], len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dy_rows = _whole_blocks(dy)
        dx = _product(dy_rows, weight.t()).resize_(x.shape) if needs_x else None
        dweight = _product(dy_rows.t(), _whole_blocks(x).t()) if needs_weight else None
        return dx, dweight, dy_rows.sum(0) if needs_bias else None


def _whole_blocks(x: Tensor) -> Tensor:
    """Flattens [..., D] to [rows, D], with rows of zeros up to a multiple of _BLOCK.

    oneDNN compiles a kernel for each shape and keeps the last 1,024. With completions of every length the caching
    never ends, and its small allocations fragment the heap, which then grows: 0.4 GiB in every step of a 135M model.
    """
    rows = x.reshape(-1, x.shape[-1])
    missing = -len(rows) % _BLOCK
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x Wᵀ + b in full float32: oneDNN rounds to bfloat16 only if torch.backends.mkldnn.matmul is set so."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
