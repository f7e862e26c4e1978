"""Functions and layers that torch compiles on an accelerator, and that run as they are on a CPU or without a compiler.

Everything is compiled for tensors of any length. FlexAttention takes no symbolic scale or cap, so floats are constants.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from common import bfloat16
from model import devices
from model.transformers_internals import decoder_layers

_uncompiled: set[Callable[..., Any]] = set()  # functions that could not be compiled


def compiled(
    function: Callable[..., Any], tensor: Tensor, *given: Any, instead: Callable[[], Any] | None = None
) -> Any:
    """Returns function(tensor, *given), compiled once for tensors of any length if the first is on an accelerator.

    instead: called where nothing is compiled; by default the function itself. A failed compilation is said once.
    """
    instead = instead or functools.partial(function, tensor, *given)
    if not is_compiled(tensor) or function in _uncompiled:
        return instead()
    try:
        with torch._dynamo.config.patch(specialize_float=True, suppress_errors=False):
            return _compiled(function)(tensor, *given)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _uncompiled.add(function)
        reason = " ".join(str(error).split())[:200]
        name = f"{function.__module__}.{function.__qualname__}"
        print(f"tandem: {name} is not compiled and slower: {reason}", file=sys.stderr, flush=True)
        return instead()


def is_compiled(tensor: Tensor) -> bool:
    """Returns whether functions of the tensor are compiled: on a device that Triton supports."""
    if not devices.is_accelerator(tensor.device) or isinstance(tensor, FakeTensor):
        return False
    return not bfloat16.is_missing(devices.compute_capability(tensor.device))


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=True)


def compile_layers(model: torch.nn.Module) -> None:
    """Compiles the model's decoder layers in place, each by itself: layers of one kind share what is compiled.

    A layer is compiled when it is first called. What cannot be compiled runs as it is, with a warning of torch's.
    """
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.suppress_errors = True
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)
