"""Lists the tensors to publish or save: all weights, adapters, or weights merged with adapters.

Their names and shapes are those of the model's checkpoints on the Hub, which vLLM's loader expects.
transformers holds some weights in a different form (all experts of a layer in one tensor, other
names), and `save_pretrained` converts them back. This conversion runs here once, at the start, on
meta tensors, which have a shape but no data. Its operations are recorded, and repeated for one
exported tensor at a time. So names and sizes are known before anything is computed, a view is never
copied, and one expert can be exported without building the others.

Under ZeRO 3 a rank holds no full parameter until it is gathered, and merging needs three parameters
at a time. So each exported tensor lists its parameters, and how to compute it from them. Nothing
here changes the model, because merged weights are new tensors.
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
    """A tensor to publish or save, and how to compute it from the model's parameters."""

    name: str
    parameters: tuple[Parameter, ...]  # what `make` reads
    make: Callable[[], Tensor]  # to be called while all of `parameters` are gathered
    form: Tensor  # a meta tensor with the full shape and the dtype


def exported(model: Any, lora: Lora) -> list[Exported]:
    """Returns the tensors that this run publishes: adapters, merged weights or all weights.

    Raises UserError if transformers cannot convert this model back to its checkpoint's form.
    """
    if lora.publishes_adapters:
        return adapters(model)
    tensors = merged(model) if lora.r else parameters(model)
    return under_checkpoint_names(model, tensors)


def parameters(model: Any) -> list[Exported]:
    """Returns all parameters and saved buffers, under their names in the model.

    A head that is tied to the embedding is left out.
    """
    named_parameters = dict(model.named_parameters(remove_duplicate=False))
    forms = {}  # meta tensors with full shapes
    for name, tensor in model.state_dict().items():
        # if ranks hold shards of a parameter, only the parameter itself knows its full shape
        forms[name] = _form(named_parameters.get(name, tensor))
    tensors = []
    for name, form in without_tied(model, forms).items():
        if name in named_parameters:
            tensors.append(_unchanged(name, named_parameters[name]))
        else:
            tensors.append(_buffer(model, name, form))
    return tensors


def adapters(model: Any) -> list[Exported]:
    """Returns the adapters' parameters, under the names that peft gives them in files."""
    tensors = []
    for module_name, parameter in model.named_parameters():
        name = published_name(module_name)
        if name:
            tensors.append(_unchanged(name, parameter))
    return tensors


def base(model: Any) -> list[Exported]:
    """Returns the frozen parameters of a model with adapters, under the base model's names."""
    tensors = []
    for module_name, parameter in model.named_parameters():
        if not published_name(module_name):
            name = module_name.replace(".base_layer.", ".")
            tensors.append(_unchanged(name, parameter))
    return tensors


def merged(model: Any) -> list[Exported]:
    """Returns the base model's tensors, with (alpha / r) · B A added to weights with adapters.

    B and A are the adapter's two factors. The names are those of the base model.
    """
    from peft.tuners.lora import LoraLayer

    layers = {}  # with adapters, by name
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layers[name] = module
    tensors = []
    for tensor in parameters(model):
        if published_name(tensor.name):  # an adapter's factor
            continue
        name = tensor.name.replace(".base_layer.", ".")
        layer = layers.get(tensor.name.removesuffix(".base_layer.weight"))
        if layer is None:
            tensors.append(replace(tensor, name=name))
        else:
            tensors.append(_with_adapter(name, tensor, layer))
    return tensors


def _unchanged(name: str, parameter: Parameter) -> Exported:
    return Exported(
        name=name, parameters=(parameter,), make=parameter.detach, form=_form(parameter)
    )


def _buffer(model: Any, name: str, tensor: Tensor) -> Exported:
    # `make` looks the buffer up, because moving the model to a GPU replaces it with a new tensor
    return Exported(
        name=name, parameters=(), make=lambda: model.get_buffer(name), form=_form(tensor)
    )


def _form(tensor: Tensor) -> Tensor:
    """Returns a meta tensor with the dtype of a tensor and its full shape, also of a ZeRO shard."""
    return torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta")


def _with_adapter(name: str, tensor: Exported, layer: Any) -> Exported:
    """Returns the sum of a layer's weight and its adapter's scaled product of two factors.

    tensor: the layer's weight. The sum is computed only when `make` is called, because only then
    are the parameters gathered.
    """
    weight = tensor.parameters[0]

    def make() -> Tensor:
        with torch.no_grad():
            return weight.detach() + layer.get_delta_weight("default").to(weight.dtype)

    factors = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return Exported(name=name, parameters=(weight, *factors), make=make, form=tensor.form)


def under_checkpoint_names(model: Any, tensors: list[Exported]) -> list[Exported]:
    """Returns the tensors that `save_pretrained` would write, equal in name, shape and bits.

    tensors: the model's tensors under their names in the model. Raises UserError if transformers
    cannot convert this model back to its checkpoint's form.
    """
    recording = _Recording()
    forms = {tensor.name: recording.add_source(tensor) for tensor in tensors}
    try:
        with recording:
            converted = checkpoint_tensors(model, forms)
    except Exception as error:
        raise UserError(
            f"transformers can load a {model.config.model_type}, but cannot save one in the form "
            f"of its checkpoint ({error!r}), so no engine could read its weights; "
            "set model.path to a model of a different family"
        ) from error
    return [recording.exported(name, tensor) for name, tensor in converted.items()]


@dataclass(frozen=True)
class _Call:
    """A recorded call of a function that returned a tensor in new storage."""

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    result: Tensor  # kept alive, so that no later storage gets the same id

    def tensors(self) -> list[Tensor]:
        """Returns the tensors among the arguments, also those inside lists and dicts."""
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class _Recording(TorchFunctionMode):
    """Records by which calls meta tensors are computed from the model's tensors.

    Only calls whose result has new storage are recorded. A view needs no call: it is described by
    the storage that it shares and by its shape, strides and offset in this storage.
    """

    def __init__(self) -> None:
        super().__init__()
        # by storage, as identified by `_storage_id`
        self._sources: dict[int, Exported] = {}  # tensors of the model
        self._calls: dict[int, _Call] = {}  # the call that returned the storage's first tensor

    def add_source(self, tensor: Exported) -> Tensor:
        """Adds a tensor of the model. Returns its form, a meta tensor for use in the recording."""
        storage = _storage_id(tensor.form)
        self._sources[storage] = tensor
        self._calls[storage] = _Call(func=tensor.make, args=(), kwargs={}, result=tensor.form)
        return tensor.form

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a torch function, and records the call for each returned tensor with new storage.

        torch calls this method in place of every torch function that is called in a `with` block
        of the recording. A view is not recorded, because its storage is known already.
        """
        if func is Tensor.contiguous:  # `exported` makes each exported tensor contiguous, once
            return args[0]
        options = dict(kwargs or {})
        result = func(*args, **options)
        leaves, _ = tree_flatten(result)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and _storage_id(leaf) not in self._calls:
                call = _Call(func=func, args=args, kwargs=options, result=leaf)
                self._calls[_storage_id(leaf)] = call
        return result

    def exported(self, name: str, tensor: Tensor) -> Exported:
        """Returns how to compute a recorded meta tensor from the model's parameters.

        name: the exported tensor's name.
        """
        parameters: list[Any] = []
        for source in self._sources_of(tensor):
            parameters += source.parameters
        return Exported(
            name=name,
            parameters=tuple(dict.fromkeys(parameters)),  # each parameter once, in order
            make=lambda: self._computed(tensor).contiguous(),
            form=tensor,
        )

    def _sources_of(self, tensor: Tensor) -> list[Exported]:
        """Returns the model's tensors from which a recorded meta tensor is computed."""
        source = self._sources.get(_storage_id(tensor))
        if source is not None:
            return [source]
        sources = []
        for argument in self._calls[_storage_id(tensor)].tensors():
            sources += self._sources_of(argument)
        return sources

    def _computed(self, tensor: Tensor) -> Tensor:
        """Returns a recorded meta tensor with data, by repeating the calls from which it came."""
        call = self._calls[_storage_id(tensor)]
        args, kwargs = tree_map(self._computed_argument, (call.args, call.kwargs))
        with torch.no_grad():
            result = call.func(*args, **kwargs).contiguous()
        # the tensor may be a view of the call's result
        offset = result.storage_offset() + tensor.storage_offset()
        return result.as_strided(tensor.shape, tensor.stride(), offset)

    def _computed_argument(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._computed(argument)
        return argument


def _storage_id(tensor: Tensor) -> int:
    """Returns a number that identifies a storage, also on the meta device, where data_ptr is 0."""
    return tensor.untyped_storage()._cdata
