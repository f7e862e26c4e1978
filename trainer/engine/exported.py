"""Tensors that leave the trainer as checkpoints name them: all weights, adapters, merged weights.

transformers keeps some weights in another form than checkpoints do (experts in one tensor, other
names), and knows how to convert them back: `save_pretrained` writes tensors as every hub checkpoint
and vLLM's loader name them. Its conversion runs here once, at the start, on tensors without memory.
The operations on each tensor are recorded, and repeated for one published tensor at a time. So
names and sizes are known before anything is made, a view is never copied, and one expert is made
without the others.

Under ZeRO 3 a tensor exists on no rank until its parameters are gathered, and merging needs three
parameters at a time, so each tensor names its parameters and how it is made of them. Nothing here
changes the model: merged weights are new.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
    """A tensor of a version or a checkpoint."""

    name: str
    parameters: tuple[Parameter, ...]
    make: Callable[[], Tensor]  # to be called while all of `parameters` are gathered
    form: Tensor  # the tensor's shape and dtype, on the meta device


def exported(model: Any, lora: Lora) -> list[Exported]:
    """Returns the tensors that are published. Raises as `under_checkpoint_names`."""
    if lora.publishes_adapters:
        return adapters(model)
    tensors = merged(model) if lora.r else parameters(model)
    return under_checkpoint_names(model, tensors)


def parameters(model: Any) -> list[Exported]:
    """Returns every parameter and every saved buffer, under the module's names.

    A tied head is left out, because it is the embedding.
    """
    named_parameters = dict(model.named_parameters(remove_duplicate=False))
    forms = {}  # a form has a tensor's full shape and dtype, and no memory
    for name, tensor in model.state_dict().items():
        # only a parameter itself knows its full shape if ranks hold shards of it
        forms[name] = _form(named_parameters.get(name, tensor))
    tensors = []
    for name, form in without_tied(model, forms).items():
        if name in named_parameters:
            tensors.append(_unchanged(name, named_parameters[name]))
        else:
            tensors.append(_buffer(model, name, form))
    return tensors


def adapters(model: Any) -> list[Exported]:
    """Returns the trained parameters, under peft's names."""
    tensors = []
    for module_name, parameter in model.named_parameters():
        name = published_name(module_name)
        if name:
            tensors.append(_unchanged(name, parameter))
    return tensors


def base(model: Any) -> list[Exported]:
    """Returns the frozen parameters under adapters, under the names of the base model."""
    tensors = []
    for module_name, parameter in model.named_parameters():
        if not published_name(module_name):
            name = module_name.replace(".base_layer.", ".")
            tensors.append(_unchanged(name, parameter))
    return tensors


def merged(model: Any) -> list[Exported]:
    """Returns the base model's tensors, plus (alpha / r) · B A where there are adapters.

    They have the names of the base model's modules.
    """
    from peft.tuners.lora import LoraLayer

    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layers[name] = module
    tensors = []
    for tensor in parameters(model):
        if published_name(tensor.name):
            continue
        name = tensor.name.replace(".base_layer.", ".")
        layer = layers.get(tensor.name.removesuffix(".base_layer.weight"))
        if layer is None:
            tensors.append(replace(tensor, name=name))
        else:
            tensors.append(_with_adapter(name, tensor, layer))
    return tensors


def _unchanged(name: str, parameter: Parameter) -> Exported:
    return Exported(name, (parameter,), parameter.detach, _form(parameter))


def _buffer(model: Any, name: str, tensor: Tensor) -> Exported:
    # it is looked up when it is needed, because on a GPU it is another tensor
    return Exported(name, (), lambda: model.get_buffer(name), _form(tensor))


def _form(tensor: Tensor) -> Tensor:
    """Returns a tensor without memory that has this tensor's full shape and its dtype."""
    return torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta")


def _with_adapter(name: str, tensor: Exported, layer: Any) -> Exported:
    """Returns the sum of a layer's weight and its adapter's scaled product of two factors.

    The sum is computed only when `make` is called, because only then are the parameters gathered.
    """
    weight = tensor.parameters[0]

    def make() -> Tensor:
        with torch.no_grad():
            return weight.detach() + layer.get_delta_weight("default").to(weight.dtype)

    factors = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return Exported(name=name, parameters=(weight, *factors), make=make, form=tensor.form)


def under_checkpoint_names(model: Any, tensors: list[Exported]) -> list[Exported]:
    """Returns the tensors that `save_pretrained` would write, equal in name, shape and bits.

    Raises UserError if transformers cannot convert this model back.
    """
    recording = _Recording()
    forms = {tensor.name: recording.add_source(tensor) for tensor in tensors}
    try:
        with recording:
            converted = checkpoint_tensors(model, forms)
    except Exception as error:
        raise UserError(
            f"transformers can load a {model.config.model_type}, and does not know how to save one "
            f"as it was ({error!r}), so no engine could read its weights; "
            "set model.path to a model of another family"
        ) from error
    return [recording.exported(name, tensor) for name, tensor in converted.items()]


@dataclass(frozen=True)
class _Call:
    """A call of a function that made a tensor."""

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    result: Tensor  # it is kept, so that no other storage gets its id

    def tensors(self) -> list[Tensor]:
        """Returns the tensors among the arguments."""
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class _Recording(TorchFunctionMode):
    """Records how tensors without memory are made of each other.

    A call is recorded where memory is new. A view is its shape, strides and offset in this memory,
    which is identified by its storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, Exported] = {}
        self._calls: dict[int, _Call] = {}

    def add_source(self, tensor: Exported) -> Tensor:
        """Adds a tensor of the model, and returns its form, of which the others are made."""
        memory = _memory(tensor.form)
        self._sources[memory] = tensor
        self._calls[memory] = _Call(tensor.make, (), {}, tensor.form)
        return tensor.form

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch, and records the call for each result in new memory.

        torch calls this method for every function inside a `with` block of the recording. A view
        is not recorded, because its memory belongs to a tensor that was recorded before.
        """
        if func is Tensor.contiguous:  # `exported` does this once, for the published tensor
            return args[0]
        options = dict(kwargs or {})
        result = func(*args, **options)
        leaves, _ = tree_flatten(result)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and _memory(leaf) not in self._calls:
                self._calls[_memory(leaf)] = _Call(func, args, options, leaf)
        return result

    def exported(self, name: str, tensor: Tensor) -> Exported:
        """Returns a recorded tensor, with the parameters of which it is made and how."""
        parameters: list[Any] = []
        for source in self._sources_of(tensor):
            parameters += source.parameters
        unique = tuple(dict.fromkeys(parameters))
        return Exported(name, unique, lambda: self._repeated(tensor).contiguous(), tensor)

    def _sources_of(self, tensor: Tensor) -> list[Exported]:
        source = self._sources.get(_memory(tensor))
        if source is not None:
            return [source]
        sources = []
        for argument in self._calls[_memory(tensor)].tensors():
            sources += self._sources_of(argument)
        return sources

    def _repeated(self, tensor: Tensor) -> Tensor:
        """Returns the tensor with memory, by repeating the calls that made it."""
        call = self._calls[_memory(tensor)]
        args, kwargs = tree_map(self._repeated_argument, (call.args, call.kwargs))
        with torch.no_grad():
            memory = call.func(*args, **kwargs).contiguous()
        offset = memory.storage_offset() + tensor.storage_offset()
        return memory.as_strided(tensor.shape, tensor.stride(), offset)

    def _repeated_argument(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._repeated(argument)
        return argument


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
