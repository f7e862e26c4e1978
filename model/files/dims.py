"""The size of a model, read from its config.json alone: parameters, bytes of cache, floating-point operations.

The formulas are for decoders of the Llama family (Llama, Qwen2, Qwen2.5, Qwen3, Mistral): attention with grouped keys,
a gated MLP with three matrices, two norms per layer; and for Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose tower is in
vision_dims.py. Other decoders are counted: counted_dims.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from model.files.vision_dims import VisionDims, vision_dims

FAMILY = ("llama", "qwen2", "qwen3", "mistral")
_WITH_TOWER = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}  # the language model's family
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # as transformers names them


@dataclass(frozen=True)
class ModelDims:
    """The dimensions of a decoder, such as Qwen2.5-1.5B's with 1,543,714,304 values:
    ModelDims(1536, 8960, 28, 12, 2, 128, 151936, tied=True, bias=True)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    bias: bool = False  # of the query, key and value projections
    qk_norm: bool = False
    vision: VisionDims | None = None  # dimensions of the tower of a model that sees images
    experts: tuple[int, int] | None = None  # experts of each layer of a mixture, and those per token

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Returns (out, in) of each of a layer's _MATRICES."""
        h, i, queries, keys = self.hidden, self.intermediate, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (queries, h), (keys, h), (keys, h), (h, queries), (i, h), (i, h), (h, i)

    @property
    def layer_parameters(self) -> int:
        """Counts q + k + v + o = 2·H·A·D + 2·H·K·D (+ biases), MLP = 3·H·I, norms = 2·H (+ 2·D for query and key)."""
        biases = self.bias * (self.heads + 2 * self.kv_heads) * self.head_dim
        norms = 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        return sum(out * into for out, into in self.matrices) + biases + norms

    @property
    def active_in_layers(self) -> int:
        """Counts the parameters of the layers that a token passes."""
        return self.layers * self.layer_parameters

    @property
    def parameters(self) -> int:
        """Counts N = V·H (twice unless the head is tied to the embedding) + layers + H for the last norm + tower."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        tower = self.vision.parameters if self.vision else 0
        return embeddings + self.layers * self.layer_parameters + self.hidden + tower

    @property
    def active_parameters(self) -> int:
        """Counts the parameters, of all N, that a token passes."""
        return self.parameters

    def per_rank(self, tp_size: int) -> float:
        """Counts the parameters of one of tp_size tensor-parallel ranks: they share layers, and a head of its own."""
        shared = self.active_in_layers + (0 if self.tied else self.vocab * self.hidden)
        return self.parameters - shared * (1 - 1 / tp_size)

    def splits_over(self, size: int) -> bool:
        """Returns whether so many tensor-parallel ranks can share the layers; False where the kinds are not known."""
        is_known = type(self) is ModelDims and self.vision is None
        return is_known and not any(n % size for n in (self.heads, self.kv_heads, self.intermediate))

    def adapter_parameters(self, r: int, modules: Collection[str] | None = None) -> int:
        """Counts r·(in + out) of the layers with these names, in every block; None = of all but the output head."""
        sides = {name: out + into for name, (out, into) in zip(_MATRICES, self.matrices, strict=True)}
        return self.layers * r * sum(sides[name] for name in _MATRICES if modules is None or name in modules)

    @property
    def kv_values_per_token(self) -> int:
        """Returns 2·L·K·D: a key and a value per layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def state_values(self) -> int:
        """Counts the values that recurrent layers keep for a sequence of any length."""
        return 0


def model_dims(settings: dict[str, Any]) -> ModelDims | None:
    """Returns the dimensions that config.json's contents give; None for a model with other layers."""
    kind, whole = settings.get("model_type"), settings
    settings = dict(whole) | dict(whole.get("text_config") or {})  # older files have both in one
    if kind in _WITH_TOWER:
        settings["tie_word_embeddings"] = whole.get("tie_word_embeddings", settings.get("tie_word_embeddings"))
    family = _WITH_TOWER.get(str(kind), kind)
    if family not in FAMILY or experts_of(settings):
        return None
    heads = int(settings["num_attention_heads"])
    head_dim = int(settings.get("head_dim") or settings["hidden_size"] // heads)
    kv_heads = int(settings.get("num_key_value_heads") or heads)
    return ModelDims(
        hidden=int(settings["hidden_size"]),
        intermediate=int(settings["intermediate_size"]),
        layers=int(settings["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=int(settings["vocab_size"]),
        tied=bool(settings.get("tie_word_embeddings", False)),
        bias=bool(settings.get("attention_bias", family == "qwen2")),
        qk_norm=family == "qwen3",
        vision=vision_dims(str(kind), whole["vision_config"]) if kind in _WITH_TOWER else None,
    )


def experts_of(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns (experts E of a layer, experts k per token) of a language model's settings; None without a mixture."""
    counts = (settings.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    count, per_token = next((n for n in counts if n), 0), settings.get("num_experts_per_tok")
    return (int(count), int(per_token)) if count and per_token else None
