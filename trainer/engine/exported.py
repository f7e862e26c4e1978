"""The tensors that leave the trainer, under the names of checkpoints: all weights, adapters, merged weights.

transformers keeps some weights in another form than checkpoints do (experts in one tensor, other names), and knows how
to convert them back: `save_pretrained` writes tensors as every hub checkpoint and vLLM's loader name them. Its own
conversion runs once, at the start, on tensors without memory. Its operations on each are recorded and repeated for one
published tensor at a time: names and sizes are known before anything is made, a view is never copied, and one expert is
made without the others.

Under ZeRO-3 a tensor exists on no rank until its parameters are gathered, and merging needs three of them at a time, so
each tensor names its parameters and how it is made of them. Nothing here changes the model: merged weights are new.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from common.config import Lora
from common.errors import UserError
from model.files.lora import published_name
from model.transformers_internals import checkpoint_tensors, without_tied
from trainer.engine.optimizer import full_shape


@dataclass(frozen=True)
class Exported:
    """A tensor of a version or a checkpoint. `make` is called while all of `parameters` are whole."""

    name: str
    parameters: tuple[Parameter, ...]
    make: Callable[[], Tensor]
    form: Tensor  # the tensor's shape and dtype, on the meta device


def exported(model: Any, lora: Lora) -> list[Exported]:
    """Returns the published tensors. Raises as `under_checkpoint_names`."""
    if lora.publishes_adapters:
        return adapters(model)
    return under_checkpoint_names(model, merged(model) if lora.r else parameters(model))


def parameters(model: Any) -> list[Exported]:
    """Returns every parameter and every saved buffer, under the module's names; a tied head is its embedding."""
    named = dict(model.named_parameters(remove_duplicate=False))
    forms = {name: _form(named.get(name, tensor)) for name, tensor in model.state_dict().items()}
    return [
        _unchanged(name, named[name]) if name in named else _buffer(model, name, form)
        for name, form in without_tied(model, forms).items()
    ]


def adapters(model: Any) -> list[Exported]:
    """Returns the trained parameters, under peft's names."""
    return [_unchanged(name, p) for own, p in model.named_parameters() if (name := published_name(own))]


def base(model: Any) -> list[Exported]:
    """Returns the frozen parameters under adapters, under the names of the base model."""
    named = [(name.replace(".base_layer.", "."), p) for name, p in model.named_parameters() if not published_name(name)]
    return [_unchanged(name, p) for name, p in named]


def merged(model: Any) -> list[Exported]:
    """Returns the base model's tensors, under its modules' names, plus (alpha / r) · B A where there are adapters."""
    from peft.tuners.lora import LoraLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    found = []
    for tensor in parameters(model):
        if published_name(tensor.name):
            continue
        layer = layers.get(tensor.name.removesuffix(".base_layer.weight"))
        plain = tensor.name.replace(".base_layer.", ".")
        parts, make = (tensor.parameters, tensor.make) if layer is None else _with_adapter(tensor.parameters[0], layer)
        found.append(Exported(plain, parts, make, tensor.form))
    return found


def _unchanged(name: str, parameter: Parameter) -> Exported:
    return Exported(name, (parameter,), parameter.detach, _form(parameter))


def _buffer(model: Any, name: str, tensor: Tensor) -> Exported:
    return Exported(name, (), lambda: model.get_buffer(name), _form(tensor))  # on a GPU it is another tensor


def _form(tensor: Tensor) -> Tensor:
    return torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta")


def _with_adapter(weight: Parameter, layer: Any) -> tuple[tuple[Parameter, ...], Callable[[], Tensor]]:
    def make() -> Tensor:
        with torch.no_grad():
            return weight.detach() + layer.get_delta_weight("default").to(weight.dtype)

    return (weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight), make


def under_checkpoint_names(model: Any, tensors: list[Exported]) -> list[Exported]:
    """Converts tensors to those that `save_pretrained` would write: in name, shape and bits.

    Raises UserError if transformers cannot convert this model back.
    """
    recorded = _Recorded()
    given = {tensor.name: recorded.source(tensor) for tensor in tensors}
    try:
        with recorded:
            found = checkpoint_tensors(model, given)
    except Exception as error:
        raise UserError(
            f"transformers can load a {model.config.model_type}, and does not know how to save one as it was "
            f"({error!r}), so no engine could read its weights; set model.path to a model of another family"
        ) from error
    return [recorded.exported(name, tensor) for name, tensor in found.items()]


class _Recorded(TorchFunctionMode):
    """A recorder of how tensors without memory are made of each other: by functions where memory is new, else as views.

    Each piece of memory is known by its storage; a view is its shape, strides and offset in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, Exported] = {}
        self._calls: dict[int, tuple[Callable[..., Any], Any, Tensor]] = {}  # the result is kept: ids are not reused

    def source(self, tensor: Exported) -> Tensor:
        self._sources[_memory(tensor.form)] = tensor
        self._calls[_memory(tensor.form)] = (tensor.make, ((), {}), tensor.form)
        return tensor.form

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is Tensor.contiguous:  # done once for the published tensor, at its end
            return args[0]
        found = func(*args, **(kwargs or {}))
        for made in tree_flatten(found)[0]:
            if isinstance(made, Tensor) and _memory(made) not in self._calls:
                self._calls[_memory(made)] = (func, (args, dict(kwargs or {})), made)
        return found

    def exported(self, name: str, tensor: Tensor) -> Exported:
        parts = {p: None for source in self._sources_of(tensor) for p in source.parameters}
        return Exported(name, tuple(parts), lambda: self._repeated(tensor).contiguous(), tensor)

    def _sources_of(self, tensor: Tensor) -> list[Exported]:
        if source := self._sources.get(_memory(tensor)):
            return [source]
        _, arguments, _ = self._calls[_memory(tensor)]
        return [s for t in tree_flatten(arguments)[0] if isinstance(t, Tensor) for s in self._sources_of(t)]

    def _repeated(self, tensor: Tensor) -> Tensor:
        func, arguments, _ = self._calls[_memory(tensor)]
        args, kwargs = tree_map(lambda x: self._repeated(x) if isinstance(x, Tensor) else x, arguments)
        with torch.no_grad():
            whole = func(*args, **kwargs).contiguous()
        return whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset() + tensor.storage_offset())


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
