"""Uses of transformers (5.19) and peft (0.21) beyond their documented interfaces.

Each function gives its reason, and tests/unit/test_transformers_internals.py names it when an upgrade breaks it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from model.files.folder import causal_lm_class


def mixes_packed_sequences(model: Any) -> bool:
    """Returns whether layers carry a state from token to token outside of attention, or do attention of their own.

    It reads `_is_stateful` and `_supports_attention_backend` (since 4.48); unknown kinds of layers count, too.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    own = kinds - {"full_attention", "sliding_attention"}
    return bool(model._is_stateful or not model._supports_attention_backend or own)


def decoder_of(model: Any) -> Any:
    """Returns the part of a causal language model without its head.

    `get_decoder` (since 4.0) of Llama 4's text model returns that model itself; then its inner model is returned.
    """
    from transformers import PreTrainedModel

    found = model.get_decoder()
    return found if found is not model else next(part for part in model.children() if isinstance(part, PreTrainedModel))


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the layers, of any family, that checkpointing recomputes: GradientCheckpointingLayer (since 4.52)."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def value_class(config: Any) -> Any:
    """Returns transformers' Auto class for sequence classification, or a class made of the family's language model.

    The latter if transformers has none for the family, or for its vision tower. The extended class is found by
    `_model_mapping` of the Auto class (since 4.0), and its `_tied_weights_keys` (a dict since 5.0) are emptied, as its
    head is not loaded.
    """
    from transformers import AutoModelForSequenceClassification

    if type(config) in AutoModelForSequenceClassification._model_mapping and not hasattr(config, "vision_config"):
        return AutoModelForSequenceClassification
    language_model: Any = causal_lm_class(config)._model_mapping[type(config)]

    def __init__(self: Any, config: Any) -> None:
        language_model.__init__(self, config)
        self.lm_head = torch.nn.Identity()
        self.score = torch.nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)

    # the same name, by which transformers finds the names of weights in older files
    same = {"__module__": language_model.__module__}
    return type(language_model.__name__, (language_model,), same | {"__init__": __init__, "_tied_weights_keys": {}})


def without_tied(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors that `save_pretrained` saves: without those that the class leaves out, each tied one once.

    It uses `_keys_to_ignore_on_save` (since 3.0) and `remove_tied_weights_from_state_dict` (since 5.0), as that does.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = model._keys_to_ignore_on_save or ()
    kept = {name: tensor for name, tensor in state.items() if name not in ignored}
    return remove_tied_weights_from_state_dict(kept, model)


def checkpoint_tensors(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts a state_dict to the names and shapes of the model's checkpoints, as `save_pretrained` writes them.

    It uses `revert_weight_conversion` (since 5.0), because no public function does this without writing files.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state)


@contextlib.contextmanager
def taking_each_parameter(take: Callable[[torch.nn.Parameter], None]) -> Iterator[None]:
    """Calls take(parameter) for each one that `from_pretrained` has set, before it reads the next, in the context.

    Parameters that may be tied are left out, because they are compared at the end. `set_param_for_module` of
    core_model_loading (since 5.0) is followed by `take`; HF_DEACTIVATE_ASYNC_LOAD keeps threads from reading ahead; and
    files are read by `pread`, because pages of a mapped file count as memory of each process that reads them.
    """
    from transformers import core_model_loading, modeling_utils

    set_parameter, open_file = core_model_loading.set_param_for_module, modeling_utils.safe_open

    def set_and_take(model: Any, name: str, *given: Any) -> None:
        set_parameter(model, name, *given)
        parameter = model.get_parameter_or_buffer(name)
        tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
        if isinstance(parameter, torch.nn.Parameter) and not parameter.is_meta and name not in tied:
            take(parameter)

    with (
        mock.patch.object(core_model_loading, "set_param_for_module", set_and_take),
        mock.patch.object(
            modeling_utils, "safe_open", lambda *a, **given: open_file(*a, **given | {"backend": "pread"})
        ),
        mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"),
    ):
        yield


def showing_layers_with_adapters() -> Any:
    """Returns a context without `weight` of peft's layers (BaseTunerLayer, since 0.6): they are searched, not split."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return mock.patch.object(BaseTunerLayer, "weight", property())


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Switches adapters off in the context: the model is its base, to the bit, in eval mode.

    Weights, gradients and their hooks are not touched. It sets `_disable_adapters` of peft's layers (since 0.6): peft's
    enable_adapters would also switch requires_grad off and on, under the hooks that DeepSpeed has set.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    was_training = model.training
    model.eval()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        model.train(was_training)
