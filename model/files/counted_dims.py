"""The size of any decoder: by the formulas of dims.py, else counted in its modules on torch's meta device.

Parameters are exact either way, and no weights are read. Counting costs the import of torch and transformers, and a
second. Left out: code that comes with a model, which is not run for an estimate; recurrent layers' activations.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from model.files.dims import ModelDims, experts_of, model_dims
from model.files.folder import require_model
from model.files.hub import model_file, read_json
from model.files.lora import targets


@dataclass(frozen=True, kw_only=True)
class CountedDims(ModelDims):
    """A ModelDims whose sums were counted. Sizes that differ between layers are the largest, or the mean."""

    counted: int  # parameters, of all experts
    in_layers: int  # parameters in layers; the rest are embeddings and the head
    passed: int  # parameters in layers that a token passes: k of E experts
    linears: tuple[tuple[str, int], ...]  # name → Σ (in + out) over all layers of that name that may get adapters
    cached: int  # values of a token in vLLM's cache
    state: int  # values of a sequence, however long it is

    @property
    def kv_values_per_token(self) -> int:
        return self.cached

    @property
    def state_values(self) -> int:
        return self.state

    @property
    def parameters(self) -> int:
        return self.counted

    @property
    def active_in_layers(self) -> int:
        return self.passed

    @property
    def active_parameters(self) -> int:
        return self.counted - self.in_layers + self.passed

    def adapter_parameters(self, r: int, modules: Collection[str] | None = None) -> int:
        return r * sum(sides for name, sides in self.linears if modules is None or name in modules)


def read_dims(path: str, revision: str | None) -> ModelDims | None:
    """Reads the dimensions of a model in a folder, or of a hub id, of which config.json alone is downloaded.

    Returns None for a model that transformers does not know. Raises UserError if there is no such model.
    """
    require_model(path, revision)
    file = model_file(path, "config.json", revision)
    if (settings := read_json(file)) is None:
        raise UserError(f"{file}: no such file, or not JSON; set model.path to a model")
    try:
        dims = model_dims(settings)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{file} is no model's ({error!r}); set model.path to a model") from None
    if dims is not None:
        return dims
    from transformers import AutoConfig

    try:
        return counted_dims(AutoConfig.from_pretrained(file.parent))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError):  # unknown to transformers
        return None


def counted_dims(config: Any) -> CountedDims | None:
    """Counts the decoder of transformers' configuration; None if transformers needs the model's own code for it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = getattr(config, "vision_config", None) is not None
    auto_class = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = auto_class.from_config(config, dtype=torch.float32)
    except ValueError:
        return None
    text, head = config.get_text_config(), model.get_output_embeddings()
    linears, adapted = Counter[str](), targets(model, "all-linear")
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, torch.nn.Linear) and module is not head and (isinstance(adapted, str) or leaf in adapted):
            linears[leaf] += module.in_features + module.out_features
    heads, embedded = _largest(text, "num_attention_heads", 1), {id(head.weight)}
    embedded |= {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    in_layers = {name: p for name, p in model.named_parameters() if id(p) not in embedded}
    per_token = _largest(text, "num_experts_per_tok", 1)
    experts = experts_of(text.to_dict() | {"num_experts_per_tok": per_token})
    passed = {  # values of a parameter that a token passes; experts' are stacked
        name: p.numel() * per_token // p.shape[0] if experts and ".experts." in name else p.numel()
        for name, p in in_layers.items()
    }
    decoder = list(model.get_decoder().modules())
    head_dim = max((m.head_dim for m in decoder if hasattr(m, "o_proj") and hasattr(m, "head_dim")), default=0)
    head_dim = head_dim or text.hidden_size // heads
    kv_heads, state = _largest(text, "num_key_value_heads", heads), sum(map(_state_values, decoder))
    cached = sum(map(_cached_values, decoder))
    if not (cached or state):  # the projections have other names
        cached = 2 * text.num_hidden_layers * kv_heads * head_dim
    return CountedDims(
        hidden=text.hidden_size,
        intermediate=_intermediate(text, per_token if experts else 1),
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=text.vocab_size,
        tied=head.weight is model.get_input_embeddings().weight,
        experts=experts,
        counted=sum(p.numel() for p in model.parameters()),
        in_layers=sum(p.numel() for p in in_layers.values()),
        passed=sum(passed.values()),
        linears=tuple(linears.items()),
        cached=cached,
        state=state,
    )


def _largest(text: Any, name: str, default: int) -> int:
    """Returns a size; the largest if every layer has its own."""
    found = getattr(text, name, None)
    return max(found) if isinstance(found, list) else found or default


def _intermediate(text: Any, per_token: int) -> int:
    """Returns the MLP's intermediate size I that a token passes in the widest layer."""
    dense = _largest(text, "intermediate_size", 4 * text.hidden_size)
    own = _largest(text, "moe_intermediate_size", 0) or dense
    return max(dense, per_token * own + _largest(text, "shared_expert_intermediate_size", 0))


def _cached_values(module: Any) -> int:
    """Counts a token's values in vLLM's cache for an attention layer: keys and values, or latent attention's state."""
    if latent := getattr(module, "kv_a_proj_with_mqa", None):
        return latent.out_features
    if (fused := getattr(module, "qkv_proj", None)) and hasattr(module, "o_proj"):
        return fused.out_features - module.o_proj.in_features
    if (key := getattr(module, "k_proj", None)) is None:
        return 0
    return key.out_features + (getattr(module, "v_proj", None) or key).out_features


def _state_values(module: Any) -> int:
    """Counts the values that a recurrent or convolutional layer keeps for a sequence of any length."""
    convolution: Any = getattr(module, "conv1d", None) or getattr(module, "conv", None)
    if not hasattr(convolution, "kernel_size"):
        return 0
    kept = convolution.out_channels * (convolution.kernel_size[0] - 1)
    if hasattr(module, "head_v_dim"):  # gated delta net
        return kept + module.num_v_heads * module.head_k_dim * module.head_v_dim
    if not hasattr(module, "ssm_state_size"):
        return kept
    width = module.num_heads * module.head_dim if hasattr(module, "num_heads") else module.intermediate_size
    return kept + width * module.ssm_state_size
